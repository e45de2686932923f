"""Generate text, or measure generation: memory of weights and cache, and tokens a second, at a precision.

    python -m experiments.generate model=smollm2_moe init_from=smollm2 tokenizer=smollm2 'prompt="Why is the sky blue?"'
    python -m experiments.generate model=qwen3_30b_a3b sequences=64 prompt_tokens=512 max_new_tokens=256

Without `init_from` the weights are random, and without `prompt` so are the prompts. Prints one JSON object: bytes of
the weights and of the cache per token at this precision and in BF16, the device's peak, seconds and tokens a second
of the second generation (the first compiles), and the texts where there is a tokenizer.
"""

import dataclasses
import json
import math
import time
from typing import Any

import hydra
import jax
import numpy as np
from flax import nnx
from omegaconf import DictConfig

from experiments.common import CONFIGS, enable_compilation_cache, script
from trace_jax.config import ConfigError, check_range, from_mapping
from trace_jax.data import HfTokenizer, decode_response, encode_text, load_tokenizer
from trace_jax.hf import is_hf_folder, read_model_config
from trace_jax.models import ModelConfig, abstract, init_cache, run_like
from trace_jax.quant import QuantPlan, rollout_weights
from trace_jax.rl.run import load_params
from trace_jax.rollout import RolloutConfig, Sampler, SamplingConfig, random_rollout_weights

PRECISIONS = ("bf16", "nvfp4", "mxfp4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """`init_from`: a run, a Hugging Face folder (then also the model), or `smollm2`; None is random weights.

    `prompt` is put into the tokenizer's chat template if it has one. Sizes in tokens; `temperature` 0 is greedy.
    """

    model: ModelConfig
    init_from: str | None = None
    tokenizer: str | None = None
    precision: str = "nvfp4"
    prompt: str | None = None
    sequences: int = 1
    prompt_tokens: int = 64
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    root: str = "runs"

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision is {self.precision!r}; expected one of {PRECISIONS}.")
        check_range("", self, "sequences", "prompt_tokens", "max_new_tokens", at_least=1)
        check_range("", self, "temperature", "seed", at_least=0)
        if self.prompt is not None and self.tokenizer is None:
            raise ConfigError("a prompt needs a tokenizer: bytes, smollm2 or a folder with a tokenizer.json.")

    @property
    def plan(self) -> QuantPlan | None:
        return None if self.precision == "bf16" else QuantPlan(format=self.precision)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def weights_of(generate: GenerateConfig, model: ModelConfig) -> nnx.State:
    """The rollout's parameters."""
    if generate.init_from is None:
        return random_rollout_weights(model, generate.plan, jax.random.key(generate.seed))
    masters = load_params(generate.init_from, model)
    return jax.jit(rollout_weights, static_argnums=(1, 2))(masters, generate.plan, model.dtype)


def memory(model: ModelConfig, plan: QuantPlan | None) -> dict[str, float]:
    """Bytes of the weights, and of what the cache holds per token and per sequence, by shapes alone."""

    def weights():
        return random_rollout_weights(model, plan, jax.random.key(0))

    def cache(length):
        return nbytes(jax.eval_shape(lambda: init_cache(model, 1, length, plan.fp4 if plan else None)))

    # What does not grow with the context (states of DeltaNet) is per sequence.
    per_token = (cache(2048) - cache(1024)) / 1024
    return {
        "weights_bytes": nbytes(jax.eval_shape(weights)),
        "cache_bytes_per_token": per_token,
        "cache_bytes_per_sequence": cache(1024) - 1024 * per_token,
    }


def prompts_of(generate: GenerateConfig, model: ModelConfig, tokenizer) -> list[np.ndarray]:
    if generate.prompt is None:
        rng = np.random.default_rng(generate.seed)
        ids = rng.integers(0, model.vocab_size, (generate.sequences, generate.prompt_tokens))
        return list(ids.astype(np.int32))
    text = generate.prompt
    if isinstance(tokenizer, HfTokenizer) and tokenizer.has_chat_template:
        text = tokenizer.chat([{"role": "user", "content": text}])
    return [np.asarray(encode_text(tokenizer, text), np.int32)] * generate.sequences


def measure(generate: GenerateConfig) -> dict[str, Any]:
    """Generates twice; see the module."""
    model = generate.model
    if is_hf_folder(generate.init_from):
        model = run_like(read_model_config(generate.init_from)[2], model)
    tokenizer = None if generate.tokenizer is None else load_tokenizer(generate.tokenizer)
    if tokenizer is not None and model.vocab_size == 0:
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    prompts = prompts_of(generate, model, tokenizer)
    params = weights_of(generate, model)
    sampler = Sampler(
        abstract(model)[0],
        model,
        RolloutConfig(num_prompts=len(prompts), group_size=1, prompt_length=len(prompts[0])),
        SamplingConfig(
            temperature=generate.temperature,
            max_new_tokens=generate.max_new_tokens,
            stop_tokens=() if tokenizer is None else (tokenizer.eos_id,),
        ),
        plan=generate.plan,
    )
    keys = jax.random.split(jax.random.key(generate.seed), len(prompts))
    for _ in range(2):
        start = time.perf_counter()
        trajectories = sampler.generate(params, prompts, keys, weight_version=0)
        seconds = time.perf_counter() - start
    sampled = int(trajectories.sampled.sum())
    stats = jax.local_devices()[0].memory_stats() or {}
    result = {
        "device": jax.devices()[0].device_kind,
        "precision": generate.precision,
        **memory(model, generate.plan),
        "bf16": memory(model, None),
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
        "tokens": sampled,
        "seconds": seconds,
        "tokens_per_second": sampled / seconds,
    }
    if tokenizer is not None:
        texts = [decode_response(tokenizer, trajectories.response(n)) for n in range(len(prompts))]
        result["texts"] = texts
    return result


@hydra.main(config_path=CONFIGS, config_name="generate", version_base="1.3")
@script
def main(config: DictConfig) -> None:
    generate = from_mapping(GenerateConfig, config)
    enable_compilation_cache(generate.root)
    print(json.dumps(measure(generate), indent=1))


if __name__ == "__main__":
    main()
