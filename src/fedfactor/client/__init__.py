"""The client's side of a round: the only loop over batches."""
