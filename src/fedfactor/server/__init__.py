"""The server's side: the only loop over rounds."""
