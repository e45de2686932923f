"""Which pages of the KV cache are whose: counted references, so that sequences can share what they have in common."""

import numpy as np


class PagePool:
    """Pages 0 to `count` - 1. A page is free, or held by as many holders as it has references.

    Invariant: `free` pages and pages with references are `count` together; `check` proves it.
    """

    def __init__(self, count: int):
        self.count = count
        self._references = np.zeros(count, np.int64)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None, and nothing taken, where there are not as many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._references[taken] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        """One more holder of each."""
        assert (self._references[pages] > 0).all(), "a free page cannot be shared"
        self._references[pages] += 1

    def release(self, pages: list[int]) -> None:
        """One holder less of each; those without any are free."""
        assert (self._references[pages] > 0).all(), "a page was released twice"
        self._references[pages] -= 1
        self._free += [page for page in pages if self._references[page] == 0]

    def check(self, holders: list[list[int]]) -> None:
        """AssertionError unless the pages that `holders` name, as often as they do, are all that is held."""
        held = np.bincount(np.concatenate([*holders, []]).astype(int), minlength=self.count)
        assert np.array_equal(held, self._references), "pages were lost, or given back while they were held"
        assert sorted(self._free) == list(np.flatnonzero(held == 0)), "the free list is not what is free"
