"""What both sides of a round agree on. There are no loops here."""
