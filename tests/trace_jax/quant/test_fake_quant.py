"""Straight-through rounding and the cast of master weights."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax.quant import cast_weight, straight_through


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_straight_through_returns_the_rounded_value_and_passes_the_gradient(rng, dtype):
    x, rounded, cotangent = (jnp.asarray(rng.standard_normal((5, 8)), dtype) for _ in range(3))
    value, pullback = jax.vjp(straight_through, x, rounded)
    assert value.dtype == dtype and np.array_equal(value, rounded)
    to_x, to_rounded = pullback(cotangent)
    assert to_x.dtype == dtype and np.array_equal(to_x, cotangent)
    assert to_rounded is None or not np.any(np.asarray(to_rounded))


def test_straight_through_has_no_clip_mask(rng):
    x = jnp.asarray(rng.standard_normal(16) * 1e6, jnp.float32)
    grad = jax.grad(lambda v: jnp.sum(straight_through(v, jnp.clip(v, -6, 6))))(x)
    assert np.array_equal(grad, np.ones(16))


@pytest.mark.parametrize("jit", [False, True])
def test_cast_weight_survives_the_compiler(rng, jit):
    w = rng.standard_normal((32, 16)).astype(np.float32)

    def round_trip(w):
        # XLA drops a plain f32 -> bf16 -> f32 pair, and fuses the casts into what follows.
        return cast_weight(w, "bfloat16").astype(jnp.float32) * 1.0

    found = (jax.jit(round_trip) if jit else round_trip)(jnp.asarray(w))
    assert np.array_equal(found, w.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert not np.array_equal(found, w)


@pytest.mark.parametrize("jit", [False, True])
def test_cast_weight_in_a_product(rng, jit):
    x = jnp.asarray(rng.standard_normal((4, 32)), jnp.bfloat16)
    w = rng.standard_normal((32, 16)).astype(np.float32)

    def product(x, w):
        return jnp.matmul(x, cast_weight(w, "bfloat16"), preferred_element_type=jnp.float32)

    run = jax.jit(product) if jit else product
    assert np.array_equal(
        run(x, jnp.asarray(w)), run(x, jnp.asarray(w.astype(ml_dtypes.bfloat16), jnp.float32))
    )


def test_cast_weight_gradient_is_that_of_the_master(rng):
    w = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    factor = jnp.asarray(rng.integers(-3, 4, (4, 4)), jnp.bfloat16)
    grad = jax.grad(lambda v: jnp.sum((cast_weight(v, "bfloat16") * factor).astype(jnp.float32)))(w)
    assert grad.dtype == jnp.float32 and np.array_equal(grad, factor.astype(jnp.float32))


def test_cast_weight_leaves_the_compute_dtype_alone(rng):
    w = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    assert cast_weight(w, "float32") is w
