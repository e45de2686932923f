"""Kernels on arrays of more than 2^31 elements and on positions past 32767: only where there is a GPU to hold them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.arrays import Stacked
from kernels_pallas.decode_attention import attention
from kernels_pallas.formats import NVFP4
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.guided_round import Guide, guided_values
from kernels_pallas.kv_cache import KVCache, append
from kernels_pallas.quantize import quantize, quantize_recorded
from kernels_pallas.tiled_matmul import tiled_weights
from kernels_pallas.triton_bridge import unavailable
from tests.kernels_pallas.same import same

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
TRITON = "triton"


def normal(seed, *shape):
    """BF16 numbers; made a row at a time, so that nothing wider is ever as large."""
    keys = jax.random.split(jax.random.key(seed), shape[0])
    return jax.jit(lambda: jax.lax.map(lambda key: jax.random.normal(key, shape[1:], jnp.bfloat16), keys))()


@pytest.fixture(scope="module")
def rows():
    """More than 2^31 elements; the last rows lie past them."""
    return normal(0, 2**10 + 1, 2**10, 2048).reshape(-1, 2048)


ENDS = (slice(0, 64), slice(2**20 - 32, 2**20 + 32), slice(-64, None))


def test_triton_quantizes_and_records(rows):
    assert rows.size > 2**31
    run = functools.partial(quantize_recorded, format=NVFP4)
    packed, mantissa = jax.jit(functools.partial(run, implementation=TRITON))(rows)
    for end in ENDS:
        expected = jax.jit(functools.partial(run, implementation="reference"))(rows[end])
        same((jax.tree.map(lambda leaf, end=end: leaf[end], packed), mantissa[end]), expected)


def test_triton_rounds_under_a_record(rows):
    record, mantissa = jax.jit(functools.partial(quantize_recorded, format=NVFP4))(rows)

    def run(x, scales, exponent, mantissa, implementation):
        valid = jnp.ones(exponent.shape, bool)
        guide = Guide(scales=scales, row_exponent=exponent, mantissa=mantissa, valid=valid, mode="mantissa")
        return guided_values(x, guide, NVFP4, implementation=implementation)

    run = jax.jit(run, static_argnames="implementation")
    trainer = jax.jit(lambda x: x * jnp.bfloat16(1.015625))(rows)
    arguments = trainer, record.scales, record.row_exponent, mantissa
    out = run(*arguments, implementation=TRITON)
    for end in ENDS:
        same(out[end], run(*(a[end] for a in arguments), implementation="reference"))


@pytest.mark.parametrize("format", [None, NVFP4], ids=["bf16", "nvfp4"])
def test_triton_multiplies_more_rows_than_2_to_the_31_elements(rows, format):
    w = normal(1, 2, 2048, 256)
    dense = w
    if format is not None:
        w = jax.jit(functools.partial(tiled_weights, format, False))(w)
        dense = jax.jit(lambda w: quantize(w, format, axis=-2, row_axes=(-2, -1)))(dense)
    sizes = jnp.int32([2**20 - 16, rows.shape[0] - 2**20])  # 16 rows short: the last are of no group
    out = jax.jit(functools.partial(grouped_matmul, implementation=TRITON))(rows, w, sizes)
    few = jax.jit(functools.partial(grouped_matmul, implementation="reference"))
    for end, counts in zip(ENDS, ([64, 0], [16, 48], [0, 48]), strict=True):
        expected = few(rows[end], dense, jnp.int32(counts))
        np.testing.assert_allclose(np.asarray(out[end]), np.asarray(expected), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("format", [None, NVFP4], ids=["bf16", "nvfp4"])
def test_triton_multiplies_the_last_layer_of_a_large_stack(format):
    layers, experts, k, n = (8, 128, 2048, 1536) if format is None else (48, 128, 2048, 1536)
    w = normal(2, experts, k, n)
    if format is not None:
        w = jax.jit(functools.partial(tiled_weights, format, True))(w)
    last = jax.jit(lambda w: jax.tree.map(lambda a: jnp.zeros((layers, *a.shape), a.dtype).at[-1].set(a), w))(
        w
    )
    assert max(leaf.size for leaf in jax.tree.leaves(last)) > 2**31
    x, sizes = normal(3, 256, k), jnp.full((experts,), 2, jnp.int32)
    run = jax.jit(functools.partial(grouped_matmul, activation="swiglu", implementation=TRITON))
    same(run(x, Stacked(last, jnp.int32(layers - 1)), sizes), run(x, w, sizes))
    assert not np.asarray(run(x, Stacked(last, jnp.int32(layers - 2)), sizes)).any()


@pytest.mark.parametrize("format", [None, NVFP4], ids=["bf16", "nvfp4"])
def test_triton_appends_and_attends_past_position_32767(format):
    batch, length, heads, dim = 2, 33024, 4, 128
    layers = 65 if format is None else 524  # in FP4 it is the words that are more than 2^31
    k, v = (normal(seed, batch, length, heads, dim) for seed in (4, 5))

    def empty(*lead):
        shape = (*lead, batch, length, heads, dim)
        if format is None:
            return jnp.zeros(shape, jnp.bfloat16)
        small = jax.eval_shape(lambda x: quantize(x, format), jax.ShapeDtypeStruct((dim,), jnp.bfloat16))
        return jax.tree.map(lambda leaf: jnp.zeros((*shape[:-1], *leaf.shape), leaf.dtype), small)

    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), (batch, 1))
    valid = jnp.ones(positions.shape, bool)
    write = jax.jit(functools.partial(append, implementation=TRITON), donate_argnums=0)
    stack = KVCache(k=empty(layers), v=empty(layers))
    assert max(leaf.size for leaf in jax.tree.leaves(stack)) > 2**31
    layer = jnp.int32(layers - 1)
    stack, *_ = write(stack, k, v, positions, valid, layer=layer)
    plain = jax.jit(functools.partial(append, implementation="reference"))
    one, *_ = plain(KVCache(k=empty(), v=empty()), k, v, positions, valid)
    same(jax.tree.map(lambda leaf: leaf[-1], stack), one)
    assert not any(bool(leaf[-2].any()) for leaf in jax.tree.leaves(stack))
    q, at = normal(6, batch, 1, 32, dim), jnp.int32([[length - 1], [32768]])
    run = jax.jit(attention, static_argnames=("implementation", "window"))
    for window in (None, 128):
        options = {"window": window, "implementation": TRITON}
        out = np.asarray(run(q, stack, at, layer=layer, **options))
        same(out, run(q, one, at, **options))
        expected = run(q, one, at, window=window, implementation="reference")
        np.testing.assert_allclose(
            out.astype(np.float32), np.asarray(expected, np.float32), rtol=2e-2, atol=2e-3
        )
