"""Clamped SwiGLU and biases of experts."""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.models.activations import clamped_swiglu, expert_bias

ALPHA, LIMIT = 1.702, 7.0
TOKENS, PER_TOKEN, EXPERTS, WIDTH = 11, 2, 5, 6


def test_clamped_swiglu(rng):
    gate, up = rng.standard_normal((2, 40, WIDTH)) * 8
    assert (gate > LIMIT).any() and (gate < -LIMIT).any() and (abs(up) > LIMIT).any()
    found = jax.jit(lambda y: clamped_swiglu(y, alpha=ALPHA, limit=LIMIT))(
        jnp.asarray(np.concatenate([gate, up], axis=-1), jnp.float32)
    )
    gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
    np.testing.assert_allclose(found, (up + 1) * gate / (1 + np.exp(-ALPHA * gate)), rtol=1e-5, atol=1e-6)


def test_nothing_flows_back_beyond_the_limits():
    y = jnp.asarray([[9.0, -9.0, 1.0, 1.0, 1.0, 8.0]])  # gates 9, -9, 1; ups 1, 1, 8
    gradient = jax.grad(lambda y: clamped_swiglu(y, alpha=ALPHA, limit=LIMIT).sum())(y)[0]
    assert gradient[0] == 0 and gradient[5] == 0
    assert np.all(np.asarray(gradient[1:5]) != 0)


def test_each_row_gets_its_experts_bias_and_gives_it_its_gradient(rng):
    experts = rng.integers(0, EXPERTS - 1, (TOKENS, PER_TOKEN)).astype(np.int32)  # the last one is empty
    bias = rng.standard_normal((EXPERTS, WIDTH)).astype(np.float32)
    cotangent = rng.standard_normal((TOKENS, PER_TOKEN, WIDTH)).astype(np.float32)

    @jax.jit
    def run(bias, experts):
        out, pullback = jax.vjp(lambda bias: expert_bias(bias, experts), bias)
        return out, *pullback(jnp.asarray(cotangent))

    out, gradient = run(jnp.asarray(bias), jnp.asarray(experts))
    assert np.array_equal(out, bias[experts])
    expected = np.zeros((EXPERTS, WIDTH))
    np.add.at(expected, experts, cotangent.astype(np.float64))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert gradient.dtype == jnp.float32 and not np.any(gradient[-1])


def test_gradients_of_many_bf16_rows_do_not_stop_growing():
    experts, bias = jnp.zeros((4096, 1), jnp.int32), jnp.zeros((2, 1), jnp.bfloat16)
    gradient = jax.grad(lambda bias: expert_bias(bias, experts).astype(jnp.float32).sum())(bias)
    assert np.array_equal(gradient.astype(jnp.float32), [[4096.0], [0.0]])
