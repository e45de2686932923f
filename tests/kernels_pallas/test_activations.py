"""Activations of a gate and an up projection against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.activations import ClampedSwiglu, activated

CLAMPED = ClampedSwiglu(alpha=1.702, limit=7.0)
RUN = jax.jit(activated, static_argnums=1)


def test_clamped_swiglu(rng):
    gate, up = rng.standard_normal((2, 40, 6)) * 8
    assert (gate > 7).any() and (gate < -7).any() and (abs(up) > 7).any()
    found = RUN(jnp.asarray(np.concatenate([gate, up], axis=-1), jnp.float32), CLAMPED)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    np.testing.assert_allclose(found, (up + 1) * gate / (1 + np.exp(-1.702 * gate)), rtol=1e-5, atol=1e-6)


def test_clamping_keeps_nan():
    found = RUN(jnp.asarray([[jnp.nan, 1.0, 1.0, jnp.nan]]), CLAMPED)
    assert np.isnan(found).all()


def test_nothing_flows_back_beyond_the_limits():
    y = jnp.asarray([[9.0, -9.0, 1.0, 1.0, 1.0, 8.0]])  # gates 9, -9, 1; ups 1, 1, 8
    gradient = jax.jit(jax.grad(lambda y: activated(y, CLAMPED).sum()))(y)[0]
    assert gradient[0] == 0 and gradient[5] == 0
    assert np.all(np.asarray(gradient[1:5]) != 0)


def test_errors_name_what_is_wrong():
    clamped = functools.partial(ClampedSwiglu, alpha=1.702, limit=7.0)
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"limit is {limit}; expected a positive number"):
            clamped(limit=limit)
    with pytest.raises(ValueError, match="alpha is inf; expected a finite number"):
        clamped(alpha=float("inf"))
