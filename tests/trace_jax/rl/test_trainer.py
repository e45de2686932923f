"""The train step: what guidance does to the mismatch, accumulation, finite checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.trace_jax import small
from trace_jax.alignment.report import audit_report
from trace_jax.quant import Bf16Numerics
from trace_jax.rl import NonFiniteError, OptimizerConfig, RLConfig, Trainer, check_finite, make_optimizer

CONFIG = RLConfig(prompts=3, group_size=2, audit_sequences=0)


@pytest.fixture(scope="module")
def mismatch():
    """Per method: the log-prob gap, and code mismatch by site and layer, of the same weights and rollout."""
    found = {}
    for name, batch in (
        ("trace_all_layers", small.batch("trace_all_layers")),
        ("qat", small.batch("trace_all_layers").without_guidance()),
    ):
        metrics, result = small.trainer("trace_all_layers").evaluate(small.masters()[1], batch)
        t = small.rollout("trace_all_layers")
        found[name] = (jax.device_get(metrics), audit_report(t.audit, result.audit, t.fed))
    return found


def test_guidance_of_all_layers_removes_the_mismatch(mismatch):
    (guided, guided_codes), (own, own_codes) = mismatch["trace_all_layers"], mismatch["qat"]
    for site in ("expert_input", "key", "value"):
        assert own_codes[site]["code_mismatch"][-1] > 0.05
        assert guided_codes[site]["code_mismatch"].mean() <= 0.01 * own_codes[site]["code_mismatch"].mean()
        assert (guided_codes[site]["unguided_share"] == 0).all() and (
            own_codes[site]["unguided_share"] == 1
        ).all()
    assert guided["logprob_abs_diff_mean"] < own["logprob_abs_diff_mean"] / 8
    assert guided["kl_k3"] < own["kl_k3"] / 8 and guided["ess"] > own["ess"]


def test_without_guidance_before_and_after_are_the_same(mismatch):
    for report in mismatch["qat"][1].values():
        for name in ("code_mismatch", "d_act", "scale_mismatch", "adjacent_share"):
            assert np.array_equal(report[name], report[f"{name}_before"])


# In FP32 the sums of microbatches are those of the batch up to FP32 rounding: a tight tolerance can tell a mistake.
FP32 = dataclasses.replace(small.MODEL, dtype="float32")


def plain_trainer(**changes):
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3, clip_norm=0.5, **changes), 10)
    return Trainer(small.masters(FP32)[0], FP32, CONFIG, optimizer, numerics=Bf16Numerics(), spec=None)


@pytest.fixture(scope="module")
def big_step():
    """(trainer, metrics and state of one step on the whole batch)."""
    trainer, batch = plain_trainer(), small.batch("bf16")
    params = copied(small.masters(FP32)[1])
    state, metrics, _ = trainer.step(trainer.init(params), batch, np.float32(batch.sampled.sum()))
    return trainer, metrics, state


def copied(params):
    return jax.tree.map(jnp.copy, params)  # the step donates them


def test_accumulation_equals_the_big_batch(big_step):
    _, metrics, state = big_step
    params, batch = small.masters(FP32)[1], small.batch("bf16")
    parts = plain_trainer(accumulation=3)
    accumulated = parts.init(copied(params))
    for start in (0, 2, 4):
        before = copied(accumulated.params)
        normalizer = np.float32(batch.sampled.sum() / 3)
        accumulated, _, _ = parts.step(accumulated, batch.rows(slice(start, start + 2)), normalizer)
        moved = not small.equal_trees(before, accumulated.params)
        assert moved == (start == 4)  # one update, after the last microbatch
    # Adam's first moment is the clipped gradient, linear; its first update is only the gradient's sign.
    ours, theirs = (optax.tree.get(s.opt_state, "mu") for s in (state, accumulated))
    gap = optax.tree.norm(jax.tree.map(lambda a, b: a - b, ours, theirs))
    assert metrics["update_norm"] > 0 and gap < 1e-4 * optax.tree.norm(ours)
    moves = jax.tree.map(
        lambda a, b, p: jnp.sign(a - p) == jnp.sign(b - p), state.params, accumulated.params, params
    )
    assert np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(moves)]).mean() > 0.999


def test_a_step_reports_the_mismatch_before_its_update(big_step):
    trainer, metrics, _ = big_step
    batch = small.batch("bf16")
    expected, _ = trainer.evaluate(small.masters(FP32)[1], batch)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"mismatch/{name}"], value, rtol=1e-3, atol=1e-5)
    assert metrics["tokens"] == batch.sampled.sum()
    assert metrics["router/agreement"] > 0.9


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_check_finite_names_the_parameter(bad):
    params = copied(small.masters()[1])
    check_finite(params)
    down = params["moe"]["down"]
    params["moe"]["down"] = down.replace(down.get_value().at[1, 0, 2, 3].set(bad))
    with pytest.raises(
        NonFiniteError, match=r"parameter 'moe\.down' holds NaN or Inf \(1 of 14 parameters do\)"
    ):
        check_finite(params)
