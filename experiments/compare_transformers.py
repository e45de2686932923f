"""Greedy generation in BF16 by this package and by Hugging Face's transformers: the same tokens, and how fast.

    python -m experiments.compare_transformers [--sequences 50] [--new-tokens 64] [--rounds 5] [--out FILE.json]

SmolLM2-135M, the same weights, prompts of different lengths in one batch, no stop token. Needs what the project itself
does not: pip install torch transformers. Where tokens differ, what follows is another text, so only the first
difference of a sequence counts. transformers in FP32 then says how far the two tokens' logits are apart, and `noise` is
how far BF16 moves that: the root mean square, over all positions of all sequences, of the change of the gap between the
two likeliest tokens from FP32 to BF16, both of transformers. Exit status 1 if a gap is above `TIE` times the noise.
"""

import argparse
import collections
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra import compose, initialize_config_dir

from experiments.common import CONFIGS, script
from trace_jax.config import ConfigError, from_mapping
from trace_jax.data import smollm2_file, smollm2_tokenizer
from trace_jax.models import ModelConfig, abstract
from trace_jax.quant import rollout_weights
from trace_jax.rl.run import SMOLLM2, load_params
from trace_jax.rollout import RolloutConfig, Sampler, SamplingConfig
from trace_jax.runs import describe_environment

TIE = 4.0
OPENINGS = (
    "The capital of",
    "A short story about",
    "Three facts that everyone should know about",
    "In the year 1905 a young woman travelled to",
    "The best way to describe",
    "Question: what is the most famous thing in the history of",
    "Once upon a time there was a king of",
    "List the largest cities of",
    "My favourite dish from",
    "The weather in the north of",
)
PLACES = ("France", "Japan", "Brazil", "Egypt", "New Zealand")


def prompts(count: int) -> list[list[int]]:
    """Token ids of beginnings of texts, of different lengths."""
    tokenizer = smollm2_tokenizer()
    texts = [f"{opening} {place}" for opening, place in itertools.product(OPENINGS, PLACES)]
    return [tokenizer.encode(texts[n % len(texts)] + " and" * (n // len(texts))) for n in range(count)]


class Here:
    """This package's sampler."""

    def __init__(self, asked: list[list[int]], new: int):
        with initialize_config_dir(CONFIGS, version_base="1.3"):
            model = from_mapping(ModelConfig, compose("model/smollm2")["model"])
        params = load_params(SMOLLM2, model)
        self.weights = jax.jit(rollout_weights, static_argnums=(1, 2))(params, None, model.dtype)
        self.asked, self.keys = asked, jax.random.split(jax.random.key(0), len(asked))
        shapes = RolloutConfig(
            num_prompts=len(asked), group_size=1, prompt_length=max(map(len, asked)), chunk=16
        )
        sampling = SamplingConfig(temperature=0.0, max_new_tokens=new)
        self.sampler = Sampler(abstract(model)[0], model, shapes, sampling)

    def generate(self) -> np.ndarray:
        """int `[sequences, new tokens]`."""
        t = self.sampler.generate(self.weights, self.asked, self.keys, weight_version=0)
        return np.stack([t.response(n) for n in range(len(t))])


class Transformers:
    """`generate` of transformers, with its own defaults but for what makes it greedy and of fixed length."""

    def __init__(self, asked: list[list[int]], new: int):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ConfigError(f"{error}; pip install torch transformers, which this alone needs.") from error
        self.torch, self.new = torch, new
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        file = smollm2_file()

        def load(dtype):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype
            )
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            return model.to(self.device).eval()

        self.model, self.wide = load(torch.bfloat16), load(torch.float32)
        longest = max(map(len, asked))
        self.ids = torch.tensor([[0] * (longest - len(p)) + p for p in asked], device=self.device)
        self.mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in asked], device=self.device)

    def generate(self) -> np.ndarray:
        """int `[sequences, new tokens]`."""
        with self.torch.inference_mode():
            out = self.model.generate(
                self.ids, attention_mask=self.mask, do_sample=False, max_new_tokens=self.new
            )
        return out[:, self.ids.shape[1] :].cpu().numpy()

    def logits(self, tokens: list[int], *, wide: bool) -> np.ndarray:
        """Logits `[T, V]` of what follows each of `tokens`, in FP32 or in BF16."""
        with self.torch.inference_mode():
            out = (self.wide if wide else self.model)(self.torch.tensor([tokens], device=self.device))
        return out.logits[0].float().cpu().numpy()


def noise(sequences: list[list[int]], logits: Callable[..., np.ndarray]) -> float:
    """See the module."""
    changes = []
    for tokens in sequences:
        exact, rounded = logits(tokens, wide=True), logits(tokens, wide=False)
        two = np.argsort(exact, axis=-1)[:, -2:]
        gaps = [np.diff(np.take_along_axis(values, two, axis=-1)) for values in (exact, rounded)]
        changes.append(gaps[1] - gaps[0])
    return float(np.sqrt(np.mean(np.square(np.concatenate(changes)))))


def differences(
    asked: list[list[int]],
    mine: np.ndarray,
    theirs: np.ndarray,
    logits: Callable[..., np.ndarray],
    unit: float,
) -> list[dict[str, Any]]:
    """The first difference of each sequence that has one: the gap between the two tokens, in FP32 and by `unit`."""
    found = []
    for n, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        at = np.flatnonzero(a != b)
        if not at.size:
            continue
        values = logits([*asked[n], *a[: at[0]].tolist()], wide=True)[-1]
        gap = float(values[a[at[0]]] - values[b[at[0]]])
        found.append(
            {
                "sequence": n,
                "token": int(at[0]),
                "gap": abs(gap),
                "by noise": abs(gap) / unit,
                "FP32 prefers": "here" if gap > 0 else "transformers",
            }
        )
    return found


def compare(sequences: int, new: int, rounds: int) -> dict[str, Any]:
    """See the module."""
    asked = prompts(sequences)
    here, there = Here(asked, new), Transformers(asked, new)
    mine, theirs = here.generate(), there.generate()
    seconds: dict[str, list[float]] = {"here": [], "transformers": []}
    for _ in range(rounds):
        for name, side in (("here", here), ("transformers", there)):
            start = time.perf_counter()
            side.generate()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: sequences * new / float(np.median(times)) for name, times in seconds.items()}
    unit = noise(
        [[*prompt, *tokens] for prompt, tokens in zip(asked, theirs.tolist(), strict=True)], there.logits
    )
    found = differences(asked, mine, theirs, there.logits, unit)
    return {
        "environment": describe_environment(),
        "torch": there.torch.__version__,
        "sequences": sequences,
        "new tokens": new,
        "tokens/s": rates,
        "ratio": rates["here"] / rates["transformers"],
        "identical sequences": sequences - len(found),
        "identical tokens": float(np.mean(mine == theirs)),
        "noise": unit,
        "largest gap by noise": max((d["by noise"] for d in found), default=0.0),
        "FP32 prefers": dict(collections.Counter(d["FP32 prefers"] for d in found)),
        "differences": found,
    }


@script
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("sequences", 50), ("new-tokens", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    result = compare(a.sequences, a.new_tokens, a.rounds)
    text = json.dumps(result, indent=1)
    print(text)
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(text + "\n")
    if result["largest gap by noise"] > TIE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
