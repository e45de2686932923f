"""The optimiser: what decays."""

import jax.numpy as jnp
import numpy as np

from trace_jax.rl import OptimizerConfig, make_optimizer


def test_a_correction_without_gradient_does_not_decay():
    ones = jnp.ones(3, jnp.float32)
    params = {"moe": {"router": ones, "router_correction": ones}}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), 10)
    zeros = {"moe": {name: jnp.zeros_like(ones) for name in params["moe"]}}
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert not np.any(updates["moe"]["router_correction"])
    np.testing.assert_allclose(updates["moe"]["router"], -0.05, rtol=1e-6)
