"""Attention over the cache: a dense float32 answer, prefill against decode, independence of rows, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kernels_pallas.decode_attention import attend, attention, reference
from kernels_pallas.decode_attention.api import IMPLEMENTATIONS
from kernels_pallas.decode_attention.shapes import SHAPES
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.kv_cache import KVCache, append, init_cache
from kernels_pallas.quantize import dequantize
from tests.kernels_pallas.jitted import quantize
from tests.kernels_pallas.serving import served

TINY = SHAPES["tiny"]
C = TINY.cache
FORMATS = pytest.mark.parametrize("format", [None, NVFP4, MXFP4], ids=["bf16", "nvfp4", "mxfp4"])


@pytest.fixture(params=sorted(IMPLEMENTATIONS), scope="module")
def run(request):
    return served(request.param, jax.jit(functools.partial(attention, implementation=request.param)))


def tokens(rng, heads, count=C.tokens, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal((C.batch, count, heads, C.head_dim)), dtype)


@functools.partial(jax.jit, static_argnames="format")
def filled(k, v, format, start=0):
    """A cache with k and v from `start` on, and the values that it holds there."""
    cache = init_cache(C.batch, C.length, C.kv_heads, C.head_dim, format)
    positions = start + jnp.tile(jnp.arange(k.shape[1], dtype=jnp.int32), (C.batch, 1))
    cache, *appended = append(cache, k, v, positions, jnp.ones(positions.shape, bool))
    return cache, positions, *((k, v) if format is None else (dequantize(rows) for rows, _ in appended))


def dense(q, k, v, mask):
    """Softmax attention in float64, one query head at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.asarray(mask)[b, t]
        scores = k[b, seen, h // group] @ q[b, t, h] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, seen, h // group] / weights.sum()
    return out


@FORMATS
def test_append_then_attend_agrees_with_a_dense_answer(run, rng, format):
    k, v, q = tokens(rng, C.kv_heads), tokens(rng, C.kv_heads), tokens(rng, TINY.q_heads)
    cache, positions, k_values, v_values = filled(k, v, format)
    causal = np.broadcast_to(np.tril(np.ones((C.tokens, C.tokens), bool)), (C.batch, C.tokens, C.tokens))
    expected = dense(q, k_values, v_values, causal)
    np.testing.assert_allclose(
        np.asarray(run(q, cache, positions), np.float64), expected, atol=0.03, rtol=0.02
    )
    # In float32 nothing is rounded but sums: the same answer to six digits.
    if format is not None:
        with jax.default_matmul_precision("highest"):
            out = run(q.astype(jnp.float32), cache, positions)
        np.testing.assert_allclose(np.asarray(out), expected, atol=2e-6)


def test_the_trainer_attends_over_the_same_values(run, rng):
    """`attend` on the fake-quantized rows is `attention` over the cache, but for when weights are normalised."""
    q = tokens(rng, TINY.q_heads, C.length)
    k, v = tokens(rng, C.kv_heads, C.length), tokens(rng, C.kv_heads, C.length)
    cache, positions, k_values, v_values = filled(k, v, NVFP4)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((C.length, C.length), bool)), (C.batch, C.length, C.length))
    train = jax.jit(attend)
    out, trained = run(q, cache, positions), train(q, k_values, v_values, causal)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(trained, np.float32), atol=0.03, rtol=0.02
    )
    with jax.default_matmul_precision("highest"):
        wide = [a.astype(jnp.float32) for a in (q, k_values, v_values)]
        out, trained = run(wide[0], cache, positions), train(*wide, causal)
    np.testing.assert_allclose(np.asarray(out), np.asarray(trained), atol=2e-6)


def test_splits_of_a_long_context_combine(run, rng):
    """A context of more than one split, of no whole number of splits, and splits that no query sees."""
    length = 300
    k, v = (jnp.asarray(rng.standard_normal((2, length, 2, 32)) * 3, jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((2, 3, 4, 32)), jnp.float32)
    positions = jnp.int32([[0, 127, 128], [255, 299, 40]])
    mask = jnp.arange(length)[None, None] <= positions[:, :, None]
    with jax.default_matmul_precision("highest"):
        out = run(q, KVCache(k=k, v=v), positions)
    np.testing.assert_allclose(np.asarray(out), dense(q, k, v, mask), atol=3e-6)


@pytest.mark.parametrize("window", [None, 8, 3])
@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_a_position_past_the_cache_sees_what_its_window_reaches(rng, implementation, window):
    run = served(implementation, functools.partial(attention, implementation=implementation))
    length, past = 160, 5
    k, v = (
        quantize(jnp.asarray(rng.standard_normal((2, length, 2, 64)), jnp.bfloat16), NVFP4) for _ in range(2)
    )
    cache, q = KVCache(k=k, v=v), jnp.asarray(rng.standard_normal((2, 1, 4, 64)), jnp.bfloat16)
    last = jnp.int32([[length - 1], [length - 1]])
    found = np.asarray(run(q, cache, last + past, window=window))
    if window is not None and window <= past:
        np.testing.assert_array_equal(found, np.zeros_like(found))
    else:
        expected = run(q, cache, last, window=None if window is None else window - past)
        np.testing.assert_array_equal(found, np.asarray(expected))


def test_decode_agrees_with_prefill_in_float32(run, rng):
    q = tokens(rng, TINY.q_heads, dtype=jnp.float32)
    k, v = tokens(rng, C.kv_heads), tokens(rng, C.kv_heads)
    cache, positions, _, _ = filled(k, v, NVFP4)
    with jax.default_matmul_precision("highest"):
        prefill = run(q, cache, positions)
        for t in range(C.tokens):
            one = slice(t, t + 1)
            decode = run(q[:, one], cache, positions[:, one])
            np.testing.assert_allclose(np.asarray(decode), np.asarray(prefill)[:, one], atol=1e-6)


def test_a_sequence_does_not_depend_on_its_batch(run, rng):
    q, k, v = tokens(rng, TINY.q_heads), tokens(rng, C.kv_heads), tokens(rng, C.kv_heads)
    cache, positions, _, _ = filled(k, v, NVFP4)
    others = [
        tokens(rng, h).at[1].set(a[1]) for h, a in ((TINY.q_heads, q), (C.kv_heads, k), (C.kv_heads, v))
    ]
    other_cache, _, _, _ = filled(*others[1:], NVFP4)
    other_positions = positions.at[0].add(3)
    a, b = run(q, cache, positions), run(others[0], other_cache, other_positions)
    np.testing.assert_array_equal(np.asarray(a)[1], np.asarray(b)[1])


@FORMATS
def test_entries_past_the_position_do_not_matter_even_if_poisoned(run, rng, format):
    q, k, v = tokens(rng, TINY.q_heads), tokens(rng, C.kv_heads), tokens(rng, C.kv_heads)
    cache, positions, _, _ = filled(k, v, format)
    bad = jnp.full((C.batch, 2, C.kv_heads, C.head_dim), jnp.nan, jnp.bfloat16)
    stale, _, _ = jax.jit(append)(
        cache, bad, bad, jnp.tile(jnp.int32([[9, 23]]), (C.batch, 1)), jnp.ones((C.batch, 2), bool)
    )
    np.testing.assert_array_equal(np.asarray(run(q, stale, positions)), np.asarray(run(q, cache, positions)))


def test_a_poisoned_entry_shows_in_the_queries_that_see_it(run, rng):
    q, k, v = tokens(rng, TINY.q_heads), tokens(rng, C.kv_heads), tokens(rng, C.kv_heads)
    cache, positions, _, _ = filled(k.at[0, 2, 0, 0].set(jnp.inf), v, NVFP4)
    nan = np.isnan(np.asarray(run(q, cache, positions), np.float32)).any(-1)
    group = TINY.q_heads // C.kv_heads
    assert nan[0, 2:, :group].all() and not nan[0, :2].any() and not nan[0, :, group:].any()
    assert not nan[1:].any()


def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients(rng):
    q, k = tokens(rng, TINY.q_heads), tokens(rng, C.kv_heads)
    mask = jnp.ones((C.batch, C.tokens, C.tokens), bool).at[0, 1].set(False)
    assert (np.asarray(jax.jit(attend)(q, k, k, mask))[0, 1] == 0).all()
    grads = jax.jit(jax.grad(lambda q, k: attend(q, k, k, mask).astype(jnp.float32).sum(), argnums=(0, 1)))(
        q, k
    )
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)


def test_gradients_are_right_in_float64(rng):
    with jax.enable_x64(True):
        q = jnp.asarray(rng.standard_normal((2, 3, 4, 8)))
        k, v = jnp.asarray(rng.standard_normal((2, 2, 3, 2, 8)))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((3, 3), bool)), (2, 3, 3))
        check_grads(jax.jit(lambda *a: attend(*a, mask)), (q, k, v), order=1, modes=["rev"])


def test_scale_replaces_the_default(rng):
    q, k = tokens(rng, TINY.q_heads), tokens(rng, C.kv_heads)
    mask = jnp.ones((C.batch, C.tokens, C.tokens), bool)
    run = jax.jit(attend, static_argnames="scale")
    default = run(q, k, k, mask)
    doubled = run(q * 2, k, k, mask, scale=C.head_dim**-0.5 / 2)
    np.testing.assert_array_equal(np.asarray(doubled), np.asarray(default))


def test_sinks_join_the_softmax_and_take_a_gradient(rng):
    """A sink is one more entry of value zero, whose score is the sink, also for a query that sees nothing else."""
    q, k, v = (rng.standard_normal((2, 3, heads, 8)) for heads in (4, 2, 2))
    sinks = rng.standard_normal(4) * 2
    mask = np.broadcast_to(np.tril(np.ones((3, 3), bool)), (2, 3, 3)).copy()
    mask[1, 0] = False

    # The same by hand: one more dimension, in which the new entry has 1 and a query its sink.
    keys = np.zeros((2, 4, 2, 9))
    keys[:, :3, :, :8], keys[:, 3, :, 8] = k, 1.0
    queries = np.concatenate([q, np.broadcast_to(sinks[:, None] * 8**0.5, (2, 3, 4, 1))], axis=-1)
    values = np.zeros((2, 4, 2, 9))
    values[:, :3, :, :8] = v
    seen = np.concatenate([mask, np.ones((2, 3, 1), bool)], axis=-1)
    run = jax.jit(attend, static_argnames="scale")
    with jax.enable_x64(True):
        out = run(*map(jnp.asarray, (q, k, v, mask)), sinks=jnp.asarray(sinks))
        expected = run(*map(jnp.asarray, (queries, keys, values, seen)), scale=8**-0.5)
        np.testing.assert_allclose(out, expected[..., :8], atol=1e-12)
        with_sinks = jax.jit(lambda q, k, v, sinks: attend(q, k, v, jnp.asarray(mask), sinks=sinks))
        check_grads(with_sinks, tuple(map(jnp.asarray, (q, k, v, sinks))), order=1, modes=["rev"])
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); expected \(4,\)"):
        run(*map(jnp.asarray, (q, k, v, mask)), sinks=jnp.asarray(sinks[:3]))


@pytest.mark.parametrize("limit", [1, 700, 3000])
@FORMATS
def test_blocks_of_queries_change_no_result(rng, monkeypatch, format, limit):
    """The reference holds the scores of a block at a time: one token of a sequence, several, some to spare."""
    q, k, v = tokens(rng, TINY.q_heads), tokens(rng, C.kv_heads), tokens(rng, C.kv_heads)
    cache, positions, _, _ = filled(k, v, format)
    positions, sinks = (
        positions.at[0, 3:].set(-1),
        jnp.asarray(rng.standard_normal(TINY.q_heads), jnp.float32),
    )

    def run():
        run = jax.jit(functools.partial(attention, implementation="reference", window=3))
        return np.asarray(run(q, cache, positions, sinks=sinks), np.float32)

    whole = run()
    monkeypatch.setattr(reference, "MAX_SCORES", limit)
    np.testing.assert_allclose(run(), whole, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("limit", [1, 150, 300])
def test_blocks_of_queries_change_neither_the_trainers_results_nor_its_gradients(
    rng, monkeypatch, dtype, limit
):
    q, k, v = (tokens(rng, heads, dtype=dtype) for heads in (TINY.q_heads, C.kv_heads, C.kv_heads))
    sinks = jnp.asarray(rng.standard_normal(TINY.q_heads), jnp.float32)
    mask = jnp.asarray(rng.random((C.batch, C.tokens, C.tokens)) < 0.6)
    weight = tokens(rng, TINY.q_heads, dtype=dtype)

    def run():
        def loss(*arrays):
            out = attend(*arrays[:3], mask, sinks=arrays[3])
            return (out * weight).astype(jnp.float32).sum(), out

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        (_, out), grads = run(q, k, v, sinks)
        return [np.asarray(a, np.float32) for a in (out, *grads)]

    whole = run()
    monkeypatch.setattr(reference, "MAX_SCORES", limit)
    # Sums are FP32's in another order: BF16 results may fall to the neighbour.
    rounding = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    for a, b in zip(run(), whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=rounding)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_named_shapes_are_served(implementation, name):
    shape = SHAPES[name]
    c = shape.cache

    def struct(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, length, options = c.batch, c.length, {}
    if c.page_size:
        pages = c.length // c.page_size
        rows, length, options = c.batch * pages, c.page_size, {"page_table": struct(c.batch, pages)}
    if shape.sinks:
        options["sinks"] = struct(shape.q_heads, dtype=jnp.float32)
    cache = jax.eval_shape(lambda: init_cache(rows, length, c.kv_heads, c.head_dim, NVFP4))
    q = struct(c.batch, c.tokens, shape.q_heads, c.head_dim, dtype=jnp.bfloat16)
    run = functools.partial(attention, window=shape.window, implementation=implementation)
    out = served(implementation, functools.partial(jax.eval_shape, run))(
        q, cache, struct(c.batch, c.tokens), **options
    )
    assert out.shape == q.shape and out.dtype == jnp.bfloat16


def test_errors_name_what_is_wrong(rng):
    q, k = tokens(rng, TINY.q_heads), tokens(rng, C.kv_heads)
    cache, positions, _, _ = filled(k, k, NVFP4)
    mask = jnp.ones((C.batch, C.tokens, C.tokens), bool)
    with pytest.raises(ValueError, match=r"q \(3, 5, 5, 32\).*cache \(3, 24, 2, 32\)"):
        attention(q[:, :, :5], cache, positions)
    with pytest.raises(TypeError, match="positions is float32; expected int32"):
        attention(q, cache, positions.astype(jnp.float32))
    with pytest.raises(ValueError, match="5 query heads cannot share 2 KV heads"):
        attend(q[:, :, :5], k, k, mask)
    with pytest.raises(TypeError, match="expected one dtype"):
        attend(q, k.astype(jnp.float32), k.astype(jnp.float32), mask)
    with pytest.raises(TypeError, match="q is int32; expected a float dtype"):
        attention(q.astype(jnp.int32), cache, positions)
    with pytest.raises(ValueError, match=r"0 sequences over a cache \(0, 24, 2, 32\)"):
        attention(q[:0], jax.tree.map(lambda leaf: leaf[:0], cache), positions[:0])
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; available"):
        attention(q, cache, positions, implementation="cuda")
