"""Dense checkpoints as models and as MoEs: the same logits from both, and configs that do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.trace_jax.models import gguf_files
from trace_jax.config import ConfigError
from trace_jax.models import ModelConfig, abstract, load_llama
from trace_jax.models.gguf import read_llama
from trace_jax.quant import Bf16Numerics


@pytest.fixture
def checkpoint(tmp_path, rng):
    tensors = gguf_files.random_tensors(rng)
    return gguf_files.write(
        tmp_path / "m.gguf",
        {name: t / np.float32(t.shape[-1] ** 0.5) if t.ndim > 1 else t for name, t in tensors.items()},
    )


def experts(dense: ModelConfig, **sizes) -> ModelConfig:
    return dataclasses.replace(dense, family="llama_moe", dense_layers=0, dense_hidden_size=0, **sizes)


def logits(model, state, tokens):
    @jax.jit
    def run(state, tokens):
        transformer = nnx.merge(abstract(model)[0], state)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        out = transformer(tokens, positions, jnp.ones(tokens.shape, bool), numerics=Bf16Numerics())
        return transformer.logits(out.hidden)

    return np.asarray(run(state, tokens))


def test_the_moe_has_the_logits_of_the_dense_model(checkpoint, rng):
    dense = dataclasses.replace(read_llama(checkpoint)[0], dtype="float32")
    tokens = jnp.asarray(rng.integers(0, gguf_files.VOCAB, (3, 7)), jnp.int32)
    expected = logits(dense, load_llama(checkpoint, dense), tokens)
    assert expected.std() > 0.1
    moe = experts(dense, num_experts=9, experts_per_token=6, expert_hidden_size=32)
    found = logits(moe, load_llama(checkpoint, moe), tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_eps": 1e-6}, r"m\.gguf holds another model: model\.norm_eps is 1e-06, not 1e-05"),
        (
            {"num_layers": 3, "dense_layers": 3},
            "model.num_layers is 3, not 2, model.dense_layers is 3, not 2",
        ),
        ({"family": "qwen3_moe"}, "model.family is 'qwen3_moe', not 'llama'"),
    ],
)
def test_a_config_of_another_model(checkpoint, change, message):
    with pytest.raises(ConfigError, match=message):
        load_llama(checkpoint, dataclasses.replace(read_llama(checkpoint)[0], **change))


def test_experts_that_the_mlp_cannot_become(checkpoint):
    moe = experts(read_llama(checkpoint)[0], num_experts=8, experts_per_token=2, expert_hidden_size=64)
    with pytest.raises(ConfigError, match=r"model\.expert_hidden_size is 64; expected a divisor of 96"):
        load_llama(checkpoint, moe)
