"""What the C library does with freed memory."""

from __future__ import annotations

import ctypes
import sys

BLOCK_BYTES = 1 << 20
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_freed_blocks() -> None:
    """Let blocks of a megabyte or more go back to the system when they are freed.

    By default, glibc keeps blocks of up to 32 MB once some have been freed, in one heap per thread: a process whose
    threads assemble large messages then holds a multiple of what it uses. Other C libraries stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES)
