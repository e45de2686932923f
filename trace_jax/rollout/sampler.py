"""Jitted rollout: prompts prefilled once per group, decode in chunks, records leaving the device as they are made."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trace_jax.config import ConfigError
from trace_jax.guidance import GuidanceSpec, PackedRows
from trace_jax.models import ModelConfig, init_cache, lay_out
from trace_jax.quant import Numerics, QuantPlan, arranged_for_kernels
from trace_jax.rollout.assembly import Assembly
from trace_jax.rollout.collector import Collector
from trace_jax.rollout.host_memory import HostMemory
from trace_jax.rollout.programs import captured_layers, check_plan, kept_rows, rollout_numerics
from trace_jax.rollout.sampling import Draws, SamplingConfig, sample, scale_logits
from trace_jax.rollout.trajectories import Trajectories, concatenate

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
        slots = self.num_prompts * self.group_size
        if any(not 0 <= row < slots for row in self.audit_rows):
            raise ConfigError(f"audit_rows {self.audit_rows} lie outside the {slots} sequences of a rollout.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """Carry of decoding: cache, logits of the next token `[N, V]`, its position, and who is done."""

    cache: dict[str, Any]
    logits: Any
    position: Any
    limit: Any
    done: Any


def _steps(t: Trajectories, count: int) -> np.ndarray:
    """Decode step of each position, int `[N, S]`."""
    return np.clip(t.positions - t.prompt_length[:, None], 0, count - 1)


class Sampler:
    """Samples from one model at one precision.

    Results depend on (parameters, prompt, request key) only: shapes are fixed, every row of every operation is
    independent, and each token is drawn with `fold_in(request key, position)`.
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
        check_plan(model, plan, record)
        self.graphdef, self.model, self.rollout, self.sampling = graphdef, model, rollout, sampling
        self.plan, self.record, self._memory = plan, record, HostMemory()
        self.slots = rollout.num_prompts * rollout.group_size
        self.length = rollout.prompt_length + sampling.max_new_tokens

    def _draws(self, keys: jax.Array) -> Draws:
        s, count = self.sampling, keys.shape[0]
        return Draws(
            inverse_temperature=jnp.full(count, s.inverse_temperature, jnp.float32),
            top_k=jnp.full(count, s.top_k, jnp.int32),
            top_p=jnp.full(count, s.top_p, jnp.float32),
            min_p=jnp.full(count, s.min_p, jnp.float32),
            keys=keys,
        )

    def _kept(self, out, tokens, positions, fed) -> tuple[PackedRows, PackedRows | None]:
        return kept_rows(self.model, self.record, out, tokens, positions, fed)

    @functools.partial(jax.jit, static_argnums=0)
    def _prefill(self, params, tokens, lengths):
        """Prompts `[P, prompt_length]` -> decode state of all `P * group_size` sequences, and what was kept."""
        r = self.rollout
        model = nnx.merge(self.graphdef, params)
        positions = jnp.broadcast_to(jnp.arange(r.prompt_length, dtype=jnp.int32), tokens.shape)
        fed = positions < lengths[:, None]
        kv_format = None if self.plan is None else self.plan.kv_format
        cache = lay_out(init_cache(self.model, tokens.shape[0], self.length, kv_format))
        prompts_of_audit = tuple(row // r.group_size for row in r.audit_rows)
        out = model(
            tokens,
            positions,
            fed,
            numerics=rollout_numerics(self.plan, self.record, prompts_of_audit),
            cache=cache,
            guided_layers=captured_layers(self.model, self.record),
        )
        last = jnp.take_along_axis(out.hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        logits = model.logits(last)
        each = functools.partial(jnp.repeat, repeats=r.group_size)
        start = each(lengths, axis=0)
        state = DecodeState(
            cache=lay_out(jax.tree.map(lambda leaf: each(leaf, axis=1), out.cache)),
            logits=each(logits, axis=0),
            position=start,
            limit=start + self.sampling.max_new_tokens,
            done=start == 0,
        )
        return state, *self._kept(out, tokens, positions, fed)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def _decode(self, params, state: DecodeState, keys):
        """`chunk` decode steps: the state, what was kept (led by the step axis), and whether all are done."""
        model = nnx.merge(self.graphdef, params)
        numerics = rollout_numerics(self.plan, self.record, self.rollout.audit_rows)
        stops = jnp.asarray(self.sampling.stop_tokens, jnp.int32)

        def step(state: DecodeState, _):
            token_keys = jax.vmap(jax.random.fold_in)(keys, state.position)
            drawn = sample(state.logits, self._draws(token_keys), plain=self.sampling.plain)
            tokens, logprobs = drawn.tokens, drawn.logprobs
            sampled = ~state.done
            tokens = jnp.where(sampled, tokens, 0)
            stop = jnp.any(tokens[:, None] == stops[None, :], axis=-1) | (state.position + 1 >= state.limit)
            done = state.done | stop
            column, position, fed = tokens[:, None], state.position[:, None], ~done[:, None]
            out, state = self._feed(model, numerics, state, column, fed)
            rows, audit = self._kept(out, column, position, fed)
            kept = {
                "rows": rows,
                "audit": audit,
                "token": tokens,
                "logprob": jnp.where(sampled, logprobs, 0.0),
                "sampled": sampled,
                "fed": fed[:, 0],
                "position": position[:, 0],
            }
            return dataclasses.replace(state, done=done), kept

        state, kept = jax.lax.scan(step, state, length=self.rollout.chunk)
        return state, kept, jnp.all(state.done)

    def _feed(self, model, numerics: Numerics, state: DecodeState, column, fed):
        """Feeds one token `[N, 1]` to the sequences that are `fed` `[N, 1]`: the output and the state after it."""
        out = model(
            column,
            state.position[:, None],
            fed,
            numerics=numerics,
            cache=state.cache,
            guided_layers=captured_layers(self.model, self.record),
        )
        logits = jnp.where(fed, model.logits(out.hidden[:, 0]), state.logits)
        return out, dataclasses.replace(
            state, cache=lay_out(out.cache), logits=logits, position=state.position + fed[:, 0]
        )

    def rescore(self, params: nnx.State, trajectories: Trajectories) -> np.ndarray:
        """Log-probs float32 `[N, S]` that this rollout, with `params`, gives to the tokens of `trajectories`.

        The same programs' shapes and arithmetic as in `generate`, one token at a time: with the weights that sampled
        the tokens it returns their own log-probs. 0 where a token was not sampled.
        """
        t, r, params = trajectories, self.rollout, arranged_for_kernels(params)
        if len(t) != self.slots:
            raise ValueError(f"{len(t)} trajectories for a rollout of {self.slots} sequences.")
        prompts, lengths = t.tokens[:: r.group_size, : r.prompt_length], t.prompt_length[:: r.group_size]
        state, *_ = self._prefill(params, prompts * (np.arange(r.prompt_length) < lengths[:, None]), lengths)
        logprobs = np.asarray(self._force(params, state, t.tokens, t.length))
        return np.where(t.sampled, np.take_along_axis(logprobs, _steps(t, logprobs.shape[1]), axis=1), 0.0)

    @functools.partial(jax.jit, static_argnums=0)
    def _force(self, params, state: DecodeState, tokens, lengths):
        """Decodes given tokens; log-probs `[N, steps]` of the token of each step."""
        model = nnx.merge(self.graphdef, params)
        numerics = rollout_numerics(self.plan, self.record, ())

        def step(state: DecodeState, _):
            column = jnp.take_along_axis(tokens, state.position[:, None], axis=1, mode="clip")
            logprobs = jax.nn.log_softmax(scale_logits(state.logits, self.sampling.temperature), axis=-1)
            chosen = jnp.take_along_axis(logprobs, column, axis=1)[:, 0]
            fed = (state.position < lengths - 1)[:, None]
            return self._feed(model, numerics, state, column, fed)[1], chosen

        return jax.lax.scan(step, state, length=self.sampling.max_new_tokens)[1].T

    def generate(
        self, params: nnx.State, prompts: Sequence[Prompt], keys: jax.Array, *, weight_version: int
    ) -> Trajectories:
        """Samples `group_size` responses to each prompt.

        Args:
            params: rollout parameters (`quant.rollout_weights`).
            prompts: token ids; run in waves of `num_prompts`.
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
        waves, params = [], arranged_for_kernels(params)
        for start in range(0, len(prompts), r.num_prompts):
            part = prompts[start : start + r.num_prompts]
            part_keys = keys[start * r.group_size : (start + len(part)) * r.group_size]
            waves.append(self._wave(params, part, part_keys, weight_version))
        return concatenate(waves)

    def _wave(self, params, prompts, keys, weight_version: int) -> Trajectories:
        r = self.rollout
        tokens = np.zeros((r.num_prompts, r.prompt_length), np.int32)
        lengths = np.zeros(r.num_prompts, np.int32)  # 0 marks an unused slot: done from the start
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
        if keys.shape[0] < self.slots:
            filler = jnp.broadcast_to(keys[:1], (self.slots - keys.shape[0], *keys.shape[1:]))
            keys = jnp.concatenate([keys, filler])
        with Collector() as collector:
            assembly = Assembly(
                self.model,
                tokens,
                lengths,
                r.group_size,
                self.length,
                weight_version,
                r.audit_rows,
                self._memory,
                collector,
            )
            state, rows, audit = self._prefill(params, tokens, lengths)
            assembly.add_prefill(rows, audit)
            for _ in range(-(-self.sampling.max_new_tokens // r.chunk)):
                state, kept, finished = self._decode(params, state, keys)
                # The flag first: copies leave the device in order, and the next chunk must not wait for the record's.
                finished.copy_to_host_async()
                assembly.add_chunk(kept)
                if finished:
                    break
            return assembly.finish(len(prompts) * r.group_size)
