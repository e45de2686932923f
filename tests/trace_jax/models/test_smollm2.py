"""A real model: SmolLM2-135M-Instruct, dense and upcycled, against log-probs that were computed in FP64."""

import dataclasses
import pathlib

import hydra
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.common import CONFIGS
from trace_jax.config import from_mapping
from trace_jax.data import smollm2_file
from trace_jax.models import ModelConfig, abstract, load_llama
from trace_jax.models.gguf import read_llama
from trace_jax.quant import Bf16Numerics

pytestmark = pytest.mark.slow  # 135M and 370M parameters on a CPU

REFERENCE = pathlib.Path(__file__).parents[2] / "data" / "smollm2_reference.npz"


@pytest.fixture(scope="module")
def file():
    pytest.importorskip("gguf")
    try:
        return smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def preset() -> ModelConfig:
    with hydra.initialize_config_dir(CONFIGS, version_base="1.3"):
        return from_mapping(ModelConfig, hydra.compose("train", ["model=smollm2_moe"]).model)


def difference(model, file) -> tuple[float, float]:
    """Largest differences of next-token log-probs and of last logits from the reference."""

    @jax.jit
    def run(state, tokens):
        transformer = nnx.merge(abstract(model)[0], state)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        out = transformer(tokens, positions, jnp.ones(tokens.shape, bool), numerics=Bf16Numerics())
        logits = transformer.logits(out.hidden)
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0], logits[:, -1]

    reference = np.load(REFERENCE)
    log_probs, last = run(load_llama(file, model), jnp.asarray(reference["input_ids"]))
    return (
        abs(log_probs - reference["next_token_logprobs"]).max(),
        abs(last - reference["last_logits"]).max(),
    )


# Both are 4e-5 away, which is FP32's rounding over 30 layers.
def test_dense(file):
    model = dataclasses.replace(read_llama(file)[0], dtype="float32")
    assert max(difference(model, file)) < 2e-4


def test_the_moe_starts_as_the_dense_model(file):
    assert max(difference(dataclasses.replace(preset(), dtype="float32"), file)) < 2e-4
