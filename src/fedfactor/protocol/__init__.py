"""Definitions that server and clients share: methods, optimizers, codecs, messages, settings. No loops over rounds."""
