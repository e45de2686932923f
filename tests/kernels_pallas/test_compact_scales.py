"""Compact scales: two bits per scale byte, rebuilt from the trainer's own maxima."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.guided_round import compact_scales, expand_compact_scales, own_scale_bytes
from tests.kernels_pallas.guided import noisy, run
from tests.kernels_pallas.strategies import bf16_rows

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
EXAMPLES = settings(max_examples=30, deadline=None)


@FORMATS
@given(x=bf16_rows(finite=True, exponents=(-20, 20)), seed=st.integers(0, 2**32 - 1))
@EXAMPLES
def test_compact_scales_rebuild_every_scale_within_their_window(format, x, seed):
    trainer = jnp.asarray(noisy(x, seed, 0.05))
    codes, _, record, _ = run(trainer, jnp.asarray(x), format, "mantissa", compact=True)
    exact, _, _, _ = run(trainer, jnp.asarray(x), format, "mantissa")
    t = np.asarray(jax.jit(own_scale_bytes, static_argnums=1)(trainer, format, record.row_exponent), int)
    r = np.asarray(record.scales, int)
    within = (r >= t - 1) & (r <= t + 2)
    np.testing.assert_array_equal(np.asarray(codes.scales)[within], r[within])
    held = np.repeat(within, format.block, axis=-1)
    np.testing.assert_array_equal(np.asarray(codes.codes)[held], np.asarray(exact.codes)[held])


@FORMATS
@pytest.mark.parametrize("axis", [-1, -2])
def test_compact_scales_round_trip_for_every_pair_in_the_window(format, axis):
    low, high = format.scale_range
    t, offset = np.meshgrid(np.arange(low, high + 1), np.arange(-1, 3), indexing="ij")
    r = t + offset
    inside = (r >= low) & (r <= high)
    r, t = r[inside].astype(np.uint8), t[inside].astype(np.uint8)
    shape = (1, -1) if axis == -1 else (-1, 1)
    r, t = r.reshape(shape), t.reshape(shape)

    @jax.jit
    def round_trip(r, t):
        packed = compact_scales(r, axis)
        return packed, expand_compact_scales(packed, t, format, axis)

    packed, rebuilt = round_trip(r, t)
    assert packed.shape[axis] == -(-r.shape[axis] // 4)
    np.testing.assert_array_equal(np.asarray(rebuilt), r)
