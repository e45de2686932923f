"""What the TPU kernels have of their own: a way to decode per generation, tiles that K, N and rows need not fill."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tiles
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.decode_attention import attention
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.pallas_tpu import visits
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.matmul import matmul
from kernels_pallas.target import Target, target
from tests.kernels_pallas.jitted import operand, quantize

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
# Two ways to decode, v7x's own cast and v5e's and v6e's integers: v6e's differ from v5e's in BF16 products only.
GENERATIONS = pytest.mark.parametrize("generation", [5, pytest.param(6, marks=pytest.mark.slow), 7])
LEAST_E8M0, MOST_E8M0 = 20, 252  # 2^(byte - 127), and NaN at 255; beyond, products are subnormal or infinite


@FORMATS
@GENERATIONS
def test_every_code_under_every_scale_decodes_exactly(format, generation):
    size = 16 * 16 * format.block
    byte = np.arange(size // format.block, dtype=np.uint8)[:, None] + np.zeros((1, 128), np.uint8)
    if format is MXFP4:
        byte = np.where(byte == 255, byte, np.clip(byte, LEAST_E8M0, MOST_E8M0))
    code = (np.arange(size)[:, None] + np.arange(128)) % 16  # each code, -0 too, in each block
    words = (code.reshape(-1, 8, 128) << (4 * np.arange(8))[:, None]).sum(1).astype(np.uint32)
    w = Fp4Array(
        words=jnp.asarray(words),
        scales=jnp.asarray(byte),
        row_exponent=jnp.uint8(127),
        format=format,
        axis=-2,
    )

    def kernel(words_ref, scales_ref, out_ref, staged):
        tiles.stage_scales(scales_ref[...], staged, format, generation, None)
        out_ref[...] = tiles.decoded(words_ref[...], staged.at[0], format, generation).astype(jnp.float32)

    decode = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((size, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((1, 1, size // format.block, 128), jnp.uint32)],
        interpret=True,
    )
    decoded = jax.jit(decode)(w.words, w.scales)
    order = np.asarray(tiles.permuted(jnp.arange(size), generation))
    values = np.empty((size, 128))
    values[order] = np.asarray(decoded, np.float64) * tiles.unit(generation)
    np.testing.assert_array_equal(values, np.asarray(operand(w), np.float64))


def both(run, generation, *args):
    """Results of kernel and reference."""
    with target(Target(generation=generation, interpreted=True)):
        kernel = jax.jit(functools.partial(run, implementation="pallas_tpu"))(*args)
    return np.asarray(kernel, np.float64), np.asarray(
        jax.jit(functools.partial(run, implementation="reference"))(*args), np.float64
    )


def weights(rng, shape, format):
    w = jnp.asarray(rng.standard_normal(shape) * 0.1, jnp.bfloat16)
    return quantize(w, format, axis=-2, row_axes=(-2, -1))


@FORMATS
@pytest.mark.parametrize(
    ("generation", "m", "k", "n"), [(5, 1, 64, 40), (6, 17, 800, 600), (7, 17, 800, 600), (7, 3, 4608, 24)]
)
def test_matmul_of_sizes_that_fill_no_tile(rng, format, generation, m, k, n):
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    kernel, reference = both(matmul, generation, x, weights(rng, (k, n), format))
    np.testing.assert_allclose(kernel, reference, rtol=0, atol=2e-6 * np.abs(reference).max())


@GENERATIONS
def test_a_row_is_the_same_in_every_batch(rng, generation):
    w = weights(rng, (3, 576, 80), NVFP4)
    x = jnp.asarray(rng.standard_normal((300, 576)), jnp.bfloat16)
    with target(Target(generation=generation, interpreted=True)):
        run = jax.jit(functools.partial(grouped_matmul, implementation="pallas_tpu"))
        many = np.asarray(run(x, w, jnp.asarray([130, 0, 170], jnp.int32)))
        few = np.asarray(run(x[128:133], w, jnp.asarray([2, 0, 3], jnp.int32)))
    np.testing.assert_array_equal(few, many[128:133])


@pytest.mark.parametrize("sizes", [[0, 5, 0, 16, 9, 0], [0, 0, 0], [48], [1] * 48, [0, 47, 0]], ids=str)
@pytest.mark.parametrize("tile_rows", [16, 32])
def test_every_row_is_visited_once_by_its_group(sizes, tile_rows):
    rows = 48
    plan = jax.tree.map(np.asarray, visits(jnp.asarray(sizes, jnp.int32), rows, tile_rows))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    found = np.full(rows, -1)
    for tile, group, active in zip(plan.tile, plan.group, plan.active, strict=True):
        held = np.arange(
            max(plan.start[group], tile * tile_rows), min(plan.end[group], (tile + 1) * tile_rows)
        )
        if active:
            assert (found[held] == -1).all()
            found[held] = group
    np.testing.assert_array_equal(found[: owner.size], owner)
    assert (found[owner.size :] == -1).all()
    # The tiles come in order, each at least once, so that each is written.
    assert (np.diff(plan.tile) >= 0).all() and set(plan.tile) == set(range(-(-rows // tile_rows)))


@pytest.mark.parametrize(("generation", "format"), [(5, NVFP4), (6, MXFP4), (7, NVFP4), (7, None)])
def test_attention_over_several_steps_and_stale_entries(rng, generation, format):
    shape = (3, 1300, 2, 64)

    def entries():
        x = jnp.asarray(
            rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[:3]))[..., None], jnp.bfloat16
        )
        return x if format is None else quantize(x, format)

    def stale(leaf):  # what no query may see is NaN
        poison = 255 if leaf.dtype == jnp.uint8 else jnp.nan
        return leaf if leaf.dtype == jnp.uint32 else leaf.at[1, 701:].set(jnp.asarray(poison, leaf.dtype))

    cache = jax.tree.map(stale, KVCache(k=entries(), v=entries()))
    q = jnp.asarray(rng.standard_normal((3, 1, 6, 64)), jnp.bfloat16)
    positions = jnp.asarray([[1299], [700], [-1]], jnp.int32)
    for window in (None, 150):
        kernel, reference = both(functools.partial(attention, window=window), generation, q, cache, positions)
        np.testing.assert_allclose(kernel, reference, rtol=2.0**-7, atol=2.0**-7)
        assert (kernel[2] == 0).all()
