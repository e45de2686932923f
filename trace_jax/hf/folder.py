"""A folder in the Hugging Face layout: config.json and one or several safetensors files."""

import contextlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from trace_jax.config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointFormatError(ValueError):
    """A folder that is not what it should be; the message names the file, tensor or key."""


class Folder:
    """The tensors of a checkpoint, read slice by slice; a context manager that keeps the files open.

    Raises:
        CheckpointFormatError: a missing shard or index, a truncated file, a tensor in two shards, or an index that does
            not say what the shards hold.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointFormatError(
                f"{self.path} is not a folder; expected one with config.json and weights."
            )
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        index = self._index()
        for name in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._open(name)
        if index is not None:
            self._compare(index)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _index(self) -> dict[str, str] | None:
        """File of each tensor by the index; None for a folder of one file."""
        found = sorted(p.name for p in self.path.glob("*.safetensors") if p.is_file())
        if (self.path / INDEX).exists():
            index = read_json(self.path / INDEX, CheckpointFormatError).get("weight_map")
            if not isinstance(index, dict) or not index:
                raise CheckpointFormatError(f"{self.path / INDEX} has no weight_map.")
            for name, file in index.items():
                if not isinstance(file, str):
                    raise CheckpointFormatError(
                        f"{self.path / INDEX} has {file!r} for {name}; expected the name of a file."
                    )
            missing = sorted(set(index.values()) - set(found))
            if missing:
                raise CheckpointFormatError(
                    f"{self.path} has no {', '.join(missing)}, which its index names; it has {', '.join(found)}."
                )
            return index
        if found == [SINGLE]:
            return None
        if not found:
            raise CheckpointFormatError(
                f"{self.path} has no safetensors files; expected {SINGLE} or shards with {INDEX}."
            )
        raise CheckpointFormatError(
            f"{self.path} has {', '.join(found)} but no {INDEX}, which says what belongs together; "
            f"expected it, or {SINGLE} alone."
        )

    def _open(self, name: str) -> None:
        try:
            # Positioned reads: mapped pages would count as this process's memory.
            file = self._stack.enter_context(safe_open(self.path / name, framework="np", backend="pread"))
        except SafetensorError as error:
            raise CheckpointFormatError(
                f"{self.path / name} is truncated or no safetensors file ({error}); copy it again."
            ) from error
        self._files[name] = file
        for tensor in file.keys():  # noqa: SIM118 (no mapping)
            if tensor in self._file_of:
                raise CheckpointFormatError(
                    f"{tensor} is both in {self._file_of[tensor]} and in {name} of {self.path}."
                )
            self._file_of[tensor] = name

    def _compare(self, index: Mapping[str, str]) -> None:
        wrong = [name for name, file in index.items() if self._file_of.get(name) != file]
        extra = sorted(set(self._file_of) - set(index))
        if wrong:
            raise CheckpointFormatError(
                f"{self.path / INDEX} has {wrong[0]} in {index[wrong[0]]}, which does not hold it "
                f"({len(wrong)} such tensors)."
            )
        if extra:
            raise CheckpointFormatError(
                f"{self.path / self._file_of[extra[0]]} holds {extra[0]}, which the index does not name "
                f"({len(extra)} such tensors)."
            )

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    @property
    def largest_file(self) -> int:
        """Bytes of the largest file."""
        return max((self.path / name).stat().st_size for name in self._files)

    def file_of(self, name: str) -> str:
        return self._file_of[name]

    def dtype(self, name: str) -> str:
        """As safetensors calls it: BF16, F32, U8, F8_E4M3."""
        return self._slice(name).get_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Part of a tensor. Slices have explicit bounds and no step."""
        if self.dtype(name) == "F8_E4M3":
            return self._read_fp8(name)[index]
        return np.asarray(self._slice(name)[(*index, ...)])

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _read_fp8(self, name: str) -> np.ndarray:
        """The library's NumPy interface knows no FP8: its bytes are found by the header."""
        path = self.path / self._file_of[name]
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            start, stop = json.loads(file.read(length))[name]["data_offsets"]
            file.seek(8 + length + start)
            data = np.frombuffer(file.read(stop - start), ml_dtypes.float8_e4m3fn)
        return data.reshape(self.shape(name))
