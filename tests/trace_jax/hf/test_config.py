"""`config.json`: what is read of it, and what is refused, in words that name the key."""

import json

import pytest

from tests.trace_jax.hf.folders import TINY
from trace_jax.hf import CheckpointFormatError, load_quantized, read_config, write_config

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LINEAR, FULL = "linear_attention", "full_attention"


def stated(family: str = "qwen3_moe", **keys) -> dict:
    """A family's config.json with other keys; `...` takes one away."""
    found = json.loads((TINY / family / "config.json").read_text()) | keys
    return {name: value for name, value in found.items() if value is not ...}


def model(family: str = "qwen3_moe", **keys):
    return read_config(stated(family, **keys))[1]


def refused(said: str, family: str = "qwen3_moe", **keys):
    with pytest.raises(CheckpointFormatError) as error:
        model(family, **keys)
    assert said in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "llama3"),
        ({"rope_parameters": {**DEFAULT, "rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {**DEFAULT, "factor": 2.0}}, "rope_parameters.factor=2.0"),
        ({"some_new_switch": 1}, "some_new_switch=1"),
        ({"num_attention_heads": None}, "no num_attention_heads; expected a whole number of at least 1"),
    ],
)
def test_keys_that_the_model_does_not_honour(keys, said):
    refused(said, **keys)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3_moe", {"vocab_size": "many"}),
        ("qwen3_moe", {"hidden_size": 64.0}),
        ("qwen3_moe", {"num_attention_heads": True}),
        ("qwen3_moe", {"num_attention_heads": 0, "head_dim": None}),
        ("qwen3_moe", {"num_experts_per_tok": 2.0}),
        ("qwen3_moe", {"num_key_value_heads": 0}),
        ("qwen3_moe", {"norm_topk_prob": "false"}),
        ("qwen3_moe", {"norm_topk_prob": None}),
        ("qwen3_moe", {"tie_word_embeddings": "false"}),
        ("qwen3_moe", {"rms_norm_eps": float("nan")}),
        ("qwen3_moe", {"rms_norm_eps": 10**400}),
        ("qwen3_moe", {"quantization_config": "fp8"}),
        ("qwen3_moe", {"rope_parameters": [1]}),
        ("qwen3_moe", {"rope_parameters": "yarn"}),
        ("qwen3_moe", {"rope_parameters": ..., "rope_theta": "big"}),
        ("qwen3_moe", {"model_type": ["qwen3_moe"]}),
        ("qwen3_5_moe_text", {"full_attention_interval": 0}),
        ("qwen3_5_moe_text", {"layer_types": [["linear_attention"]]}),
        ("gpt_oss", {"sliding_window": 0}),
        ("gpt_oss", {"swiglu_limit": "7"}),
        ("deepseek_v3", {"first_k_dense_replace": -1}),
        ("deepseek_v3", {"n_shared_experts": 0.5}),
        ("deepseek_v3", {"q_lora_rank": 0}),
        ("deepseek_v3", {"routed_scaling_factor": True}),
        ("deepseek_v3", {"rope_interleave": None}),
    ],
)
def test_values_of_another_kind(family, keys):
    name, value = next((name, value) for name, value in keys.items() if value is not ...)
    refused(f"config.json has {name}={value!r}; expected", family, **keys)


def test_values_within_mappings():
    for name, value in (("rope_theta", "big"), ("factor", None), ("truncate", None), ("beta_fast", [1])):
        refused(f"rope_parameters.{name}", rope_parameters={**YARN, name: value})
    keys = {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"}
    refused(
        "no rope_parameters.original_max_position_embeddings; expected a whole number", rope_parameters=keys
    )


@pytest.mark.parametrize("method", [["x"], 1])
def test_a_quantization_method_is_a_string(tmp_path, method):
    keys = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(stated(**keys)))
    with pytest.raises(
        CheckpointFormatError, match=r"quantization_config\.quant_method=.* expected a string"
    ):
        load_quantized(tmp_path)


def test_keys_have_been_renamed_over_the_years():
    older = stated(
        rope_parameters=...,
        num_local_experts=...,
        rope_theta=1000000.0,
        rope_scaling=None,
        num_experts=8,
        torch_dtype="bfloat16",
    )
    assert read_config(older)[1] == model()
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert model(rope_parameters=..., rope_theta=1e4, rope_scaling=yarn) == model(rope_parameters=YARN)


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"num_experts": 4}, ["num_experts=4", "num_local_experts=8"]),
        ({"rope_theta": 1e4}, ["rope_theta=10000.0", "rope_parameters.rope_theta=1000000.0"]),
        ({"rope_parameters": DEFAULT, "rope_scaling": YARN}, [f"{DEFAULT}", f"{YARN}"]),
        ({"rope_parameters": YARN, "rope_scaling": {"type": "default"}}, [f"{YARN}", "'type': 'default'"]),
        # Without its own theta it would have a reader's default.
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"rope_theta": 2e4}}, ["20000.0"]),
        ({"rope_parameters": {**YARN, "type": "linear"}}, ["rope_type='yarn'", "type='linear'"]),
    ],
)
def test_different_statements_of_one_thing(keys, shown):
    for part in [*shown, "different statements of one thing; delete all but the right one"]:
        refused(part, **keys)


def test_the_same_statement_twice():
    assert model(num_experts=8, rope_theta=1e6) == model()
    twice = model(rope_parameters=YARN, rope_scaling=dict(YARN), rope_theta=1e4)
    assert twice == model(rope_parameters=YARN) and twice.rope.scaling.factor == 4
    without_theta = {name: value for name, value in YARN.items() if name != "rope_theta"}
    assert model(rope_parameters=YARN, rope_scaling=without_theta, rope_theta=1e4) == twice
    assert model("gpt_oss", experts_per_token=2) == model("gpt_oss")
    refused("experts_per_token=4", "gpt_oss", experts_per_token=4)
    # A reader's default theta stands for what the second does not say.
    refused("different statements", rope_parameters=YARN, rope_scaling=without_theta)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_families_that_rotate_whole_heads(family):
    refused("partial_rotary_factor=0.5", family, partial_rotary_factor=0.5)
    rope = stated(family)["rope_parameters"]
    refused("partial_rotary_factor=0.5", family, rope_parameters={**rope, "partial_rotary_factor": 0.5})
    assert model(family, partial_rotary_factor=1.0) == model(family)


@pytest.mark.parametrize(("keys", "dim"), [({}, 8), ({"partial_rotary_factor": 1.0}, None)])
@pytest.mark.parametrize("outside", [False, True])
def test_qwen3_5_says_what_it_rotates(keys, dim, outside):
    keys = {"rope_parameters": DEFAULT, **keys} if outside else {"rope_parameters": {**DEFAULT, **keys}}
    config = model("qwen3_5_moe_text", **keys)
    assert config.rope.dim == dim
    written = write_config(config)
    assert written["rope_parameters"]["partial_rotary_factor"] == (dim or 32) / 32
    assert read_config(written)[1] == config
    assert write_config(config, stated("qwen3_5_moe_text", **keys)) == stated("qwen3_5_moe_text", **keys)


@pytest.mark.parametrize("share", [2.0, 1.01, 0.0, -0.25])
def test_shares_of_a_head_that_cannot_be_rotated(share):
    said = f"partial_rotary_factor={share}; expected the share of a head"
    refused(said, "qwen3_5_moe_text", rope_parameters={**DEFAULT, "partial_rotary_factor": share})


def test_a_layer_type_for_each_layer():
    types = [LINEAR, FULL]
    by_types = model("qwen3_5_moe_text", layer_types=2 * types)
    assert by_types.layer_types == ("delta", "full")
    assert model("qwen3_5_moe_text", layer_types=..., full_attention_interval=2) == by_types
    assert model("qwen3_5_moe_text", layer_types=2 * types, full_attention_interval=2) == by_types
    assert model("qwen3_5_moe_text", layer_types=...) == model("qwen3_5_moe_text")
    refused("expected for each of 4 layers a type", "qwen3_5_moe_text", layer_types=4 * types)
    refused("full_attention_interval=4", "qwen3_5_moe_text", layer_types=2 * types, full_attention_interval=4)
    refused("sliding and full attention in turn", "gpt_oss", layer_types=["sliding_attention"])
