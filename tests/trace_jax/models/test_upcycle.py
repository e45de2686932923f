"""Upcycling keeps the function, whatever the router says, and takes whole copies of the MLP."""

import numpy as np
import pytest

from trace_jax.config import ConfigError
from trace_jax.models import ModelConfig
from trace_jax.models.router import RouterConfig
from trace_jax.models.upcycle import upcycle

LAYERS, HIDDEN, MLP = 2, 32, 128


@pytest.fixture
def dense(rng):
    shapes = {
        ("dense", "norm"): (LAYERS, HIDDEN),
        ("dense", "gate_up"): (LAYERS, HIDDEN, 2 * MLP),
        ("dense", "down"): (LAYERS, MLP, HIDDEN),
        ("attention", "norm"): (LAYERS, HIDDEN),
        ("embedding",): (5, HIDDEN),
    }
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in shapes.items()}


def sizes(experts=16, k=4, granularity=4, **others):
    others = {"hidden_size": HIDDEN, "num_layers": LAYERS, "expert_hidden_size": MLP // granularity} | others
    return ModelConfig(family="llama_moe", num_experts=experts, experts_per_token=k, **others)


def mlp(x, gate_up, down):
    gate, up = np.split(x @ gate_up, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down


def experts_of(x, moe, layer, k):
    logits = x @ moe["moe", "router"][layer].astype(np.float64)
    return np.argsort(-logits, axis=-1, kind="stable")[:, :k], logits


def moe_layer(x, moe, layer, k):
    """A softmax over the k chosen experts, in FP64."""
    experts, logits = experts_of(x, moe, layer, k)
    out = np.zeros_like(x)
    for row, chosen in enumerate(experts):
        gates = np.exp(logits[row, chosen] - logits[row, chosen].max())
        for expert, gate in zip(chosen, gates / gates.sum(), strict=True):
            weights = (moe["moe", name][layer, expert].astype(np.float64) for name in ("gate_up", "down"))
            out[row] += gate * mlp(x[row], *weights)
    return out


@pytest.mark.parametrize(
    ("experts", "k", "granularity"),
    [(16, 4, 4), (8, 2, 2), (8, 2, 1), (8, 4, 2), (4, 4, 4), (12, 8, 4), (6, 3, 1)],
)
def test_the_function_is_kept(dense, rng, experts, k, granularity):
    moe = upcycle(dense, sizes(experts, k, granularity))
    width = MLP // granularity
    assert moe["moe", "gate_up"].shape == (LAYERS, experts, HIDDEN, 2 * width)
    assert moe["moe", "down"].shape == (LAYERS, experts, width, HIDDEN)
    assert moe["moe", "router"].shape == (LAYERS, HIDDEN, experts)
    assert all(array.dtype == np.float32 for array in moe.values())
    x = rng.standard_normal((40, HIDDEN))
    for layer in range(LAYERS):
        expected = mlp(x, *(dense["dense", name][layer].astype(np.float64) for name in ("gate_up", "down")))
        np.testing.assert_allclose(moe_layer(x, moe, layer, k), expected, rtol=1e-12, atol=1e-9)


def test_tokens_take_whole_copies_and_not_all_the_same(dense, rng):
    moe = upcycle(dense, sizes(16, 8, 4))
    experts, _ = experts_of(rng.standard_normal((200, HIDDEN)), moe, 0, 8)
    assert (np.sort(experts % 4, axis=-1) == np.repeat(np.arange(4), 2)).all()  # every shard, twice
    copies = np.sort(experts // 4, axis=-1)
    assert (copies[:, :4] == copies[:, :1]).all() and (copies[:, 4:] == copies[:, 4:5]).all()
    assert (np.bincount(copies.ravel(), minlength=4) > 100).all()


def test_the_rest_is_passed_on(dense):
    moe = upcycle(dense, sizes())
    assert set(moe) == {("embedding",), ("attention", "norm")} | {
        ("moe", name) for name in ("norm", "router", "gate_up", "down")
    }
    for path in (("embedding",), ("attention", "norm")):
        assert moe[path] is dense[path]
    np.testing.assert_array_equal(moe["moe", "norm"], dense["dense", "norm"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (sizes(experts=6), "model.num_experts is 6; expected a multiple of 4, the experts of 32 neurons"),
        (sizes(k=6), "model.experts_per_token is 6; expected a multiple of 4"),
        (sizes(k=1, granularity=1), "expected at least 2: the gate of a single expert is always 1"),
        (sizes(expert_hidden_size=48), "model.expert_hidden_size is 48; expected a divisor of 128"),
        (sizes(router=RouterConfig(normalize=False)), "expected a softmax over the chosen experts"),
    ],
)
def test_sizes_that_cannot_keep_the_function(dense, model, message):
    with pytest.raises(ConfigError, match=message):
        upcycle(dense, model)
