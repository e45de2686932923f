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
from trace_jax.rollout.programs import Programs, Slots, copy_pages, copy_states
from trace_jax.rollout.requests import DecodeText
from trace_jax.rollout.scheduler import Job, Scheduler
from trace_jax.rollout.sequences import Sequence


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

    def hold(self, params: nnx.State, version: int) -> tuple[PackedRows, PackedRows | None]:
        """Takes a version of the weights, and with the first one room for the cache. How rows are packed."""
        self.weights[version] = arranged_for_kernels(params)
        if self.cache is None:
            self.cache = jax.block_until_ready(self.programs.init_cache())
        return self.programs.layouts(self.weights[version], self.words)

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
        width = min(self.config.slots, 32)
        for start in range(0, len(targets), width):
            chosen = slice(start, start + width)
            self.cache = copy_pages(
                self.cache,
                _padded(sources[chosen], width, 0),
                _padded(targets[chosen], width, self.config.pages),
            )
        if self.scheduler.keeps_slot:
            for start in range(0, len(to_slots), width):
                chosen = slice(start, start + width)
                arrays = (
                    _padded(from_slots[chosen], width, 0),
                    _padded(to_slots[chosen], width, self.config.slots),
                )
                self.cache = copy_states(self.cache, *arrays)
        for start in range(0, len(first), width):
            self._draw_first(logits, first[start : start + width], width)
        return [sequence for _, sequence in first]

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

    def decode(self) -> list[Sequence] | None:
        """One chunk of every sequence in a slot, of each version in turn: those sequences, None if there are none."""
        table = self.scheduler.table
        versions = np.unique(table.version[table.running]).tolist()
        drew = [sequence for version in versions for sequence in self._decode_version(version)]
        return drew if versions else None

    def _decode_version(self, version: int) -> list[Sequence]:
        table = self.scheduler.table
        live = np.flatnonzero(table.take_part(version))
        with self.meter.phase("decode"):
            self.cache, kept = self.programs.decode(
                self.weights[version],
                self.cache,
                table.slots,
                plain=_plain(self.scheduler.slots[i] for i in live),
            )
            # The few bytes that say how to go on first: copies leave the device in order.
            for array in (kept.tokens, kept.logprobs):
                array.copy_to_host_async()
            tokens, logprobs = np.asarray(kept.tokens), np.asarray(kept.logprobs)
        with self.meter.phase("schedule"):
            step = table.advance(tokens, logprobs, version)
            sequences = [self.scheduler.slots[slot] for slot in step.slots]
            placed, audited = [], []
            for sequence, slot, start, n in zip(
                sequences, step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True
            ):
                sequence.advance(n)
                placed.append(Placed(slot, n, sequence.rows, start))
                if sequence.audited:
                    audited.append(Placed(slot, n, sequence.audit, start))
            self.meter.sampled += int(step.counts.sum())
            self._keep(kept.rows, kept.audit, placed, audited, by_step=True)
            for finish, slots in zip(("stop", "length"), table.ended(step.slots), strict=True):
                for slot in slots:
                    self.scheduler.slots[slot].finish = finish
            for sequence, n in zip(sequences, step.counts.tolist(), strict=True):
                sequence.stop_at_strings(self.decode_text, sequence.count - n)
        return sequences


def _plain(sequences: Iterable[Sequence]) -> bool:
    """Whether all are sampled from the model's own distribution."""
    return all(s.request.sampling.plain for s in sequences)


def _padded(values: list[int], width: int, fill: int) -> np.ndarray:
    return np.array(values + [fill] * (width - len(values)), np.int32)
