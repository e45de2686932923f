"""Rollouts of a fixed size: groups of responses to prompts, as trajectories, by an engine of its own."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trace_jax.config import ConfigError
from trace_jax.guidance import GuidanceSpec
from trace_jax.models import ModelConfig
from trace_jax.quant import QuantPlan, arranged_for_kernels
from trace_jax.rollout.collate import collate
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.engine_config import EngineConfig
from trace_jax.rollout.host_memory import HostMemory
from trace_jax.rollout.programs import Programs
from trace_jax.rollout.requests import Request
from trace_jax.rollout.sampling import SamplingConfig, scale_logits
from trace_jax.rollout.trajectories import Trajectories

Prompt = Sequence[int] | np.ndarray
"""Token ids of one prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Static shapes of a sampler.

    `num_prompts` x `group_size` sequences run side by side; `prompt_length` is the prefill bucket in tokens;
    `chunk` decode steps run per device call; `audit_rows` are the sequences whose full codes are kept.
    """

    num_prompts: int
    group_size: int
    prompt_length: int
    chunk: int = 8
    audit_rows: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("num_prompts", "group_size", "prompt_length", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} is {getattr(self, name)}; expected at least 1.")
        if any(not 0 <= row < self.slots for row in self.audit_rows):
            raise ConfigError(
                f"audit_rows {self.audit_rows} lie outside the {self.slots} sequences of a rollout."
            )

    @property
    def slots(self) -> int:
        """Sequences side by side."""
        return self.num_prompts * self.group_size

    def engine(self, length: int) -> EngineConfig:
        """An engine whose pages hold all slots' sequences of `length` tokens."""
        # Kernels read whole tiles of a page; on a CPU there are none, and longer pages only cost.
        page = 128 if jax.default_backend() != "cpu" else min(128, -(-length // 32) * 32)
        return EngineConfig(
            slots=self.slots,
            max_length=length,
            page_size=page,
            pages=self.slots * -(-length // page),
            chunk=self.chunk,
            buckets=(self.prompt_length,),
            prefill_tokens=self.num_prompts * self.prompt_length,
            audit_slots=len(self.audit_rows),
            host_bytes=2**62,  # the rollout as a whole is asked for
        )


class Sampler:
    """Samples from one model at one precision.

    Results depend on (parameters, prompt, request key) only. See `Engine`.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        model: ModelConfig,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        *,
        plan: QuantPlan | None = None,
        record: GuidanceSpec | None = None,
    ):
        """`plan` None rolls out in BF16; `record` says what guided layers keep, None records routes only."""
        if sampling.stop_strings:
            raise ConfigError("a sampler knows no text; for stop_strings use Engine(decode_text=...).")
        self.graphdef, self.model, self.rollout, self.sampling = graphdef, model, rollout, sampling
        self.plan, self.record = plan, record
        self.length = rollout.prompt_length + sampling.max_new_tokens
        self.programs = Programs(graphdef, model, rollout.engine(self.length), plan=plan, record=record)
        self._memory = HostMemory()

    def generate(
        self, params: nnx.State, prompts: Sequence[Prompt], keys: jax.Array, *, weight_version: int
    ) -> Trajectories:
        """Samples `group_size` responses to each prompt.

        Args:
            params: rollout parameters (`quant.rollout_weights`).
            prompts: token ids; any number, `num_prompts` groups at a time.
            keys: one PRNG key per response, `[len(prompts) * group_size]`.
            weight_version: of `params`, written to every recorded row.

        Raises:
            ValueError: no prompts, an empty prompt, a prompt longer than the prefill bucket, or a wrong number of
                keys.
        """
        r = self.rollout
        if len(prompts) == 0:
            raise ValueError("no prompts to roll out; the task is empty.")
        if keys.shape[0] != len(prompts) * r.group_size:
            raise ValueError(f"{keys.shape[0]} keys for {len(prompts)} prompts x {r.group_size} responses.")
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= r.prompt_length:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; expected 1 to {r.prompt_length} (the cache holds "
                    f"{self.length} tokens, {self.sampling.max_new_tokens} of them for the response). Raise "
                    "task.max_prompt_tokens or shorten the prompt."
                )
        words = np.asarray(jax.random.key_data(keys))
        with Engine(self.programs) as engine:
            engine.sync(params, weight_version)
            rows = self._memory.take((len(words), self.length, engine.row_bytes))
            for i, prompt in enumerate(prompts):
                group = range(i * r.group_size, (i + 1) * r.group_size)
                engine.submit(
                    Request(
                        prompt=prompt,
                        sampling=self.sampling,
                        seeds=words[group],
                        audit=tuple(n % r.slots in r.audit_rows for n in group),
                        rows=tuple(rows[n] for n in group),
                    )
                )
            results = sorted(engine.run(), key=lambda result: result.id)
            return collate(
                results, engine.layout, engine.audit_layout, self.model, length=self.length, rows=rows
            )

    def rescore(self, params: nnx.State, trajectories: Trajectories) -> np.ndarray:
        """Log-probs float32 `[N, S]` that this rollout, with `params`, gives to the tokens of `trajectories`.

        The same shapes and arithmetic as in `generate`, one token at a time: with the weights that sampled the tokens
        it returns their own log-probs. 0 where a token was not sampled.
        """
        t, r, programs = trajectories, self.rollout, self.programs
        if len(t) != r.slots:
            raise ValueError(f"{len(t)} trajectories for a rollout of {r.slots} sequences.")
        params, pages = arranged_for_kernels(params), programs.config.pages_per_sequence
        table = np.arange(r.slots * pages, dtype=np.int32).reshape(r.slots, pages)
        cache, temperature = programs.init_cache(), self.sampling.temperature
        logprobs, rows = np.zeros(t.tokens.shape, np.float32), np.arange(r.slots)
        for start in range(0, r.slots, r.num_prompts):
            lanes = rows[start : start + r.num_prompts]
            counts = t.prompt_length[lanes]
            tokens = t.tokens[lanes, : r.prompt_length] * (np.arange(r.prompt_length) < counts[:, None])
            cache, logits, *_ = programs.prefill(
                params, cache, tokens, np.zeros_like(counts), counts, lanes.astype(np.int32), table[lanes]
            )
            first = jax.nn.log_softmax(scale_logits(logits, temperature), axis=-1)
            chosen = jnp.take_along_axis(first, t.tokens[lanes, counts][:, None], axis=-1)
            logprobs[lanes, counts] = chosen[:, 0]
        steps = t.prompt_length[:, None] + np.arange(self.sampling.max_new_tokens)
        tokens = np.take_along_axis(t.tokens, np.minimum(steps, self.length - 1), axis=1)
        tokens = np.where(steps < t.length[:, None], tokens, -1).astype(np.int32)
        _, forced = programs.force(params, cache, tokens, t.prompt_length, table, temperature=temperature)
        row, step = np.nonzero(tokens[:, 1:] >= 0)
        logprobs[row, steps[row, step + 1]] = np.asarray(forced)[row, step]
        return np.where(t.sampled, logprobs, 0.0)
