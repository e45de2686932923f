"""Metrics of a run: one JSON row a step, and the same scalars for TensorBoard."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorboardX

from trace_jax.runs.files import write_atomically
from trace_jax.runs.folder import RunFolder

# JSON has no such numbers, and a bare NaN makes a row unreadable to most readers.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsError(ValueError):
    """A metrics file or value that cannot be used; the message names file and line, or metric and value."""


class MetricsWriter:
    """Appends rows to metrics.jsonl, each on disk when `write` returns, and scalars to TensorBoard.

    A run that resumes from a checkpoint at `start_step` does its later steps again: their rows, and a last row
    that a kill left torn, are dropped when the writer opens, so that a resumed run's file equals an uninterrupted
    one's. TensorBoard's events are written from memory by a thread and may be lost in a kill, so they are made
    anew from the rows that are kept.

    Args:
      folder: the run.
      start_step: first step that will be written.

    Raises:
      MetricsError: the file holds a row that is not JSON, other than a torn last one.
    """

    def __init__(self, folder: RunFolder, start_step: int = 0):
        self.path = folder.metrics_path
        self._last_step = start_step - 1
        rows = read_metrics(self.path) if self.path.exists() else []
        kept = [row for row in rows if row["step"] < start_step]
        write_atomically(self.path, "".join(map(_row, kept)).encode())
        shutil.rmtree(folder.tensorboard_path, ignore_errors=True)
        self._tensorboard = tensorboardX.SummaryWriter(
            str(folder.tensorboard_path), max_queue=1000, flush_secs=10
        )
        for row in kept:
            self._add_scalars(row)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one row: {"step": step, **metrics}.

        Args:
          step: larger than that of the row before.
          metrics: numbers, booleans, None, arrays of one element, or lists of these (by layer; JSON only).

        Raises:
          MetricsError: a step that is not later than the last, or a value of another kind.
        """
        if step <= self._last_step:
            raise MetricsError(
                f"metrics of step {step} after those of step {self._last_step}: expected a later step"
            )
        row = {"step": step, **{name: _plain(name, value) for name, value in metrics.items()}}
        with open(self.path, "ab") as file:
            file.write(_row(row).encode())
            file.flush()
            os.fsync(file.fileno())
        self._last_step = step
        self._add_scalars(row)

    def close(self) -> None:
        self._tensorboard.close()

    def _add_scalars(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._tensorboard.add_scalar(name, value, row["step"])

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order, without a torn last one.

    Raises:
      MetricsError: another row is not a JSON object with a step.
    """
    rows = []
    *complete, torn = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(complete, start=1):
        try:
            row = json.loads(line)
            row["step"] + 0
        except (ValueError, TypeError, KeyError) as error:
            if number == len(complete) and not torn:
                break  # a machine that lost power can leave a last line of zeros
            raise MetricsError(f"{path}, line {number} is not a metrics row: {line[:80]!r}") from error
        rows.append({name: _from_json(value) for name, value in row.items()})
    return rows


def _row(row: Mapping[str, Any]) -> str:
    return json.dumps({name: _to_json(value) for name, value in row.items()}, allow_nan=False) + "\n"


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "biuf":
        return array.item()
    if array.size == 1 and array.dtype.name == "bfloat16":
        return float(array.item())
    raise MetricsError(
        f"metric {name!r} is a {type(value).__name__} of shape {array.shape} and dtype {array.dtype}; expected one "
        "number, or a list of numbers"
    )


def _to_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
