"""What an encoded message is, and the error for bytes that are not one. Needs no torch, unlike `message.py`."""

from __future__ import annotations

Bytes = bytes | bytearray | memoryview
"""An encoded message. Tensors decoded from a writable buffer are views of it."""


class BadMessage(ValueError):
    """Bytes are not a message, or not the expected one; the text says why."""
