"""Compare the logits of a Hugging Face folder with reference logits.

    python -m experiments.check_hf --checkpoint DIR --reference FILE.npz [--tolerance 1e-4]

The file holds `input_ids` int32 [B, T] and `logits` float32 [B, T, V] of a causal forward without padding. Computed
here in FP32 at the highest matmul precision, without quantization; FP4 experts are dequantized first. Prints the
largest absolute difference and the share of positions with the same largest logit; exit status 1 above the tolerance.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.common import script
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.quantize import dequantize
from trace_jax.config import ConfigError
from trace_jax.hf import load_model, load_quantized, read_model_config
from trace_jax.models import ModelConfig, abstract
from trace_jax.quant import Bf16Numerics

TOLERANCE = 1e-4


def load_dense(folder: str) -> tuple[ModelConfig, nnx.State]:
    """A folder's model in FP32; FP4 experts dequantized."""
    if not read_model_config(folder)[0].get("quantization_config"):
        loaded = load_model(folder)
        return loaded.config, loaded.params
    quantized = load_quantized(folder)
    return quantized.config, dense(quantized.rollout)


@jax.jit
def dense(rollout: nnx.State) -> nnx.State:
    """FP32 values of a rollout's parameters."""

    def convert(variable):
        x = variable.get_value()
        return variable.replace(
            dequantize(x, jnp.float32) if isinstance(x, Fp4Array) else x.astype(jnp.float32)
        )

    return nnx.from_flat_state([(path, convert(variable)) for path, variable in nnx.to_flat_state(rollout)])


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config: ModelConfig, params: nnx.State, tokens: jax.Array) -> jax.Array:
    """FP32 logits `[B, T, V]` of a full causal forward."""
    transformer = nnx.merge(abstract(config)[0], params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    out = transformer(tokens, positions, positions >= 0, numerics=Bf16Numerics())
    return transformer.logits(out.hidden)


def read_reference(path: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`input_ids` and `logits` of a file.

    Raises:
        ConfigError: an array is missing, of another shape, or of another vocabulary.
    """
    with np.load(path) as file:
        missing = {"input_ids", "logits"} - set(file.files)
        if missing:
            raise ConfigError(f"{path} has no {', '.join(sorted(missing))}; it has {', '.join(file.files)}.")
        tokens, logits = file["input_ids"], file["logits"]
    if tokens.ndim != 2 or logits.shape != (*tokens.shape, vocab_size):
        raise ConfigError(
            f"{path} has input_ids {tokens.shape} and logits {logits.shape}; expected [B, T] and "
            f"[B, T, {vocab_size}] for this checkpoint."
        )
    return tokens.astype(np.int32), logits


@script
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="folder with config.json and safetensors files")
    parser.add_argument("--reference", required=True, help="npz file with input_ids and logits")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="largest absolute difference allowed"
    )
    arguments = parser.parse_args()
    config, params = load_dense(arguments.checkpoint)
    tokens, expected = read_reference(arguments.reference, config.vocab_size)
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(logits_of(dataclasses.replace(config, dtype="float32"), params, tokens))
    difference = float(np.abs(logits - expected).max())
    agreement = float((logits.argmax(-1) == expected.argmax(-1)).mean())
    print(f"max_abs_diff {difference:.3e}\ntop1_agreement {agreement:.4f}")
    if not difference <= arguments.tolerance:  # NaN is above every tolerance
        raise SystemExit(1)


if __name__ == "__main__":
    main()
