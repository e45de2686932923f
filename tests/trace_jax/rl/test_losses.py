"""The policy loss on numbers worked by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.rl import RLConfig
from trace_jax.rl.losses import correction_weight, policy_loss

MASK = np.array([[False, True, True, True], [False, True, True, False]])
ADVANTAGES = np.array([1.0, -2.0], np.float32)
ZEROS = np.zeros((2, 4), np.float32)


def settings(**changes):
    return RLConfig(prompts=1, group_size=2, audit_sequences=0, **changes)


@functools.partial(jax.jit, static_argnames=("config",))
def run(logprobs, entropy, rollout, old, reference, config):
    def loss(logprobs, entropy):
        return policy_loss(
            logprobs,
            entropy,
            rollout=rollout,
            old=old,
            reference=reference,
            advantages=jnp.asarray(ADVANTAGES),
            mask=jnp.asarray(MASK),
            normalizer=jnp.float32(5),
            config=config,
        )

    (value, sums), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(logprobs, entropy)
    return value, sums, grads


def loss_of(log_ratio, config, *, old_log_ratio=None, reference=None, entropy=ZEROS):
    """`log_ratio` is trainer - rollout, or trainer - old with `old_log_ratio` old - rollout."""
    rollout = np.full((2, 4), -1.5, np.float32)
    old = None if old_log_ratio is None else rollout + np.float32(old_log_ratio)
    base = rollout if old is None else old
    value, sums, (grad, entropy_grad) = run(
        (base + np.float32(log_ratio)).astype(np.float32), entropy, rollout, old, reference, config
    )
    return float(value), {k: float(v) for k, v in sums.items()}, np.asarray(grad), np.asarray(entropy_grad)


def test_ratio_one_is_the_plain_policy_gradient():
    value, sums, grad, _ = loss_of(ZEROS, settings())
    assert value == pytest.approx(-(3 * 1 + 2 * -2) / 5)
    np.testing.assert_allclose(grad, np.where(MASK, -ADVANTAGES[:, None], 0) / 5, rtol=1e-5)
    assert sums["clipped"] == 0 and sums["is_clipped"] == 0


@pytest.mark.parametrize("config", [settings(), settings(ratio="decoupled")], ids=["behaviour", "decoupled"])
def test_masked_tokens_have_no_gradient_whatever_they_hold(config):
    for junk in (50.0, -50.0, np.inf, -np.inf, np.nan):
        log_ratio = np.where(MASK, 0.01, junk).astype(np.float32)
        entropy = np.where(MASK, 1.0, junk).astype(np.float32)
        old = None if config.ratio == "behaviour" else 0.0
        reference = np.where(MASK, -1.5, junk).astype(np.float32)
        value, sums, grad, _ = loss_of(
            log_ratio, config, old_log_ratio=old, reference=reference, entropy=entropy
        )
        assert np.isfinite(value) and all(np.isfinite(v) for v in sums.values())
        assert not grad[~MASK].any() and np.isfinite(grad).all() and grad[MASK].all()


def test_clip_is_asymmetric():
    config = settings(clip_low=0.2, clip_high=0.28)
    for ratio, advantage_positive_active, advantage_negative_active in (
        (1.27, True, True),
        (1.29, False, True),
        (1.21, True, True),
        (0.81, True, True),
        (0.79, True, False),
        (0.73, True, False),
    ):
        value, sums, grad, _ = loss_of(np.full((2, 4), np.log(ratio)), config)
        assert bool(grad[0][MASK[0]].all()) == bool(grad[0].any()) == advantage_positive_active
        assert bool(grad[1][MASK[1]].all()) == bool(grad[1].any()) == advantage_negative_active
        clipped = np.clip(ratio, 0.8, 1.28)
        expected = 3 * min(ratio, clipped) - 2 * 2 * max(ratio, clipped)
        assert value == pytest.approx(-expected / 5, rel=1e-5)
        assert sums["clipped"] == 3 * (not advantage_positive_active) + 2 * (not advantage_negative_active)


def test_ratio_cap_holds_for_negative_advantages():
    for ratio, capped in ((4.9, False), (5.1, True), (1e3, True)):
        value, sums, grad, _ = loss_of(np.full((2, 4), np.log(ratio)), settings(ratio_cap=5.0))
        assert bool(grad[1].any()) != capped
        assert value == pytest.approx(-(3 * 1.28 - 4 * min(ratio, 5.0)) / 5, rel=1e-5)
        assert sums["is_clipped"] == 5 * capped


def weights(correction, log_weight, **changes):
    config = settings(ratio="decoupled", correction=correction, **changes)
    run = jax.jit(correction_weight, static_argnums=3)
    weight, outside = run(jnp.asarray(log_weight, jnp.float32), jnp.asarray(ZEROS), jnp.asarray(MASK), config)
    return np.asarray(weight), np.asarray(outside) & MASK


LOG_WEIGHT = np.log(np.array([[9.0, 0.25, 1.5, 4.0], [9.0, 0.125, 1.0, 9.0]]))


def test_tis_bounds_from_above():
    weight, outside = weights("tis", LOG_WEIGHT, tis_cap=2.0)
    np.testing.assert_allclose(weight[MASK], [0.25, 1.5, 2.0, 0.125, 1.0], rtol=1e-6)
    assert list(outside[MASK]) == [False, False, True, False, False]


def test_icepop_masks_both_sides():
    weight, outside = weights("icepop", LOG_WEIGHT, icepop_low=0.5, icepop_high=3.0)
    np.testing.assert_allclose(weight[MASK], [0, 1.5, 0, 0, 1.0], rtol=1e-6)
    assert list(outside[MASK]) == [True, False, True, True, False]


def test_sequence_mask_drops_whole_sequences():
    # Geometric means over the sampled tokens: (0.25 x 1.5 x 4)^(1/3) = 1.14 and (0.125 x 1)^(1/2) = 0.35.
    weight, outside = weights("sequence_mask", LOG_WEIGHT, icepop_low=0.5, icepop_high=3.0)
    np.testing.assert_allclose(weight[MASK], [1, 1, 1, 0, 0])
    assert list(outside[MASK]) == [False, False, False, True, True]


def test_no_correction():
    weight, outside = weights("none", LOG_WEIGHT)
    assert (weight == 1).all() and not outside.any()


@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "sequence_mask"])
def test_decoupled_weight_is_stopped_and_multiplies_the_objective(correction):
    config = settings(ratio="decoupled", correction=correction, icepop_low=0.5, icepop_high=3.0)
    log_ratio = np.full((2, 4), np.log(1.1))
    value, sums, grad, _ = loss_of(log_ratio, config, old_log_ratio=LOG_WEIGHT)
    weight, outside = weights(correction, LOG_WEIGHT, icepop_low=0.5, icepop_high=3.0)
    expected = weight * 1.1 * ADVANTAGES[:, None]
    assert value == pytest.approx(-expected[MASK].sum() / 5, rel=1e-4)
    np.testing.assert_allclose(grad, np.where(MASK, -expected, 0) / 5, rtol=1e-4)
    assert sums["is_clipped"] == outside.sum()


def test_kl_is_k3_and_zero_at_equality():
    config = settings(kl_coefficient=0.5)
    plain, *_ = loss_of(ZEROS, settings())
    at_reference, sums, grad, _ = loss_of(ZEROS, config, reference=np.full((2, 4), -1.5, np.float32))
    assert at_reference == pytest.approx(plain) and sums["kl"] == 0
    np.testing.assert_allclose(grad, loss_of(ZEROS, settings())[2], atol=1e-7)
    r = np.log(1.3)  # reference over trainer
    value, sums, _, _ = loss_of(ZEROS, config, reference=np.full((2, 4), -1.5 + r, np.float32))
    assert sums["kl"] == pytest.approx(5 * (1.3 - 1 - r), rel=1e-4)
    assert value == pytest.approx(plain + 0.5 * (1.3 - 1 - r), rel=1e-4)


def test_entropy_bonus():
    plain, *_ = loss_of(ZEROS, settings())
    entropy = np.full((2, 4), 2.0, np.float32)
    value, sums, _, grad = loss_of(ZEROS, settings(entropy_coefficient=0.1), entropy=entropy)
    assert value == pytest.approx(plain - 0.1 * 2.0, abs=1e-6) and sums["entropy"] == 10
    np.testing.assert_allclose(grad, np.where(MASK, -0.1, 0) / 5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": "old"}, r"rl.ratio is 'old'; expected one of \('behaviour', 'decoupled'\)"),
        ({"correction": "cap"}, "rl.correction is 'cap'; expected one of"),
        ({"group_size": 1}, "rl.group_size is 1; group-normalised advantages need at least 2"),
        ({"minibatches": 5}, "do not split into rl.minibatches=5"),
        ({"audit_sequences": 200}, "rl.audit_sequences is 200; expected 0 to 128"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        RLConfig(**changes)
