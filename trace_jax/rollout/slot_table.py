"""The sequences that decode, as arrays by slot: what a chunk did to hundreds of them is worked out at once."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Float32, Int32

from trace_jax.rollout.engine_config import EngineConfig
from trace_jax.rollout.programs import LIMIT, LIVE, POSITION, STOPS, TOKEN, Slots
from trace_jax.rollout.sequences import Sequence


@dataclasses.dataclass(frozen=True)
class Advance:
    """What a chunk brought: the slots that took part, int `[M]`, where each began to feed and how many tokens it fed.

    Of these `stopped` slots drew a stop token, and those of `full` have their response's whole length.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    stopped: np.ndarray
    full: np.ndarray


class SlotTable:
    """While a sequence runs its tokens, log-probs and versions are rows of these arrays.

    `slots` is what programs take. Invariant: the token there of a running sequence is its last one, so that it has as
    many tokens as that one's position and one.
    """

    def __init__(self, config: EngineConfig, words: int):
        n, length = config.slots, config.max_length
        self.config = config
        self.slots = Slots.empty(n, config.pages_per_sequence, words)
        self.tokens = np.zeros((n, length), np.int32)
        self.sampled = np.zeros((n, length), bool)
        self.logprobs = np.zeros((2, n, length), np.float32)
        self.versions = np.zeros((n, length), np.int32)
        self.running = np.zeros(n, bool)
        self.plain = np.zeros(n, bool)
        self.stop_strings = np.zeros(n, bool)
        self.version = np.zeros(n, np.int64)
        self.pages = np.zeros(n, np.int64)
        self.started = np.zeros(n, np.int64)

    def enter(self, sequence: Sequence) -> None:
        """A sequence begins to run in its slot."""
        at, length = sequence.slot, sequence.length
        for name in ("tokens", "sampled", "versions"):
            row = getattr(self, name)[at, :length]
            row[:] = getattr(sequence, name)
            setattr(sequence, name, row)
        self.logprobs[:, at, :length] = sequence.logprobs
        sequence.logprobs = self.logprobs[:, at, :length]
        sequence.fill(self.slots, at)
        self.running[at], self.version[at], self.started[at] = True, sequence.version, sequence.started
        self.pages[at] = len(sequence.pages)
        sampling = sequence.request.sampling
        self.plain[at], self.stop_strings[at] = sampling.plain, bool(sampling.stop_strings)

    def leave(self, sequence: Sequence) -> None:
        """It runs no more: its arrays are its own again."""
        at = sequence.slot
        for name in ("tokens", "sampled", "versions", "logprobs"):
            setattr(sequence, name, getattr(sequence, name).copy())
        self.running[at], self.slots.ints[at, LIVE] = False, 0
        self.slots.table[at] = -1

    def give(self, sequence: Sequence, pages: list[int]) -> None:
        """A running sequence has got more pages."""
        at = sequence.slot
        sequence.pages += pages
        self.slots.table[at, : len(sequence.pages)] = sequence.pages
        self.pages[at] = len(sequence.pages)

    def needed(self) -> Int32[np.ndarray, " N"]:
        """Pages that each slot lacks for its next chunk."""
        ints, c = self.slots.ints, self.config
        last = np.minimum(ints[:, POSITION] + c.chunk, ints[:, LIMIT] - 1)
        return np.where(self.running, np.maximum(-(-last // c.page_size) - self.pages, 0), 0).astype(np.int32)

    def taking_part(self, version: int) -> tuple[Slots, bool]:
        """What a program needs to know, and whether all are sampled from the model's own distribution.

        Those take part that run under the version. A copy, since a program may read its arguments later.
        """
        live = self.running & (self.version == version)
        self.slots.ints[:, LIVE] = live
        return jax.tree.map(np.copy, self.slots), bool(self.plain[live].all())

    def advance(
        self, tokens: Int32[np.ndarray, "chunk N"], logprobs: Float32[np.ndarray, "2 chunk N"], version: int
    ) -> Advance:
        """Takes over what a program drew; who is done runs no more."""
        ints = self.slots.ints
        drew = tokens >= 0
        step, slot = np.nonzero(drew)
        fed = ints[slot, POSITION] + step
        self.versions[slot, fed] = version
        self.tokens[slot, fed + 1] = tokens[step, slot]
        self.sampled[slot, fed + 1] = True
        self.logprobs[:, slot, fed + 1] = logprobs[:, step, slot]
        counts = drew.sum(axis=0)
        took = np.flatnonzero(counts)
        starts = ints[took, POSITION].copy()
        ints[took, POSITION] += counts[took].astype(np.int32)
        ints[took, TOKEN] = self.tokens[took, ints[took, POSITION]]
        stopped = (ints[took, TOKEN, None] == ints[took, STOPS:]).any(axis=1)
        full = ~stopped & (ints[took, POSITION] + 1 >= ints[took, LIMIT])
        self.running[took[stopped | full]] = False
        return Advance(took, starts, counts[took], took[stopped], took[full])
