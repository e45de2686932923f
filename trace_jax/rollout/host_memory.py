"""Memory of the host that is used again: the first touch of new memory costs more than a record's way to it."""

import math
import weakref

import numpy as np
from jaxtyping import UInt8


class HostMemory:
    """Blocks of bytes, each of which comes back once no array is a view of it any more.

    Of the blocks that came back none is kept that did not fit the next request, so no more is held than was in use.
    """

    def __init__(self):
        self._free: list[np.ndarray] = []

    def take(self, shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
        """An array of bytes, with whatever they last held."""
        size = math.prod(shape)
        fitting = [block for block in self._free if size <= block.size <= 2 * size]
        self._free.clear()
        block = fitting.pop() if fitting else np.empty(size, np.uint8)
        self._free += fitting
        # Views of a view refer to the first array that does not look at another: to this one, never to the block.
        array = np.frombuffer(memoryview(block)[:size], np.uint8)
        weakref.finalize(array, self._free.append, block).atexit = False
        return array.reshape(shape)
