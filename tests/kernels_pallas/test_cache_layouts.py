"""Append and attend in every layout of the cache, one token per sequence: the layout changes no bit.

And what decode attention has beyond a causal mask, windows and sinks, against float64.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.decode_attention import attention
from kernels_pallas.decode_attention.api import IMPLEMENTATIONS as ATTENTION
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.kv_cache import append, init_cache
from kernels_pallas.kv_cache.api import IMPLEMENTATIONS as APPEND
from kernels_pallas.quantize import dequantize
from tests.kernels_pallas.caches import LAYOUTS, lay_out
from tests.kernels_pallas.serving import served

BATCH, LENGTH, HEADS, Q_HEADS, DIM, PAGE = 4, 320, 2, 8, 64, 32
FORMATS = pytest.mark.parametrize("format", [None, NVFP4, MXFP4], ids=["bf16", "nvfp4", "mxfp4"])
OTHER_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS[1:])
OPTIONS = pytest.mark.parametrize(
    ("window", "sinks"), [(None, False), (100, False), (None, True), (17, True)], ids=str
)
POSITIONS = jnp.int32([[5], [127], [-1], [300]])


@pytest.fixture(params=sorted(ATTENTION), scope="module")
def attend(request):
    run = jax.jit(functools.partial(attention, implementation=request.param), static_argnames="window")
    return served(request.param, run)


@pytest.fixture(params=sorted(APPEND), scope="module")
def write(request):
    return served(request.param, jax.jit(functools.partial(append, implementation=request.param)))


def rows(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal(shape) * 2, dtype)


@functools.partial(jax.jit, static_argnames="format")
def filled(k, v, format):
    cache = init_cache(BATCH, LENGTH, HEADS, DIM, format)
    positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, 1))
    return append(cache, k, v, positions, jnp.ones(positions.shape, bool))[0]


VALUES = jax.jit(lambda a: a if isinstance(a, jax.Array) else dequantize(a))


@pytest.fixture
def case(rng):
    """Queries of one token, sinks, and a full cache in any format and layout."""
    k, v = rows(rng, BATCH, LENGTH, HEADS, DIM), rows(rng, BATCH, LENGTH, HEADS, DIM)
    q, sinks = rows(rng, BATCH, 1, Q_HEADS, DIM), rows(rng, Q_HEADS, dtype=jnp.float32)
    return q, sinks, functools.partial(filled, k, v)


def dense(q, k, v, mask, sinks=None):
    """Softmax attention in float64, one head at a time; a sink is one more logit whose value is 0."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group, out = q.shape[2] // k.shape[2], np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.asarray(mask)[b, t]
        if not seen.any():
            continue
        scores = k[b, seen, h // group] @ q[b, t, h] / np.sqrt(q.shape[3])
        values = v[b, seen, h // group]
        if sinks is not None:
            scores, values = np.append(scores, float(sinks[h])), np.append(values, np.zeros((1, DIM)), axis=0)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ values / weights.sum()
    return out


def visible(positions, window):
    index = np.arange(LENGTH)[None, None]
    positions = np.asarray(positions)[:, :, None]
    return (index <= positions) & (index > positions - (window or 2**30))


@FORMATS
@OPTIONS
def test_one_query_per_sequence_agrees_with_a_dense_answer(attend, case, format, window, sinks):
    q, logits, fill = case
    cache, logits = fill(format), logits if sinks else None
    mask = visible(POSITIONS, window)
    expected = dense(q, VALUES(cache.k), VALUES(cache.v), mask, logits)
    out = np.asarray(attend(q, cache, POSITIONS, window=window, sinks=logits), np.float64)
    np.testing.assert_allclose(out, expected, atol=0.03, rtol=0.02)
    assert (out[2] == 0).all()  # position -1 sees nothing, whether or not there is a sink


@OPTIONS
def test_in_float32_only_sums_are_rounded(attend, case, window, sinks):
    """Several queries per sequence too."""
    q, logits, fill = case
    cache, logits = fill(NVFP4), logits if sinks else None
    positions = jnp.concatenate([POSITIONS, POSITIONS + 19], axis=1)
    q = jnp.concatenate([q, q[:, :, ::-1]], axis=1).astype(jnp.float32)
    expected = dense(q, VALUES(cache.k), VALUES(cache.v), visible(positions, window), logits)
    with jax.default_matmul_precision("highest"):
        out = attend(q, cache, positions, window=window, sinks=logits)
    np.testing.assert_allclose(np.asarray(out), expected, atol=4e-6)


@FORMATS
@OTHER_LAYOUTS
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (100, True)], ids=str)
def test_the_layout_of_the_cache_changes_no_bit(attend, case, rng, format, layout, window, sinks):
    q, logits, fill = case
    options = {"window": window, "sinks": logits if sinks else None}
    cache = fill(format)
    # Pages that lie beyond a sequence's position are not even mapped.
    holes = [(b, p) for b in range(BATCH) for p in range(LENGTH // PAGE) if p * PAGE > int(POSITIONS[b, 0])]
    laid = lay_out(cache, layout, rng, PAGE, holes if "pages" in layout else ())
    out = attend(q, laid.cache, POSITIONS, **options, **laid.options)
    np.testing.assert_array_equal(
        np.asarray(out, np.float32), np.asarray(attend(q, cache, POSITIONS, **options), np.float32)
    )


@FORMATS
@pytest.mark.parametrize("length", [2304, 4608])  # of FP4 kernels' shorter and longer chunks, several
def test_pages_of_a_long_context(attend, rng, format, length):
    """The layout changes no bit; a page that is missing is not attended to, whatever lies in its place."""
    page, positions = 128, jnp.int32([[length - 1], [1300]])
    k, v = rows(rng, 2, length, 1, DIM), rows(rng, 2, length, 1, DIM)
    q, everywhere = rows(rng, 2, 1, 4, DIM), jnp.tile(jnp.arange(length, dtype=jnp.int32), (2, 1))
    cache = append(init_cache(2, length, 1, DIM, format), k, v, everywhere, jnp.ones(everywhere.shape, bool))[
        0
    ]
    table = rng.permutation(2 * length // page).astype(np.int32).reshape(2, -1)
    pages = jax.tree.map(
        lambda leaf: leaf.reshape(-1, page, *leaf.shape[2:])[np.argsort(table.ravel())], cache
    )
    out = attend(q, pages, positions, page_table=jnp.asarray(table))
    np.testing.assert_array_equal(
        np.asarray(out, np.float32), np.asarray(attend(q, cache, positions), np.float32)
    )
    missing = table.copy()
    missing[0, [3, 9]] = missing[1, 0] = -1
    mask = (np.arange(length)[None] <= np.asarray(positions)) & np.repeat(missing >= 0, page, axis=1)
    out = attend(q, pages, positions, page_table=jnp.asarray(missing))
    expected = dense(q, VALUES(cache.k), VALUES(cache.v), mask[:, None])
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03, rtol=0.02)


@FORMATS
@OPTIONS
def test_a_chunk_of_queries_agrees_with_a_dense_answer(attend, case, rng, format, window, sinks):
    """At any offset, and with padding; some pages are not mapped."""
    _, logits, fill = case
    cache, logits = fill(format), logits if sinks else None
    laid = lay_out(cache, "layer_and_pages", rng, PAGE, [(0, 0), (3, 8)])
    q, step = rows(rng, BATCH, 33, Q_HEADS, DIM), jnp.arange(33, dtype=jnp.int32)[None]
    positions = jnp.where((POSITIONS < 0) & (step > 20), -1, POSITIONS + step)
    mask = visible(positions, window) & laid.mapped[:, None]
    out = attend(q, laid.cache, positions, window=window, sinks=logits, **laid.options)
    expected = dense(q, VALUES(cache.k), VALUES(cache.v), mask, logits)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03, rtol=0.02)
    assert (np.asarray(out, np.float32)[~mask.any(-1)] == 0).all()


@pytest.mark.parametrize("format", [None, NVFP4], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("layout", ["pages", "layer_and_pages"])
def test_an_unmapped_page_in_between_is_not_attended_to(attend, case, rng, format, layout):
    q, sinks, fill = case
    cache = fill(format)
    laid = lay_out(cache, layout, rng, PAGE, [(0, 0), (1, 2), (3, 4), (3, 9)])
    mask = visible(POSITIONS, 200) & laid.mapped[:, None]
    out = attend(q, laid.cache, POSITIONS, window=200, sinks=sinks, **laid.options)
    expected = dense(q, VALUES(cache.k), VALUES(cache.v), mask, sinks)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03, rtol=0.02)
    assert (np.asarray(out, np.float32)[0] == 0).all()  # all that it might see is unmapped


@pytest.mark.parametrize("format", [None, NVFP4], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_outside_the_window_do_not_matter_even_if_poisoned(attend, case, rng, format, layout):
    q, sinks, fill = case
    cache = fill(format)
    bad = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, -1, f"i{leaf.dtype.itemsize}").view(leaf.dtype), cache
    )
    seen = visible(POSITIONS, 40)[:, 0]

    def mixed(leaf, bad):
        return jnp.where(seen.reshape(*seen.shape, *(1,) * (leaf.ndim - 2)), leaf, bad)

    laid = lay_out(jax.tree.map(mixed, cache, bad), layout, rng, PAGE)
    out = attend(q, laid.cache, POSITIONS, window=40, sinks=sinks, **laid.options)
    expected = attend(q, cache, POSITIONS, window=40, sinks=sinks)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_does_not_depend_on_its_batch(attend, case, rng, layout):
    q, sinks, fill = case
    cache = fill(NVFP4)
    laid = lay_out(cache, layout, rng, PAGE)
    out = attend(q, laid.cache, POSITIONS, sinks=sinks, **laid.options)
    swapped = jax.tree.map(lambda leaf: leaf[::-1], cache)
    again = lay_out(swapped, layout, rng, PAGE)
    others = POSITIONS[::-1].at[0].set(17).at[1].set(200)
    out_again = attend(q[::-1].at[0].add(1), again.cache, others, sinks=sinks, **again.options)
    np.testing.assert_array_equal(np.asarray(out, np.float32)[:2], np.asarray(out_again, np.float32)[:1:-1])


@pytest.mark.parametrize("format", [None, NVFP4], ids=["bf16", "nvfp4"])
@OTHER_LAYOUTS
@pytest.mark.parametrize("count", [1, 3])
def test_append_writes_the_same_rows_in_every_layout_and_nothing_else(
    write, case, rng, format, layout, count
):
    _, _, fill = case
    cache = fill(format)
    laid = lay_out(cache, layout, rng, PAGE, [(3, 1)] if "pages" in layout else ())
    k, v = rows(rng, BATCH, count, HEADS, DIM), rows(rng, BATCH, count, HEADS, DIM)
    # Around a page's end; before and past the cache; one that is not valid; into the unmapped page.
    positions = jnp.int32([[30, 31, 32], [LENGTH - 1, LENGTH, -1], [7, 9, 8], [40, 63, 64]])[:, :count]
    valid = jnp.asarray([[True] * 3, [True] * 3, [False, True, True], [True] * 3])[:, :count]
    new, k_q, v_q = write(laid.cache, k, v, positions, valid, **laid.options)
    expected, *expected_rows = write(cache, k, v, positions, valid)
    for a, b in zip(jax.tree.leaves((k_q, v_q)), jax.tree.leaves(expected_rows), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(jax.tree.leaves(laid.rows(new)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(bits(a)[laid.mapped], bits(b)[laid.mapped])
    for a, b in zip(laid.others(new), laid.others(laid.cache), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def bits(a):
    """Bits of an array, the same for every NaN: XLA:CPU writes BF16 by way of float32."""
    a = np.asarray(a)
    if a.dtype == ml_dtypes.bfloat16:
        a = np.where(np.isnan(a.astype(np.float32)), ml_dtypes.bfloat16(np.nan), a)
    return a.view(f"u{a.dtype.itemsize}")


def test_a_scan_over_layers_carries_the_stacked_cache(write, case, rng):
    """As a model does: every layer writes its own rows of the one cache that is carried."""
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), case[2](NVFP4))
    k = rows(rng, 3, BATCH, 1, HEADS, DIM)
    positions, valid = jnp.int32([[3], [4], [319], [0]]), jnp.ones((BATCH, 1), bool)

    @jax.jit
    def scanned(cache, k):
        def layer(cache, inputs):
            k, index = inputs
            cache, k_q, _ = write(cache, k, -k, positions, valid, layer=index)
            return cache, k_q

        return jax.lax.scan(layer, cache, (k, jnp.arange(3, dtype=jnp.int32)))

    new, k_q = scanned(cache, k)
    for layer in range(3):
        alone = jax.tree.map(lambda leaf, layer=layer: leaf[layer], cache)
        expected, expected_k, _ = write(alone, k[layer], -k[layer], positions, valid)
        for a, b in zip(jax.tree.leaves((new, k_q)), jax.tree.leaves((expected, expected_k)), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[layer], np.asarray(b))


def test_errors_name_what_is_wrong(case):
    q, sinks, fill = case
    cache = fill(NVFP4)
    k = jnp.ones((BATCH, 1, HEADS, DIM), jnp.bfloat16)
    valid, table = jnp.ones((BATCH, 1), bool), jnp.zeros((BATCH, 3), jnp.int32)
    calls = (
        functools.partial(attention, q, cache, POSITIONS),
        functools.partial(append, cache, k, k, POSITIONS, valid),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=r"cache \(4, 320, 2, 64\) has 4 axes; expected \[L, B, S, H, Dh\]"
        ):
            call(layer=jnp.int32(0))
        with pytest.raises(ValueError, match=r"expected \[L, P, page_size, H, Dh\]"):
            call(layer=jnp.int32(0), page_table=table)
        with pytest.raises(TypeError, match=r"layer is int32 of shape \(2,\); expected an int32 scalar"):
            call(layer=jnp.int32([0, 1]))
        with pytest.raises(TypeError, match="page_table is float32; expected int32"):
            call(page_table=table.astype(jnp.float32))
        with pytest.raises(ValueError, match=r"page_table has shape \(2, 3\); expected \[4, pages\]"):
            call(page_table=table[:2])
    with pytest.raises(ValueError, match=r"positions has shape \(2, 1\); expected \(4, 1\)"):
        attention(q, cache, POSITIONS[:2])
    with pytest.raises(ValueError, match="window is 0; expected at least 1"):
        attention(q, cache, POSITIONS, window=0)
    with pytest.raises(TypeError, match=r"sinks is float32 \(3,\); expected float32 \(8,\)"):
        attention(q, cache, POSITIONS, sinks=sinks[:3])
