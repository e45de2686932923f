"""Decode attention on NVIDIA GPUs, over FP4 or BF16 caches. The kernels are in `triton_kernels`."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas import triton_bridge
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.kv_cache.cache import KVCache, init_cache
from kernels_pallas.triton_bridge import CompileCase

CHUNK, BF16_CHUNK = 512, 1024
"""Positions of a program. Fixed, so that a row's result does not depend on the batch or on the cache's length."""
HEAD_DIMS = (64, 128, 256)
MAX_QUERIES = 16
MAX_GRID = 65535  # of a second grid axis


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
    _, tokens, q_heads, dim = q.shape
    queries = q_heads // cache.k.shape[-2]
    if tokens != 1:
        return f"it decodes 1 token a sequence, not {tokens}"
    for name, dtype in (("queries", q.dtype), ("a cache", jnp.bfloat16 if cache.format else cache.k.dtype)):
        if dtype != jnp.bfloat16:
            return f"it attends in bfloat16, not with {name} of {dtype}"
    if dim not in HEAD_DIMS:
        return f"head dimension {dim} is not one of its {HEAD_DIMS}"
    if queries > MAX_QUERIES:
        return f"{queries} query heads of a KV head exceed its {MAX_QUERIES}"
    tile = _tiles(cache, dim)["TILE"]
    if page_table is not None and cache.length % tile:
        return f"pages of {cache.length} positions are not multiples of {tile}"
    if q.shape[0] * cache.k.shape[-2] > MAX_GRID:
        return f"{q.shape[0]} sequences of {cache.k.shape[-2]} KV heads exceed its {MAX_GRID} programs"
    return triton_bridge.unavailable()


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
    from kernels_pallas.decode_attention.triton_kernels import attention_kernel, join_kernel

    batch, _, q_heads, dim = q.shape
    heads = cache.k.shape[-2]
    pages = 0 if page_table is None else page_table.shape[1]
    chunk = BF16_CHUNK if cache.format is None else CHUNK
    chunks = -(-(pages or 1) * cache.length // chunk)
    tiles = _tiles(cache, dim)
    # The second operand of a matrix instruction has at least 8 columns, one warp alone, or 16.
    group = max(16 if cache.format is None else 8, 1 << (q_heads // heads - 1).bit_length())
    entries = []
    for a in (cache.k, cache.v):
        entries += [a, a, a] if cache.format is None else [a.words, a.scales, a.row_exponent]
    partial = (batch * heads, chunks, group)
    shared = {"HEADS": heads, "QUERIES": q_heads // heads, "G": group, "D": dim}
    parts = triton_bridge.call(
        attention_kernel,
        q,
        positions,
        # What is not given is not read: any array stands in its place.
        positions if page_table is None else page_table,
        positions if layer is None else layer,
        *entries,
        outputs=[jax.ShapeDtypeStruct((*partial, *tail), jnp.float32) for tail in ((dim,), (), ())],
        grid=(chunks, batch * heads),
        num_warps=1 if cache.format is not None else 4,
        num_stages=tiles["STAGES"],
        SCALE=dim**-0.5 if scale is None else scale,
        FORMAT="bf16" if cache.format is None else cache.format.name,
        SEQUENCES=cache.k.shape[-4],
        LENGTH=cache.length,
        PAGES=pages,
        LAYERED=layer is not None,
        WINDOW=window or 0,
        CHUNK=chunk,
        **shared,
        **tiles,
    )
    return triton_bridge.call(
        join_kernel,
        *parts,
        positions if sinks is None else sinks,
        outputs=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=(batch * heads, q_heads // heads),
        num_warps=1,
        CHUNKS=chunks,
        CHUNKS_POW2=1 << (chunks - 1).bit_length(),
        SINKS=sinks is not None,
        **shared,
    )[0]


def _tiles(cache: KVCache, dim: int) -> dict[str, int]:
    """Positions of a tile, which lies in one page, and depth of the pipeline, measured on an H200.

    They follow from the model alone, so that the layout of the cache changes no bit.
    """
    tile = 64 if cache.format is None else 32
    return {"TILE": tile // 2 if dim > 128 else tile, "STAGES": 3}


def compile_cases() -> Iterator[CompileCase]:
    """All head dimensions and formats, pages of a layer, window and sinks."""

    def shape(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    for format in (None, NVFP4, MXFP4):
        name = f"attention_{'bf16' if format is None else format.name}"
        for heads, q_heads, dim in ((4, 32, 128), (8, 64, 64), (2, 16, 256)):
            q = shape(64, 1, q_heads, dim, dtype=jnp.bfloat16)
            cache = jax.eval_shape(functools.partial(init_cache, 64, 8192, heads, dim, format))
            yield CompileCase(f"{name}_{dim}", attention, (q, cache, shape(64, 1)))
        q = shape(64, 1, 64, 64, dtype=jnp.bfloat16)
        pages = jax.eval_shape(functools.partial(init_cache, 1000, 64, 8, 64, format, layers=4))
        yield CompileCase(
            f"{name}_paged_layer_window_sinks",
            lambda q, cache, positions, layer, page_table, sinks: attention(
                q, cache, positions, layer=layer, page_table=page_table, window=128, sinks=sinks
            ),
            (q, pages, shape(64, 1), shape(), shape(64, 20), shape(64, dtype=jnp.float32)),
        )
