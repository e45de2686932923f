"""Routers against NumPy, one token at a time; replay, gradients, and choices that corrections and groups change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import ConfigError
from trace_jax.models.router import RouterConfig, route

BATCH, LENGTH, EXPERTS, CHOSEN = 2, 9, 12, 3
DEEPSEEK = RouterConfig(scores="sigmoid", groups=4, top_groups=2, scale=2.5, correction=True)
FAMILIES = {
    "softmax of the chosen": RouterConfig(),
    "softmax of all": RouterConfig(normalize=False),
    "scaled": RouterConfig(scale=2.0),
    "sigmoid": RouterConfig(scores="sigmoid", normalize=False),
    "deepseek_v3": DEEPSEEK,
    "corrected": RouterConfig(scores="sigmoid", correction=True),
}
run = jax.jit(route, static_argnums=(1, 3))


@pytest.fixture
def logits(rng):
    return jnp.asarray(rng.standard_normal((BATCH, LENGTH, EXPERTS)) * 2, jnp.float32)


@pytest.fixture
def correction(rng):
    # Negative throughout: an expert outside the kept groups must not be chosen for its score of 0.
    return jnp.asarray(rng.standard_normal(EXPERTS) - 3, jnp.float32)


def by_hand(logits, config, correction, experts=None):
    """(experts, gates) of one token, in float64."""
    logits = np.asarray(logits, np.float64)
    exp = np.exp(logits - logits.max())
    scores = exp / exp.sum() if config.scores == "softmax" else 1 / (1 + np.exp(-logits))
    wanted = scores + (np.asarray(correction, np.float64) if config.correction else 0)
    if experts is None:
        size = EXPERTS // config.groups
        groups = [sorted(wanted[g * size : (g + 1) * size])[-2:] for g in range(config.groups)]
        kept = sorted(range(config.groups), key=lambda g: -sum(groups[g]))[: config.top_groups]
        allowed = [e for e in range(EXPERTS) if e // size in kept]
        experts = sorted(allowed, key=lambda e: -wanted[e])[:CHOSEN]
    gates = scores[list(experts)]
    if config.normalize:
        gates = gates / gates.sum()
    return experts, gates * config.scale


@pytest.mark.parametrize("family", FAMILIES)
def test_choice_and_gates(logits, correction, family):
    config = FAMILIES[family]
    correction = correction if config.correction else None
    config.check(EXPERTS, CHOSEN)
    own, experts, gates = run(logits, CHOSEN, None, config, correction)
    assert own.shape == (BATCH, LENGTH, CHOSEN) and own.dtype == jnp.int32
    assert np.array_equal(own, experts)
    for token in np.ndindex(BATCH, LENGTH):
        chosen, expected = by_hand(logits[token], config, correction)
        assert list(experts[token]) == chosen
        np.testing.assert_allclose(gates[token], expected, rtol=2e-6)


def test_default_is_bitwise_the_softmax_over_the_chosen_logits(logits):
    _, expected = jax.lax.top_k(logits, CHOSEN)
    own, experts, gates = route(logits, CHOSEN, None, RouterConfig())
    assert np.array_equal(own, expected) and np.array_equal(experts, expected)
    assert np.array_equal(gates, jax.nn.softmax(jnp.take_along_axis(logits, expected, axis=-1), axis=-1))


def test_groups_and_corrections_change_the_choice(logits, correction):
    plain = run(logits, CHOSEN, None, RouterConfig(scores="sigmoid"), None)[1]
    corrected = run(logits, CHOSEN, None, FAMILIES["corrected"], correction)[1]
    grouped = run(logits, CHOSEN, None, DEEPSEEK, correction)[1]
    assert np.mean(np.any(plain != corrected, axis=-1)) > 0.5
    assert np.mean(np.any(corrected != grouped, axis=-1)) > 0.1
    groups_used = [len({int(e) // 3 for e in token}) for token in grouped.reshape(-1, CHOSEN)]
    assert max(groups_used) == DEEPSEEK.top_groups


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_experts_get_this_models_gates(logits, correction, family, rng):
    config = FAMILIES[family]
    correction = correction if config.correction else None
    replay = np.argsort(rng.random((BATCH, LENGTH, EXPERTS)), axis=-1)[..., :CHOSEN].astype(np.int32)
    replay[:, -2:] = -1
    own, experts, gates = run(logits, CHOSEN, jnp.asarray(replay), config, correction)
    alone = run(logits, CHOSEN, None, config, correction)
    assert np.array_equal(own, alone[0])
    assert np.array_equal(experts[:, :-2], replay[:, :-2]) and np.array_equal(experts[:, -2:], own[:, -2:])
    for token in np.ndindex(BATCH, LENGTH):
        _, expected = by_hand(logits[token], config, correction, [int(e) for e in experts[token]])
        np.testing.assert_allclose(gates[token], expected, rtol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_flow_through_the_gates_alone(logits, correction, family, rng):
    config = FAMILIES[family]
    weights = jnp.asarray(rng.standard_normal((BATCH, LENGTH, CHOSEN)), jnp.float32)
    experts = run(logits, CHOSEN, None, config, correction if config.correction else None)[1]

    @functools.partial(jax.jit, static_argnums=2)
    def loss(logits, correction, replayed):
        correction = correction if config.correction else None
        gates = route(logits, CHOSEN, experts if replayed else None, config, correction)[2]
        return jnp.sum(gates * weights)

    of_logits, of_correction = jax.grad(loss, argnums=(0, 1))(logits, correction, False)
    assert not np.any(of_correction)
    used = np.zeros((BATCH, LENGTH, EXPERTS), bool)
    np.put_along_axis(used, np.asarray(experts), True, axis=-1)
    assert np.all(of_logits[used] != 0)
    if family != "softmax of all":  # whose denominator all logits share
        assert not np.any(of_logits[~used])
    direction = jnp.where(used, jnp.asarray(rng.standard_normal(logits.shape), jnp.float32), 0.0)
    step = 1e-2
    slope = (
        loss(logits + step * direction, correction, True) - loss(logits - step * direction, correction, True)
    ) / (2 * step)
    assert float(slope) == pytest.approx(float(jnp.sum(of_logits * direction)), rel=5e-3, abs=1e-3)


def test_hopeless_scores_give_gates_of_zero():
    gates = route(jnp.full((1, 1, 4), -200.0), 2, None, RouterConfig(scores="sigmoid"))[2]
    assert np.array_equal(gates, np.zeros((1, 1, 2)))


def test_what_is_not_defined_is_refused(logits, correction):
    with pytest.raises(ConfigError, match=r"scores is 'relu'; expected one of"):
        RouterConfig(scores="relu")
    with pytest.raises(ConfigError, match=r"top_groups is 3"):
        RouterConfig(scores="sigmoid", groups=2, top_groups=3)
    with pytest.raises(ConfigError, match="expected scores 'sigmoid'"):
        RouterConfig(correction=True)
    with pytest.raises(ConfigError, match=r"groups is 5 of 12 experts"):
        RouterConfig(scores="sigmoid", groups=5).check(12, 2)
    with pytest.raises(ConfigError, match=r"at least two experts"):
        RouterConfig(scores="sigmoid", groups=12).check(12, 1)
    with pytest.raises(ConfigError, match=r"experts_per_token is 4, but the 1 groups that are kept have 3"):
        RouterConfig(scores="sigmoid", groups=4).check(12, 4)
    for config, given in ((RouterConfig(), correction), (DEEPSEEK, None)):
        with pytest.raises(ValueError, match="correction is"):
            functools.partial(route, logits, CHOSEN, None, config)(given)
