"""From parameters to a folder of safetensors files, one file's tensors in memory at a time."""

import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as Maps
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from trace_jax.hf.folder import INDEX, SINGLE, CheckpointFormatError
from trace_jax.hf.model import is_kept_wide
from trace_jax.hf.table import Mapping, Tensor, put, take
from trace_jax.quant import cast_weight

MAX_FILE_BYTES = 5_000_000_000
FORMAT = {"format": "pt"}
"""Metadata without which some readers refuse a file; it says nothing of how the file was written."""


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `out` when all of it has been written.

    Raises:
        CheckpointFormatError: `out` exists and is not empty.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointFormatError(f"{out} exists and is not empty; choose another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o755)
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_tensors(
    folder: Path,
    mapping: Mapping,
    values: Maps[str, jax.Array],
    extra: Maps[str, np.ndarray],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes every tensor of a mapping, in files of at most `max_file_bytes` (but at least one tensor each).

    Args:
        folder: where to.
        mapping: the model's table.
        values: parameters by dotted path, all of this process's devices. Floating-point ones are rounded to BF16, but
            for those that stay FP32 in rollouts (`quant.KEPT_WIDE`), where BF16 would not hold them.
        extra: small tensors besides, by name.
        max_file_bytes: more than that, and the folder has several files and an index.

    Raises:
        CheckpointFormatError: parameters that are spread over several processes.
    """
    for param, value in values.items():
        if not value.is_fully_addressable:
            raise CheckpointFormatError(
                f"{param} is spread over several processes; restore the checkpoint in one process and export there."
            )
    wide = frozenset(param for param in mapping.shapes if is_kept_wide(param) and _is_rounded(values[param]))
    files = _distribute(mapping, extra, wide, max_file_bytes)
    layers, index, total = _Layers(values, wide), {}, 0
    for number, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {
            name: extra[name] if name in extra else build(mapping, mapping.tensors[name], layers.block)
            for name in names
        }
        save_file(tensors, folder / file, metadata=FORMAT)
        index |= dict.fromkeys(names, file)
        total += sum(x.nbytes for x in tensors.values())
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def build(mapping: Mapping, tensor: Tensor, block: Callable[[str, int | None], np.ndarray]) -> np.ndarray:
    """One tensor as the file holds it, from the parameters that it is a part of.

    Args:
        mapping: the model's table.
        tensor: of the mapping.
        block: gives a parameter's layer on the host (None: a parameter without layers).
    """
    built: np.ndarray | None = None
    for use in tensor.uses:
        link = use.link
        unit = block(link.param, use.index[0] if link.per_layer else None)
        if link.leading > link.per_layer:
            unit = unit[use.index[-1]]
        part = take(np.asarray(unit), use.ours, link.axis)
        if built is None:
            built = np.empty(tensor.shape, part.dtype)
        put(link.to_unit(built), use.positions, link.axis, part)
    assert built is not None
    return tensor.codec.encode(built)


class _Layers:
    """Layers of parameters on the host; those of one layer at a time, since files go layer by layer."""

    def __init__(self, values: Maps[str, jax.Array], wide: frozenset[str]):
        self._values, self._wide = values, wide
        self._layer: int | None = None
        self._blocks: dict[str, np.ndarray] = {}

    def block(self, param: str, layer: int | None) -> np.ndarray:
        if layer != self._layer:
            self._layer, self._blocks = layer, {}
        if param not in self._blocks:
            if layer is None:
                self._blocks[param] = np.asarray(_stored(self._values[param]))
            else:  # all of its stack together: one program, not one per parameter
                stack = param.split(".")[0]
                whole = {name: x for name, x in self._values.items() if name.split(".")[0] == stack}
                self._blocks |= {name: np.asarray(x) for name, x in _layer(whole, layer, self._wide).items()}
        return self._blocks[param]


@jax.jit
def _stored(x: jax.Array) -> jax.Array:
    return cast_weight(x, jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.partial(jax.jit, static_argnums=2)
def _layer(stack: dict[str, jax.Array], layer: jax.Array, wide: frozenset[str]) -> dict[str, jax.Array]:
    of_layer = {name: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in stack.items()}
    return {name: x if name in wide else _stored(x) for name, x in of_layer.items()}


@jax.jit
def _is_rounded(x: jax.Array) -> jax.Array:
    """Whether BF16 does not hold every value."""
    return (cast_weight(x, jnp.bfloat16).astype(x.dtype) != x).any()


def _distribute(
    mapping: Mapping, extra: Maps[str, np.ndarray], wide: frozenset[str], max_file_bytes: int
) -> list[list[str]]:
    """Names of the tensors of each file, in the model's order."""
    sizes = {name: _stored_bytes(tensor, wide) for name, tensor in mapping.tensors.items()}
    sizes |= {name: x.nbytes for name, x in extra.items()}
    files: list[list[str]] = []
    room = -1
    for name in sorted(sizes, key=_natural):
        if sizes[name] > room or not files:
            files.append([])
            room = max_file_bytes
        files[-1].append(name)
        room -= sizes[name]
    return files


def _stored_bytes(tensor: Tensor, wide: frozenset[str]) -> int:
    dtype = tensor.codec.dtypes[0]
    if tensor.uses[0].link.param in wide:
        dtype = "F32"
    itemsize = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
    return int(np.prod(tensor.stored_shape, dtype=np.int64)) * itemsize


def _natural(name: str) -> list[Any]:
    """Key that sorts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def copied_files(base: Path | None) -> Sequence[Path]:
    """Tokenizer and generation settings of the folder that a model came from."""
    if base is None:
        return []
    names = (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
        "vocab.json",
        "tokenizer.model",
    )
    return [base / name for name in names if (base / name).exists()]
