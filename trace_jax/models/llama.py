"""Dense Llama checkpoints as models, and as the MoEs that are made of them."""

import dataclasses
import os

import jax.numpy as jnp
from flax import nnx

from trace_jax.models.config import ModelConfig, check_same_model
from trace_jax.models.gguf import read_llama
from trace_jax.models.transformer import abstract
from trace_jax.models.upcycle import upcycle


def load_llama(path: str | os.PathLike, model: ModelConfig) -> nnx.State:
    """FP32 masters of a GGUF file's dense model, upcycled where `model` has experts.

    Args:
      path: a GGUF file of architecture `llama`.
      model: the checkpoint's own config, or its MoE: of family `llama_moe`, with experts in every layer.

    Raises:
      GgufError, FileNotFoundError: see `read_llama`.
      ConfigError: `model` is not what the file holds or can be upcycled to; names the fields.
    """
    found, parameters = read_llama(path)
    if model.layers_of("moe"):
        parameters = upcycle(parameters, model)
        found = dataclasses.replace(
            found,
            family="llama_moe",
            dense_layers=0,
            dense_hidden_size=0,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            expert_hidden_size=model.expert_hidden_size,
        )
    check_same_model(found, model, str(path))
    state = nnx.to_flat_state(abstract(model)[1])
    # Popped one by one: what is on the device need not stay on the host.
    return nnx.from_flat_state(
        [(key, variable.replace(jnp.asarray(parameters.pop(key)))) for key, variable in state]
    )
