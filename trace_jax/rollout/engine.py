"""Continuous batching: requests in, sequences with their records out, an accelerator kept full in between."""

import collections
import queue
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.guidance import PackedRows
from trace_jax.quant import arranged_for_kernels
from trace_jax.rollout.collate import blank_row
from trace_jax.rollout.collector import Collector, Placed
from trace_jax.rollout.host_memory import HostMemory
from trace_jax.rollout.metrics import Meter
from trace_jax.rollout.programs import Programs, Slots, copy_pages, copy_states
from trace_jax.rollout.requests import Request, RequestError, Result, key_words
from trace_jax.rollout.scheduler import Job, Scheduler
from trace_jax.rollout.sequences import Sequence, State
from trace_jax.rollout.slot_table import SlotTable

DecodeText = Callable[[list[int]], str]
"""Text of token ids: what stop strings are looked for in."""


class Engine:
    """Rolls out one model at one precision.

    `submit` requests, then call `step` (or iterate over `run`) and take results as they come: a step is at most one
    prefill call and one decode call, after which finished slots are refilled. What a sequence becomes depends on
    (weights, prompt, key) alone: shapes are fixed, every row of every operation is independent, and a token is drawn
    with `fold_in(key, position)`. Preemption is the exception: rows that are computed again, by a prefill, may
    differ in their last bits, and their record replaces the first.
    """

    def __init__(self, programs: Programs, *, decode_text: DecodeText | None = None):
        """`programs` may serve one engine after another; compiling them is what costs."""
        self.programs, self.model, self.config = programs, programs.model, programs.config
        self.decode_text = decode_text
        self.meter = Meter()
        self._words = len(key_words((0,))[0])
        self._memory, self._collector = HostMemory(), Collector()
        self._table = SlotTable(self.config, self._words)
        self._scheduler = Scheduler(
            self.config, self._table, keeps_slot=bool(self.model.layers_of("delta")), take=self._memory.take
        )
        self._weights: dict[int, nnx.State] = {}
        self._cache: dict[str, Any] | None = None
        self._version: int | None = None
        self._next_id = 0
        self._finished: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._turns: collections.deque[Result] = collections.deque()
        self._ending = 0
        self._stalled = False

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine's thread. Results that were not taken are lost."""
        self._collector.close()

    # -- weights -------------------------------------------------------------------------------------------------

    def sync(self, params: nnx.State, version: int) -> None:
        """New rollout parameters (`quant.rollout_weights`) for whatever begins from here on.

        Sequences in flight keep theirs, both being held until the last of them ends, or continue with the new ones
        (`EngineConfig.sync`). Nothing is compiled again.

        Raises:
            ValueError: `version` is not above the last one.
        """
        if self._version is not None and version <= self._version:
            raise ValueError(f"weight version {version} follows {self._version}; expected a later one.")
        try:
            self._weights[version] = arranged_for_kernels(params)
            if self._cache is None:
                self.layout, self.audit_layout = self.programs.layouts(self._weights[version], self._words)
                self._cache = self.programs.init_cache()
                jax.block_until_ready(self._cache)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            c = self.config
            raise MemoryError(
                f"the device has no room for version {version} of the weights beside {c.pages} pages of {c.page_size} "
                f"positions. Lower engine.pages (rollout.capacity says how many fit), or use sync='continue', which "
                f"holds one version: {str(error).splitlines()[0]}"
            ) from error
        self._version = version
        if self.config.sync == "continue":
            for sequence in self._scheduler.sequences.values():
                if sequence.version is not None:
                    sequence.version = version
            self._table.version[:] = version
        self._drop_weights()

    def _drop_weights(self) -> None:
        used = {s.version for s in self._scheduler.sequences.values() if s.state is not State.DONE}
        for version in set(self._weights) - used - {self._version}:
            del self._weights[version]

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that are held."""
        return tuple(sorted(self._weights))

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's record."""
        return self._layout("row_bytes").data.shape[-1]

    def _layout(self, what: str) -> PackedRows:
        if self._version is None:
            raise RequestError(f"{what}: the engine has no weights yet; call sync first.")
        return self.layout

    def submit(self, request: Request) -> list[int]:
        """Queues a request; returns an id for each of its responses.

        Raises:
            RequestError: it could never be served: too long, an id that the model lacks, stop strings without
                `decode_text`, more memory than the engine may hold, an audit without audit slots.
        """
        layout, c = self._layout("submit"), self.config
        prompt = np.asarray(request.prompt)
        if not np.issubdtype(prompt.dtype, np.integer) or prompt.ndim != 1:
            raise RequestError(
                f"the prompt is {prompt.dtype}{list(prompt.shape)}; expected a list of token ids."
            )
        self._check_ids("the prompt", prompt)
        self._scheduler.check_length(len(prompt), request.length)
        if request.sampling.stop_strings and self.decode_text is None:
            raise RequestError(
                "stop_strings need Engine(decode_text=...): the engine knows tokens, not text."
            )
        audit = request.audit or (False,) * len(request.seeds)
        if any(audit) and (not c.audit_slots or self.audit_layout is None):
            raise RequestError("audit needs an FP4 engine with audit_slots of at least 1.")
        audit_bytes = 0 if self.audit_layout is None else self.audit_layout.data.shape[-1]
        sequences = []
        for index, key in enumerate(key_words(request.seeds)):
            sequences.append(
                Sequence.of(
                    self._next_id + index,
                    request,
                    index,
                    key,
                    layout.data.shape[-1],
                    audit_bytes if audit[index] else 0,
                )
            )
        needed = max(sequence.nbytes for sequence in sequences)
        if needed > c.host_bytes:
            raise RequestError(
                f"a sequence of {request.length} tokens takes {needed} bytes of the host, engine.host_bytes is "
                f"{c.host_bytes}; raise it, or shorten the request."
            )
        self._next_id += len(sequences)
        self._stalled = False
        self._scheduler.submit(sequences)
        return [sequence.id for sequence in sequences]

    def _check_ids(self, what: str, tokens: np.ndarray) -> None:
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.model.vocab_size):
            raise RequestError(
                f"{what} holds id {tokens.max() if tokens.min() >= 0 else tokens.min()}; the model has "
                f"{self.model.vocab_size} ids."
            )

    def _find(self, id: int, *, paused: bool) -> Sequence:
        sequence = self._scheduler.sequences.get(id)
        if sequence is None or (paused and sequence.state is not State.PAUSED):
            state = "unknown, or was handed over" if sequence is None else sequence.state.value
            raise RequestError(f"sequence {id} is {state}; expected one that waits between turns.")
        return sequence

    def extend(self, id: int, tokens: Many[int] | np.ndarray) -> None:
        """Another turn: `tokens`, an observation, follow the response, and the policy goes on.

        Raises:
            RequestError: the sequence is not between turns, or has no room for them and a token more.
        """
        sequence, tokens = self._find(id, paused=True), np.asarray(tokens)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
            raise RequestError(
                f"an observation needs token ids, at least one; got {tokens.dtype}{list(tokens.shape)}."
            )
        self._check_ids("an observation", tokens)
        if sequence.count + len(tokens) >= sequence.length:
            raise RequestError(
                f"sequence {id} has {sequence.count} tokens, an observation of {len(tokens)} leaves no room for a "
                f"response within its {sequence.length}; end it, or raise max_length."
            )
        sequence.observe(tokens)
        self._stalled = False
        self._scheduler.resume(sequence)

    def end(self, id: int) -> None:
        """No more turns: the sequence's result follows."""
        self._end(self._find(id, paused=True), "ended")

    def cancel(self, id: int) -> None:
        """Ends a sequence wherever it is; its result, with what there is of it, follows."""
        sequence = self._scheduler.sequences.get(id)
        if sequence is not None and sequence.state is not State.DONE:
            self._end(sequence, "cancelled")

    def _end(self, sequence: Sequence, finish: str | None = None) -> None:
        if finish is not None:
            sequence.finish = finish
        heir = self._scheduler.end(sequence)
        if heir is not None:
            self._share_rows(sequence, [heir], heir.fed)
        self._ending += 1
        self._stalled = False
        self._collector.then(self._complete, sequence)

    def _complete(self, sequence: Sequence) -> None:
        """All rows of a sequence are in place. Those of a caller get the blank ones that follow, while work goes on."""
        if sequence.request.rows is not None and sequence.rows is not None:
            sequence.rows[len(sequence.result().rows) :] = blank_row(self.layout)
        self._finished.put(sequence)

    # -- work ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do.

        Sequences between turns wait for `extend` or `end`, and so do requests for which these hold too much memory.
        """
        s = self._scheduler
        waiting = s.waiting and not self._stalled
        return bool(waiting or s.jobs or s.ready or self._ending or self._turns or any(s.running()))

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Result]:
        """Submits requests, then yields results until nothing is left to do."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from self.step()

    def step(self) -> list[Result]:
        """At most one prefill and one decode call; returns what was finished meanwhile.

        Results are the caller's from then on: the engine's memory limit counts what it still holds.
        """
        scheduler = self._scheduler
        before = scheduler.preemptions
        with self.meter.phase("schedule"):
            scheduler.admit()
            for job in scheduler.jobs:
                for sequence in job.sequences:
                    if sequence.version is None:
                        sequence.version = self._version
        fed = self._prefill()
        with self.meter.phase("schedule"):
            scheduler.place()
            scheduler.reserve()
        preempted = scheduler.preemptions - before
        self.meter.preemptions += preempted
        worked = self._decode()
        idle = not (fed or worked or preempted or scheduler.jobs or self._ending)
        self._stalled = idle and bool(scheduler.waiting)
        self.meter.occupancy(scheduler)
        return self._take_results(wait=not worked)

    def _take_results(self, wait: bool) -> list[Result]:
        results = list(self._turns)
        self._turns.clear()
        if wait and self._ending and not results:
            self._collector.wait()
        while True:
            try:
                sequence = self._finished.get_nowait()
            except queue.Empty:
                break
            self._ending -= 1
            self._scheduler.handed_over(sequence)
            results.append(sequence.result())
        if results:
            self._drop_weights()
        return results

    # -- prefill -------------------------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        """One call, if there is anything to feed. Whether there was."""
        bucket, lanes = self._scheduler.call()
        if not lanes:
            return False
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
            self._cache, logits, rows, audit = self.programs.prefill(
                self._weights[version], self._cache, tokens, starts, counts, slots, table
            )
            self._keep(rows, audit, placed, audited, by_step=False)
            self.meter.prefilled += int(counts.sum())
            self._begin_decoding(logits, done)
        return True

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
        self._collector.add(rows.data, placed, by_step=by_step)
        self.meter.record_bytes += rows.data.shape[-1] * sum(p.count for p in placed)
        if audited:
            self._collector.add(audit.data, audited, by_step=by_step)

    def _share_rows(self, source: Sequence, targets: list[Sequence], count: int) -> None:
        """The rows of what sequences have in common, which the first of them was fed."""

        def copy() -> None:
            for target in targets:
                target.rows[:count] = source.rows[:count]

        self._collector.then(copy)

    def _begin_decoding(self, logits: jax.Array, done: list[tuple[int, Job]]) -> None:
        """Sequences whose prefill is done get pages and a token of their own."""
        first: list[tuple[int, Sequence]] = []
        sources, targets, from_slots, to_slots = [], [], [], []
        for lane, job in done:
            leader, *others = job.sequences
            from_pages, to_pages = self._scheduler.fed(job)
            sources += from_pages
            targets += to_pages
            for sequence in others:
                sequence.fed = sequence.recorded = leader.fed
                sequence.versions[: leader.fed] = leader.versions[: leader.fed]
                from_slots.append(leader.slot)
                to_slots.append(sequence.slot)
            if others:
                self._share_rows(leader, others, leader.fed)
            if leader.draws:
                first += [(lane, sequence) for sequence in job.sequences]
        width = min(self.config.slots, 32)
        for start in range(0, len(targets), width):
            chosen = slice(start, start + width)
            self._cache = copy_pages(
                self._cache,
                _padded(sources[chosen], width, 0),
                _padded(targets[chosen], width, self.config.pages),
            )
        if self._scheduler.keeps_slot:
            for start in range(0, len(to_slots), width):
                chosen = slice(start, start + width)
                arrays = (
                    _padded(from_slots[chosen], width, 0),
                    _padded(to_slots[chosen], width, self.config.slots),
                )
                self._cache = copy_states(self._cache, *arrays)
        for start in range(0, len(first), width):
            self._draw_first(logits, first[start : start + width], width)

    def _draw_first(self, logits: jax.Array, first: list[tuple[int, Sequence]], width: int) -> None:
        state = Slots.empty(width, self.config.pages_per_sequence, self._words)
        lanes = np.zeros(width, np.int32)
        for n, (lane, sequence) in enumerate(first):
            lanes[n] = lane
            sequence.fill(state, n)
        drawn = jax.device_get(self.programs.first(logits, lanes, state, plain=_plain(s for _, s in first)))
        logprobs = np.stack([drawn.logprobs, drawn.raw_logprobs])
        for n, (_, sequence) in enumerate(first):
            sequence.draw(drawn.tokens[n : n + 1], logprobs[:, n : n + 1])
            self.meter.sampled += 1
            self._look_for_strings(sequence, sequence.count - 1)
            self._leave_if_done(sequence)

    def skip_prefill(self, fill: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Takes prefills as done over what `fill` makes of the cache, their rows as they happen to be.

        For measuring: decoding over long contexts needs them in the cache, not computed.
        """
        self._cache = fill(self._cache)
        self._scheduler.admit()
        for job in list(self._scheduler.jobs):
            for sequence in job.sequences:
                sequence.version = self._version
            job.leader.feed(job.leader.target)
            self._scheduler.fed(job)
            for sequence in job.sequences:
                sequence.fed = sequence.recorded = job.leader.fed
                sequence.draw(np.zeros(1, np.int32), np.zeros((2, 1), np.float32))

    # -- decode --------------------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        """One chunk of every sequence in a slot, of each version in turn. Whether there was any."""
        versions = np.unique(self._table.version[self._table.running])
        for version in versions.tolist():
            self._decode_version(version)
        return bool(versions.size)

    def _decode_version(self, version: int) -> None:
        table = self._table
        live = np.flatnonzero(table.take_part(version))
        with self.meter.phase("decode"):
            self._cache, kept = self.programs.decode(
                self._weights[version],
                self._cache,
                table.slots,
                plain=_plain(self._scheduler.slots[i] for i in live),
            )
            # The few bytes that say how to go on first: copies leave the device in order.
            for array in (kept.tokens, kept.logprobs):
                array.copy_to_host_async()
            tokens, logprobs = np.asarray(kept.tokens), np.asarray(kept.logprobs)
        with self.meter.phase("schedule"):
            step = table.advance(tokens, logprobs, version)
            sequences = [self._scheduler.slots[slot] for slot in step.slots]
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
                    self._scheduler.slots[slot].finish = finish
            for sequence, n in zip(sequences, step.counts.tolist(), strict=True):
                if sequence.request.sampling.stop_strings:
                    self._look_for_strings(sequence, sequence.count - n)
                if sequence.finish is not None:
                    self._leave_if_done(sequence)

    def _look_for_strings(self, sequence: Sequence, before: int) -> None:
        """Cuts what follows the token that completes a stop string, of what was drawn since `before` tokens.

        A string may span tokens, and a token's text may depend on those before it: the whole response is read.
        """
        strings = sequence.request.sampling.stop_strings
        if not strings:
            return
        observed = np.flatnonzero(~sequence.sampled[: sequence.count])[-1] + 1

        def stops(count: int) -> bool:
            text = self.decode_text(sequence.tokens[observed:count].tolist())
            return any(string in text for string in strings)

        if not stops(sequence.count):
            return
        low, high = max(before, observed), sequence.count  # it was not there at `low`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if stops(middle) else (middle, high)
        sequence.cut(high)

    def _leave_if_done(self, sequence: Sequence) -> None:
        if sequence.finish is None:
            return
        if sequence.request.turns and sequence.count < sequence.length:
            self._scheduler.pause(sequence)
            if self._scheduler.keeps_slot and sequence.fed_beyond:
                self._scheduler.preempt(sequence)  # a state cannot forget the tokens that were cut
            self._turns.append(sequence.result())
        else:
            self._end(sequence)


def _plain(sequences: Iterable[Sequence]) -> bool:
    """Whether all are sampled from the model's own distribution."""
    return all(s.request.sampling.plain for s in sequences)


def _padded(values: list[int], width: int, fill: int) -> np.ndarray:
    return np.array(values + [fill] * (width - len(values)), np.int32)
