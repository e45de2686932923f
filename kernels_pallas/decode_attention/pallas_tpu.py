"""Decode attention on TPUs: one query token per sequence over the cache, FP4 or BF16, in splits of 128 entries.

Keys and values come with their entries along lanes (see `kv_cache.pallas_tpu`), so a split of a head is a weight tile
[Dh, 128] like those of the matmuls and is decoded by the same code. The power-of-two row scale of a key multiplies its
score, that of a value its weight, both exactly. The arithmetic is that of `reference`, but that splits are combined one
after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from kernels_pallas import formats, target, tiles
from kernels_pallas.decode_attention.reference import SPLIT
from kernels_pallas.formats import Fp4Format
from kernels_pallas.kv_cache.cache import KVCache
from kernels_pallas.kv_cache.pallas_tpu import cache_refusal, entries_last, leaves

STEP_SPLITS = 8  # splits in VMEM at a time, at most
EMPTY = -1e30  # peak of no score: finite, so that differences of peaks are never NaN


def refusal(
    q: jax.Array | jax.ShapeDtypeStruct,
    cache: KVCache,
    positions: jax.Array | jax.ShapeDtypeStruct,
    *,
    scale: float | None = None,
    layer: jax.Array | jax.ShapeDtypeStruct | None = None,
    page_table: jax.Array | jax.ShapeDtypeStruct | None = None,
    window: int | None = None,
    sinks: jax.Array | jax.ShapeDtypeStruct | None = None,
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    if q.shape[1] != 1:
        return f"it serves one query a sequence, not {q.shape[1]}"
    if q.dtype != jnp.bfloat16:
        return f"its queries are BF16, not {q.dtype}"
    return cache_refusal(cache, page_table)


def attention(
    q: Float[Array, "b t hq d"],
    cache: KVCache,
    positions: Int32[Array, "b t"],
    *,
    scale: float | None = None,
    layer: Int32[Array, ""] | None = None,
    page_table: Int32[Array, "b pages"] | None = None,
    window: int | None = None,
    sinks: Float32[Array, " hq"] | None = None,
) -> Float[Array, "b t hq d"]:
    """See `api.attention`."""
    batch, _, q_heads, dim = q.shape
    heads, size = cache.k.shape[-2], cache.k.shape[-3]
    group = q_heads // heads
    generation = target.current().generation
    q = q.reshape(batch, heads, group, dim)
    order = None
    if cache.format is not None:
        q = tiles.permuted(q, generation)
        order = jnp.argsort(tiles.permuted(jnp.arange(dim, dtype=jnp.int32), generation))
    # A step's splits lie in one page or row, and no step reaches from one into the next.
    splits = next(
        n
        for n in range(min(STEP_SPLITS, pl.cdiv(size, SPLIT)), 0, -1)
        if size % (n * SPLIT) == 0 or n == 1 or page_table is None
    )
    tokens, pages = splits * SPLIT, 1 if page_table is None else page_table.shape[1]
    steps = pl.cdiv(size, tokens)  # of a page or row
    table = jnp.arange(batch, dtype=jnp.int32)[:, None] if page_table is None else page_table
    # The first entry that a query sees follows from its own position, also where that lies past the cache.
    firsts = jnp.maximum(positions[:, 0] - (window or 0) + 1, 0)
    positions = jnp.minimum(positions[:, 0], pages * size - 1)
    stacked = layer is not None
    arrays = [entries_last(leaf, stacked) for a in (cache.k, cache.v) for leaf in leaves(a)]
    arrays = target.left_in_hbm(arrays) if stacked else arrays

    def cache_spec(leaf):
        def index(b, s, positions, table, layer, firsts):
            # Steps that see nothing fetch nothing: they stay at the first or the last one that does.
            first = jnp.int32(0) if window is None else lax.div(firsts[b], tokens)
            s = jnp.clip(s, first, lax.div(jnp.maximum(positions[b], 0), tokens))
            page = jnp.maximum(table[b * pages + lax.div(s, steps)], 0)
            return layer[0], page, *(0,) * len(rows), lax.rem(s, steps)

        rows = leaf.shape[2:-1]
        return pl.BlockSpec((pl.squeezed, pl.squeezed, *rows, tokens), index)

    def query_spec(width):
        return pl.BlockSpec((pl.squeezed, heads, group, width), lambda b, *_: (b, 0, 0, 0))

    sinks = jnp.full((heads, group, 1), -jnp.inf) if sinks is None else sinks.reshape(heads, group, 1)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            format=cache.format,
            generation=generation,
            scale=dim**-0.5 if scale is None else scale,
            window=window,
            splits=splits,
            page=(steps, pages, size),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, pages * steps),
            in_specs=[
                query_spec(dim),
                pl.BlockSpec((heads, group, 1), lambda b, *_: (0, 0, 0)),
                *map(cache_spec, arrays),
            ],
            out_specs=query_spec(dim),
            scratch_shapes=[
                pltpu.VMEM((heads, group, 1), jnp.float32),
                pltpu.VMEM((heads, group, 1), jnp.float32),
                pltpu.VMEM((heads, group, dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, group, dim), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=target.interpreted(),
        name=f"decode_attention_{cache.format.name if cache.format else 'bf16'}",
    )(
        positions,
        table.reshape(-1),
        jnp.zeros((1,), jnp.int32) if layer is None else layer[None],
        firsts,
        q,
        sinks,
        *arrays,
    )
    out = out if order is None else out[..., order]
    return out.reshape(batch, 1, q_heads, dim)


def _kernel(
    positions,
    table,
    _,
    firsts,
    q_ref,
    sinks_ref,
    *refs,
    format: Fp4Format | None,
    generation,
    scale,
    window,
    splits,
    page,
):
    *cache_refs, out_ref, peak_ref, total_ref, acc_ref = refs
    steps, pages, size = page
    b, step = pl.program_id(0), pl.program_id(1)
    position = positions[b]
    heads = q_ref.shape[0]
    arrays = len(cache_refs) // 2
    unit = 1.0 if format is None else tiles.unit(generation)

    @pl.when(step == 0)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, EMPTY)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def attend(i, _):
        within = lax.rem(step, steps) * splits * SPLIT + i * SPLIT  # of the page or row
        entry = lax.broadcasted_iota(jnp.int32, (1, SPLIT), 1) + within
        index = entry + lax.div(step, steps) * size
        seen = (index <= position) & (entry < size)
        if window is not None:
            seen &= index >= firsts[b]
        lanes = pl.ds(pl.multiple_of(i * SPLIT, SPLIT), SPLIT)
        k = [ref[..., lanes] for ref in cache_refs[:arrays]]
        v = [ref[..., lanes] for ref in cache_refs[arrays:]]
        k_scale, v_scale = (None if format is None else formats.row_scale(a[2]) for a in (k, v))
        for head in range(heads):
            keys = _operand(k, head, heads, format, generation, None)
            scores = jnp.dot(q_ref[head], keys, preferred_element_type=jnp.float32)
            if format is not None:
                scores = scores * unit * k_scale[head : head + 1]
            scores = jnp.where(seen, scores * scale, -jnp.inf)
            own = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), EMPTY)
            weights = jnp.exp(scores - own)
            total = jnp.sum(weights, axis=1, keepdims=True)
            weights = weights.astype(jnp.bfloat16)
            if format is not None:  # an entry that is not seen has any scale, NaN included
                weights = (
                    weights.astype(jnp.float32) * jnp.where(seen, v_scale[head : head + 1], 0.0)
                ).astype(jnp.bfloat16)
            values = _operand(v, head, heads, format, generation, seen)
            partial = lax.dot_general(
                weights, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            peak = jnp.maximum(peak_ref[head], own)
            before, share = jnp.exp(peak_ref[head] - peak), jnp.exp(own - peak)
            peak_ref[head] = peak
            total_ref[head] = total_ref[head] * before + total * share
            acc_ref[head] = acc_ref[head] * before + partial * share

    first = jnp.int32(0) if window is None else lax.div(firsts[b], SPLIT)
    last = lax.div(jnp.maximum(position, 0), SPLIT)
    base = lax.div(step, steps) * lax.div(size + SPLIT - 1, SPLIT) + lax.rem(step, steps) * splits

    @pl.when((position >= 0) & (table[b * pages + lax.div(step, steps)] >= 0))
    def _():
        lax.fori_loop(jnp.maximum(first - base, 0), jnp.minimum(last - base + 1, splits), attend, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        peak = jnp.maximum(peak_ref[...], sinks_ref[...])
        share = jnp.exp(peak_ref[...] - peak)
        total = total_ref[...] * share + jnp.exp(sinks_ref[...] - peak)
        out = acc_ref[...] * (share * unit) / jnp.where(total == 0.0, 1.0, total)
        out_ref[...] = out.astype(out_ref.dtype)


def _operand(
    arrays: list[Array],
    head: int,
    heads: int,
    format: Fp4Format | None,
    generation: int,
    seen: Bool[Array, "1 s"] | None,
) -> Array:
    """A head's entries of a split [Dh, 128] in BF16; those that are not `seen` are zero, whatever they hold."""

    def rows(a):
        if a.ndim == 3:  # with heads as an axis, see `entries_last`
            return a[head]
        size = a.shape[0] // heads
        return a[head * size : (head + 1) * size]

    if format is None:
        entries = rows(arrays[0])
        if seen is None:
            return entries
        return jnp.where(seen, entries.astype(jnp.float32), 0.0).astype(jnp.bfloat16)
    scales = arrays[1]
    # Those of all heads at once where they are rows of one array: four bytes are unpacked at a time.
    merged = scales.ndim == 2
    bits = rows(tiles.scale_bits(scales, format)) if merged else tiles.scale_bits(rows(scales), format)
    if seen is not None:
        bits = jnp.where(seen, bits, jnp.uint32(0))
    return tiles.scaled_codes(rows(arrays[0]), tiles.staged_form(bits, generation), format, generation)
