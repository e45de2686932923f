"""Trajectories: what a rollout hands to rewards and to the trainer."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from kernels_pallas.arrays import Fp4Array
from trace_jax.guidance import GuidanceRecord, PackedRows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "prompt_length", "length", "logprobs", "record", "audit", "observed"),
    meta_fields=("audit_rows", "audit_layers"),
    drop_fields=("packed",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectories:
    """N sequences of at most S tokens, on the host. Prompt and response are contiguous, padding is at the end.

    Invariants:
        * `tokens` int32 `[N, S]`; `prompt_length`, `length` int32 `[N]`, `length` counts prompt and response.
        * `logprobs` float32 `[N, S]`: log-prob of token i given those before it, 0 where it was not sampled.
        * Positions `prompt_length .. length-1` were sampled, but for those that `observed` bool `[N, S]` marks, which
          an environment wrote between turns (None where there is one turn). Positions `0 .. length-2` were fed to the
          model: the last sampled token never is.
        * `record` holds routes, row hashes and weight versions always, and sites when the method is guided.
        * `audit`: full codes of the sequences `audit_rows` by site, `[L, A, S, ...]`, or None; `audit_layers` maps a
          site to the layers of the model that these are, where not all have it.
        * `packed`: the bytes that the record's arrays are views of, `((routes, groups of sites), row_hash)`; None where
          they are arrays of their own, as after any tree transformation.
    """

    tokens: Any
    prompt_length: Any
    length: Any
    logprobs: Any
    record: GuidanceRecord
    audit: dict[str, Fp4Array] | None
    audit_rows: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    audit_layers: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )
    packed: PackedRows | None = None
    observed: Any = None

    @property
    def positions(self) -> np.ndarray:
        return np.broadcast_to(np.arange(self.tokens.shape[1], dtype=np.int32), self.tokens.shape)

    @property
    def fed(self) -> np.ndarray:
        """bool `[N, S]`: rows that went through the model."""
        return self.positions < self.length[:, None] - 1

    @property
    def sampled(self) -> np.ndarray:
        """bool `[N, S]`: tokens that the policy produced."""
        inside = (self.positions >= self.prompt_length[:, None]) & (self.positions < self.length[:, None])
        return inside if self.observed is None else inside & ~self.observed

    def response(self, n: int) -> list[int]:
        """Token ids of sequence n after its prompt; with turns, observations included."""
        return self.tokens[n, self.prompt_length[n] : self.length[n]].tolist()

    def __len__(self) -> int:
        return self.tokens.shape[0]
