"""Small helpers that every layer may use: checks of settings, writing files, how to install an extra."""
