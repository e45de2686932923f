"""Hyperparameters of the RL loop."""

import dataclasses
import math

from trace_jax.config import check_range

RATIOS = ("behaviour", "decoupled")
CORRECTIONS = ("none", "tis", "icepop", "sequence_mask")
SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with warm-up, global-norm clipping and accumulation.

    `warmup_steps` and the schedule count optimiser steps; `clip_norm` 0 switches clipping off; `accumulation` is the
    number of microbatches per optimiser step.
    """

    learning_rate: float = 3e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    accumulation: int = 1

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule is {self.schedule!r}; expected one of {SCHEDULES}.")
        check_range("optimizer", self, "learning_rate", above=0.0)
        check_range("optimizer", self, "warmup_steps", "weight_decay", "clip_norm", at_least=0.0)
        check_range("optimizer", self, "beta1", "beta2", at_least=0.0, below=1.0)
        check_range("optimizer", self, "accumulation", at_least=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig:
    """GRPO with rollout correction.

    Sizes: a step rolls out `prompts` x `group_size` sequences and makes `minibatches` optimiser steps on them.

    Ratio: `behaviour` = trainer / rollout log-probs, upper bound `ratio_cap`; `decoupled` = trainer / old (the
    trainer's own log-probs before the first update) times a stopped weight of old / rollout, bounded by `correction`:
    `tis` (at most `tis_cap`), `icepop` (zero outside `icepop_low` .. `icepop_high`), `sequence_mask` (sequences whose
    geometric-mean weight leaves that interval are dropped), `none`.
    """

    steps: int = 50
    prompts: int = 16
    group_size: int = 8
    minibatches: int = 1
    max_new_tokens: int = 24
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio: str = "behaviour"
    ratio_cap: float = 5.0
    correction: str = "tis"
    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    replay_routes: bool = True
    guide_weights: bool = False
    max_version_lag: int = 0
    decode_chunk: int = 8
    audit_sequences: int = 2
    control_every: int = 10
    evaluate_every: int = 0
    evaluation_prompts: int = 64
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    save_trajectories_every: int = 0

    def __post_init__(self):
        if self.ratio not in RATIOS:
            raise ValueError(f"rl.ratio is {self.ratio!r}; expected one of {RATIOS}.")
        if self.correction not in CORRECTIONS:
            raise ValueError(f"rl.correction is {self.correction!r}; expected one of {CORRECTIONS}.")
        counts = ("steps", "prompts", "group_size", "minibatches", "max_new_tokens", "decode_chunk")
        check_range(
            "rl", self, *counts, "evaluation_prompts", "checkpoint_every", "keep_checkpoints", at_least=1
        )
        check_range("rl", self, "ratio_cap", "tis_cap", "icepop_high", at_least=1.0)
        check_range("rl", self, "icepop_low", "clip_low", at_least=0.0, below=1.0)
        periods = ("control_every", "evaluate_every", "save_trajectories_every")
        check_range("rl", self, "clip_high", "kl_coefficient", *periods, "max_version_lag", at_least=0.0)
        check_range("rl", self, "entropy_coefficient", at_least=-math.inf)
        check_range("rl", self, "temperature", above=0.0)
        if self.group_size < 2:
            raise ValueError(
                "rl.group_size is 1; group-normalised advantages need at least 2 responses to a prompt."
            )
        if self.sequences % self.minibatches:
            raise ValueError(
                f"{self.prompts} prompts x {self.group_size} responses = {self.sequences} sequences do not split into "
                f"rl.minibatches={self.minibatches}."
            )
        if not 0 <= self.audit_sequences <= self.minibatch:
            raise ValueError(
                f"rl.audit_sequences is {self.audit_sequences}; expected 0 to {self.minibatch}, the "
                "sequences of a minibatch."
            )

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size

    @property
    def minibatch(self) -> int:
        """Sequences per optimiser step."""
        return self.sequences // self.minibatches

    def audit_rows(self, accumulation: int = 1) -> tuple[int, ...]:
        """Sequences of a rollout whose full codes are kept: the first few of each microbatch."""
        micro = self.minibatch // accumulation
        return tuple(
            start + i for start in range(0, self.sequences, micro) for i in range(self.audit_sequences)
        )
