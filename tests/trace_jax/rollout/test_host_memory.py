"""Memory comes back when its last view is gone, never before."""

import numpy as np

from trace_jax.rollout.host_memory import HostMemory


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_once_nothing_views_it():
    memory = HostMemory()
    first = memory.take((3, 5))
    where = address(first)
    view = first[1:, 2:].T[::2].view(np.int8)
    del first
    second = memory.take((3, 5))
    assert address(second) != where
    view[:] = 1
    assert not np.shares_memory(second, view)
    del view
    assert address(memory.take((5, 3))) == where


def test_a_block_that_is_too_small_or_far_too_large_is_not_used():
    memory = HostMemory()
    previous = memory.take((100,))
    where = address(previous)
    del previous
    small = memory.take((40,))
    assert small.size == 40 and address(small) != where
    assert memory.take((101,)).shape == (101,)


def test_a_smaller_array_of_a_block_keeps_the_whole_block():
    memory = HostMemory()
    whole = memory.take((100,))
    where = address(whole)
    del whole
    part = memory.take((60,))
    assert address(part) == where
    del part
    assert address(memory.take((100,))) == where
