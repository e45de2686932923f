"""Rows on their way from the device to the sequences they belong to."""

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np


def to_host(arrays: Any) -> Any:
    """Starts to copy arrays from the device to page-locked memory of the host.

    By a plain copy, to memory that is not, an H200 moved 1.3 GB/s in the place of 35.
    """
    if jax.default_backend() == "cpu":
        return arrays
    return jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind("pinned_host")), arrays)


class Placed(NamedTuple):
    """Where rows belong: `count` of lane or slot `index` to `target[start:]`."""

    index: int
    count: int
    target: np.ndarray
    start: int


class Collector:
    """Puts rows into place in a thread of its own, in the order in which they were added, while the device goes on.

    Adding waits where `PENDING` programs' rows are not in place yet, so no more than these and the added one are held.
    """

    PENDING = 2

    def __init__(self):
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
        self._pending: collections.deque[Future[None]] = collections.deque()
        self._others: collections.deque[Future[None]] = collections.deque()

    def add(self, arrays: Any, write: Callable[[Any], None]) -> None:
        """Starts a tree of arrays on its way to the host, where `write` puts it into place, as NumPy's."""
        arrays = to_host(arrays)
        while len(self._pending) >= self.PENDING:
            self._pending.popleft().result()  # its error, if it had one
        self._pending.append(self._worker.submit(lambda: write(jax.tree.map(np.asarray, arrays))))

    def then(self, run: Callable[..., None], *args: Any) -> None:
        """Runs after everything added so far is in place, in the same thread."""
        while self._others and self._others[0].done():
            self._others.popleft().result()
        self._others.append(self._worker.submit(run, *args))

    def wait(self) -> None:
        """Until everything added so far is in place; raises the error of what failed."""
        for futures in (self._pending, self._others):
            while futures:
                futures.popleft().result()

    def close(self) -> None:
        """Ends the thread; what is not in place yet is lost."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def place_rows(data: np.ndarray, placed: list[Placed], *, by_step: bool) -> None:
    """Rows of one program: `[steps, slots, 1, bytes]` if `by_step`, else `[lanes, positions, bytes]`."""
    for p in placed:
        rows = data[: p.count, p.index, 0] if by_step else data[p.index, : p.count]
        p.target[p.start : p.start + p.count] = rows
