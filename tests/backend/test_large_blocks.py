"""What is large goes back to the system, wherever in the heap it would have been."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import sys
if sys.argv[1] == "yes":
    from backend.large_blocks import give_back_large_blocks
    give_back_large_blocks()

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) >> 8

bytes(20 << 20)  # freed at once: from here on glibc would take such blocks from its heap
before = resident_mb()
blocks = [b"x" * (4 << 20) for _ in range(20)]
del blocks[:-1:2]  # the others stay in between: a heap keeps the holes
print(resident_mb() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not on glibc")
def test_large_blocks_are_given_back() -> None:
    kept = {
        answer: int(
            subprocess.run([sys.executable, "-c", PROGRAM, answer], capture_output=True, check=True).stdout
        )
        for answer in ("no", "yes")
    }
    assert kept["no"] > 75, "or this tests nothing"
    assert kept["yes"] < 45
