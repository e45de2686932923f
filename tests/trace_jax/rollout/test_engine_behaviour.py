"""The engine, promise by promise."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from tests.trace_jax import families, small
from tests.trace_jax.rollout.engines import CONFIG, programs, start, text, weights
from trace_jax.config import ConfigError
from trace_jax.rollout import Engine, Programs, Request, RequestError, SamplingConfig
from trace_jax.rollout.sequences import State


@functools.cache
def family_weights(name: str):
    model = dataclasses.replace(families.config_of(name), dtype="float32")
    return model, small.sync(small.masters(model)[1], None, "float32")


def request(prompt, new=6, seeds=(0,), **options) -> Request:
    sampling = options.pop("sampling", SamplingConfig(max_new_tokens=new))
    return Request(prompt=prompt, sampling=sampling, seeds=seeds, **options)


def by_id(results):
    return sorted(results, key=lambda result: result.id)


def test_a_group_is_fed_its_prompt_once_and_shares_whole_pages():
    engine = start()
    prompt = np.arange(20) % 17
    ids = engine.submit(request(prompt, new=12, seeds=(0, 1, 2)))
    while not all(engine._scheduler.sequences[id].state is State.RUNNING for id in ids):
        assert engine.step() == []
    assert engine.meter.prefilled == 20
    first, second, third = (engine._scheduler.sequences[id].pages for id in ids)
    assert first[:2] == second[:2] == third[:2] and len({first[2], second[2], third[2]}) == 3
    results = by_id(engine.run())
    assert len({tuple(r.tokens) for r in results}) == 3
    for index, result in enumerate(results):
        with start() as alone:
            (expected,) = alone.run([request(prompt, new=12, seeds=(index,))])
        assert np.array_equal(result.tokens, expected.tokens) and np.array_equal(result.rows, expected.rows)


def test_a_long_prompt_is_fed_in_calls_that_depend_on_its_own_length_alone():
    prompt = np.arange(37) % 17
    with start() as alone, start() as engine:
        (expected,) = alone.run([request(prompt)])
        assert alone.meter.prefilled == 37
        others = [request([1 + i], new=9, seeds=(i,)) for i in range(6)]
        results = by_id(engine.run([*others[:3], request(prompt), *others[3:]]))
    mine = results[3]
    assert np.array_equal(mine.tokens, expected.tokens) and np.array_equal(mine.rows, expected.rows)
    assert np.array_equal(mine.logprobs, expected.logprobs)


def test_a_warm_engine_compiles_nothing():
    engine = start()
    mixed = [request(np.arange(n) % 17, new=5, seeds=(n, n + 1)) for n in (1, 7, 9, 30)]
    mixed += [request([3, 4], sampling=SamplingConfig(temperature=0.5, top_p=0.8, max_new_tokens=5))]
    list(engine.run(mixed))
    list(engine.run(mixed[:1]))  # from the model's own distribution alone
    before = engine.programs.compilations
    engine.sync(weights(1), 1)
    list(engine.run(mixed))
    list(engine.run([request(np.arange(n) % 17, new=n % 7 + 1, seeds=(n,)) for n in range(1, 40)]))
    assert engine.programs.compilations == before > 0


@pytest.mark.parametrize("sync", ["finish", "continue"])
def test_new_weights_while_sequences_are_in_flight(sync):
    engine = start(dataclasses.replace(CONFIG, sync=sync))
    engine.submit(request([1, 2, 3], new=20))
    engine.step()
    engine.step()
    engine.sync(weights(1), 5)
    assert engine.versions == ((0, 5) if sync == "finish" else (5,))
    engine.submit(request([4, 5], new=6))
    old, new = by_id(engine.run())
    assert set(new.versions) == {5}
    assert set(old.versions) == ({0} if sync == "finish" else {0, 5})
    assert (np.diff(old.versions) >= 0).all() and engine.versions == (5,)
    with start() as alone:
        (expected,) = alone.run([request([1, 2, 3], new=20)])
    same = np.array_equal(old.tokens, expected.tokens) and np.array_equal(old.logprobs, expected.logprobs)
    assert same == (sync == "finish")
    with pytest.raises(ValueError, match="weight version 5 follows 5; expected a later one"):
        engine.sync(weights(1), 5)


def test_a_stop_string_that_spans_tokens():
    with start() as engine:
        (whole,) = engine.run([request([1, 2], new=24, seeds=(4,))])
    response = text(whole.tokens[2:])
    stop = response[9:12]
    end = response.index(stop) + 3
    sampling = SamplingConfig(max_new_tokens=24, stop_strings=("never there", stop))
    with start(decode_text=text) as engine:
        (cut,) = engine.run([request([1, 2], sampling=sampling, seeds=(4,))])
    assert cut.finish == "stop" and text(cut.tokens[2:]) == response[:end]
    assert len(cut.rows) == len(cut.tokens) - 1 and np.array_equal(cut.rows, whole.rows[: len(cut.rows)])


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "deepseek_v3", "gpt_oss"])
def test_families_in_company_alone_and_in_turns(name):
    """States of DeltaNet cannot forget: what follows a stop string within a chunk must not be in them."""
    model, params = family_weights(name)
    config = dataclasses.replace(CONFIG, slots=3, pages=40)
    own = Programs(small.masters(model)[0], model, config)
    vocabulary = "".join(chr(0x4E00 + i) for i in range(model.vocab_size))

    def decode(tokens):
        return "".join(vocabulary[token] for token in tokens)

    def play(companions, stop):
        with Engine(own, decode_text=decode) as engine:
            engine.sync(params, 0)
            for n in range(companions):
                engine.submit(request([2 + n, 3], new=7, seeds=(50 + n,)))
            sampling = SamplingConfig(max_new_tokens=9, stop_strings=stop)
            ids = engine.submit(
                Request(
                    prompt=[1, 5, 2, 7, 3, 3, 9, 4, 6],
                    sampling=sampling,
                    seeds=(1, 2),
                    turns=True,
                    max_length=40,
                )
            )
            turns, ended = dict.fromkeys(ids, 0), {}
            while engine.busy:
                for result in engine.step():
                    if result.finish is None:
                        turns[result.id] += 1
                        if turns[result.id] == 2:
                            engine.end(result.id)
                        else:
                            engine.extend(result.id, [4, 4, 8])
                    else:
                        ended[result.id] = result
            engine._scheduler.check()
            return [ended[id] for id in ids]

    alone = play(0, ())
    stop = (decode(alone[0].tokens[11:12]),)  # the first response's third token
    for stops in ((), stop):
        few, many = play(0, stops), play(5, stops)
        for a, b in zip(few, many, strict=True):
            assert np.array_equal(a.tokens, b.tokens), name
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            assert len(a.rows) == len(a.tokens) - 1
    assert len(few[0].tokens) < len(alone[0].tokens)


def test_memory_of_the_host_is_never_more_than_stated():
    probe = start()
    probe.submit(request([1], new=20))
    each = next(iter(probe._scheduler.sequences.values())).nbytes
    engine = start(dataclasses.replace(CONFIG, host_bytes=2 * each))
    for n in range(9):
        engine.submit(request([1], new=20, seeds=(n,)))
    finished = []
    while engine.busy:
        scheduler = engine._scheduler
        held = [s for s in scheduler.sequences.values() if s.started]
        assert sum(s.nbytes for s in held) == scheduler.host_bytes <= 2 * each
        finished += engine.step()
    assert len(finished) == 9
    with pytest.raises(RequestError, match=r"takes \d+ bytes of the host, engine.host_bytes is"):
        engine.submit(request([1], new=60))


def test_cancelling_wherever_a_sequence_is():
    engine = start()
    leader, follower, other = engine.submit(request(np.arange(40) % 17, new=8, seeds=(0, 1, 2)))
    engine.step()
    sequences = engine._scheduler.sequences
    assert sequences[leader].state is State.PREFILL and 0 < sequences[leader].fed < 40
    engine.cancel(leader)
    engine.cancel(other)
    (waiting,) = engine.submit(request([1, 2]))
    engine.cancel(waiting)
    engine._scheduler.check()
    results = {r.id: r for r in engine.run()}
    ends = [results[id].finish for id in (leader, follower, other, waiting)]
    assert ends == ["cancelled", "length", "cancelled", "cancelled"]
    with start() as alone:
        (expected,) = alone.run([request(np.arange(40) % 17, new=8, seeds=(1,))])
    assert np.array_equal(results[follower].rows, expected.rows)
    assert len(results[leader].rows) == 16 and results[waiting].rows is None
    (running,) = engine.submit(request([1, 2], new=30))
    engine.step()
    engine.cancel(running)
    engine.cancel(running)
    (result,) = engine.run()
    assert result.finish == "cancelled" and len(result.rows) == len(result.tokens) - 1 > 2
    engine._scheduler.check()
    assert engine._scheduler.pool.free == CONFIG.pages and not engine.busy


def test_requests_wait_for_the_memory_that_sequences_between_turns_hold():
    engine = start(dataclasses.replace(CONFIG, host_bytes=1200))
    (first,) = engine.submit(request([1], new=3, turns=True, max_length=40))
    engine.submit(request([2], new=30))
    (turn,) = engine.run()
    assert turn.id == first and turn.finish is None and not engine.busy
    engine.end(first)
    assert engine.busy and {r.finish for r in engine.run()} == {"ended", "length"}


def test_a_device_without_room_says_what_to_lower(monkeypatch):
    def full(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9GiB.")

    monkeypatch.setattr(Programs, "init_cache", full)
    engine = Engine(programs())
    monkeypatch.setattr(engine.programs, "layouts", lambda params, words: (None, None))
    with pytest.raises(
        MemoryError, match=r"48 pages of 8 positions. Lower engine.pages .*trying to allocate 9GiB"
    ):
        engine.sync(weights(0), 0)


def test_metrics_and_trace(tmp_path):
    engine = start()
    engine.meter.trace()
    list(engine.run([request([1, 2, 3], new=9, seeds=(n,)) for n in range(5)]))
    metrics = engine.meter.metrics()
    assert engine.meter.sampled == 45 and engine.meter.prefilled == 15
    assert metrics["engine/tokens_per_s"] > 0 and metrics["engine/record_bytes_per_s"] > 0
    assert 0 < metrics["engine/slot_occupancy"] <= 1 and 0 < metrics["engine/page_occupancy"] <= 1
    shares = [metrics[f"engine/{name}_share"] for name in ("prefill", "decode", "schedule")]
    assert all(share > 0 for share in shares) and sum(shares) <= 1.001
    assert "tokens/s" in engine.meter.line()
    engine.meter.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"prefill", "decode", "schedule", "slots", "pages"} == {event["name"] for event in events}
    with pytest.raises(ValueError, match="nothing was traced"):
        engine.meter.save_trace(tmp_path / "again.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: request([]), "the prompt is empty"),
        (lambda: request([1], seeds=()), "without seeds asks for no response"),
        (lambda: request([1], seeds=(1, 2), audit=(True,)), "audit has 1 entries for 2 responses"),
        (lambda: request([1, 2], max_length=2), "max_length is 2, but the prompt alone has 2 tokens"),
        (lambda: request([1], new=64), "need 65 positions, the engine has 64"),
        (lambda: request([17]), "the prompt holds id 17; the model has 17 ids"),
        (lambda: request([-1]), "the prompt holds id -1"),
        (lambda: request([0.5]), "expected a list of token ids"),
        (lambda: request([1], sampling=SamplingConfig(stop_strings=("a",))), "stop_strings need Engine"),
        (lambda: request([1], audit=(True,)), "audit needs an FP4 engine with audit_slots"),
    ],
)
def test_refuses_requests(make, message):
    with start() as engine, pytest.raises(RequestError, match=message):
        engine.submit(make())


def test_refuses_turns_that_are_none():
    engine = start()
    with pytest.raises(RequestError, match="sequence 7 is unknown"):
        engine.extend(7, [1])
    (id,) = engine.submit(request([1], new=3, turns=True, max_length=12))
    with pytest.raises(RequestError, match="is waiting; expected one that waits between turns"):
        engine.end(id)
    (turn,) = engine.run()
    assert turn.finish is None and len(turn.turn) == 3 and turn.rows is None
    with pytest.raises(RequestError, match="leaves no room for a response within its 12"):
        engine.extend(id, [1] * 8)
    with pytest.raises(RequestError, match="needs token ids, at least one"):
        engine.extend(id, [])
    with pytest.raises(RequestError, match="an observation holds id 99"):
        engine.extend(id, [99])
    engine.extend(id, [1] * 7)
    (result,) = engine.run()
    assert result.finish == "length" and len(result.tokens) == 12 and result.sampled.sum() == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "engine.slots is 0"),
        ({"sync": "later"}, r"engine.sync is 'later'; expected one of \('finish', 'continue'\)"),
        ({"buckets": (16, 8)}, r"engine.buckets are \(16, 8\); expected increasing lengths"),
        ({"audit_slots": 5}, "engine.audit_slots is 5; expected 0 to the 4 slots"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_no_weights_yet():
    with (
        Engine(programs()) as engine,
        pytest.raises(RequestError, match="the engine has no weights yet; call sync"),
    ):
        engine.submit(request([1]))
