"""What FP4 costs a model on given text: the mean negative log-likelihood of its tokens at each precision.

    python -m experiments.likelihood model=smollm2_moe init_from=smollm2 tokens=tests/data/smollm2_reference.npz

The file holds `input_ids` int32 [B, T]. Each row is computed as a rollout computes a prompt: in BF16, with experts
packed (weights and their inputs), with the KV cache packed (and attended to as packed), and with both, in NVFP4 and
MXFP4. Prints a table of nats a token and the rise over BF16, and writes it to `out` as JSON.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import hydra
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from omegaconf import DictConfig

from experiments.common import CONFIGS, checkpoint_model, enable_compilation_cache, script
from trace_jax.config import ConfigError, from_mapping
from trace_jax.models import ModelConfig, abstract, init_cache
from trace_jax.quant import Bf16Numerics, PackedNumerics, PlanError, QuantPlan, rollout_weights
from trace_jax.rl.run import load_params
from trace_jax.runs import describe_environment

PLANS: dict[str, QuantPlan | None] = {"bf16": None} | {
    f"{format}, {what}": QuantPlan(format=format, experts="experts" in what, kv="cache" in what)
    for format in ("nvfp4", "mxfp4")
    for what in ("experts and cache", "experts", "cache")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LikelihoodConfig:
    """`init_from`: a run or a BF16 Hugging Face folder, which also say what the model is, or `smollm2`.

    `tokens`: the npz file.
    """

    model: ModelConfig
    init_from: str
    tokens: str
    out: str = "runs/likelihood"


def read_tokens(path: str, vocab_size: int) -> np.ndarray:
    """`input_ids` of a file.

    Raises:
        ConfigError: there are none, they are not [B, T] with T at least 2, or not ids of the vocabulary.
    """
    with np.load(path) as file:
        if "input_ids" not in file.files:
            raise ConfigError(f"{path} has no input_ids; it has {', '.join(file.files)}.")
        tokens = file["input_ids"]
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"{path} has input_ids {tokens.dtype} {tokens.shape}; expected integers [B, T], T >= 2."
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ConfigError(
            f"{path} has ids from {tokens.min()} to {tokens.max()}; expected 0 to {vocab_size - 1}, the model's."
        )
    return tokens.astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def log_likelihoods(
    model: ModelConfig, plan: QuantPlan | None, masters: nnx.State, tokens: jax.Array
) -> jax.Array:
    """Of tokens 1 to T - 1 given those before, float32 `[B, T - 1]`, as a rollout of `plan` computes a prompt."""
    transformer = nnx.merge(abstract(model)[0], rollout_weights(masters, plan, model.dtype))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    out = transformer(
        tokens,
        positions,
        positions >= 0,
        numerics=Bf16Numerics() if plan is None else PackedNumerics(plan=plan),
        cache=init_cache(model, *tokens.shape, None if plan is None else plan.kv_format),
    )
    logprobs = jax.nn.log_softmax(transformer.logits(out.hidden)[:, :-1])
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def measure(config: LikelihoodConfig) -> dict[str, float]:
    """Mean negative log-likelihood by precision, in nats a token; without those whose blocks do not fit the model."""
    model = checkpoint_model(config.init_from, config.model)
    tokens = jnp.asarray(read_tokens(config.tokens, model.vocab_size))
    masters = load_params(config.init_from, model)
    found = {}
    for name, plan in PLANS.items():
        try:
            if plan is not None:
                plan.check(**model.contractions)
        except PlanError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        found[name] = -float(log_likelihoods(model, plan, masters, tokens).mean())
    return found


def table(found: dict[str, float]) -> str:
    """Markdown."""
    lines = ["| precision | nats a token | rise |", "|---|---|---|"]
    lines += [f"| {name} | {nats:.4f} | {nats - found['bf16']:+.4f} |" for name, nats in found.items()]
    return "\n".join(lines)


@hydra.main(config_path=CONFIGS, config_name="likelihood", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    parsed = from_mapping(LikelihoodConfig, config)
    enable_compilation_cache(parsed.out)
    found = measure(parsed)
    result: dict[str, Any] = {
        "environment": describe_environment(),
        "config": dataclasses.asdict(parsed),
        "nats_per_token": found,
    }
    out = Path(parsed.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "likelihood.json").write_text(json.dumps(result, indent=1, default=str))
    (out / "likelihood.md").write_text(table(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
