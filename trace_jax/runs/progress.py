"""Progress of a run: a live bar on a terminal, plain lines anywhere else."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

# Label -> metric, in the order shown.
RL_FIELDS = {
    "reward": "reward/mean",
    "gap": "mismatch/logprob_abs_diff_mean",
    "rollout": "time/rollout",
    "train": "time/train",
    "sync": "time/sync",
}


class Progress:
    """Shows how far a run is, with a few of its metrics. A context manager.

    Args:
      total: number of steps of the whole run.
      start: steps that were done before (a resumed run).
      title: name of the run.
      fields: label -> metric name; metrics under time/ are shown in seconds.
      console: where to; standard output by default.
      interval: seconds between plain lines. The first and the last step are always shown.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        title: str = "",
        fields: Mapping[str, str] = RL_FIELDS,
        console: Console | None = None,
        interval: float = 10.0,
    ):
        self.total = total
        self.title = title
        self.fields = fields
        self.console = console or Console()
        self.interval = interval
        self._start = start
        self._last_line: float | None = None
        self._bar: RichProgress | None = None

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self._start, shown="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Shows that `done` steps of the run are complete, the last of them with these metrics."""
        shown = "  ".join(
            f"{label} {_format(name, metrics.get(name))}" for label, name in self.fields.items()
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=done, shown=shown)
            return
        now = time.monotonic()
        due = self._last_line is None or now - self._last_line >= self.interval
        if due or done >= self.total:
            self._last_line = now
            title = f"{self.title}  " if self.title else ""
            self.log(f"{title}{done}/{self.total}  {shown}")

    def log(self, message: str) -> None:
        """One line of text, above the bar where there is one."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)


def _format(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{float(value):.2f}s" if name.startswith("time/") else f"{float(value):.4g}"
