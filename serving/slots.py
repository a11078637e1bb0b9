"""Pixels in memory that front end and executors share: preprocessing writes, models read.

The memory is an anonymous file, not /dev/shm, which containers cap at 64 MB. Pages that were never
written take no memory, so the number of slots is generous.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


def anonymous_file() -> int:
    """Descriptor of a new empty file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("serving-slots")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Slots:
    """`count` pictures of size x size x 3 bytes in one shared file.

    Args:
        descriptor: of an anonymous file, which is made large enough.
    """

    def __init__(self, descriptor: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        shape = (count, size, size, 3)
        length = count * size * size * 3
        if os.fstat(descriptor).st_size < length:
            os.truncate(descriptor, length)
        memory = mmap.mmap(descriptor, length)
        self.pixels: Pixels = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> int | None:
        """A free slot, the one last given back first (its pages are warm); None if all are used."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def gather(self, slots: list[int]) -> Pixels:
        """A copy of some pictures as one batch, shape (b, size, size, 3)."""
        return self.pixels[slots]
