"""Upcycling keeps the function, whatever the router says, and takes whole copies of the MLP."""

import numpy as np
import pytest

from trace_jax.config import ConfigError
from trace_jax.models.upcycle import UpcycleConfig, upcycle

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
    moe = upcycle(dense, UpcycleConfig(num_experts=experts, experts_per_token=k, granularity=granularity))
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
    moe = upcycle(dense, UpcycleConfig(num_experts=16, experts_per_token=8, granularity=4))
    experts, _ = experts_of(rng.standard_normal((200, HIDDEN)), moe, 0, 8)
    assert (np.sort(experts % 4, axis=-1) == np.repeat(np.arange(4), 2)).all()  # every shard, twice
    copies = np.sort(experts // 4, axis=-1)
    assert (copies[:, :4] == copies[:, :1]).all() and (copies[:, 4:] == copies[:, 4:5]).all()
    assert (np.bincount(copies.ravel(), minlength=4) > 100).all()


def test_the_rest_is_passed_on(dense):
    moe = upcycle(dense, UpcycleConfig())
    assert set(moe) == {("embedding",), ("attention", "norm")} | {
        ("moe", name) for name in ("norm", "router", "gate_up", "down")
    }
    for path in (("embedding",), ("attention", "norm")):
        assert moe[path] is dense[path]
    np.testing.assert_array_equal(moe["moe", "norm"], dense["dense", "norm"])


def test_noise_makes_every_expert_its_own(dense):
    exact, noisy, again, other = (
        upcycle(dense, UpcycleConfig(noise=noise, seed=seed))
        for noise, seed in ((0.0, 0), (0.1, 0), (0.1, 0), (0.1, 1))
    )
    for name in ("gate_up", "down"):
        clean, moved = exact["moe", name], noisy["moe", name]
        np.testing.assert_array_equal(moved, again["moe", name])
        assert (moved != other["moe", name]).mean() > 0.99
        difference = (moved - clean).reshape(LAYERS, 16, -1)
        np.testing.assert_allclose(difference.std(-1) / clean.std(axis=(1, 2, 3))[:, None], 0.1, rtol=0.1)
        assert abs(np.corrcoef(difference[0])[np.triu_indices(16, 1)]).max() < 0.1
    np.testing.assert_array_equal(exact["moe", "router"], noisy["moe", "router"])
    assert (exact["moe", "router"] != other["moe", "router"]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 6}, "upcycle.num_experts is 6; expected a multiple of granularity 4"),
        ({"experts_per_token": 6}, "upcycle.experts_per_token is 6; expected a multiple of granularity 4"),
        ({"experts_per_token": 32}, "upcycle.experts_per_token is 32; .* below 17"),
        ({"granularity": 0}, "upcycle.granularity is 0"),
        (
            {"granularity": 1, "experts_per_token": 1},
            "expected at least 2: the gate of a single expert is always 1",
        ),
        ({"noise": -0.1}, "upcycle.noise is -0.1"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        UpcycleConfig(**options)


@pytest.mark.parametrize(("granularity", "width"), [(8, "16"), (3, "42.6667")])
def test_shards_keep_blocks_whole(dense, granularity, width):
    config = UpcycleConfig(num_experts=granularity, experts_per_token=granularity, granularity=granularity)
    with pytest.raises(
        ConfigError, match=f"a shard of the MLP's 128 neurons would have {width}; expected a multiple"
    ):
        upcycle(dense, config)
