"""Quantizers that do more in one pass: low bits for a record, RMSNorm before, dequantized values after."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.guided_round import MODES, guided_round, guided_values
from kernels_pallas.guided_round.api import VALUES_IMPLEMENTATIONS
from kernels_pallas.quantize import dequantize, quantize, quantize_recorded, rms_norm_quantize
from kernels_pallas.quantize.api import NORM_IMPLEMENTATIONS, RECORDED_IMPLEMENTATIONS
from tests.kernels_pallas.guided import guide_of, noisy
from tests.kernels_pallas.same import same
from tests.kernels_pallas.serving import served

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
SHAPES = pytest.mark.parametrize("shape", [(5, 128), (2, 3, 4, 64)], ids=str)
EPS = 1e-6

QUANTIZE = jax.jit(quantize, static_argnames="format")


def values(rng, shape, dtype):
    """Rows of different magnitudes, one with NaN, one of zeros."""
    x = rng.standard_normal(shape) * np.ldexp(1.0, rng.integers(-9, 9, (*shape[:-1], 1)))
    x.reshape(-1, shape[-1])[1, 3] = np.nan
    x.reshape(-1, shape[-1])[2] = 0
    return jnp.asarray(x, dtype)


def low_bits(words):
    """Low bit of each 4-bit code, value i in bit i of a byte."""
    codes = (np.asarray(words)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 1
    return np.packbits(codes.astype(np.uint8), axis=-1, bitorder="little")[..., 0]


@FORMATS
@DTYPES
@SHAPES
@pytest.mark.parametrize("implementation", sorted(RECORDED_IMPLEMENTATIONS))
def test_the_record_is_the_low_bits_of_the_codes(implementation, rng, format, dtype, shape):
    x = values(rng, shape, dtype)
    run = jax.jit(lambda x: quantize_recorded(x, format, implementation=implementation))
    packed, mantissa = served(implementation, run)(x)
    same(packed, QUANTIZE(x, format))
    assert mantissa.dtype == jnp.uint8
    np.testing.assert_array_equal(np.asarray(mantissa), low_bits(packed.words))


@FORMATS
@DTYPES
@SHAPES
@pytest.mark.parametrize("implementation", sorted(NORM_IMPLEMENTATIONS))
def test_norm_and_quantize_in_one_pass(implementation, rng, format, dtype, shape):
    x = values(rng, shape, dtype)
    gain = jnp.asarray(1 + 0.1 * rng.standard_normal(shape[-1]), jnp.bfloat16).astype(dtype)
    run = jax.jit(lambda x, gain: rms_norm_quantize(x, gain, EPS, format, implementation=implementation))
    h, packed, mantissa = served(implementation, run)(x, gain)
    assert h.dtype == jnp.bfloat16
    # Codes and bits are those of the very rows that are returned.
    same(packed, QUANTIZE(h, format))
    np.testing.assert_array_equal(np.asarray(mantissa), low_bits(packed.words))
    wide, g = np.asarray(x, np.float64), np.asarray(gain, np.float64)
    expected = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + EPS) * g
    # At most the neighbour of the rounded answer: sums in FP32 differ in their last bits.
    h, rounded = np.asarray(h, np.float64), expected.astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(h), np.isnan(expected))
    differs = (h != rounded) & ~np.isnan(h)
    assert (np.abs(h - expected)[differs] <= np.abs(expected[differs]) * 2.0**-8 * 1.001).all()
    assert differs.mean() < 0.01


@FORMATS
@DTYPES
@pytest.mark.parametrize(
    ("mode", "compact"), [(None, False), *((mode, compact) for mode in MODES for compact in (False, True))]
)
@pytest.mark.parametrize("implementation", sorted(VALUES_IMPLEMENTATIONS))
def test_values_are_those_of_the_codes(implementation, rng, format, dtype, mode, compact):
    rollout = values(rng, (2, 4, 3, 64), jnp.bfloat16)
    trainer = jnp.asarray(noisy(np.asarray(rollout, np.float32), 7, 0.05), dtype)
    trainer = trainer.at[1, 2, 0, 40].set(jnp.inf)
    valid = jnp.asarray(rng.random((2, 4, 3)) < 0.7)

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(trainer, rollout, valid, implementation):
        guide = None if mode is None else guide_of(quantize(rollout, format), mode, valid, compact)
        return guided_values(trainer, guide, format, implementation=implementation)

    @jax.jit
    def composed(trainer, rollout, valid):
        if mode is None:
            return dequantize(quantize(trainer, format), dtype)
        guide = guide_of(quantize(rollout, format), mode, valid, compact)
        return dequantize(guided_round(trainer, guide, format), dtype)

    out = served(implementation, run)(trainer, rollout, valid, implementation=implementation)
    expected = composed(trainer, rollout, valid)
    assert out.dtype == dtype and out.shape == trainer.shape
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))
    assert np.isnan(np.asarray(out, np.float32)[1, 2, 0, 40 // format.block * format.block])


def test_errors_name_what_is_wrong():
    x = jnp.zeros((2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"axis -1 has size 40.*nvfp4 block of 16"):
        quantize_recorded(x[:, :40], NVFP4)
    with pytest.raises(ValueError, match=r"gain has shape \(32,\); expected \(64,\)"):
        rms_norm_quantize(x, jnp.ones(32), EPS, NVFP4)
    with pytest.raises(TypeError, match="x is float16; expected bfloat16 or float32"):
        rms_norm_quantize(x.astype(jnp.float16), jnp.ones(64), EPS, NVFP4)
    with pytest.raises(ValueError, match=r"axis -1 has size 40.*nvfp4 block of 16"):
        guided_values(x[:, :40], None, NVFP4)
    guide = guide_of(quantize(x, NVFP4), "mantissa")
    with pytest.raises(ValueError, match=r"guide.scales has shape \(2, 4\); expected \(3, 4\)"):
        guided_values(jnp.zeros((3, 64), jnp.bfloat16), guide, NVFP4)
    with pytest.raises(TypeError, match=r"float16.*bfloat16"):
        guided_values(x.astype(jnp.float16), guide, NVFP4)
