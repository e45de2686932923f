"""Rows of a JSON Lines file by index, checked when it is opened."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_jax.data.problem import DataError


@dataclasses.dataclass(frozen=True)
class Row:
    """One object of the file and the number of its line, from 1."""

    line: int
    fields: Mapping[str, Any]


class JsonlSource:
    """A Grain random-access source (`grain.MapDataset.source`) of a file's rows, which it holds in memory.

    Args:
      path: a UTF-8 file with a JSON object a line; blank lines are passed over.
      fields: the fields that every row must have, and the types that each may be of. Others are dropped.

    Raises:
      FileNotFoundError: no such file.
      DataError: no rows, or a line that is not a JSON object with these fields; the message has its number.
    """

    def __init__(self, path: str | os.PathLike, fields: Mapping[str, tuple[type, ...]]):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"no JSONL file at {self.path}")
        with self.path.open("rb") as lines:
            self._rows = [
                Row(number, self._fields(number, line, fields))
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
        if not self._rows:
            raise DataError(f"{self.path} is empty; expected a JSON object a line with {', '.join(fields)}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def _fields(self, number: int, line: bytes, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # also bytes that are not UTF-8
            raise DataError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is a JSON {type(row).__name__}; expected an object")
        for name, types in fields.items():
            if name not in row:
                raise DataError(f"{where} has no {name!r}; it has {', '.join(map(repr, row)) or 'nothing'}")
            # JSON's true is a Python int, but no number.
            if not isinstance(row[name], types) or (isinstance(row[name], bool) and bool not in types):
                expected = " or ".join(kind.__name__ for kind in types)
                raise DataError(
                    f"{where}: {name!r} is {row[name]!r} ({type(row[name]).__name__}); expected {expected}"
                )
        return {name: row[name] for name in fields}
