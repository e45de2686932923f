"""Who is fed, who decodes, who waits, and whose pages are taken when there are none left."""

import collections
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from trace_jax.rollout.engine_config import EngineConfig
from trace_jax.rollout.pages import PagePool
from trace_jax.rollout.requests import RequestError
from trace_jax.rollout.sequences import Sequence, State
from trace_jax.rollout.slot_table import SlotTable


@dataclasses.dataclass(eq=False)
class Job:
    """A prefill: what `sequences` have in common is fed once, by the first of them, which holds the pages.

    `tails` are pages for the others' copies of the last page, where that is not full.
    """

    sequences: list[Sequence]
    tails: list[int]

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    @property
    def remaining(self) -> int:
        return self.leader.target - self.leader.fed

    @property
    def audited(self) -> bool:
        return any(sequence.audited for sequence in self.sequences)


class Scheduler:
    """Bookkeeping on the host, without any array of the device.

    Sequences are admitted in the order of arrival, those that have begun before, oldest first. Nobody waits for ever:
    the oldest sequence always gets pages, by taking those of younger ones.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: SlotTable,
        *,
        keeps_slot: bool,
        take: Callable[[tuple[int, ...]], np.ndarray],
    ):
        """`table` gets to know who runs; `take` gives memory for rows.

        `keeps_slot`: a sequence has state in its slot, so it is fed there, and keeps it between turns.
        """
        self.config, self.table, self.keeps_slot, self._take = config, table, keeps_slot, take
        self.pool = PagePool(config.pages)
        self.waiting: collections.deque[list[Sequence]] = collections.deque()
        self.jobs: list[Job] = []
        self.ready: collections.deque[Sequence] = collections.deque()
        self.slots: list[Sequence | None] = [None] * config.slots
        self.sequences: dict[int, Sequence] = {}
        self.host_bytes = 0
        self.preemptions = 0
        self._started = 0

    # -- arrival -------------------------------------------------------------------------------------------------

    def check_length(self, prompt: int, length: int) -> None:
        """Raises RequestError for a sequence that could never be served."""
        c = self.config
        most = min(c.max_length, c.pages * c.page_size)
        if length > most:
            raise RequestError(
                f"a prompt of {prompt} tokens and its response of up to {length - prompt} need {length} positions, "
                f"the engine has {most} for a sequence (max_length {c.max_length}, {c.pages} pages of {c.page_size}). "
                "Shorten the prompt, lower max_new_tokens, or raise engine.max_length or engine.pages."
            )

    def submit(self, sequences: list[Sequence]) -> None:
        """Sequences with the same prompt."""
        self.sequences |= {sequence.id: sequence for sequence in sequences}
        self.waiting.append(sequences)

    def resume(self, sequence: Sequence) -> None:
        """A paused sequence has been extended."""
        self._wait([sequence])

    def _wait(self, group: list[Sequence]) -> None:
        """Back to those that wait: before all that never began, and behind those that are older.

        The oldest so is the first to be fed, and no one whose pages were taken keeps older ones from theirs.
        """
        for sequence in group:
            sequence.state = State.WAITING
        older = sum(1 for other in self.waiting if 0 < other[0].started < group[0].started)
        self.waiting.insert(older, group)

    @property
    def contended(self) -> bool:
        """Whether someone waits for slots or pages: then those who are done give them up before anything else."""
        return bool(self.waiting or self.jobs or self.ready or self.table.needed().sum() > self.pool.free)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def admit(self, version: int) -> None:
        """Begins prefills while slots will be free for what comes of them, and pages and memory are.

        Sequences that never began do so under weights of `version`.
        """
        while self.waiting:
            group = self.waiting[0]
            expected = len(self.ready) + sum(len(job.sequences) for job in self.jobs)
            if expected and expected >= self.slots.count(None) + self.config.slots // 4:
                return
            job = self._begin(group)
            if job is None:
                return
            self.jobs.append(job)
            for sequence in job.sequences:
                sequence.version = version if sequence.version is None else sequence.version
            del group[: len(job.sequences)]
            if not group:
                self.waiting.popleft()

    def _begin(self, group: list[Sequence]) -> Job | None:
        """As many of the group as can be, or None."""
        c, leader = self.config, group[0]
        most = self._with_slots(group) if self.keeps_slot else len(group)
        if leader.started == 0:  # others are accounted for already
            room = (c.host_bytes - self.host_bytes) // leader.nbytes
            most = min(most, max(room, 0 if self.host_bytes else 1))
        if most == 0:
            return None
        pages = -(-leader.target // c.page_size) - len(leader.pages)
        tail = leader.target % c.page_size > 0
        running = sum(1 for _ in self.running())
        if not (running or self.jobs or self.ready):
            # Only what waits, between turns or to be fed another, holds pages then, and nobody knows for how long.
            while self.pool.free < pages and (holders := self._holders(leader)):
                self.preempt(max(holders, key=lambda s: s.started))
        # What runs will need pages soon: without these it would take them back at once.
        spare = self.pool.free - pages - running
        if spare < 0 and (running or self.jobs or self.ready):
            return None
        if tail:
            most = min(most, 1 + max(spare, 0))
        taken = self.pool.take(pages + (most - 1 if tail else 0))
        if taken is None:
            return None
        leader.pages += taken[:pages]
        sequences, free = group[:most], self._free()
        for sequence in sequences:
            sequence.state = State.PREFILL
            if sequence.started == 0:
                self._started += 1
                sequence.begin(self._started, self._take)
                self.host_bytes += sequence.nbytes
            if self.keeps_slot and sequence.slot is None:
                self._give_slot(sequence, free)
        return Job(sequences, taken[pages:])

    def _with_slots(self, group: list[Sequence]) -> int:
        """How many of a group, from the first on, have slots or could be given some."""
        free = self._free()
        for n, sequence in enumerate(group):
            if sequence.slot is None and _choose(sequence, free) is None:
                return n
        return len(group)

    def _holders(self, other: Sequence) -> list[Sequence]:
        """Sequences whose pages can be taken."""
        return [s for s in self.sequences.values() if s.pages and s is not other]

    def call(self) -> tuple[int, list[tuple[int, Job]]]:
        """The next prefill call: its bucket, and its lanes with their jobs, those of one bucket, oldest first."""
        if not self.jobs:
            return 0, []
        c = self.config
        bucket = c.bucket(self.jobs[0].remaining)
        lanes = c.lanes(bucket)
        same = [job for job in self.jobs if c.bucket(job.remaining) == bucket]
        audited = [job for job in same if job.audited][: min(c.audit_slots, lanes)]
        others = [job for job in same if not job.audited]
        chosen = [*enumerate(audited), *enumerate(others, start=len(audited))][:lanes]
        return bucket, chosen

    def fed(self, job: Job) -> tuple[list[int], list[int]]:
        """A job is done, its sequences are ready, each with pages of its own to write to.

        Returns the pages that have to be copied, from and to.
        """
        self.jobs.remove(job)
        leader, *others = job.sequences
        whole, tail = divmod(leader.target, self.config.page_size)
        sources, targets = [], []
        for sequence in others:
            shared = leader.pages[:whole]
            self.pool.share(shared)
            sequence.pages = list(shared)
            if tail:
                sequence.pages.append(job.tails.pop())
                sources.append(leader.pages[whole])
                targets.append(sequence.pages[whole])
        self.pool.release(job.tails)  # of sequences that were cancelled meanwhile
        for sequence in job.sequences:
            sequence.state = State.READY
            self.ready.append(sequence)
        return sources, targets

    # -- decoding --------------------------------------------------------------------------------------------------

    def _free(self) -> tuple[list[int], list[int]]:
        """Free slots, the next one last: those whose codes can be kept, and the others."""
        audit = self.config.audit_slots
        free = [i for i in range(len(self.slots) - 1, -1, -1) if self.slots[i] is None]
        return [i for i in free if i < audit], [i for i in free if i >= audit]

    def _give_slot(self, sequence: Sequence, free: tuple[list[int], list[int]]) -> bool:
        """Whether there is one for it."""
        slot = _choose(sequence, free)
        if slot is not None:
            sequence.slot, self.slots[slot] = slot, sequence
        return slot is not None

    def place(self) -> None:
        """Gives ready sequences slots."""
        free, waiting = self._free(), collections.deque()
        for sequence in self.ready:
            if sequence.slot is None and not self._give_slot(sequence, free):
                waiting.append(sequence)
                continue
            sequence.state = State.RUNNING
            self.table.enter(sequence)
        self.ready = waiting

    def running(self) -> Iterator[Sequence]:
        return (s for s in self.slots if s is not None and s.state is State.RUNNING)

    def reserve(self) -> None:
        """Pages for the next chunk of all that run, oldest first; the youngest give theirs where there are too few."""
        needed = self.table.needed()
        slots = np.flatnonzero(needed)
        for slot in slots[np.argsort(self.table.started[slots])]:
            sequence = self.slots[slot]
            while sequence is not None and sequence.state is State.RUNNING:  # else its pages were taken
                taken = self.pool.take(int(needed[slot]))
                if taken is not None:
                    self.table.give(sequence, taken)
                    break
                self.preempt(self._victim(sequence))

    def _victim(self, needing: Sequence) -> Sequence:
        """Whose pages are taken: the youngest between turns, which nobody waits for, else the youngest of all."""
        holders = self._holders(needing)
        idle = [sequence for sequence in holders if sequence.state is State.PAUSED]
        return max(idle or [*holders, needing], key=lambda s: s.started)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages. Its tokens stay; its rows are computed, and recorded, again."""
        self.preemptions += 1
        group, moves = [sequence], sequence.state not in (State.PAUSED, State.WAITING)
        if sequence.state is State.PREFILL:  # it leads a job, which is begun anew
            job = next(job for job in self.jobs if job.leader is sequence)
            self.jobs.remove(job)
            self.pool.release(job.tails)
            group = job.sequences
        for member in group:
            self._leave(member)
        sequence.fed = 0
        if moves:
            self._wait(group)

    def pause(self, sequence: Sequence) -> None:
        """Between turns a sequence keeps its pages, and its slot if it has state there."""
        if sequence.state is State.READY:  # its first token was its last
            self.ready.remove(sequence)
        if sequence.state is State.RUNNING:
            self.table.leave(sequence)
        if sequence.slot is not None and not self.keeps_slot:
            self.slots[sequence.slot], sequence.slot = None, None
        sequence.state = State.PAUSED

    # -- departure -------------------------------------------------------------------------------------------------

    def end(self, sequence: Sequence) -> Sequence | None:
        """A sequence is done, wherever it is. Returns who feeds what they have in common in its place, if any do."""
        heir = None
        if sequence.state is State.WAITING:
            group = next(group for group in self.waiting if sequence in group)
            group.remove(sequence)
            if not group:
                self.waiting.remove(group)
        elif sequence.state is State.PREFILL:
            job = next(job for job in self.jobs if sequence in job.sequences)
            led = job.leader is sequence
            job.sequences.remove(sequence)
            if not job.sequences:
                self.jobs.remove(job)
                self.pool.release(job.tails)
            elif led:
                heir = job.leader
                heir.pages, sequence.pages = sequence.pages, []
                heir.fed, heir.recorded = sequence.fed, sequence.recorded
                heir.versions[: heir.fed] = sequence.versions[: heir.fed]
                if self.keeps_slot:
                    heir.slot, sequence.slot = sequence.slot, heir.slot
                    self.slots[heir.slot], self.slots[sequence.slot] = heir, sequence
        self._leave(sequence)
        sequence.state = State.DONE
        return heir

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is State.READY:
            self.ready.remove(sequence)
        if sequence.state is State.RUNNING:
            self.table.leave(sequence)
        if sequence.slot is not None:
            self.slots[sequence.slot], sequence.slot = None, None
        self.pool.release(sequence.pages)
        sequence.pages = []

    def handed_over(self, sequence: Sequence) -> None:
        """The consumer has a sequence's result: its memory is no longer the engine's."""
        del self.sequences[sequence.id]
        if sequence.started:
            self.host_bytes -= sequence.nbytes

    def check(self) -> None:
        """AssertionError unless every page is free or held by whom it should be."""
        holders = [sequence.pages for sequence in self.sequences.values()]
        self.pool.check([*holders, *(job.tails for job in self.jobs)])
        for i, sequence in enumerate(self.slots):
            assert sequence is None or sequence.slot == i
        assert np.all([s.slot is None or self.slots[s.slot] is s for s in self.sequences.values()])


def _choose(sequence: Sequence, free: tuple[list[int], list[int]]) -> int | None:
    """Takes a slot that serves a sequence from those that are free."""
    audit, others = free
    if sequence.audited:
        return audit.pop() if audit else None
    return others.pop() if others else audit.pop() if audit else None
