"""Memory of the KV buffers of many sequences: one array per layer and part, a slot of it for each sequence."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from via_sd.errors import BusyError

#: A slot's positions are a multiple of this, so that slots begin at pages of memory.
_POSITIONS = 256


class KVStorage:
    """Slots of KV buffers that a graph reads and writes in place.

    A slot takes memory as its sequence grows, and gives it back when it is released: until then only addresses are
    reserved. Neighbouring slots are one contiguous array, so a pass over several sequences binds them as they lie.

    Args:
        kv: naming, geometry and dtype of the buffers, as a manifest has them.
        slots: most sequences at once.
        positions: of a sequence, padding included.
    """

    def __init__(self, kv: Mapping[str, Any], slots: int, positions: int) -> None:
        self.slots = slots
        self.positions = -(-positions // _POSITIONS) * _POSITIONS
        shape = (slots, kv["num_heads"], self.positions, kv["head_dim"])
        dtype = np.dtype(kv["dtype"])
        self._slot_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        self._mapped = [_reserve(slots * self._slot_bytes) for _ in range(kv["num_layers"] * len(kv["parts"]))]
        arrays = [np.frombuffer(memory, dtype).reshape(shape) for memory in self._mapped]
        count = len(kv["parts"])
        #: Per layer, per part: [slots, heads, positions, head_dim].
        self.layers = [arrays[layer * count : (layer + 1) * count] for layer in range(kv["num_layers"])]
        self._free = set(range(slots))
        # Reentrant: memory is also given back by a finaliser, which may run on any line.
        self._lock = threading.RLock()

    def take(self) -> int:
        """The lowest free slot: slots in use lie close together, so a pass over all of them skips few.

        Raises:
            BusyError: every slot is taken.
        """
        with self._lock:
            if not self._free:
                raise BusyError(f"all {self.slots} KV slots of the engine are taken; open it with more slots")
            slot = min(self._free)
            self._free.remove(slot)
            return slot

    def release(self, slot: int) -> None:
        """Free `slot`; its memory goes back to the system."""
        for memory in self._mapped:
            _discard(memory, slot * self._slot_bytes, self._slot_bytes)
        with self._lock:
            self._free.add(slot)

    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of slot `source` to slot `target`."""
        for parts in self.layers:
            for array in parts:
                array[target, :, :positions] = array[source, :, :positions]


def _reserve(size: int) -> mmap.mmap:
    """Zeroed memory of `size` bytes that is taken page by page as it is written to."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _discard(memory: mmap.mmap, start: int, size: int) -> None:
    """Give back the pages that lie within; they are zero when they are used again."""
    page = mmap.PAGESIZE
    first, end = -(-start // page) * page, (start + size) // page * page
    if hasattr(mmap, "MADV_DONTNEED") and first < end:
        memory.madvise(mmap.MADV_DONTNEED, first, end - first)
