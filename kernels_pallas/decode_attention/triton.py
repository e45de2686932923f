"""Attention over FP4 or BF16 caches on NVIDIA GPUs.

One query a sequence is decoding, by flash-decoding (`triton_kernels`); more are prefill, by flash attention
(`triton_prefill_kernels`).
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas import triton_bridge
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.kv_cache.cache import KVCache, init_cache
from kernels_pallas.triton_bridge import CompileCase

CHUNK = 1024
"""Positions of a program that decodes. Fixed for a cache: a row's result depends on no batch and no other length."""
SHORT, SHORT_CHUNK = 4096, 512
"""Positions of a program where a sequence of an FP4 cache has at most so many: a GPU has too few programs else."""
HEAD_DIMS = (64, 128, 256)
MAX_QUERIES = 16  # that decode, of a KV head
STAGES = 3  # of the pipelines
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
    for name, dtype in (("queries", q.dtype), ("a cache", jnp.bfloat16 if cache.format else cache.k.dtype)):
        if dtype != jnp.bfloat16:
            return f"it attends in bfloat16, not with {name} of {dtype}"
    if dim not in HEAD_DIMS:
        return f"head dimension {dim} is not one of its {HEAD_DIMS}"
    if tokens == 1:
        if queries > MAX_QUERIES:
            return f"{queries} query heads of a KV head exceed its {MAX_QUERIES} for one token"
        tile = _tiles(cache, dim)["TILE"]
        if page_table is not None and cache.length % tile:
            return f"pages of {cache.length} positions are not multiples of {tile}, for one token"
    if tokens > 1 and q.shape[0] * cache.k.shape[-2] > MAX_GRID:
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
    options = {"scale": scale, "layer": layer, "page_table": page_table, "window": window, "sinks": sinks}
    return (_decode if q.shape[1] == 1 else _prefill)(q, cache, positions, **options)


def _decode(
    q: Float[Array, "b 1 hq d"],
    cache: KVCache,
    positions: Int32[Array, "b 1"],
    *,
    scale: float | None,
    layer: Int32[Array, ""] | None,
    page_table: Int32[Array, "b pages"] | None,
    window: int | None,
    sinks: Float32[Array, " hq"] | None,
) -> Float[Array, "b 1 hq d"]:
    from kernels_pallas.decode_attention.triton_kernels import attention_kernel, join_kernel

    batch, _, q_heads, dim = q.shape
    heads = cache.k.shape[-2]
    capacity = (1 if page_table is None else page_table.shape[1]) * cache.length
    chunk = SHORT_CHUNK if cache.format is not None and capacity <= SHORT else CHUNK
    chunks = -(-capacity // chunk)
    # The second operand of a matrix instruction has at least 8 columns, one warp alone, or 16.
    group = max(16 if cache.format is None else 8, 1 << (q_heads // heads - 1).bit_length())
    partial = (batch * heads, chunks, group)
    shared = {"HEADS": heads, "QUERIES": q_heads // heads, "G": group, "D": dim}
    arrays, constants = _entries(cache, positions, layer, page_table)
    parts = triton_bridge.call(
        attention_kernel,
        q,
        positions,
        *arrays,
        outputs=[jax.ShapeDtypeStruct((*partial, *tail), jnp.float32) for tail in ((dim,), (), ())],
        grid=(batch * heads, chunks),
        num_warps=1 if cache.format is not None else 4,
        num_stages=STAGES,
        SCALE=dim**-0.5 if scale is None else scale,
        WINDOW=window or 0,
        CHUNK=chunk,
        NEAR=1 << (chunk // cache.length + 1).bit_length(),  # at least as many as the pages of a chunk
        STAGES=STAGES,
        **constants,
        **shared,
        **_tiles(cache, dim),
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


def _prefill(
    q: Float[Array, "b t hq d"],
    cache: KVCache,
    positions: Int32[Array, "b t"],
    *,
    scale: float | None,
    layer: Int32[Array, ""] | None,
    page_table: Int32[Array, "b pages"] | None,
    window: int | None,
    sinks: Float32[Array, " hq"] | None,
) -> Float[Array, "b t hq d"]:
    from kernels_pallas.decode_attention.triton_prefill_kernels import prefill_kernel

    batch, tokens, q_heads, dim = q.shape
    heads = cache.k.shape[-2]
    scale = dim**-0.5 if scale is None else scale
    if scale <= 0:  # the kernel scales by a positive number
        q, scale = q * jnp.asarray(np.sign(scale), q.dtype), abs(scale) or 1.0
    if cache.format is not None:  # the head dimension as words are decoded: code p + 4 i at 2 p + i
        q = q.reshape(*q.shape[:3], dim // 8, 2, 4).swapaxes(-1, -2).reshape(q.shape)
    arrays, constants = _entries(cache, positions, layer, page_table)
    tiles = _prefill_tiles(dim)
    return triton_bridge.call(
        prefill_kernel,
        q,
        positions,
        *arrays,
        positions if sinks is None else sinks,
        tokens,
        outputs=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=(-(-tokens * (q_heads // heads) // tiles["M"]), batch * heads),
        num_warps=8,
        num_stages=STAGES,
        SCALE=scale,
        WINDOW=window or 0,
        SINKS=sinks is not None,
        HEADS=heads,
        QUERIES=q_heads // heads,
        D=dim,
        STAGES=STAGES,
        **constants,
        **tiles,
    )[0]


def _entries(
    cache: KVCache,
    positions: Int32[Array, "b t"],
    layer: Int32[Array, ""] | None,
    page_table: Int32[Array, "b pages"] | None,
) -> tuple[list[Array], dict[str, int | str]]:
    """What both kernels take of the cache and of where its entries lie: arrays, and constants."""
    # What is not given is not read: any array stands in its place.
    arrays = [positions if page_table is None else page_table, positions if layer is None else layer]
    for a in (cache.k, cache.v):
        arrays += [a, a, a] if cache.format is None else [a.words, a.scales, a.row_exponent]
    return arrays, {
        "FORMAT": "bf16" if cache.format is None else cache.format.name,
        "SEQUENCES": cache.k.shape[-4],
        "LENGTH": cache.length,
        "PAGES": 0 if page_table is None else page_table.shape[1],
        "LAYERS": 0 if layer is None else cache.k.shape[0],
    }


def _tiles(cache: KVCache, dim: int) -> dict[str, int]:
    """Positions of a tile that is decoded, which lies in one page, measured on an H200.

    They follow from the model alone, so that the layout of the cache changes no bit.
    """
    tile = 64 if cache.format is None else 32
    return {"TILE": tile // 2 if dim > 128 else tile}


def _prefill_tiles(dim: int) -> dict[str, int]:
    """Queries of a program (tokens times the query heads of a KV head), and positions of a tile.

    Two warp groups, each with its instructions' 64 rows, whose sums and scores fit the registers.
    """
    return {"M": 128, "TILE": 32 if dim > 128 else 64}


def compile_cases() -> Iterator[CompileCase]:
    """One token and many, all head dimensions and formats, pages of a layer, window and sinks."""

    def shape(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    for (kind, batch, tokens), format in itertools.product(
        (("attention", 64, 1), ("prefill", 8, 2048)), (None, NVFP4, MXFP4)
    ):
        name = f"{kind}_{'bf16' if format is None else format.name}"
        for heads, q_heads, dim in ((4, 32, 128), (8, 64, 64), (2, 16, 256)):
            q = shape(batch, tokens, q_heads, dim, dtype=jnp.bfloat16)
            cache = jax.eval_shape(functools.partial(init_cache, batch, 8192, heads, dim, format))
            # Some registers of the tiles that are masked do not fit, none of the whole tiles.
            spilled = 128 if tokens > 1 and format is None and dim == 256 else 0
            yield CompileCase(f"{name}_{dim}", attention, (q, cache, shape(batch, tokens)), spilled)
        q = shape(batch, tokens, 64, 64, dtype=jnp.bfloat16)
        for page in (64,) if tokens == 1 else (64, 16):
            pages = jax.eval_shape(functools.partial(init_cache, 1000, page, 8, 64, format, layers=4))
            yield CompileCase(
                f"{name}_paged_{page}_layer_window_sinks",
                lambda q, cache, positions, layer, page_table, sinks: attention(
                    q, cache, positions, layer=layer, page_table=page_table, window=128, sinks=sinks
                ),
                (q, pages, shape(batch, tokens), shape(), shape(batch, 20), shape(64, dtype=jnp.float32)),
            )
