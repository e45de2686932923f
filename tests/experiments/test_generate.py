"""Generation and what it measures, at the smallest size."""

import jax
import numpy as np
import pytest

from experiments.export_hf import ExportConfig, export
from experiments.generate import GenerateConfig, measure, memory, start_of, weights_of
from kernels_pallas.arrays import Fp4Array
from tests.experiments.settings import composed, run_config
from tests.trace_jax import small
from tests.trace_jax.families import FAMILIES, ROOT, config_of
from trace_jax.config import ConfigError, from_mapping
from trace_jax.data import TokenizerError
from trace_jax.hf import load_model
from trace_jax.models import abstract
from trace_jax.quant import QuantPlan
from trace_jax.rl.run import train, with_vocabulary
from trace_jax.rollout import random_rollout_weights
from trace_jax.rollout.capacity import nbytes


def config(*overrides) -> GenerateConfig:
    return from_mapping(GenerateConfig, composed("generate", *overrides))


def weights(*overrides):
    generate = config(*overrides)
    return weights_of(generate, start_of(generate).model)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_those_of_a_rollout(family):
    """Same structure, shapes and dtypes as the weights that masters are packed to."""
    model = config_of(family)
    random = jax.eval_shape(lambda: random_rollout_weights(model, QuantPlan(), jax.random.key(0)))
    packed = jax.eval_shape(lambda: small.sync(abstract_zeros(model), QuantPlan(), model.dtype))
    assert jax.tree.structure(random) == jax.tree.structure(packed)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(random)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(packed)
    ]


def abstract_zeros(model):
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), abstract(model)[1])


def test_random_layers_differ_and_are_scaled_like_new_ones():
    weights = random_rollout_weights(small.MODEL, QuantPlan(), jax.random.key(0))
    gate_up = weights["moe"]["gate_up"].get_value()
    assert isinstance(gate_up, Fp4Array) and not np.array_equal(gate_up.words[0], gate_up.words[1])
    query = np.asarray(weights["attention"]["query"].get_value(), np.float32)
    assert query.std() == pytest.approx(small.MODEL.hidden_size**-0.5, rel=0.1)
    assert not np.array_equal(query[0], query[1])


def test_memory_of_a_family_with_states():
    found, model = memory(config_of("qwen3_5_moe_text"), QuantPlan()), config_of("qwen3_5_moe_text")
    attention, delta = len(model.layers_of("attention")), len(model.layers_of("delta"))
    row = model.head_dim // 2 + model.head_dim // 16 + 1  # codes, scales, the exponent
    assert found["cache_bytes_per_token"] == attention * 2 * model.num_kv_heads * row
    c = model.delta
    state = c.value_heads * c.key_dim * c.value_dim * 4
    conv = (c.conv_width - 1) * (2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim) * 2
    assert found["cache_bytes_per_sequence"] == delta * (state + conv)
    assert found["weights_bytes"] < memory(model, None)["weights_bytes"]


def test_a_checkpoint_generates_and_is_measured():
    overrides = (
        f"init_from={ROOT / 'olmoe'}",
        "max_new_tokens=8",
        "temperature=1",
    )
    found = measure(config(*overrides))
    assert found["tokens"] == 8 and found["tokens_per_second"] > 0
    params = jax.eval_shape(
        lambda: random_rollout_weights(config_of("olmoe"), QuantPlan(), jax.random.key(0))
    )
    assert found["weights_bytes"] == nbytes(params)


@pytest.mark.slow
def test_a_run_says_what_its_model_and_tokenizer_are(tmp_path):
    """Nothing else has to be given; its text is what its tokenizer decodes."""
    run = run_config(tmp_path, "name=done", "method=qat", "rl.steps=1")
    train(run)
    folder = f"init_from={tmp_path / 'done'}"
    start = start_of(config(folder))
    assert start.model == with_vocabulary(run.model, run.task)
    assert start.tokenizer.vocab_size == start.model.vocab_size
    with pytest.raises(TokenizerError, match="character 'H' at position 0"):
        measure(config(folder, "prompt=Hi"))
    found = measure(config(folder, "prompt='1+2='", "max_new_tokens=4"))
    assert len(start.tokenizer.encode(found["texts"][0])) <= 4  # its characters


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_an_fp4_checkpoint_is_rolled_out_as_it_is(tmp_path, layout):
    """Its codes, which masters of it would not have to give again."""
    source = str(ROOT / "qwen3_moe")
    export(
        from_mapping(
            ExportConfig, composed("export_hf", f"checkpoint={source}", f"format={layout}", f"out={tmp_path}")
        )
    )
    stored, packed = (weights(f"init_from={folder}") for folder in (tmp_path, source))
    assert small.equal_trees(stored, packed)


def test_masters_are_packed_as_from_fp32():
    folder = ROOT / "deepseek_v3"  # has values that stay FP32
    found = weights(f"init_from={folder}")
    expected = small.sync(load_model(folder).params, QuantPlan(), config_of("deepseek_v3").dtype)
    assert small.equal_trees(found, expected)


def test_refusals():
    with pytest.raises(ConfigError, match="precision is 'int4'; expected one of"):
        config("precision=int4")
    with pytest.raises(ConfigError, match="a prompt needs a tokenizer"):
        start_of(config("model.vocab_size=64", "prompt=hello"))
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0 and there is no tokenizer"):
        start_of(config())
    with pytest.raises(ConfigError, match="tokenizer=bytes has 259 ids, the model 160"):
        start_of(config(f"init_from={ROOT / 'olmoe'}", "tokenizer=bytes", "prompt=hello"))
