"""Random requests: nothing leaks, nothing is lost or duplicated, every row belongs to its token."""

import collections
import functools

import numpy as np
import pytest

from tests.trace_jax import small
from tests.trace_jax.rollout.engines import MODEL, weights
from trace_jax.guidance import row_hash, unpack_rows
from trace_jax.rollout import Engine, EngineConfig, Programs, Request, SamplingConfig

LENGTH, PAGE = 48, 8
MOST_STEPS = 40  # per request, far more than any needs


@functools.cache
def programs(sync: str, pages: int) -> Programs:
    config = EngineConfig(
        slots=8,
        max_length=LENGTH,
        page_size=PAGE,
        pages=pages,
        chunk=4,
        buckets=(8, 32),
        prefill_tokens=64,
        host_bytes=200_000,
        sync=sync,
    )
    return Programs(small.masters(MODEL)[0], MODEL, config)


def random_request(rng, number: int) -> Request:
    prompt = rng.integers(0, MODEL.vocab_size, rng.integers(1, 24))
    turns = bool(rng.random() < 0.25)
    new = int(rng.integers(1, 24))
    return Request(
        prompt=prompt,
        sampling=SamplingConfig(
            max_new_tokens=new,
            stop_tokens=tuple(rng.integers(0, MODEL.vocab_size, rng.integers(0, 3)).tolist()),
            temperature=float(rng.choice([1.0, 1.0, 0.7, 0.0])),
            top_k=int(rng.choice([0, 0, 3])),
        ),
        seeds=tuple(int(seed) for seed in 1000 * number + np.arange(rng.integers(1, 4))),
        turns=turns,
        max_length=LENGTH if turns else None,
    )


class Drive:
    """An engine, random things done to it, and what came of it."""

    def __init__(self, sync: str, pages: int, seed: int):
        self.rng, self.version = np.random.default_rng(seed), 0
        self.engine = Engine(programs(sync, pages))
        self.engine.sync(weights(0), 0)
        self.requests, self.results, self.cancelled = {}, {}, set()

    def submit(self, number: int) -> None:
        request = random_request(self.rng, number)
        for index, id in enumerate(self.engine.submit(request)):
            self.requests[id] = (request, index)

    def step(self) -> None:
        rng, scheduler = self.rng, self.engine._scheduler
        if rng.random() < 0.02:
            self.version += 1
            self.engine.sync(weights(self.version % 4), self.version)
        if rng.random() < 0.1 and scheduler.sequences:
            id = int(rng.choice(list(scheduler.sequences)))
            self.engine.cancel(id)
            self.cancelled.add(id)
        for result in self.engine.step():
            if result.finish is None:
                self.next_turn(result)
                continue
            assert result.id not in self.results, "a sequence came back twice"
            self.results[result.id] = result
        scheduler.check()
        assert scheduler.host_bytes <= self.engine.config.host_bytes

    def next_turn(self, result) -> None:
        room = LENGTH - len(result.tokens) - 1
        if self.rng.random() < 0.3 or room < 1:
            return self.engine.end(result.id)
        self.engine.extend(
            result.id, self.rng.integers(0, MODEL.vocab_size, self.rng.integers(1, min(room, 6) + 1))
        )

    def run(self, count: int) -> None:
        for number in range(count):
            self.submit(number)
            while len(self.engine._scheduler.waiting) > 20:
                self.step()
        for _ in range(MOST_STEPS * count):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError(f"no end: {self.state()}")

    def state(self) -> str:
        s = self.engine._scheduler
        states = collections.Counter(sequence.state.value for sequence in s.sequences.values())
        return (
            f"{dict(states)}, {s.pool.free} pages free, {len(s.jobs)} jobs, {s.host_bytes} bytes of the host"
        )


@pytest.mark.parametrize(
    ("sync", "pages", "count"),
    [
        ("finish", 16, 150),
        ("continue", 7, 150),
        pytest.param("finish", 7, 5000, marks=pytest.mark.slow),
        pytest.param("continue", 16, 5000, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_or_duplicated(sync, pages, count):
    drive = Drive(sync, pages, seed=pages)
    drive.run(count)
    engine, scheduler = drive.engine, drive.engine._scheduler
    assert set(drive.results) == set(drive.requests), drive.state()
    assert scheduler.pool.free == pages and not any(scheduler.slots) and scheduler.host_bytes == 0
    assert scheduler.preemptions > 0 and drive.version > 0 and not scheduler.sequences
    assert engine.versions == (drive.version,)
    ends = collections.Counter()
    for id, result in drive.results.items():
        request, _ = drive.requests[id]
        ends[result.finish] += 1
        check_result(engine, request, result)
        assert (result.finish == "cancelled") <= (id in drive.cancelled)
    assert set(ends) == {"stop", "length", "cancelled", "ended"}
    engine.close()


def check_result(engine, request, result) -> None:
    tokens, count = result.tokens, len(result.tokens)
    assert (
        np.array_equal(tokens[: result.prompt_length], request.prompt)
        and not result.sampled[: len(request.prompt)].any()
    )
    assert (result.logprobs[~result.sampled] == 0).all() and (result.raw_logprobs[result.sampled] < 0).all()
    if result.finish != "cancelled":
        assert len(result.rows) == count - 1 and result.sampled[-1]
    if result.rows is None or not len(result.rows):
        assert result.finish == "cancelled"
        return
    (_, _), hashes = unpack_rows(result.rows[None], engine.layout)
    fed = len(result.rows)
    assert np.array_equal(hashes[0], row_hash(tokens[:fed], np.arange(fed)))
    assert (result.versions >= 0).all() and len(result.versions) == fed
    if engine.config.sync == "finish":
        assert len(set(result.versions.tolist())) == 1


def test_a_sequence_is_what_it_is_alone():
    """Unquantized, in FP32, preempted or not: tokens are those of the request by itself."""
    drive = Drive("finish", 10, seed=3)
    rng = np.random.default_rng(5)
    requests = [
        Request(
            prompt=rng.integers(0, 17, rng.integers(1, 24)),
            sampling=SamplingConfig(max_new_tokens=int(rng.integers(8, 24))),
            seeds=(i, 100 + i),
        )
        for i in range(30)
    ]
    engine = drive.engine
    ids = [engine.submit(request) for request in requests]
    results = {result.id: result for result in engine.run()}
    assert engine.meter.preemptions > 3
    for i in range(0, 30, 3):
        with Engine(engine.programs) as alone:
            alone.sync(weights(0), 0)
            expected = sorted(alone.run([requests[i]]), key=lambda result: result.id)
        for id, one in zip(ids[i], expected, strict=True):
            assert np.array_equal(results[id].tokens, one.tokens)
            np.testing.assert_allclose(results[id].logprobs, one.logprobs, atol=1e-4)
