"""Pictures in memory that front end and executors share: preprocessing writes, models read.

A slot holds the pixels of one picture, or its encoded bytes where the executor decodes. The memory
is an anonymous file, not /dev/shm, which containers cap at 64 MB. Pages that were never written
take no memory, so slots are many and as large as the largest picture.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.pixels import Pixels


def anonymous_file() -> int:
    """Descriptor of a new empty file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("serving-slots")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Slots:
    """`count` slots of `size` bytes in one shared file.

    Args:
        descriptor: of an anonymous file, which is made large enough.
    """

    def __init__(self, descriptor: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        length = count * size
        if os.fstat(descriptor).st_size < length:
            os.truncate(descriptor, length)
        memory = mmap.mmap(descriptor, length)
        self._rows: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(count, size)
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> int | None:
        """A free slot, the one last given back first (its pages are warm); None if all are used."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def put(self, slot: int, data: Pixels | bytes) -> None:
        """Copy a picture's pixels, or its encoded bytes, into a slot."""
        if isinstance(data, bytes):
            self._rows[slot, : len(data)] = np.frombuffer(data, np.uint8)
        else:
            self._rows[slot, : data.size].reshape(data.shape)[:] = data

    def pixels(self, slots: list[int], crop: int) -> Pixels:
        """A copy of some pictures as one batch, shape (b, crop, crop, 3)."""
        batch: Any = self._rows[slots, : crop * crop * 3]
        return batch.reshape(len(slots), crop, crop, 3)  # type: ignore[no-any-return]

    def encoded(self, slot: int, length: int) -> NDArray[np.uint8]:
        """A view of a picture's encoded bytes."""
        return self._rows[slot, :length]
