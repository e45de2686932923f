"""Generate text, or measure generation: memory of weights and cache, and tokens a second, at a precision.

    python -m experiments.generate model=smollm2_moe init_from=smollm2 tokenizer=smollm2 'prompt="Why is the sky blue?"'
    python -m experiments.generate model=qwen3_30b_a3b sequences=64 prompt_tokens=512 max_new_tokens=256

Without `init_from` the weights are random, and without `prompt` so are the prompts. An FP4 checkpoint of this precision
is rolled out as it is. Prints one JSON object: bytes of the weights and of the cache per token at this precision and in
BF16, the device's peak, seconds and tokens a second of the second generation (the first compiles), and the texts where
there is a tokenizer.
"""

import dataclasses
import json
import time
from typing import Any, NamedTuple

import hydra
import jax
import numpy as np
from flax import nnx
from omegaconf import DictConfig

from experiments.common import CONFIGS, checkpoint_model, enable_compilation_cache, run_model, script
from trace_jax.config import ConfigError, check_range, from_mapping
from trace_jax.data import (
    HfTokenizer,
    Tokenizer,
    check_own_tokenizer,
    decode_response,
    encode_text,
    load_tokenizer,
)
from trace_jax.hf import is_hf_folder, load_model, load_quantized, read_model_config
from trace_jax.hf.layouts import layout_of
from trace_jax.models import ModelConfig, abstract
from trace_jax.quant import QuantPlan, rollout_weights
from trace_jax.rl.run import SMOLLM2, load_params, own_tokenizer
from trace_jax.rollout import RolloutConfig, Sampler, SamplingConfig, random_rollout_weights
from trace_jax.rollout.capacity import cache_bytes, nbytes
from trace_jax.runs import describe_environment
from trace_jax.tasks import ChatConfig, conversation, make_task

PRECISIONS = ("bf16", "nvfp4", "mxfp4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """`init_from`: a run or a Hugging Face folder, which also say what the model is, or `smollm2`; None: random ones.

    `tokenizer`: None is the checkpoint's own. `prompt` is put into its chat template if it has one; else there are
    random prompts of `prompt_tokens`. Sizes in tokens; `temperature` 0 is greedy.
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

    @property
    def plan(self) -> QuantPlan | None:
        return None if self.precision == "bf16" else QuantPlan(format=self.precision)


class Start(NamedTuple):
    """What `init_from` is: model, tokenizer, and what a run's chats were like."""

    model: ModelConfig
    tokenizer: Tokenizer | None
    chat: ChatConfig


def start_of(generate: GenerateConfig) -> Start:
    """Reads everything but the weights.

    Raises:
        ConfigError: no vocabulary is known, or the tokenizer is not the checkpoint's or has ids that the model has not.
    """
    folder, chat, tokenizer = generate.init_from, ChatConfig(), None
    model, name = checkpoint_model(folder, generate.model), own_tokenizer(folder)
    if generate.tokenizer is not None:
        check_own_tokenizer(name, generate.tokenizer, key="tokenizer")
        name = generate.tokenizer
    if folder not in (None, SMOLLM2) and not is_hf_folder(folder):
        task = run_model(folder)[1]
        chat, tokenizer = task.chat or chat, make_task(task).tokenizer
    if name is not None:
        tokenizer = load_tokenizer(name)
    if model.vocab_size == 0 and tokenizer is not None:
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if model.vocab_size == 0:
        raise ConfigError("model.vocab_size is 0 and there is no tokenizer; set one of them, or init_from.")
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"tokenizer={name} has {tokenizer.vocab_size} ids, the model {model.vocab_size}; expected the checkpoint's "
            "own."
        )
    if generate.prompt is not None and tokenizer is None:
        raise ConfigError("a prompt needs a tokenizer: bytes, smollm2 or a folder with a tokenizer.json.")
    return Start(model, tokenizer, chat)


def weights_of(generate: GenerateConfig, model: ModelConfig) -> nnx.State:
    """The rollout's parameters."""
    folder, plan = generate.init_from, generate.plan
    if folder is None:
        return random_rollout_weights(model, plan, jax.random.key(generate.seed))
    if is_hf_folder(folder):
        hf_config = read_model_config(folder)[0]
        if plan and hf_config.get("quantization_config") and layout_of(hf_config, folder).format == plan.fp4:
            return load_quantized(folder).rollout
        masters = load_model(folder, dtype="bfloat16").params  # what is packed is rounded to it first
    else:
        masters = load_params(folder, model)
    return jax.jit(rollout_weights, static_argnums=(1, 2))(masters, plan, model.dtype)


def memory(model: ModelConfig, plan: QuantPlan | None) -> dict[str, int]:
    """Bytes of the weights, and of what the cache holds per token and per sequence, by shapes alone."""

    def weights():
        return random_rollout_weights(model, plan, jax.random.key(0))

    per_token, per_sequence = cache_bytes(model, plan.kv_format if plan else None)
    return {
        "weights_bytes": nbytes(jax.eval_shape(weights)),
        "cache_bytes_per_token": per_token,
        "cache_bytes_per_sequence": per_sequence,
    }


def prompts_of(generate: GenerateConfig, start: Start) -> list[np.ndarray]:
    if generate.prompt is None:
        rng = np.random.default_rng(generate.seed)
        ids = rng.integers(0, start.model.vocab_size, (generate.sequences, generate.prompt_tokens))
        return list(ids.astype(np.int32))
    text, tokenizer = generate.prompt, start.tokenizer
    if isinstance(tokenizer, HfTokenizer) and tokenizer.has_chat_template:
        text = conversation(tokenizer, text, start.chat)
    return [np.asarray(encode_text(tokenizer, text), np.int32)] * generate.sequences


def measure(generate: GenerateConfig) -> dict[str, Any]:
    """Generates twice; see the module."""
    start = start_of(generate)
    model, tokenizer = start.model, start.tokenizer
    prompts = prompts_of(generate, start)
    params = weights_of(generate, model)
    sampler = Sampler(
        abstract(model)[0],
        model,
        RolloutConfig(num_prompts=len(prompts), group_size=1, prompt_length=len(prompts[0])),
        SamplingConfig(
            temperature=generate.temperature,
            max_new_tokens=generate.max_new_tokens,
            stop_tokens=() if tokenizer is None else tokenizer.eos_ids,
        ),
        plan=generate.plan,
    )
    keys = jax.random.split(jax.random.key(generate.seed), len(prompts))
    for _ in range(2):
        begun = time.perf_counter()
        trajectories = sampler.generate(params, prompts, keys, weight_version=0)
        seconds = time.perf_counter() - begun
    sampled = int(trajectories.sampled.sum())
    stats = jax.local_devices()[0].memory_stats() or {}
    result = {
        "environment": describe_environment(),
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
