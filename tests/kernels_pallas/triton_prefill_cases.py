"""Cases of the interpreted attention kernel with several tokens a sequence."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.decode_attention import reference, triton
from kernels_pallas.formats import Fp4Format
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.quantize import reference as quantize_reference
from tests.kernels_pallas.caches import garbage, lay_out

LENGTH = 192
SHAPES = ((2, 6, 64), (4, 8, 128), (1, 8, 256))  # KV heads, query heads, head dimension
TOKENS = (2, 33)


def prefill_cases(rng: np.random.Generator, format: Fp4Format | None) -> Iterator[tuple[str, object, object]]:
    """Within a rounding of BF16 weights of the reference, as in `attention_cases`; by bits, what others change."""
    for heads, q_heads, dim in SHAPES:
        cache = _cache(rng, 2, heads, dim, format)
        sinks = jnp.asarray(rng.standard_normal(q_heads), jnp.float32)
        table = jnp.int32([[2, 0, 1], [-1, 5, 4]])
        pages = jax.tree.map(lambda leaf: leaf.reshape(-1, 64, *leaf.shape[2:]), cache)
        small = lay_out(cache, "layer_and_pages", rng, 32, holes=[(0, 1), (1, 0)])  # a tile lies in two pages
        stack = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(garbage(leaf)), leaf]), cache)
        layer = {"layer": jnp.int32(1)}
        for tokens in TOKENS if dim == 64 else TOKENS[-1:]:
            q, positions = _queries(rng, tokens, q_heads, dim)
            for name, entries, options in (
                ("plain", cache, {}),
                ("window and sinks", cache, {"window": 50, "sinks": sinks}),
                ("pages", pages, {"page_table": table, "sinks": sinks}),
                ("pages of half a tile", small.cache, small.options | {"window": 100}),
                ("scale", stack, layer | {"scale": -0.2}),
                ("no scale", stack, layer | {"scale": 0.0, "window": 3}),
            ):
                yield f"head {dim} tokens {tokens} {name}", *_far(q, entries, positions, options)
    cache = _cache(rng, 2, 1, 64, format)
    for options in ({}, {"window": 40}):
        yield from _bits(rng, cache, *_queries(rng, 33, 8, 64), options)  # three programs a sequence


def _cache(rng, batch, heads, dim, format):
    k, v = (jnp.asarray(rng.standard_normal((batch, LENGTH, heads, dim)), jnp.bfloat16) for _ in "kv")
    if format is not None:
        k, v = (quantize_reference.quantize(a, format) for a in (k, v))
    return KVCache(k=k, v=v)


def _queries(rng, tokens, q_heads, dim):
    """Two sequences: a chunk far into the cache, and uneven positions, some past the cache, some of padding."""
    q = jnp.asarray(rng.standard_normal((2, tokens, q_heads, dim)), jnp.bfloat16)
    uneven = rng.integers(-1, LENGTH, tokens)
    uneven[-1], uneven[0] = -(2**31), LENGTH + 7
    return q, jnp.int32([np.arange(tokens) + 130, uneven])


def _far(q, cache, positions, options):
    """Whether elements are further apart than the rounding of weights; the reference's are not rounded, in FP32."""
    out = triton.attention(q, cache, positions, **options).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        expected = reference.attention(q.astype(jnp.float32), cache, positions, **options)
    far = ~(jnp.abs(out - expected) <= 2.0**-7 * jnp.maximum(1.0, jnp.abs(expected)))
    return far, jnp.zeros_like(far)


def _bits(rng, cache, q, positions, options):
    """A query's bits depend on no other query, on no other sequence, and on no entry that it does not see."""
    whole = triton.attention(q, cache, positions, **options)
    for cut in (2, 29):
        parts = [
            triton.attention(q[:, part], cache, positions[:, part], **options)
            for part in (slice(cut), slice(cut, None))
        ]
        yield f"{options} cut at {cut}", jnp.concatenate(parts, axis=1), whole
    order = rng.permutation(q.shape[1])
    yield (
        f"{options} order",
        triton.attention(q[:, order], cache, positions[:, order], **options),
        whole[:, order],
    )
    one = jax.tree.map(lambda leaf: leaf[1:], cache)
    yield f"{options} batch", triton.attention(q[1:], one, positions[1:], **options), whole[1:]

    def spoiled(leaf, at):
        bad = np.array(leaf)
        bad[:, at] = garbage(bad[:, at])
        return jnp.asarray(bad)

    within = jnp.minimum(positions, 160)  # entries beyond are seen by none
    clean = triton.attention(q, cache, within, **options)
    stale = jax.tree.map(lambda leaf: spoiled(leaf, np.s_[161:]), cache)
    yield f"{options} stale entries", triton.attention(q, stale, within, **options), clean
    # Poison in one entry reaches those that see it and no others, those in its block included.
    entry = 140
    sees = (positions >= entry) & (positions < entry + options.get("window", 2**30))
    for name in ("k", "v"):
        poisoned = {"k": cache.k, "v": cache.v}
        poisoned[name] = jax.tree.map(lambda leaf: spoiled(leaf, entry), poisoned[name])
        out = triton.attention(q, KVCache(**poisoned), positions, **options)
        expected = jnp.where(sees[..., None, None], jnp.bfloat16(jnp.nan), whole)
        yield f"{options} poison in {name}", out, expected
