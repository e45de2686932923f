"""A checkpoint in memory that counts what is read of it, and folders on disk that are changed to be wrong."""

import json
import math
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.trace_jax.families import ROOT as TINY
from trace_jax.hf.folder import INDEX, SINGLE, Folder

__all__ = ["TINY", "InMemory", "changed", "configured", "split"]
NAMES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "float8_e4m3fn": "F8_E4M3"}


class InMemory(Folder):
    """What `Folder` offers, of a dictionary of arrays."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.path = pathlib.Path("memory")
        self.tensors = tensors
        self.elements_read = 0

    @property
    def names(self) -> set[str]:
        return set(self.tensors)

    @property
    def largest_file(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def file_of(self, name: str) -> str:
        return "tensors"

    def dtype(self, name: str) -> str:
        return NAMES[self.tensors[name].dtype.name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        assert all(s.step is None and 0 <= s.start < s.stop for s in index)
        part = self.tensors[name][index]
        self.elements_read += math.prod(part.shape)
        return part.copy()


def changed(
    source: pathlib.Path, out: pathlib.Path, change: Callable[[dict[str, np.ndarray]], None]
) -> pathlib.Path:
    """A copy of a one-file folder whose tensors went through `change`."""
    shutil.copytree(source, out)
    tensors = load_file(out / SINGLE)
    change(tensors)
    save_file(tensors, out / SINGLE)
    return out


def configured(source: pathlib.Path, out: pathlib.Path, **keys) -> pathlib.Path:
    """A copy of a folder with other keys in its config.json."""
    shutil.copytree(source, out)
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return out


def split(source: pathlib.Path, out: pathlib.Path, files: int = 3) -> pathlib.Path:
    """A copy of a one-file folder in several files with an index."""
    shutil.copytree(source, out)
    tensors = load_file(out / SINGLE)
    (out / SINGLE).unlink()
    names, index = sorted(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = names[number::files]
        save_file({name: tensors[name] for name in part}, out / file)
        index |= dict.fromkeys(part, file)
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return out
