"""The client's side of a round, with the only loop over batches."""
