"""From a folder's tensors to sharded arrays, layer by layer.

Every device's part of a parameter is built on that device from blocks of one layer, read as the slices that it needs.
What a host holds besides the arrays is one block, a fraction of the checkpoint's largest file.
"""

import functools
import math
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Maps

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import MXFP4, ROW_EXPONENT_BIAS
from kernels_pallas.quantize import dequantize
from trace_jax.hf.codecs import PLAIN, CodecError
from trace_jax.hf.folder import CheckpointFormatError, Folder
from trace_jax.hf.table import Link, Mapping, put, take

SHOWN = 5
CODES_PER_WORD = 8
BLOCKS_OF_A_FILE = 8
"""A block is at most this part of the largest file, unless a single expert or row is more."""


def check_tensors(folder: Folder, mapping: Mapping, ignored: Callable[[str], bool]) -> None:
    """Compares what a folder holds with what the model needs, before anything is read.

    Args:
        folder: the checkpoint.
        mapping: the model's table.
        ignored: whether a checkpoint may have a tensor of this name, which the model does not use.

    Raises:
        CheckpointFormatError: missing or unknown tensors, a wrong shape or dtype; the message names them.
    """
    missing = [name for name in mapping.tensors if name not in folder.names]
    unknown = sorted(name for name in folder.names - mapping.tensors.keys() if not ignored(name))
    if missing or unknown:
        parts = [
            f"{word} {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
            for word, names in (("lacks", missing), ("holds unknown", unknown))
            if names
        ]
        raise CheckpointFormatError(f"{folder.path} does not fit its config.json: it {' and '.join(parts)}.")
    for name, tensor in mapping.tensors.items():
        if folder.shape(name) != tensor.stored_shape:
            raise CheckpointFormatError(
                f"{name} in {folder.path / folder.file_of(name)} has shape {folder.shape(name)}; "
                f"expected {tensor.stored_shape} by config.json."
            )
        if folder.dtype(name) not in tensor.codec.dtypes:
            raise CheckpointFormatError(
                f"{name} in {folder.path / folder.file_of(name)} is {folder.dtype(name)}; "
                f"expected one of {tensor.codec.dtypes}."
            )


def load_arrays(
    folder: Folder,
    mapping: Mapping,
    shapes: Maps[str, tuple[int, ...]],
    shardings: Maps[str, Sharding],
    dtypes: Maps[str, jnp.dtype],
) -> dict[str, jax.Array]:
    """Arrays by dotted path. `check_tensors` has passed before.

    Args:
        folder: the checkpoint.
        mapping: the model's table.
        shapes: of the parameters: those of the mapping, or of MXFP4 weights whose words and scales it maps, which are
            dequantized block by block.
        shardings: of each parameter; a process reads only what its own devices hold.
        dtypes: of each parameter.

    Raises:
        CheckpointFormatError: values that are no numbers, or tensors that differ but share a value; names them.
    """
    return {
        param: _load_array(folder, mapping, param, shape, shardings[param], dtypes[param])
        for param, shape in shapes.items()
    }


def _load_array(
    folder: Folder, mapping: Mapping, param: str, shape: tuple[int, ...], sharding: Sharding, dtype
) -> jax.Array:
    parts: dict[tuple[range, ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        wanted = tuple(range(*s.indices(n)) for s, n in zip(index, shape, strict=True))
        parts.setdefault(wanted, []).append(device)
    arrays = {}
    for wanted, (first, *others) in parts.items():
        arrays[first] = _load_part(folder, mapping, param, wanted, dtype, first)
        arrays |= {device: jax.device_put(arrays[first], device) for device in others}
    return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays.values()), dtype=dtype)


def _load_part(
    folder: Folder, mapping: Mapping, param: str, wanted: tuple[range, ...], dtype, device: jax.Device
) -> jax.Array:
    packed = param not in mapping.shapes
    read = read_values if packed else functools.partial(read_block, dtype=dtype)
    layers = wanted[:1] if mapping.links[f"{param}.words" if packed else param][0].per_layer else ()
    rest = wanted[len(layers) :]
    rows = _rows_of_a_block(rest, folder.largest_file // BLOCKS_OF_A_FILE)
    whole = jnp.zeros([len(r) for r in wanted], dtype, device=device)
    for place in np.ndindex(*(len(r) for r in layers)):
        index = tuple(r[i] for r, i in zip(layers, place, strict=True))
        for start in range(0, len(rest[0]) if rest else 1, rows):
            part = (rest[0][start : start + rows], *rest[1:]) if rest else ()
            block = read(folder, mapping, param, index, part)
            block = block.reshape((1,) * len(layers) + block.shape)
            at = (*place, *([start] if rest else []), *[0] * (len(rest) - 1))
            # Waits, so that blocks do not queue up on the host when reading is faster than the device.
            whole = jax.block_until_ready(_set_block(whole, jax.device_put(block, device), at))
    return whole


def _rows_of_a_block(wanted: Sequence[range], max_bytes: int) -> int:
    """How much of the first axis (experts, mostly) makes a block of at most `max_bytes`, in FP32; at least 1."""
    return max(1, max_bytes // (4 * math.prod(len(r) for r in wanted[1:])))


@functools.partial(jax.jit, donate_argnums=0)
def _set_block(whole: jax.Array, block: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, block.astype(whole.dtype), at)


def read_block(
    folder: Folder,
    mapping: Mapping,
    param: str,
    index: tuple[int, ...],
    wanted: Sequence[range],
    dtype: jnp.dtype,
) -> np.ndarray:
    """One layer's part of a parameter (or of a parameter without layers) in the dtype of the file.

    Args:
        folder: the checkpoint.
        mapping: the model's table.
        param: dotted path.
        index: of the layer in the stack; empty for a parameter without layers.
        wanted: positions along the remaining axes.
        dtype: of the parameter, in which the values have to be finite too.

    Raises:
        CheckpointFormatError: values that are no numbers, or tensors that differ but share a value; names them.
    """
    links = mapping.links[param]
    stored = {folder.dtype(mapping.name(link, at)) for link in links for at in _units(link, index, wanted)}
    block: np.ndarray | None = None
    for link in links:
        per_expert = link.leading > len(index)
        for place, at in enumerate(_units(link, index, wanted)):
            name = mapping.name(link, at)
            part_wanted = wanted[1:] if per_expert else wanted
            found = _read_part(folder, name, link, mapping.ours(link), part_wanted, dtype)
            if found is None:
                continue
            part, values = found
            if block is None:
                block_dtype = values.dtype if len(stored) == 1 else np.float32
                block = np.empty([len(r) for r in wanted], block_dtype)
            unit = block[place : place + 1].reshape(block.shape[1:]) if per_expert else block
            if not link.same:
                put(unit, part, link.axis, values)
            elif not np.array_equal(take(unit, part, link.axis), values):
                raise CheckpointFormatError(
                    f"{name} differs from {mapping.name(links[0], at)}, whose values it "
                    "has to repeat by config.json."
                )
    assert block is not None
    return block


def read_values(
    folder: Folder, mapping: Mapping, param: str, index: tuple[int, ...], wanted: Sequence[range]
) -> jax.Array:
    """FP32 values of one layer's part of an MXFP4 weight, see `read_block`; whole blocks of its codes are read."""
    *lead, inputs, columns = wanted
    first, last = inputs.start // MXFP4.block, -(-inputs.stop // MXFP4.block)
    words = range(first * MXFP4.block // CODES_PER_WORD, last * MXFP4.block // CODES_PER_WORD)
    blocks = range(first, last)
    codes = read_block(folder, mapping, f"{param}.words", index, (*lead, words, columns), jnp.dtype("uint32"))
    scales = read_block(
        folder, mapping, f"{param}.scales", index, (*lead, blocks, columns), jnp.dtype("uint8")
    )
    packed = Fp4Array(
        words=jnp.asarray(codes),
        scales=jnp.asarray(scales),
        row_exponent=jnp.full([len(r) for r in lead], ROW_EXPONENT_BIAS, jnp.uint8),
        format=MXFP4,
        axis=-2,
    )
    start = inputs.start - first * MXFP4.block
    return _dequantized(packed)[..., start : start + len(inputs), :]


_dequantized = jax.jit(functools.partial(dequantize, dtype=jnp.float32))


def _units(link: Link, index: tuple[int, ...], wanted: Sequence[range]) -> list[tuple[int, ...]]:
    """Leading indices of the tensors of a block: of each expert, where experts have tensors of their own."""
    return [index] if link.leading == len(index) else [(*index, expert) for expert in wanted[0]]


def _read_part(
    folder: Folder, name: str, link: Link, ours: range, wanted: Sequence[range], dtype: jnp.dtype
) -> tuple[range, np.ndarray] | None:
    """What a tensor holds of a block: positions along the link's axis of the block, and their values."""
    slices, within, part = [slice(r.start, r.stop) for r in wanted], range(1), range(1)
    if wanted:
        along = wanted[link.axis]
        start, stop = max(along.start, ours.start), min(along.stop, ours.stop)
        if start >= stop:
            return None
        part = range(start - along.start, stop - along.start)
        positions = (range(len(ours)) if link.theirs is None else link.theirs)[
            start - ours.start : stop - ours.start
        ]
        low = min(positions)
        slices[link.axis] = slice(low, max(positions) + 1)
        within = tuple(p - low for p in positions)
        if isinstance(positions, range):
            within = range(positions.start - low, positions.stop - low, positions.step)
    # Packed tensors are read whole along their last axis: what is packed there is cut once it is unpacked.
    raw = link.raw(slices, slice(0, 1))
    rest: tuple[slice, ...] = ()
    if link.codec != PLAIN:
        rest, raw = raw[-1:], raw[:-1]
    try:
        values = link.codec.decode(folder.read(name, raw))
    except CodecError as error:
        raise CheckpointFormatError(f"{name} in {folder.path / folder.file_of(name)}: {error}") from error
    if link.codec == PLAIN and jnp.finfo(dtype).max < jnp.finfo(values.dtype).max:
        with np.errstate(over="ignore"):
            cast = values.astype(dtype)
        if not np.isfinite(cast).all():
            raise CheckpointFormatError(
                f"{name} in {folder.path / folder.file_of(name)}: it holds {np.abs(values).max()}, which is infinite "
                f"in {jnp.dtype(dtype).name}. Parameters that `load_model` reads with dtype float32 hold it."
            )
    return part, take(link.to_unit(values[(..., *rest)]), within, link.axis)
