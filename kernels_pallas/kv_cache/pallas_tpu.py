"""Writes to the KV cache on TPUs, in place.

Kernels see a cache with its entries last, [B, H x n, S]: entries fill the 128 lanes of a register, as columns of a
weight do, and a decode step reads whole registers. [B, S, H, n] with n = Dh / 8 words would be padded to 128 lanes in
memory, eight times its size. The transposition costs nothing where XLA may lay the cache out that way, as it may
inside a jitted decode loop. Where n is no whole number of a tile's 8 rows, heads stay an axis, [B, H, n, S]: to merge
the two would move data.

A token is one column. Its 128 columns are read, changed and written back.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32, Shaped

from kernels_pallas import target
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.kv_cache.cache import AppendedRows, KVCache
from kernels_pallas.kv_cache.pages import entry_index
from kernels_pallas.quantize import pallas_tpu as quantize_tpu
from kernels_pallas.tiles import LANES, SUBLANES


def refusal(
    cache: KVCache,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    positions: jax.Array | jax.ShapeDtypeStruct,
    valid: jax.Array | jax.ShapeDtypeStruct,
    *,
    layer: jax.Array | jax.ShapeDtypeStruct | None = None,
    page_table: jax.Array | jax.ShapeDtypeStruct | None = None,
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    if k.shape[1] != 1:
        return f"it appends one token to each sequence, not {k.shape[1]}"
    return cache_refusal(cache, page_table)


def cache_refusal(cache: KVCache, page_table: jax.Array | jax.ShapeDtypeStruct | None) -> str | None:
    """Why kernels do not serve a cache, None if they do."""
    if cache.format is None and cache.k.dtype != jnp.bfloat16:
        return f"an unquantized cache is BF16, not {cache.k.dtype}"
    if page_table is not None and cache.k.shape[-3] % LANES:
        return f"pages of {cache.k.shape[-3]} entries are no whole number of {LANES}"
    return None


def leaves(entries: Fp4Array | Array) -> list[Array]:
    """The arrays of keys or values, each [..., S, H, n] or, of row exponents, [..., S, H]."""
    return (
        [entries.words, entries.scales, entries.row_exponent] if isinstance(entries, Fp4Array) else [entries]
    )


def entries_last(leaf: Shaped[Array, "..."], stacked: bool) -> Shaped[Array, "..."]:
    """A cache array [..., S, H, n] or [..., S, H] as kernels see it: [L, B, H x n, S] or [L, B, H, n, S]."""
    leaf = jnp.moveaxis(leaf if stacked else leaf[None], 2, -1)
    if leaf.ndim == 5 and leaf.shape[3] % SUBLANES == 0:
        return leaf.reshape(*leaf.shape[:2], -1, leaf.shape[-1])
    return leaf


def append(
    cache: KVCache,
    k: Float[Array, "b t h d"],
    v: Float[Array, "b t h d"],
    positions: Int32[Array, "b t"],
    valid: Bool[Array, "b t"],
    *,
    layer: Int32[Array, ""] | None = None,
    page_table: Int32[Array, "b pages"] | None = None,
) -> tuple[KVCache, AppendedRows | None, AppendedRows | None]:
    """See `api.append`."""
    if cache.format is None:
        new, quantized = (k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)), (None, None)
    else:
        quantized = tuple(quantize_tpu.quantize_recorded(a, cache.format) for a in (k, v))
        new = tuple(rows for rows, _ in quantized)
    # One pair (sequence or page, entry) per token; out of range where nothing is to be written.
    index = [
        a[:, 0] for a in jnp.broadcast_arrays(*entry_index(positions, valid, page_table, cache.k.shape[-4:]))
    ]
    inside = (index[0] < cache.k.shape[-4]) & (index[1] < cache.k.shape[-3])
    old, structure = jax.tree.flatten(cache)
    stacked = layer is not None
    arrays = [entries_last(leaf, stacked) for a in (cache.k, cache.v) for leaf in leaves(a)]
    rows = [leaf for a in new for leaf in leaves(a)]
    written = _write(
        target.left_in_hbm(arrays) if stacked else arrays,
        [row.reshape(row.shape[0], *leaf.shape[2:-1]) for row, leaf in zip(rows, arrays, strict=True)],
        index,
        inside,
        jnp.zeros((1,), jnp.int32) if layer is None else layer[None],
    )
    written = [_entries_third(leaf, before.shape, stacked) for leaf, before in zip(written, old, strict=True)]
    return jax.tree.unflatten(structure, written), *quantized


def _entries_third(leaf: Shaped[Array, "..."], shape: tuple[int, ...], stacked: bool) -> Shaped[Array, "..."]:
    """`entries_last` undone: a cache array of `shape`."""
    heads = shape[3 if stacked else 2 :]
    return jnp.moveaxis(leaf.reshape(*leaf.shape[:2], *heads, leaf.shape[-1]), -1, 2).reshape(shape)


def _write(
    cache: list[Array],
    new: list[Array],
    index: list[Array],
    inside: Bool[Array, " b"],
    layer: Int32[Array, " 1"],
) -> Sequence[Array]:
    """Set entry `index` of each array [L, B, ..., S] to a row of `new` [B, ...] where `inside`."""
    batch = inside.shape[0]
    # A token that is not written stays with the columns of the one before it, or of the first that is: blocks that no
    # other step holds. Without any, all steps leave the first columns as they are.
    step = jnp.arange(batch, dtype=jnp.int32)
    last = lax.cummax(jnp.where(inside, step, -1))
    owner = jnp.where(last < 0, jnp.argmax(inside).astype(jnp.int32), last)
    row, entry = (jnp.where(jnp.any(inside), a[owner], 0) for a in index)
    # Tokens lie along lanes here, too, and as 32-bit integers, which a kernel can move from lane to lane.
    new = [jnp.moveaxis(_as_int32(leaf), 0, -1) for leaf in new]

    def cache_spec(leaf):
        rows = leaf.shape[2:-1]

        def index(b, row, entry, _, layer):
            return layer[0], row[b], *(0,) * len(rows), lax.div(entry[b], LANES)

        return pl.BlockSpec((pl.squeezed, pl.squeezed, *rows, LANES), index)

    def new_spec(leaf):
        rows = leaf.shape[:-1]
        return pl.BlockSpec((*rows, LANES), lambda b, *_: (*(0,) * len(rows), lax.div(b, LANES)))

    cache_specs = [cache_spec(leaf) for leaf in cache]
    new_specs = [new_spec(leaf) for leaf in new]
    return pl.pallas_call(
        functools.partial(_kernel, count=len(cache)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4, grid=(batch,), in_specs=cache_specs + new_specs, out_specs=cache_specs
        ),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in cache],
        input_output_aliases={4 + i: i for i in range(len(cache))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=target.interpreted(),
        name="kv_append",
    )(row, entry, inside.astype(jnp.int32), layer, *cache, *new)


def _kernel(row, entry, inside, _, *refs, count: int):
    old_refs, new_refs, out_refs = refs[:count], refs[count : 2 * count], refs[2 * count :]
    step = pl.program_id(0)
    before = jnp.maximum(step - 1, 0)
    moved = (row[step] != row[before]) | (lax.div(entry[step], LANES) != lax.div(entry[before], LANES))

    @pl.when((step == 0) | moved)
    def _():
        for old_ref, out_ref in zip(old_refs, out_refs, strict=True):
            out_ref[...] = old_ref[...]

    @pl.when(inside[step] == 1)
    def _():
        lane = lax.rem(entry[step], LANES)
        shift = lax.rem(lane - lax.rem(step, LANES) + LANES, LANES)
        for new_ref, out_ref in zip(new_refs, out_refs, strict=True):
            new = new_ref[...]
            new = pltpu.roll(new, shift, new.ndim - 1)
            here = lax.broadcasted_iota(jnp.int32, new.shape, new.ndim - 1) == lane
            out_ref[...] = _from_int32(jnp.where(here, new, _as_int32(out_ref[...])), out_ref.dtype)


def _as_int32(a: Array) -> Int32[Array, "..."]:
    """Bits of `a`; those of the FP32 value of BF16."""
    if a.dtype == jnp.uint8:
        return a.astype(jnp.int32)
    return lax.bitcast_convert_type(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, jnp.int32)


def _from_int32(bits: Int32[Array, "..."], dtype: jnp.dtype) -> Array:
    if dtype == jnp.uint8:
        return bits.astype(jnp.uint8)
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
    return lax.bitcast_convert_type(bits, dtype)
