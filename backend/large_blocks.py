"""Memory for what is large and soon free again, as images and sounds are: from the system, and back to it.

By default glibc takes blocks of up to 32 MB from its heap once some of that size were freed, and a heap only
shrinks at its end: 40 requests with an image of 12 MB left a gateway with 870 MB, and a job with large images
a worker with 1 to 3 GB. A block of its own costs 0.1 ms/MB more, for its pages are new.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # malloc.h of glibc
_MIN_BYTES: Final = 1 << 20


def give_back_large_blocks() -> None:
    """For this process and those that it forks from now on. Only with glibc; others do so by themselves."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MIN_BYTES)
