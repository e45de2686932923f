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
from trace_jax.rollout.collate import blank_row
from trace_jax.rollout.collector import Collector
from trace_jax.rollout.executor import Executor
from trace_jax.rollout.host_memory import HostMemory
from trace_jax.rollout.metrics import Meter
from trace_jax.rollout.programs import Programs
from trace_jax.rollout.requests import DecodeText, NoRoomError, Request, RequestError, Result, key_words
from trace_jax.rollout.scheduler import Scheduler
from trace_jax.rollout.sequences import Sequence, State
from trace_jax.rollout.slot_table import SlotTable


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
        self.decode_text, self.meter = decode_text, Meter()
        words = len(key_words((0,))[0])
        self._collector, self._table = Collector(), SlotTable(self.config, words)
        self._scheduler = Scheduler(
            self.config,
            self._table,
            keeps_slot=bool(self.model.layers_of("delta")),
            take=HostMemory().take,
        )
        self._executor = Executor(
            programs, self._scheduler, self._collector, self.meter, decode_text, words=words
        )
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
        """Ends the engine's thread, and lets go of the device's memory. Results that were not taken are lost."""
        self._collector.close()
        self._executor.release()

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
        self._settle()
        try:
            self.layout, self.audit_layout = self._executor.hold(params, version)
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
        for version in set(self._executor.weights) - used - {self._version}:
            del self._executor.weights[version]

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that are held."""
        return tuple(sorted(self._executor.weights))

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

    def _paused(self, id: int) -> Sequence:
        sequence = self._scheduler.sequences.get(id)
        if sequence is None or sequence.state is not State.PAUSED:
            state = "unknown, or was handed over" if sequence is None else sequence.state.value
            raise RequestError(f"sequence {id} is {state}; expected one that waits between turns.")
        return sequence

    def extend(self, id: int, tokens: Many[int] | np.ndarray) -> None:
        """Another turn: `tokens`, an observation, follow the response, and the policy goes on.

        Raises:
            RequestError: the sequence is not between turns, or `tokens` are none, or no ids of the model.
            NoRoomError: the sequence has no room for them and a token more.
        """
        sequence, tokens = self._paused(id), np.asarray(tokens)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
            raise RequestError(
                f"an observation needs token ids, at least one; got {tokens.dtype}{list(tokens.shape)}."
            )
        self._check_ids("an observation", tokens)
        if sequence.count + len(tokens) >= sequence.length:
            raise NoRoomError(
                f"sequence {id} has {sequence.count} tokens, an observation of {len(tokens)} leaves no room for a "
                f"response within its {sequence.length}; end it, or raise max_length."
            )
        sequence.observe(tokens)
        self._stalled = False
        self._scheduler.resume(sequence)

    def end(self, id: int) -> None:
        """No more turns: the sequence's result follows."""
        sequence = self._paused(id)
        sequence.finish = "ended"
        self._end([sequence])

    def cancel(self, id: int) -> None:
        """Ends a sequence wherever it is; its result, with what there is of it, follows."""
        self._settle()
        sequence = self._scheduler.sequences.get(id)
        if sequence is not None and sequence.state is not State.DONE:
            sequence.finish = "cancelled"
            self._end([sequence])

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            heir = self._scheduler.end(sequence)
            if heir is not None:
                self._executor.share_rows(sequence, [heir])
        if self._turns:  # of a sequence that is cancelled its turn's end is no news any more
            ended = {sequence.id for sequence in sequences}
            self._turns = collections.deque(turn for turn in self._turns if turn.id not in ended)
        self._ending += len(sequences)
        self._stalled = False
        self._collector.then(self._complete, sequences)

    def _complete(self, sequences: list[Sequence]) -> None:
        """All rows are in place. Those of a caller get the blank ones that follow, while work goes on."""
        blank = blank_row(self.layout)
        for sequence in sequences:
            if sequence.request.rows is not None and sequence.rows is not None:
                sequence.rows[min(sequence.recorded, sequence.count - 1) :] = blank
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
        scheduler, executor = self._scheduler, self._executor
        before = scheduler.preemptions
        if scheduler.contended or executor.must_settle:
            self._settle()
        with self.meter.phase("schedule"):
            scheduler.admit(self._version)
        drew = executor.prefill()
        self._leave([sequence for sequence in drew or () if sequence.finish is not None])
        with self.meter.phase("schedule"):
            scheduler.place()
            scheduler.reserve()
        preempted = scheduler.preemptions - before
        self.meter.preemptions += preempted
        launched = executor.launch()
        self._settle()
        executor.collect()
        idle = not (drew is not None or launched or preempted or scheduler.jobs or self._ending)
        self._stalled = idle and bool(scheduler.waiting)
        self.meter.occupancy(scheduler)
        return self._take_results(wait=not launched)

    def _settle(self) -> None:
        """Ends, or pauses, the sequences that the last chunk ended."""
        self._leave(self._executor.settle())

    def _leave(self, done: list[Sequence]) -> None:
        """Sequences whose response has ended wait for another turn, or end."""
        ended = []
        for sequence in done:
            if sequence.request.turns and sequence.count < sequence.length:
                self._scheduler.pause(sequence)
                if self._scheduler.keeps_slot and sequence.fed_beyond:
                    self._scheduler.preempt(sequence)  # a state cannot forget the tokens that were cut
                self._turns.append(sequence.result())
            else:
                ended.append(sequence)
        if ended:
            self._end(ended)

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

    def skip_prefill(self, fill: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Takes the prefills of what was submitted as done, over what `fill` makes of the cache.

        Their rows are as they happen to be. For measuring: decoding over long contexts needs them in the cache, not
        computed.
        """
        self._scheduler.admit(self._version)
        self._executor.skip_prefill(fill)
