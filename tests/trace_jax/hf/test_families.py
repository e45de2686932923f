"""Every family's checkpoint through every format and back."""

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
