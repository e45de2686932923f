"""One RL step after another: prompts, rollout, rewards, advantages, guided training, weight sync."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernels_pallas.arrays import Fp4Array
from trace_jax.alignment.report import audit_report, flatten_report
from trace_jax.config import ConfigError
from trace_jax.data import decode_response
from trace_jax.guidance import HealthAlarm, PackedRows
from trace_jax.guidance.budget import bytes_per_token, route_bytes_per_token
from trace_jax.models import ModelConfig
from trace_jax.quant import DOWN_INPUT, expert_guides, rollout_weights
from trace_jax.rl.advantages import group_advantages
from trace_jax.rl.batch import TrainBatch, make_batch, send_rows
from trace_jax.rl.config import OptimizerConfig, RLConfig
from trace_jax.rl.methods import MethodConfig
from trace_jax.rl.optimizer import make_optimizer
from trace_jax.rl.trainer import Trainer, TrainState, check_finite
from trace_jax.rollout import Prompt, RolloutConfig, Sampler, SamplingConfig, Trajectories
from trace_jax.tasks import Problem, Task


class Loop:
    """Colocated RL of one method.

    The state between steps is `train` (masters, optimiser), `history` (rollout weights by version, the newest and the
    `max_version_lag` before it), `step` and `alarm`; everything else is derived from the seed and the step.
    """

    def __init__(
        self,
        *,
        graphdef: nnx.GraphDef,
        model: ModelConfig,
        method: MethodConfig,
        config: RLConfig,
        optimizer: OptimizerConfig,
        task: Task,
        prompt_length: int,
    ):
        """Compiles nothing yet; `start` gives the loop its parameters, and may be called again for another seed."""
        if config.minibatch % optimizer.accumulation:
            raise ConfigError(
                f"a minibatch of {config.minibatch} sequences does not split into "
                f"optimizer.accumulation={optimizer.accumulation} microbatches."
            )
        if config.audit_sequences > config.minibatch // optimizer.accumulation:
            raise ConfigError(
                f"rl.audit_sequences is {config.audit_sequences}; expected at most the "
                f"{config.minibatch // optimizer.accumulation} sequences of a microbatch."
            )
        self.model, self.method, self.config, self.task = model, method, config, task
        self.spec = method.record_spec(model)
        if self.spec and DOWN_INPUT in self.spec.sites and not config.replay_routes:
            raise ConfigError(
                f"method {method.name!r} guides {DOWN_INPUT!r}, whose record belongs to the recorded experts; "
                "rl.replay_routes=false lets the trainer choose others. Replay routes, or leave this site out."
            )
        self.plan = method.rollout_plan()
        self.accumulation = optimizer.accumulation
        sampling = SamplingConfig(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop_tokens=task.tokenizer.eos_ids,
        )
        sampling.check_for_training()
        self.sampler = Sampler(
            graphdef,
            model,
            RolloutConfig(
                num_prompts=config.prompts,
                group_size=config.group_size,
                prompt_length=prompt_length,
                chunk=config.decode_chunk,
                audit_rows=config.audit_rows(self.accumulation) if self.plan else (),
            ),
            sampling,
            plan=self.plan,
            record=self.spec,
        )
        self.trainer = Trainer(
            graphdef,
            model,
            config,
            make_optimizer(optimizer, config.steps * config.minibatches),
            numerics=method.trainer_numerics(config.audit_sequences),
            spec=self.spec,
        )
        self._sync = jax.jit(rollout_weights, static_argnums=(1, 2))

    def start(self, params: nnx.State, seed: int) -> None:
        """Begins a run at step 0 from masters `params`; they are donated to the first train step.

        Raises:
            NonFiniteError: a parameter holds NaN or Inf.
        """
        check_finite(params)
        self.seed, self.step, self.version = seed, 0, 0
        self.train: TrainState = self.trainer.init(params)
        self.reference = jax.tree.map(jnp.copy, params) if self.config.kl_coefficient else None
        self.history: dict[int, nnx.State] = {0: self._sync(params, self.plan, self.model.dtype)}
        self.alarm = HealthAlarm()

    # -- rollout ------------------------------------------------------------------------------------------------

    def rollout_version(self) -> int:
        """Version of the weights that this step's rollout uses."""
        return max(0, self.version - self.config.max_version_lag)

    def roll_out(self, prompts: Sequence[Prompt]) -> Trajectories:
        """Samples a group of responses to each prompt (token ids) with this step's keys."""
        key = jax.random.fold_in(jax.random.key(self.seed), self.step)
        keys = jax.random.split(key, len(prompts) * self.config.group_size)
        version = self.rollout_version()
        return self.sampler.generate(self.history[version], prompts, keys, weight_version=version)

    def rewards(self, problems: Sequence[Problem], trajectories: Trajectories) -> np.ndarray:
        """float64 `[prompts, group_size]`."""
        scores = [
            self.task.score(
                decode_response(self.task.tokenizer, trajectories.response(n)),
                problems[n // self.config.group_size],
            )
            for n in range(len(trajectories))
        ]
        return np.asarray(scores, np.float64).reshape(len(problems), self.config.group_size)

    # -- training -----------------------------------------------------------------------------------------------

    def weight_guides(self, version: int) -> dict[str, Fp4Array] | None:
        """Expert codes of the weights behind a batch of trajectories."""
        if not self.config.guide_weights or self.method.trainer == "bf16" or self.plan is None:
            return None
        return expert_guides(self.history[version])

    def train_on(
        self, batch: TrainBatch, trajectories: Trajectories, version: int, sent: PackedRows | None = None
    ) -> dict[str, Any]:
        """All minibatches of a batch; returns their metrics.

        `sent` is the first microbatch's record, already on its way to the device. Every other one is sent while the
        device works on the microbatch before it.
        """
        config, guides = self.config, self.weight_guides(version)
        minibatches = [
            [batch.rows(slice(i, i + self._microbatch)) for i in starts]
            for starts in self._microbatch_starts()
        ]
        old = {}
        if config.ratio == "decoupled":
            for m, micro in enumerate(minibatches):
                for i, part in enumerate(micro):
                    old[m, i] = self.trainer.evaluate(self.train.params, part, guides)[1].logprobs
        metrics: dict[str, Any] = {}
        guided, unguided = {}, {}
        following = iter([part for micro in minibatches for part in micro][1:])
        for m, micro in enumerate(minibatches):
            normalizer = np.float32(max(sum(part.sampled.sum() for part in micro), 1) / self.accumulation)
            for i, part in enumerate(micro):
                part, reference = part.to_device(sent), None
                if self.reference is not None:
                    # Under the same record, so that the KL term sees the change of the policy and no rounding.
                    reference = self.trainer.evaluate(self.reference, part, guides)[1].logprobs
                self.train, scalars, result = self.trainer.step(
                    self.train, part, normalizer, old.get((m, i)), reference, guides
                )
                upcoming = next(following, None)
                sent = None if upcoming is None else send_rows(upcoming.packed)
                for site, c in (result.counts or {}).items():
                    guided[site] = guided.get(site, 0) + c.guided_rows.sum()
                    unguided[site] = unguided.get(site, 0) + c.unguided_rows.sum()
                if i:
                    continue  # the first microbatch of each minibatch is the one that is measured
                row = jax.device_get(scalars) | self._alignment(trajectories, result, m * self.accumulation)
                if m == 0:
                    metrics |= row | self._guidance(result, self.version - version)
                if config.minibatches > 1:
                    # Optimiser steps since the rollout are an axis of every measurement.
                    kept = (k for k in row if k.startswith(("mismatch/", "alignment/", "is/")))
                    metrics |= {f"age_{m}/{k}": row[k] for k in kept}
            # With accumulation only the last microbatch of an optimiser step updates anything.
            if m == 0:
                metrics["update_norm"] = float(scalars["update_norm"])
        if guided:
            # Over all microbatches: every row of the rollout is accounted for exactly once.
            metrics["guidance/rows_guided"] = int(sum(guided.values()))
            metrics["guidance/rows_unguided"] = int(sum(unguided.values()))
        return metrics

    @property
    def _microbatch(self) -> int:
        """Sequences per train step."""
        return self.config.minibatch // self.accumulation

    def _microbatch_starts(self):
        starts = list(range(0, self.config.sequences, self._microbatch))
        return [starts[i : i + self.accumulation] for i in range(0, len(starts), self.accumulation)]

    def _alignment(self, trajectories: Trajectories, result, microbatch: int) -> dict[str, Any]:
        count = self.config.audit_sequences
        if not trajectories.audit or not count or result.audit is None:
            return {}
        part = slice(microbatch * count, (microbatch + 1) * count)
        codes = jax.tree.map(lambda leaf: leaf[:, part], trajectories.audit)
        report = audit_report(codes, result.audit, trajectories.fed[list(trajectories.audit_rows[part])])
        scalars, lists = flatten_report(report)
        guided = (
            [report[site]["scale_miss"][self._recorded_places(site)] for site in self.spec.sites]
            if self.spec
            else []
        )
        return (
            scalars
            | lists
            | ({"guidance/scale_miss": float(np.mean(np.concatenate(guided)))} if guided else {})
        )

    def _recorded_places(self, site: str) -> list[int]:
        """Places of a site's recorded layers among those that have it."""
        return [self.model.site_layers(site).index(layer) for layer in self.spec.layers_of(site)]

    def _guidance(self, result, lag: int) -> dict[str, Any]:
        if not result.counts:
            return {}
        counts = jax.device_get(result.counts)
        first = {site: (int(c.overruled[0]), int(c.values[0])) for site, c in counts.items()}
        # Weights that moved since the rollout overrule more of the record: each lag has a baseline of its own.
        messages = self.alarm.observe({f"{s}@lag{lag}" if lag else s: c for s, c in first.items()})
        for message in messages:
            warnings.warn(f"step {self.step}: {message}", RuntimeWarning, stacklevel=2)
        overruled = sum(o for o, _ in first.values()) / max(sum(n for _, n in first.values()), 1)
        return {
            "guidance/overruled_share": overruled,
            "guidance/alarm": float(bool(messages)),
        }

    def control(self, batch: TrainBatch, trajectories: Trajectories) -> dict[str, Any]:
        """The same rows without guidance, before any update: what guidance does."""
        first = batch.rows(slice(0, self._microbatch)).without_guidance()
        mismatch, result = self.trainer.evaluate(self.train.params, first)
        row = {f"mismatch/{k}": v for k, v in jax.device_get(mismatch).items()}
        row |= self._alignment(trajectories, result, 0)
        return {f"control/{k}": v for k, v in row.items() if not k.startswith("guidance/")}

    def sync(self) -> None:
        """Publishes the masters to the rollout as a new version."""
        check_finite(self.train.params)
        self.version += 1
        self.history[self.version] = self._sync(self.train.params, self.plan, self.model.dtype)
        for version in [v for v in self.history if v < self.rollout_version()]:
            del self.history[version]

    # -- checkpoint ---------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Any]:
        """Everything on the device that the next step depends on."""
        older = {f"version_{v}": weights for v, weights in self.history.items() if v != self.version}
        return {"train": self.train, "history": older} | self._reference_part()

    def _reference_part(self) -> dict[str, Any]:
        return {} if self.reference is None else {"reference": self.reference}

    def values(self) -> dict[str, Any]:
        """The rest of the state, as JSON: with the seed, `step` fixes every PRNG key."""
        return {"step": self.step, "version": self.version, "seed": self.seed, "alarm": self.alarm.baseline}

    def template(self, step: int) -> dict[str, Any]:
        """`arrays()` of a loop after `step` steps, in shape, dtype and sharding. Call after `start`."""
        newest = self.history[self.version]
        older = {f"version_{v}": newest for v in range(max(0, step - self.config.max_version_lag), step)}
        return {"train": self.train, "history": older} | self._reference_part()

    def restore(self, arrays: dict[str, Any], values: dict[str, Any]) -> None:
        """Continues from a checkpoint.

        Raises:
            ValueError: the checkpoint was written under another seed.
        """
        if values["seed"] != self.seed:
            raise ValueError(f"checkpoint was written with seed {values['seed']}, this run has {self.seed}.")
        self.step, self.version = values["step"], values["version"]
        self.alarm = HealthAlarm({site: tuple(counts) for site, counts in values["alarm"].items()})
        self.train, self.reference = arrays["train"], arrays.get("reference")
        self.history = {int(name.removeprefix("version_")): w for name, w in arrays["history"].items()}
        self.history[self.version] = self._sync(self.train.params, self.plan, self.model.dtype)

    # -- one step -----------------------------------------------------------------------------------------------

    def run_step(self, prompts: Sequence[Prompt], problems: Sequence[Problem]) -> dict[str, Any]:
        """One step on `problems`, whose `prompts` are token ids; returns its metrics, all on the host."""
        clock, config = _Clock(), self.config
        version = self.rollout_version()
        trajectories = self.roll_out(prompts)
        clock.lap("rollout")
        # On its way while rewards are scored and the record is checked.
        sent = send_rows(trajectories.packed, slice(0, self._microbatch)) if self.spec else None
        rewards = self.rewards(problems, trajectories)
        advantages = group_advantages(rewards)
        batch = make_batch(
            trajectories,
            advantages.values.reshape(-1),
            model=self.model,
            spec=self.spec,
            weight_version=version,
            replay_routes=config.replay_routes,
        )
        clock.lap("reward")
        metrics: dict[str, Any] = {}
        if self.spec is not None and config.control_every and self.step % config.control_every == 0:
            metrics |= self.control(batch, trajectories)
            clock.lap("control")
        metrics |= self.train_on(batch, trajectories, version, sent)
        jax.block_until_ready(self.train)
        clock.lap("train")
        self.sync()
        jax.block_until_ready(self.history[self.version])
        clock.lap("sync")
        length = trajectories.length - trajectories.prompt_length
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/pass_at_k": float((rewards.max(axis=1) >= 1.0).mean()),
            "reward/degenerate_groups": advantages.degenerate_groups,
            "rollout/response_length": float(length.mean()),
            "rollout/tokens": int(length.sum()),
            "rollout/version": version,
            "rollout/version_lag": self.version - 1 - version,
            "guidance/bytes_per_token": bytes_per_token(trajectories.record),
            "guidance/rows_refused": 0,  # a refused record is an error, never a silent skip
            "routes/bytes_per_token": route_bytes_per_token(trajectories.record),
            "audit/bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(trajectories.audit)),
            **clock.seconds,
        }
        self.step += 1
        self.trajectories = trajectories
        return metrics


class _Clock:
    """Seconds per phase."""

    def __init__(self):
        self.start, self.seconds = time.perf_counter(), {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"time/{phase}"] = now - self.start
        self.start = now
