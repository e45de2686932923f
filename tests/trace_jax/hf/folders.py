"""A checkpoint in memory that counts what is read of it, and folders on disk that are changed to be wrong."""

import json
import math
import pathlib
import shutil
from collections.abc import Callable

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.trace_jax.families import ROOT as TINY
from trace_jax.hf.folder import INDEX, SINGLE, Folder

__all__ = ["TINY", "InMemory", "changed", "configured", "fused", "in_mxfp4", "split"]
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
    """A one-file copy of a folder whose tensors went through `change`."""
    shutil.copytree(source, out)
    tensors = {}
    for path in sorted(out.glob("*.safetensors*")):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    change(tensors)
    save_file(tensors, out / SINGLE)
    return out


def configured(source: pathlib.Path, out: pathlib.Path, **keys) -> pathlib.Path:
    """A copy of a folder with other keys in its config.json."""
    shutil.copytree(source, out)
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return out


def fused(tensors: dict[str, np.ndarray], experts: int = 8) -> None:
    """Stacks the experts of every layer, gate above up, under the names of transformers 5."""
    for name in [n for n in tensors if ".experts.0." in n and n.endswith(("gate_proj.weight", "w1.weight"))]:
        block, _, last = name.partition(".experts.0.")
        parts = ("w1", "w3", "w2") if last == "w1.weight" else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            np.stack([tensors.pop(f"{block}.experts.{e}.{part}.weight") for e in range(experts)])
            for part in parts
        )
        tensors[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{block}.experts.down_proj"] = down
    for name in [n for n in tensors if ".block_sparse_moe." in n]:
        tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(name)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def in_mxfp4(source: pathlib.Path, out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A gpt-oss folder with its experts in MXFP4, as it is published, and one with the same values in BF16.

    Every 7th zero is -0, a block is zero, and one has a scale that is twice what it needs.
    """
    quantized, dense = out / "mxfp4", out / "dense"

    def change(tensors):
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            # [E, in, out] -> blocks of inputs [E, out, in / 32, 32].
            x = np.ascontiguousarray(tensors.pop(name).astype(np.float32).swapaxes(1, 2))
            x = x.reshape(*x.shape[:2], -1, 32)
            x[0, 0, 0] = 0
            exponent = np.ceil(np.log2(np.maximum(np.abs(x).max(-1), 2.0**-60) / 6)).astype(int)
            exponent[1, 1, 1] += 1
            scaled = x / 2.0 ** exponent[..., None]
            codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1).astype(np.uint8)
            signs = np.where(codes > 0, scaled < 0, np.arange(codes.size).reshape(codes.shape) % 7 == 0)
            values = E2M1[codes] * np.where(signs, -1, 1) * 2.0 ** exponent[..., None]
            values = values.reshape(*values.shape[:2], -1).swapaxes(1, 2)
            exact[name] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
            assert np.array_equal(exact[name].astype(np.float32), values)
            codes |= signs.astype(np.uint8) << 3
            tensors[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
            tensors[f"{name}_scales"] = (exponent + 127).astype(np.uint8)

    exact: dict[str, np.ndarray] = {}
    changed(source, out / "plain", change)
    changed(source, dense, lambda tensors: tensors.update(exact))
    return configured(out / "plain", quantized, quantization_config={"quant_method": "mxfp4"}), dense


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
