"""MXFP4 blocks of checkpoints against a decoder of single nibbles."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.quantize import dequantize, quantize
from trace_jax.models.mxfp4 import from_blocks, join_pairs, split_pairs, to_blocks

EXPERTS, COLUMNS, BLOCKS = 3, 10, 2
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture
def checkpoint(rng):
    blocks = rng.integers(0, 256, (EXPERTS, COLUMNS, BLOCKS, 16)).astype(np.uint8)
    scales = rng.integers(100, 140, (EXPERTS, COLUMNS, BLOCKS)).astype(np.uint8)
    return blocks, scales


def decoded(blocks, scales):
    """`[E, K, N]`, byte by byte."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
    values = VALUES[codes] * 2.0 ** (scales.astype(int)[..., None] - 127)
    return values.reshape(EXPERTS, COLUMNS, -1).swapaxes(1, 2)


def negative_zeros_gone(blocks):
    low, high = blocks & 15, blocks >> 4
    return np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4


def test_every_value_is_the_checkpoints(checkpoint):
    blocks, scales = checkpoint
    w = from_blocks(blocks, scales)
    w.check()
    assert w.shape == (EXPERTS, BLOCKS * 32, COLUMNS) and w.axis == -2 and w.format == MXFP4
    found = dequantize(w, jnp.float32)
    assert np.array_equal(found, decoded(blocks, scales))
    assert not np.any(np.signbit(found) & (found == 0)), "-0 is stored as 0"


def test_back_again_but_for_negative_zeros(checkpoint):
    blocks, scales = checkpoint
    assert ((blocks & 15) == 8).any() and ((blocks >> 4) == 8).any()
    found, found_scales = to_blocks(from_blocks(blocks, scales))
    assert np.array_equal(found, negative_zeros_gone(blocks)) and np.array_equal(found_scales, scales)
    assert np.array_equal(decoded(np.asarray(found), scales), decoded(blocks, scales))


def test_own_quantization_survives_a_checkpoint(rng):
    w = jnp.asarray(rng.standard_normal((EXPERTS, 64, COLUMNS)), jnp.float32)
    packed = quantize(w, MXFP4, axis=-2, row_axes=(-2, -1))
    again = from_blocks(*to_blocks(packed))
    for name in ("words", "scales", "row_exponent"):
        assert np.array_equal(getattr(again, name), getattr(packed, name)), name


def test_rounding_a_checkpoint_again_changes_no_value(checkpoint):
    # Masters made of a checkpoint's values give the rollout the same values: the numeric contract's scale of a block
    # may be half of the checkpoint's, of codes that are then twice as large.
    blocks, scales = checkpoint
    blocks = blocks.copy()
    blocks[0] &= 0xDD  # codes of at most 3, or 5 where the high bit survives
    blocks[0] &= 0xBB
    values = jnp.asarray(decoded(blocks, scales), jnp.float32)
    again = quantize(values, MXFP4, axis=-2, row_axes=(-2, -1))
    assert np.array_equal(dequantize(again, jnp.float32), values)
    assert not np.array_equal(again.scales, from_blocks(blocks, scales).scales)


def test_a_poisoned_block_stays_poisoned(checkpoint):
    blocks, scales = checkpoint
    scales = scales.copy()
    scales[1, 2, 0] = 255
    found = np.isnan(dequantize(from_blocks(blocks, scales), jnp.float32))
    assert found[1, :32, 2].all() and found.sum() == 32


def test_gate_and_up_columns(rng):
    x = rng.standard_normal((4, 6, 5))
    apart = split_pairs(x, 1)
    assert np.array_equal(apart[:, :3], x[:, 0::2]) and np.array_equal(apart[:, 3:], x[:, 1::2])
    assert np.array_equal(join_pairs(apart, 1), x)
    assert np.array_equal(split_pairs(jnp.asarray(x, jnp.float32), -2), apart.astype(np.float32))
    with pytest.raises(ValueError, match="odd size"):
        split_pairs(x, -1)


def test_tensors_that_do_not_fit_are_refused(checkpoint):
    blocks, scales = checkpoint
    with pytest.raises(ValueError, match="do not fit"):
        from_blocks(blocks, scales[:, :-1])
    with pytest.raises(ValueError, match="cannot store nvfp4"):
        to_blocks(quantize(jnp.ones((2, 32, 4)), NVFP4, axis=-2, row_axes=(-2, -1)))


def test_columns_are_put_apart_before_or_after_decoding(checkpoint):
    blocks, scales = checkpoint
    found = dequantize(from_blocks(split_pairs(blocks, 1), split_pairs(scales, 1)), jnp.float32)
    assert np.array_equal(found, split_pairs(decoded(blocks, scales), -1))
