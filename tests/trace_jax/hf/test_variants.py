"""What folders of one family differ in: experts in one array, a model that sees images around it, FP32 tensors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trace_jax import small
from tests.trace_jax.families import FAMILIES
from tests.trace_jax.hf.folders import TINY, changed, configured, fused
from trace_jax.hf import (
    LAYOUTS,
    CheckpointFormatError,
    export_bf16,
    export_nvfp4,
    load_model,
    load_quantized,
    read_config,
)
from trace_jax.hf.folder import SINGLE
from trace_jax.hf.model import by_path
from trace_jax.quant import KEPT_WIDE, QuantPlan

QWEN = TINY / "qwen3_5_moe_text"
WIDE = {"qwen3_5_moe_text": ("A_log", "linear_attn.norm.weight"), "deepseek_v3": ("e_score_correction_bias",)}
"""Tensors that stay FP32, by the end of their names."""


def refused(folder, *said):
    with pytest.raises(CheckpointFormatError) as error:
        load_model(folder)
    for part in said:
        assert part in str(error.value), str(error.value)


def same_bits(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return small.equal_trees(a, b) and all(x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gpt_oss"}))
def test_fused_experts_are_those_of_the_folder_that_has_them_apart(tmp_path, family):
    apart, together = load_model(TINY / family), load_model(changed(TINY / family, tmp_path / "fused", fused))
    tensors = load_file(tmp_path / "fused" / SINGLE)
    assert not [name for name in tensors if ".experts.0." in name or "block_sparse" in name]
    assert together.config == apart.config and same_bits(together.params, apart.params)


def test_what_a_fused_folder_lacks_is_named_as_it_would_hold_it(tmp_path):
    def without_down(tensors):
        fused(tensors)
        tensors["model.layers.2.mlp.experts.down"] = tensors.pop("model.layers.2.mlp.experts.down_proj")

    refused(
        changed(TINY / "qwen3_moe", tmp_path / "out", without_down),
        "it lacks model.layers.2.mlp.experts.down_proj and holds unknown model.layers.2.mlp.experts.down",
    )


def test_experts_partly_fused_are_refused(tmp_path):
    def one_layer(tensors):
        rest = {name: tensors.pop(name) for name in list(tensors) if ".layers.1." not in name}
        fused(tensors)
        tensors.update(rest)

    refused(
        changed(TINY / "qwen3_moe", tmp_path / "out", one_layer),
        "it lacks model.layers.1.mlp.experts.0.down_proj.weight",
        "holds unknown model.layers.1.mlp.experts.down_proj",
    )


def in_fp32(source, out):
    """A folder whose tensors that stay FP32 are FP32, of values that BF16 would round."""

    def widen(tensors):
        for name, x in tensors.items():
            if name.endswith(WIDE[source.name]):
                tensors[name] = x.astype(np.float32) + np.float32(2.0**-13)
                assert (tensors[name].astype(x.dtype) != tensors[name]).any()

    return changed(source, out, widen)


def published(out):
    """The tiny text model inside one of text and images, as Qwen3.5 is published."""

    def wrap(tensors):
        fused(tensors)
        for name in list(tensors):
            if name.startswith("model."):
                tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = np.ones((4, 3), np.float32)
        tensors["mtp.layers.0.input_layernorm.weight"] = np.ones(64, np.float32)

    changed(in_fp32(QWEN, out / "wide"), out / "published", wrap)
    text = json.loads((QWEN / "config.json").read_text())
    del text["architectures"]
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 150,
        "model_type": "qwen3_5_moe",
        "text_config": text | {"mlp_only_layers": [], "mamba_ssm_dtype": "float32"},
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27},
    }
    (out / "published" / "config.json").write_text(json.dumps(config))
    return out / "published"


def test_the_text_part_of_a_model_that_sees_images(tmp_path):
    folder = published(tmp_path)
    found, expected = load_model(folder), load_model(tmp_path / "wide")
    assert found.config == expected.config == load_model(QWEN).config
    assert same_bits(found.params, expected.params)
    export_bf16(found.params, found.config, tmp_path / "out", source=folder)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["model_type"] == "qwen3_5_moe_text" and "text_config" not in stated
    assert stated["architectures"] == ["Qwen3_5MoeForCausalLM"] and stated["mamba_ssm_dtype"] == "float32"
    again = load_model(tmp_path / "out")
    assert again.config == found.config and same_bits(again.params, found.params)


def test_only_known_parts_of_other_models_are_passed_over(tmp_path):
    def hear(tensors):
        tensors["model.audio.conv.weight"] = np.ones((4, 3), np.float32)

    refused(changed(published(tmp_path), tmp_path / "audio", hear), "holds unknown model.audio.conv.weight")
    refused(
        configured(tmp_path / "published", tmp_path / "text", text_config=None),
        "model_type='qwen3_5_moe' but no text_config",
    )


def test_the_whole_model_says_whether_its_embedding_is_tied():
    text = json.loads((QWEN / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True}
    assert read_config(outer)[1].tied_embedding and not read_config(text)[1].tied_embedding


@pytest.mark.parametrize("family", WIDE)
def test_wide_parameters_keep_their_bits_in_every_export(tmp_path, family):
    folder = in_fp32(TINY / family, tmp_path / "wide")
    loaded = load_model(folder)
    wide = {param for param in by_path(loaded.params) if param.rpartition(".")[2] in KEPT_WIDE}
    export_bf16(loaded.params, loaded.config, tmp_path / "bf16", source=folder)
    written, original = load_file(tmp_path / "bf16" / SINGLE), load_file(folder / SINGLE)
    assert {name for name, x in written.items() if x.dtype == np.float32} == {
        name for name in original if name.endswith(WIDE[family])
    }
    assert all(np.array_equal(written[n], x) and written[n].dtype == x.dtype for n, x in original.items())
    rollout = small.sync(loaded.params, QuantPlan(), "bfloat16")
    for layout in LAYOUTS.values():
        export_nvfp4(rollout, loaded.config, QuantPlan(), layout, tmp_path / layout.name, source=folder)
        again = load_quantized(tmp_path / layout.name).rollout
        assert same_bits(again, rollout)
        assert wide and all(by_path(again)[param].dtype == jnp.float32 for param in wide)
