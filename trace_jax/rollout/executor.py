"""The device's side of an engine: feeds and decodes what the scheduler says, and sends rows on their way."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.guidance import PackedRows
from trace_jax.quant import arranged_for_kernels
from trace_jax.rollout.collector import Collector, Placed, place_rows
from trace_jax.rollout.metrics import Meter
from trace_jax.rollout.programs import Decoded, Programs, Slots, copy_pages, copy_states
from trace_jax.rollout.requests import DecodeText
from trace_jax.rollout.scheduler import Job, Scheduler
from trace_jax.rollout.sequences import Sequence
from trace_jax.rollout.slot_table import Advance

FEW = 32
"""Sequences that programs between prefill and decode take at a time, unless there are more."""


class Executor:
    """Holds what lies on the device: `weights` by version, and the cache."""

    def __init__(
        self,
        programs: Programs,
        scheduler: Scheduler,
        collector: Collector,
        meter: Meter,
        decode_text: DecodeText | None,
        *,
        words: int,
    ):
        """`words`: of a PRNG key."""
        self.programs, self.config, self.scheduler = programs, programs.config, scheduler
        self.collector, self.meter, self.decode_text, self.words = collector, meter, decode_text, words
        self.weights: dict[int, nnx.State] = {}
        self.cache: dict[str, Any] | None = None
        self._launched: list[tuple[int, Decoded]] = []
        self._unsettled: list[tuple[Decoded, Advance]] = []

    @property
    def must_settle(self) -> bool:
        """Whether the text of what was drawn decides who goes on."""
        return bool(self.scheduler.table.stop_strings[self.scheduler.table.running].any())

    def hold(self, params: nnx.State, version: int) -> tuple[PackedRows, PackedRows | None]:
        """Takes a version of the weights, and with the first one room for the cache. How rows are packed."""
        self.weights[version] = arranged_for_kernels(params)
        if self.cache is None:
            self.cache = jax.block_until_ready(self.programs.init_cache())
        return self.programs.layouts(self.weights[version], self.words)

    def release(self) -> None:
        """Lets go of weights and cache."""
        self.weights.clear()
        self._launched.clear()
        self._unsettled.clear()
        self.cache = None

    # -- prefill -------------------------------------------------------------------------------------------------

    def prefill(self) -> list[Sequence] | None:
        """One call: the sequences that drew their first token after it; None if there was nothing to feed."""
        bucket, lanes = self.scheduler.call()
        if not lanes:
            return None
        # Calls are of one version; others' turn comes.
        version = lanes[0][1].leader.version
        lanes = [(lane, job) for lane, job in lanes if job.leader.version == version]
        count, pages = self.config.lanes(bucket), self.config.pages_per_sequence
        tokens = np.zeros((count, bucket), np.int32)
        starts, counts, slots = (np.zeros(count, np.int32) for _ in range(3))
        table = np.full((count, pages), -1, np.int32)
        placed, audited, done = [], [], []
        for lane, job in lanes:
            leader = job.leader
            fed, n = leader.fed, min(job.remaining, bucket)
            tokens[lane, :n] = leader.tokens[fed : fed + n]
            starts[lane], counts[lane] = fed, n
            slots[lane] = 0 if leader.slot is None else leader.slot
            table[lane, : len(leader.pages)] = leader.pages
            placed.append(Placed(lane, n, leader.rows, fed))
            audited += [Placed(lane, n, s.audit, fed) for s in job.sequences if s.audited]
            leader.feed(fed + n)
            if not job.remaining:
                done.append((lane, job))
        with self.meter.phase("prefill"):
            self.cache, logits, rows, audit = self.programs.prefill(
                self.weights[version], self.cache, tokens, starts, counts, slots, table
            )
            self._keep(rows, audit, placed, audited, by_step=False)
            self.meter.prefilled += int(counts.sum())
            return self._begin_decoding(logits, done)

    def _keep(
        self,
        rows: PackedRows,
        audit: PackedRows | None,
        placed: list[Placed],
        audited: list[Placed],
        *,
        by_step: bool,
    ) -> None:
        """Starts the rows of one program on their way to their sequences."""
        place = functools.partial(place_rows, by_step=by_step)
        self.collector.add(rows.data, functools.partial(place, placed=placed))
        self.meter.record_bytes += rows.data.shape[-1] * sum(p.count for p in placed)
        if audited:
            self.collector.add(audit.data, functools.partial(place, placed=audited))

    def share_rows(self, source: Sequence, targets: list[Sequence]) -> None:
        """The rows of what sequences have in common, which one of them was fed."""
        count = targets[0].fed

        def copy() -> None:
            for target in targets:
                target.rows[:count] = source.rows[:count]

        self.collector.then(copy)

    def _begin_decoding(self, logits: jax.Array, done: list[tuple[int, Job]]) -> list[Sequence]:
        """Gives sequences whose prefill is done pages of their own. Returns those that also drew their first token."""
        first: list[tuple[int, Sequence]] = []
        sources, targets, from_slots, to_slots = [], [], [], []
        for lane, job in done:
            leader, *others = job.sequences
            from_pages, to_pages = self.scheduler.fed(job)
            sources += from_pages
            targets += to_pages
            for sequence in others:
                sequence.fed = sequence.recorded = leader.fed
                sequence.versions[: leader.fed] = leader.versions[: leader.fed]
                from_slots.append(leader.slot)
                to_slots.append(sequence.slot)
            if others:
                self.share_rows(leader, others)
            if leader.draws:
                first += [(lane, sequence) for sequence in job.sequences]
        width = self._width(len(targets))
        for start in range(0, len(targets), width):
            chosen = slice(start, start + width)
            self.cache = copy_pages(
                self.cache,
                _padded(sources[chosen], width, 0),
                _padded(targets[chosen], width, self.config.pages),
            )
        if self.scheduler.keeps_slot:
            width = self._width(len(to_slots))
            for start in range(0, len(to_slots), width):
                chosen = slice(start, start + width)
                arrays = (
                    _padded(from_slots[chosen], width, 0),
                    _padded(to_slots[chosen], width, self.config.slots),
                )
                self.cache = copy_states(self.cache, *arrays)
        width = self._width(len(first))
        for start in range(0, len(first), width):
            self._draw_first(logits, first[start : start + width], width)
        return [sequence for _, sequence in first]

    def _width(self, count: int) -> int:
        """Of the program that does something for `count` sequences: one of two, so that there are few."""
        return self.config.slots if count > FEW else min(self.config.slots, FEW)

    def _draw_first(self, logits: jax.Array, first: list[tuple[int, Sequence]], width: int) -> None:
        state = Slots.empty(width, self.config.pages_per_sequence, self.words)
        lanes = np.zeros(width, np.int32)
        for n, (lane, sequence) in enumerate(first):
            lanes[n] = lane
            sequence.fill(state, n)
        drawn = jax.device_get(self.programs.first(logits, lanes, state, plain=_plain(s for _, s in first)))
        logprobs = np.stack([drawn.logprobs, drawn.raw_logprobs])
        for n, (_, sequence) in enumerate(first):
            sequence.draw(drawn.tokens[n : n + 1], logprobs[:, n : n + 1])
            self.meter.sampled += 1
            sequence.stop_at_strings(self.decode_text, sequence.count - 1)

    def skip_prefill(self, fill: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Takes all jobs as done over what `fill` makes of the cache; see `Engine.skip_prefill`."""
        self.cache = fill(self.cache)
        for job in list(self.scheduler.jobs):
            job.leader.feed(job.leader.target)
            self.scheduler.fed(job)
            for sequence in job.sequences:
                sequence.fed = sequence.recorded = job.leader.fed
                sequence.draw(np.zeros(1, np.int32), np.zeros((2, 1), np.float32))

    # -- decode --------------------------------------------------------------------------------------------------

    def launch(self) -> bool:
        """Starts a chunk of every sequence in a slot, of each version in turn. Whether there are any."""
        table = self.scheduler.table
        with self.meter.phase("decode"):
            for version in np.unique(table.version[table.running]).tolist():
                slots, plain = table.taking_part(version)
                self.cache, kept = self.programs.decode(self.weights[version], self.cache, slots, plain=plain)
                # The few bytes that say how to go on first: copies leave the device in order.
                for array in (kept.tokens, kept.logprobs):
                    array.copy_to_host_async()
                self._launched.append((version, kept))
        return bool(self._launched)

    def collect(self) -> None:
        """Waits for what was launched. The table knows then who goes on; `settle` tells the sequences."""
        for version, kept in self._launched:
            with self.meter.phase("decode"):
                tokens, logprobs = np.asarray(kept.tokens), np.asarray(kept.logprobs)
            with self.meter.phase("schedule"):
                step = self.scheduler.table.advance(tokens, logprobs, version)
                self.meter.sampled += int(step.counts.sum())
            self._unsettled.append((kept, step))
        self._launched.clear()

    def settle(self) -> list[Sequence]:
        """Sends the rows of the chunks collected last on their way. Returns the sequences that ended with them.

        It costs time for every sequence, for which the device need not wait: it may work on the next chunk meanwhile.
        """
        ended = []
        with self.meter.phase("schedule"):
            for kept, step in self._unsettled:
                ended += self._settle(kept, step)
            self._unsettled.clear()
        return ended

    def _settle(self, kept: Decoded, step: Advance) -> list[Sequence]:
        slots, strings = self.scheduler.slots, self.scheduler.table.stop_strings
        placed, audited, ended = [], [], []
        for slot, start, n in zip(*(a.tolist() for a in (step.slots, step.starts, step.counts)), strict=True):
            sequence = slots[slot]
            sequence.advance(n)
            placed.append(Placed(slot, n, sequence.rows, start))
            if sequence.audited:
                audited.append(Placed(slot, n, sequence.audit, start))
        self._keep(kept.rows, kept.audit, placed, audited, by_step=True)
        for finish, done in (("stop", step.stopped), ("length", step.full)):
            for slot in done.tolist():
                slots[slot].finish = finish
                ended.append(slots[slot])
        for slot, n in zip(
            step.slots[strings[step.slots]].tolist(), step.counts[strings[step.slots]], strict=True
        ):
            sequence = slots[slot]
            done = sequence.finish is not None
            sequence.stop_at_strings(self.decode_text, sequence.count - int(n))
            if sequence.finish is not None and not done:
                ended.append(sequence)
        return ended


def _plain(sequences: Iterable[Sequence]) -> bool:
    """Whether all are sampled from the model's own distribution."""
    return all(s.request.sampling.plain for s in sequences)


def _padded(values: list[int], width: int, fill: int) -> np.ndarray:
    return np.array(values + [fill] * (width - len(values)), np.int32)
