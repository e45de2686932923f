"""The KV cache: what is written where, in FP4 and BF16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.kv_cache import KVCache, append, init_cache
from kernels_pallas.kv_cache.api import IMPLEMENTATIONS
from kernels_pallas.kv_cache.shapes import SHAPES
from kernels_pallas.quantize import dequantize, quantize_recorded
from tests.kernels_pallas.serving import served

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
TINY = SHAPES["tiny"]


@pytest.fixture(params=sorted(IMPLEMENTATIONS), scope="module")
def run(request):
    return served(request.param, jax.jit(functools.partial(append, implementation=request.param)))


def empty(format, shape=TINY, **options):
    return init_cache(shape.batch, shape.length, shape.kv_heads, shape.head_dim, format, **options)


def new_rows(rng, tokens=TINY.tokens, dtype=jnp.bfloat16):
    shape = (TINY.batch, tokens, TINY.kv_heads, TINY.head_dim)
    return jnp.asarray(rng.standard_normal(shape), dtype), jnp.asarray(rng.standard_normal(shape), dtype)


@FORMATS
def test_rows_are_quantized_one_per_token_and_head_and_written_at_their_positions(run, rng, format):
    k, v = new_rows(rng)
    positions = jnp.int32([[0, 1, 2, 3, 4], [7, 3, 23, 0, 11], [5, 6, 7, 8, 9]])
    cache, *appended = run(empty(format), k, v, positions, jnp.ones((3, 5), bool))
    for entries, (returned, bits), rows in zip((cache.k, cache.v), appended, (k, v), strict=True):
        expected, expected_bits = jax.jit(lambda a: quantize_recorded(a, format))(rows)
        np.testing.assert_array_equal(np.asarray(bits), np.asarray(expected_bits))
        assert returned.row_exponent.shape == (3, 5, TINY.kv_heads)
        for leaf, got, stored in zip(*map(jax.tree.leaves, (expected, returned, entries)), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(leaf))
            for b in range(3):
                np.testing.assert_array_equal(
                    np.asarray(stored)[b, np.asarray(positions)[b]], np.asarray(leaf)[b]
                )
    untouched = np.ones(TINY.length, bool)
    untouched[np.asarray(positions)[1]] = False
    assert (np.asarray(cache.k.words)[1, untouched] == 0).all()


def test_a_bf16_cache_keeps_the_rows(run, rng):
    k, v = new_rows(rng)
    positions = jnp.tile(jnp.arange(5, dtype=jnp.int32), (3, 1))
    cache, k_q, v_q = run(empty(None), k, v, positions, jnp.ones((3, 5), bool))
    assert k_q is None and v_q is None and cache.format is None
    np.testing.assert_array_equal(np.asarray(cache.k[:, :5]), np.asarray(k))
    np.testing.assert_array_equal(np.asarray(cache.v[:, :5]), np.asarray(v))
    assert (np.asarray(cache.k[:, 5:]) == 0).all()


@pytest.mark.parametrize("format", [None, NVFP4], ids=["bf16", "nvfp4"])
def test_invalid_rows_and_positions_outside_are_dropped(run, rng, format):
    k, v = new_rows(rng)
    full, _, _ = run(
        empty(format), k + 1, v + 1, jnp.tile(jnp.arange(5, dtype=jnp.int32), (3, 1)), jnp.ones((3, 5), bool)
    )
    positions = jnp.int32([[0, 1, 2, 3, 4], [-1, -5, 24, 2**31 - 1, -(2**31)], [0, 1, 2, 3, 4]])
    valid = jnp.asarray([[False] * 5, [True] * 5, [False, True, False, False, False]])
    cache, _, _ = run(full, k, v, positions, valid)
    for old, new in zip(jax.tree.leaves(full), jax.tree.leaves(cache), strict=True):
        old, new = np.asarray(old), np.asarray(new)
        np.testing.assert_array_equal(new[:2], old[:2])
        np.testing.assert_array_equal(np.delete(new[2], 1, 0), np.delete(old[2], 1, 0))
    assert (np.asarray(jax.tree.leaves(cache)[0])[2, 1] != np.asarray(jax.tree.leaves(full)[0])[2, 1]).any()


@FORMATS
def test_one_token_at_a_time_equals_all_at_once(run, rng, format):
    k, v = new_rows(rng)
    positions = jnp.tile(jnp.arange(5, dtype=jnp.int32), (3, 1))
    at_once, _, _ = run(empty(format), k, v, positions, jnp.ones((3, 5), bool))
    cache = empty(format)
    for t in range(5):
        one = slice(t, t + 1)
        cache, _, _ = run(cache, k[:, one], v[:, one], positions[:, one], jnp.ones((3, 1), bool))
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_stacked_layers_scan(run, rng):
    cache = empty(NVFP4, layers=2)
    assert cache.k.shape == (2, 3, TINY.length, TINY.kv_heads, TINY.head_dim) and cache.length == TINY.length
    k, v = new_rows(rng, tokens=1)
    positions, valid = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1), bool)

    def layer(_, c):
        c, (k_q, _), _ = run(c, k, v, positions, valid)
        return None, (c, k_q)

    _, (new, k_q) = jax.jit(lambda c: jax.lax.scan(layer, None, c))(cache)
    assert isinstance(new, KVCache) and k_q.shape == (2, 3, 1, TINY.kv_heads, TINY.head_dim)
    values = np.asarray(jax.jit(dequantize)(new.k))
    np.testing.assert_array_equal(values[:, :, :1], np.asarray(jax.jit(dequantize)(k_q)))


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_served_at_a_little_over_four_bits(run, name):
    shape = SHAPES[name]
    cache = jax.eval_shape(lambda: empty(NVFP4, shape))
    rows = jax.ShapeDtypeStruct((shape.batch, shape.tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((shape.batch, shape.tokens), jnp.int32)
    valid = jax.ShapeDtypeStruct((shape.batch, shape.tokens), jnp.bool_)
    out, (k_q, _), _ = jax.eval_shape(run, cache, rows, rows, positions, valid)
    assert jax.tree.structure(out) == jax.tree.structure(cache) and k_q.shape == rows.shape
    assert cache.k.nbytes * 8 <= 4.8 * np.prod(cache.k.shape)


def test_errors_name_what_is_wrong(rng):
    k, v = new_rows(rng)
    cache = empty(NVFP4)
    positions, valid = jnp.zeros((3, 5), jnp.int32), jnp.ones((3, 5), bool)
    with pytest.raises(ValueError, match="size 40, not a multiple of the nvfp4 block of 16"):
        init_cache(1, 8, 2, 40, NVFP4)
    with pytest.raises(ValueError, match=r"do not fit the cache \(3, 24, 2, 32\)"):
        append(cache, k[..., :16], v[..., :16], positions, valid)
    with pytest.raises(ValueError, match=r"positions \(3, 4\)"):
        append(cache, k, v, positions[:, :4], valid)
    with pytest.raises(TypeError, match="positions is float32"):
        append(cache, k, v, positions.astype(jnp.float32), valid)
    with pytest.raises(ValueError, match=r"k is \('nvfp4', .*\) and its v \('mxfp4', .*the same twice"):
        append(KVCache(k=cache.k, v=empty(MXFP4).v), k, v, positions, valid)
    with pytest.raises(ValueError, match=r"page_table has shape \(3, 0\).*at least one page"):
        append(cache, k, v, positions, valid, page_table=jnp.zeros((3, 0), jnp.int32))
    with pytest.raises(TypeError, match=r"layer is float32 of shape \(\); expected an int32 scalar"):
        append(empty(NVFP4, layers=2), k, v, positions, valid, layer=jnp.float32(0))
    with pytest.raises(TypeError, match="k is int32"):
        append(cache, k.astype(jnp.int32), v, positions, valid)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; available"):
        append(cache, k, v, positions, valid, implementation="cuda")
