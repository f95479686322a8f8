"""From a recipe to a run directory, and back from there."""
