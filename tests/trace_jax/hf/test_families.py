"""Every family's checkpoint through every format and back."""

import dataclasses
import functools
import json

import jax
import pytest

from tests.trace_jax import small
from tests.trace_jax.families import FAMILIES
from tests.trace_jax.families import ROOT as TINY
from trace_jax.hf import (
    LAYOUTS,
    export_bf16,
    export_nvfp4,
    load_model,
    load_quantized,
    read_config,
    read_model_config,
    write_config,
)
from trace_jax.hf.families import FAMILIES as KNOWN
from trace_jax.hf.model import shapes_by_path
from trace_jax.models import ModelConfig
from trace_jax.quant import QuantPlan


@functools.cache
def loaded(name: str):
    return load_model(TINY / name)


def test_every_family_has_a_checkpoint():
    assert {path.name for path in TINY.iterdir()} == set(FAMILIES)
    assert {read_model_config(TINY / name)[1].model_type for name in FAMILIES} == set(KNOWN)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_json_is_the_model_config(name):
    stated = json.loads((TINY / name / "config.json").read_text())
    config = loaded(name).config
    assert read_config(write_config(config))[1] == config
    assert write_config(config, stated) == stated
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(loaded(name).params))


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_and_nvfp4_come_back_bit_for_bit(tmp_path, name):
    config, params = loaded(name).config, loaded(name).params
    export_bf16(params, config, tmp_path / "bf16", source=TINY / name, max_file_bytes=200_000)
    assert small.equal_trees(load_model(tmp_path / "bf16").params, params)
    plan = QuantPlan()
    rollout = small.sync(params, plan, "bfloat16")
    for layout in LAYOUTS.values():
        export_nvfp4(rollout, config, plan, layout, tmp_path / layout.name, source=TINY / name)
        assert small.equal_trees(load_quantized(tmp_path / layout.name).rollout, rollout)


def comes_back(tmp_path, config: ModelConfig) -> dict:
    """Checks the BF16 export of random parameters, and gives its `config.json`."""
    params = jax.tree.map(lambda w: w.astype("bfloat16").astype(w.dtype), small.masters(config)[1])
    export_bf16(params, config, tmp_path / "out")
    again = load_model(tmp_path / "out")
    assert dataclasses.replace(again.config, family=config.family) == config
    assert small.equal_trees(again.params, params)
    return json.loads((tmp_path / "out" / "config.json").read_text())


def test_an_upcycled_llama_is_a_mixtral(tmp_path):
    config = dataclasses.replace(small.MODEL, family="llama_moe", qk_norm="none", tied_embedding=True)
    assert comes_back(tmp_path, config)["model_type"] == "mixtral"


@pytest.mark.parametrize("dense_layers", [0, 4])
def test_deepseek_with_layers_of_one_kind(tmp_path, dense_layers):
    stated = json.loads((TINY / "deepseek_v3" / "config.json").read_text())
    config = read_config(stated | {"first_k_dense_replace": dense_layers})[1]
    assert config.dense_layers == dense_layers and config.dense_hidden_size == (96 if dense_layers else 0)
    assert {name.split(".")[0] for name in shapes_by_path(config)} & {"moe", "dense"} == {
        "dense" if dense_layers else "moe"
    }
    comes_back(tmp_path, config)
