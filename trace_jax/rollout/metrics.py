"""What an engine does with its time, and how full it is."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trace_jax.rollout.scheduler import Scheduler


class Meter:
    """Counts since the engine began, or since `reset`; `trace` keeps the phases for Perfetto.

    Phases: `prefill` and `decode` are starting a program and waiting for what says how to go on; `schedule` is the
    host's work in between, most of it while the device decodes.
    """

    def __init__(self):
        self._events: list[dict[str, Any]] | None = None
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.seconds = {"prefill": 0.0, "decode": 0.0, "schedule": 0.0}
        self.prefilled = self.sampled = self.steps = 0
        self.preemptions = self.record_bytes = 0
        self._slots = self._pages = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[name] += end - begin
            if self._events is not None:
                event = {
                    "name": name,
                    "ph": "X",
                    "pid": 0,
                    "tid": 0,
                    "ts": begin * 1e6,
                    "dur": (end - begin) * 1e6,
                }
                self._events.append(event)

    def occupancy(self, scheduler: Scheduler) -> None:
        """Notes how full slots and pages are after a step."""
        self.steps += 1
        running = int(scheduler.table.running.sum())
        pages = 1 - scheduler.pool.free / scheduler.pool.count
        self._slots += running / len(scheduler.slots)
        self._pages += pages
        if self._events is not None:
            now = time.perf_counter() * 1e6
            for name, value in (("slots", running), ("pages", scheduler.pool.count - scheduler.pool.free)):
                self._events.append({"name": name, "ph": "C", "pid": 0, "ts": now, "args": {name: value}})

    def metrics(self) -> dict[str, float]:
        """Tokens and record bytes a second, mean shares of slots and pages in use, shares of the time, preemptions."""
        elapsed, steps = time.perf_counter() - self.start, max(self.steps, 1)
        return {
            "engine/tokens_per_s": self.sampled / elapsed,
            "engine/prefill_tokens_per_s": self.prefilled / elapsed,
            "engine/record_bytes_per_s": self.record_bytes / elapsed,
            "engine/slot_occupancy": self._slots / steps,
            "engine/page_occupancy": self._pages / steps,
            "engine/preemptions": float(self.preemptions),
            **{f"engine/{name}_share": value / elapsed for name, value in self.seconds.items()},
        }

    def line(self) -> str:
        """The metrics in a line, for a person who waits."""
        m = self.metrics()
        return (
            f"{m['engine/tokens_per_s']:.0f} tokens/s, slots {m['engine/slot_occupancy']:.0%}, pages "
            f"{m['engine/page_occupancy']:.0%}, prefill {m['engine/prefill_share']:.0%} of the time, decode "
            f"{m['engine/decode_share']:.0%}, record {m['engine/record_bytes_per_s'] / 1e6:.1f} MB/s, "
            f"{self.preemptions} preemptions"
        )

    def trace(self) -> None:
        """Keeps every phase from here on, until `save_trace`."""
        self._events = []

    def save_trace(self, path: str | Path) -> None:
        """Writes the phases and occupancies kept since `trace` as a JSON that Perfetto (ui.perfetto.dev) opens.

        Raises:
            ValueError: `trace` was not called.
        """
        if self._events is None:
            raise ValueError("nothing was traced; call trace() before the work.")
        Path(path).write_text(json.dumps({"traceEvents": self._events}))
        self._events = None
