"""Presets of full-size models: their parameter counts are the published ones, and FP4 blocks fit."""

import hydra
import pytest

from experiments.common import CONFIGS
from trace_jax.config import from_mapping
from trace_jax.hf import family_of, read_config, write_config
from trace_jax.models import ModelConfig, abstract, parameter_count
from trace_jax.quant import QuantPlan

# Total and active billions of parameters, as the models' authors state them.
PRESETS = {
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_5_35b_a3b": (34.7, 3.5),
    "gpt_oss_20b": (20.9, 4.2),  # 3.6 without the embedding, which its authors leave out
    "olmoe_7b": (6.9, 1.3),
    "mixtral_8x7b": (46.7, 12.9),
    "deepseek_v3": (671.0, 37.6),
}


def preset(name: str) -> ModelConfig:
    with hydra.initialize_config_dir(CONFIGS, version_base="1.3"):
        return from_mapping(ModelConfig, hydra.compose(config_name=f"model/{name}").model, prefix="model")


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    model = preset(name)
    state = abstract(model)[1]
    total = parameter_count(state)
    experts = sum(state["moe"][weight].get_value().size for weight in ("gate_up", "down"))
    active = total - experts * (1 - model.experts_per_token / model.num_experts)
    expected, expected_active = PRESETS[name]
    assert total / 1e9 == pytest.approx(expected, rel=0.01)
    assert active / 1e9 == pytest.approx(expected_active, rel=0.04)
    for format in ("nvfp4", "mxfp4"):
        QuantPlan(format=format).check(**model.contractions)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_survives_a_config_json(name):
    """What a preset says of its family is all that the family's checkpoints say."""
    model = preset(name)
    family, read = read_config(write_config(model))
    assert read == model and family == family_of(model)
