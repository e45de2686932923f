"""Records of models whose layers differ: each row is that of its own layer; and models without experts."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.trace_jax import small
from tests.trace_jax.families import config_of
from trace_jax.models import ModelConfig
from trace_jax.rl import MethodConfig, make_batch
from trace_jax.rollout import load_trajectories, save_trajectories
from trace_jax.rollout.rerecord import rerecord

CASES = {
    # Attention in layers 3 and 7 only; the record is of sites that layer 3 has all of.
    "qwen3_5": (
        dataclasses.replace(config_of("qwen3_5_moe_text"), num_layers=8),
        (3,),
        ("expert_input", "key", "value"),
    ),
    "qwen3_5, sites in different layers": (
        dataclasses.replace(config_of("qwen3_5_moe_text"), num_layers=8),
        (2, 3, 6, 7),
        ("key", "down_input", "value", "expert_input"),
    ),
    # Layer 0 has no experts, and the latent's place is its layer's, not that of the experts.
    "deepseek_v3": (config_of("deepseek_v3"), (1,), ("key", "expert_input")),
    "deepseek_v3, the dense layer too": (config_of("deepseek_v3"), (0, 2), ("expert_input", "key")),
}


def rolled_out(model, method):
    plan, spec = method.rollout_plan(), method.record_spec(model)
    weights = small.sync(small.masters(model)[1], plan, model.dtype)
    sampler = small.sampler(plan, spec, model)
    return spec, sampler.generate(weights, small.PROMPTS, small.keys_for(small.PROMPTS), weight_version=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_record_is_that_of_its_layers(case, tmp_path):
    """The audit sample holds every layer's codes by the model's own account: the record has to be what they give."""
    model, layers, sites = CASES[case]
    spec, t = rolled_out(model, MethodConfig(name="some", layers=layers, sites=sites))
    expected = rerecord(t, spec).record.sites
    assert set(expected) == set(t.record.sites) == set(sites)
    for site in sites:
        assert t.record.sites[site].row_exponent.shape[0] == len(spec.layers_of(site))
        assert small.equal_trees(t.record.sites[site], expected[site])
    make_batch(t, small.ADVANTAGES, model=model, spec=spec, weight_version=3, replay_routes=True)
    save_trajectories(tmp_path / "t.npz", t)
    again = load_trajectories(tmp_path / "t.npz")
    assert small.equal_trees(again, jax.tree.map(np.asarray, dataclasses.replace(t, packed=None)))


def test_a_model_without_experts_rolls_out_with_an_fp4_cache(tmp_path):
    model = ModelConfig(
        family="llama",
        vocab_size=17,
        num_layers=2,
        dense_layers=2,
        dense_hidden_size=64,
        qk_norm="none",
    )
    spec, t = rolled_out(
        model, MethodConfig(name="kv", layers="last_half", sites=("expert_input", "key", "value"))
    )
    assert spec.sites == ("key", "value") and t.record.routes.shape[0] == 0 and t.record.route_layers == ()
    assert small.equal_trees(rerecord(t, spec).record.sites, t.record.sites)
    make_batch(t, small.ADVANTAGES, model=model, spec=spec, weight_version=3, replay_routes=True)
    save_trajectories(tmp_path / "t.npz", t)
    assert load_trajectories(tmp_path / "t.npz").record.sites["key"].spec == spec
