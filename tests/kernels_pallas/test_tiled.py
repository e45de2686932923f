"""Weights tiled for tensor cores: nothing is lost, and every byte of a scale decodes to its value."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.activations import ClampedSwiglu
from kernels_pallas.formats import MXFP4, NVFP4, decode_scales
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.matmul import matmul
from kernels_pallas.tiled import _narrow, _widen, tile
from tests.kernels_pallas.jitted import quantize

# One program each in the place of dozens of operations that are compiled one by one.
tiled_weights = jax.jit(tile, static_argnames="gated")
untiled = jax.jit(lambda w: w.untile())
FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)


def packed(format, *shape):
    return quantize(jax.random.normal(jax.random.key(0), shape), format, axis=-2, row_axes=(-2, -1))


@FORMATS
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(64, 48), (3, 160, 96), (2, 2, 288, 32)], ids=str)
def test_tiling_and_back_is_the_same_tensor(format, gated, shape):
    w = packed(format, *shape)
    tiled = tiled_weights(w, gated=gated)
    assert tiled.shape == shape and tiled.ndim == len(shape)
    for leaf, back in zip(jax.tree.leaves(w), jax.tree.leaves(untiled(tiled)), strict=True):
        np.testing.assert_array_equal(np.asarray(back), np.asarray(leaf))


def test_widened_scale_bytes_are_the_scales_with_more_exponent():
    byte = jnp.arange(128, dtype=jnp.uint8)
    wide = np.asarray(_widen(byte)).astype(np.int64)
    value = (1 + (wide & 7) / 8) * 2.0 ** ((wide >> 3) + 224 - 127 - 119)
    expected = np.asarray(decode_scales(byte, NVFP4), np.float64)
    np.testing.assert_array_equal(value[1:127], expected[1:127])
    assert wide[0] == 0 and wide[127] == 0xFF
    np.testing.assert_array_equal(np.asarray(_narrow(_widen(byte))), np.asarray(byte))


@pytest.mark.parametrize("largest", [100, 128, 129, 200, 253])
def test_every_e8m0_byte_comes_back(largest):
    rng = np.random.default_rng(largest)
    w = packed(MXFP4, 2, 128, 64)
    scales = rng.integers(0, largest, w.scales.shape, dtype=np.uint8)
    scales[1, 0, 0], scales[1, 1, 1], scales[1, 2, 2] = largest, 0, 0xFF
    w = dataclasses.replace(w, scales=jnp.asarray(scales))
    tiled = tiled_weights(w)
    back = untiled(tiled)
    np.testing.assert_array_equal(np.asarray(back.scales), scales)
    np.testing.assert_array_equal(np.asarray(back.row_exponent), np.asarray(w.row_exponent))
    # As a BF16 number's exponent, and times what was taken out, a byte is 2^126 times the scale.
    assert int(tiled.row_exponent[1]) == 127 + max(largest - 128, 0)


@FORMATS
@pytest.mark.parametrize(
    "activation", ["swiglu", ClampedSwiglu(alpha=1.702, limit=7.0)], ids=["swiglu", "clamped"]
)
def test_the_reference_takes_tiled_weights(format, activation):
    x = jax.random.normal(jax.random.key(1), (9, 64)).astype(jnp.bfloat16)
    w = packed(format, 3, 64, 32)
    sizes, bias = jnp.int32([4, 0, 5]), jax.random.normal(jax.random.key(2), (3, 32))
    options = {"bias": bias, "activation": activation, "implementation": "reference"}
    run = jax.jit(functools.partial(grouped_matmul, x, group_sizes=sizes, **options))
    np.testing.assert_array_equal(np.asarray(run(w=tiled_weights(w, gated=True))), np.asarray(run(w=w)))
    one, run = jax.tree.map(lambda leaf: leaf[1], w), jax.jit(matmul)
    np.testing.assert_array_equal(np.asarray(run(x, tiled_weights(one))), np.asarray(run(x, one)))


def test_errors_name_what_is_wrong():
    columns = quantize(jnp.ones((64, 32)), NVFP4, axis=-2, row_axes=(-2,))
    with pytest.raises(ValueError, match="one row scale per matrix"):
        tile(columns)
    with pytest.raises(ValueError, match="33 columns cannot be a gate and an up projection"):
        tile(packed(NVFP4, 64, 33), gated=True)
