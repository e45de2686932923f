"""Episodes over one engine: what was drawn and what was told, failures that stay their own, weights that change."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from tests.trace_jax.rollout.engines import CONFIG, LETTERS, MODEL, programs, start, text, weights
from trace_jax.rollout import (
    Engine,
    Request,
    SamplingConfig,
    Step,
    collate,
    load_trajectories,
    run_episodes,
    save_trajectories,
)

SAMPLING = SamplingConfig(max_new_tokens=4)


def encode(string):
    return [99 if letter == "!" else LETTERS.index(letter) for letter in string]


class Counting:
    """Answers with its number of turns so far, as letters; rewards the share of an "a"; ends after `turns`."""

    def __init__(self, name: str, turns: int, seconds: float = 0.0):
        self.name, self.turns, self.seconds, self.heard = name, turns, seconds, []

    def reset(self):
        return self.name

    def step(self, response):
        time.sleep(self.seconds)
        self.heard.append(response)
        n = len(self.heard)
        return Step(LETTERS[n] * n, float("a" in response), n == self.turns)


class Failing(Counting):
    def __init__(self, name, how):
        super().__init__(name, 3)
        self.how = how

    def reset(self):
        return self.how["reset"]() if "reset" in self.how else self.name

    def step(self, response):
        return self.how["step"]() if "step" in self.how else super().step(response)


def play(engine, environments, **options):
    options = {"sampling": SAMPLING, "max_length": 48, "seeds": range(len(environments))} | options
    episodes = run_episodes(engine, environments, encode=encode, decode=text, **options)
    return sorted(episodes, key=lambda episode: episode.index)


def test_episodes_hold_what_was_drawn_and_what_was_told():
    environments = [Counting("abcdefgh"[: 1 + n % 5], 1 + n % 4) for n in range(11)]  # more than slots
    with start() as engine:
        episodes = play(engine, environments)
        assert engine._scheduler.pool.free == CONFIG.pages and not engine._scheduler.sequences
    assert [episode.index for episode in episodes] == list(range(11))
    for episode, environment in zip(episodes, environments, strict=True):
        result, said, told, drawn = episode.result, environment.heard, environment.name, ""
        marks = [False] * len(told)
        for n, response in enumerate(said, start=1):
            told += response
            marks += [True] * len(response)
            if n < environment.turns:
                told += LETTERS[n] * n
                marks += [False] * n
            drawn += response
        assert text(result.tokens) == told and result.sampled.tolist() == marks
        assert (result.logprobs[~result.sampled] == 0).all() and (result.logprobs[result.sampled] < 0).all()
        assert len(result.rows) == len(result.versions) == len(result.tokens) - 1
        assert episode.failure is None and result.finish == "ended"
        assert episode.rewards == tuple(float("a" in response) for response in said)


def test_an_episode_is_what_it_is_alone():
    with start() as engine:
        together = play(engine, [Counting("abc"[: 1 + n % 3], 3) for n in range(6)])
    for n in (0, 4):
        with start() as engine:
            (alone,) = play(engine, [Counting("abc"[: 1 + n % 3], 3)], seeds=[n])
        assert np.array_equal(alone.result.tokens, together[n].result.tokens)
        np.testing.assert_allclose(alone.result.logprobs, together[n].result.logprobs, atol=1e-4)


def test_environments_think_at_the_same_time():
    with start() as engine:
        play(engine, [Counting("a", 2)])  # compiles
        begun = time.monotonic()
        play(engine, [Counting("a", 2, seconds=0.3) for _ in range(8)])
    assert time.monotonic() - begun < 0.6 * 16 * 0.3


def raises():
    raise RuntimeError("no disk")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"reset": raises}, "RuntimeError: no disk"),
        ({"step": raises}, "RuntimeError: no disk"),
        ({"step": lambda: "text"}, "step returned 'text'; expected"),
        ({"step": lambda: Step("a", float("nan"), False)}, "reward nan; expected a finite number"),
        ({"step": lambda: Step("", 0.0, False)}, "the observation has no tokens"),
        ({"step": lambda: Step("?", 0.0, False)}, "ValueError"),
        ({"step": lambda: Step("!", 0.0, False)}, "an observation holds id 99"),
        ({"reset": lambda: 3}, "reset returned 3; expected the text"),
        ({"reset": lambda: ""}, "the prompt is empty"),
        ({"reset": lambda: "a" * 60}, "max_length is 48, but the prompt alone has 60 tokens"),
    ],
    ids=[
        "reset raises",
        "step raises",
        "text",
        "nan",
        "no tokens",
        "no code",
        "no id",
        "no text",
        "empty",
        "long",
    ],
)
def test_a_failure_is_its_own_episodes(how, why):
    with start() as engine:
        good, bad, other = play(engine, [Counting("ab", 2), Failing("c", how), Counting("abc", 3)])
        assert not engine._scheduler.sequences
    assert why in bad.failure and good.failure is None is other.failure
    assert len(good.rewards) == 2 and len(other.rewards) == 3
    assert bad.result is None or bad.result.finish == "cancelled"


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_call_that_hangs_fails_its_episode_alone(call):
    hang = threading.Event()
    with start() as engine:
        play(engine, [Counting("a", 1)])
        begun = time.monotonic()
        bad, good = play(engine, [Failing("c", {call: hang.wait}), Counting("abc", 3)], step_seconds=0.5)
    assert time.monotonic() - begun < 10
    assert "took longer than 0.5 s" in bad.failure and good.failure is None and len(good.rewards) == 3
    hang.set()


def test_an_episode_without_room_ends_with_the_turns_it_has():
    with start() as engine:
        (episode,) = play(engine, [Counting("ab", 100)], max_length=16)
    assert episode.failure is None and 1 < len(episode.rewards) < 6
    assert len(episode.result.tokens) <= 16 and episode.result.sampled[-1]


def test_observations_may_be_read_under_newer_weights():
    engine = Engine(programs(dataclasses.replace(CONFIG, sync="continue")))
    engine.sync(weights(0), 0)

    class Syncing(Counting):
        def step(self, response):
            answer = super().step(response)
            due.set()
            return answer

    due, version = threading.Event(), 0
    episodes = run_episodes(
        engine, [Syncing("abc", 3)], encode=encode, decode=text, sampling=SAMPLING, seeds=[0], max_length=48
    )
    step = engine.step

    def stepping():
        nonlocal version
        if due.is_set():
            due.clear()
            version += 1
            engine.sync(weights(version), version)
        return step()

    engine.step = stepping
    (episode,) = episodes
    assert len(set(episode.result.versions.tolist())) > 1 and (np.diff(episode.result.versions) >= 0).all()


def test_the_trainer_sees_observations_but_does_not_learn_to_say_them(tmp_path):
    with start() as engine:
        episodes = play(engine, [Counting("ab", 2), Counting("abcd", 3)])
        results = [episode.result for episode in episodes]
        t = collate(results, engine.layout, engine.audit_layout, MODEL, length=48)
    for n, result in enumerate(results):
        assert np.array_equal(t.sampled[n, : len(result.tokens)], result.sampled)
        assert t.observed[n].sum() == (~result.sampled[result.prompt_length :]).sum() > 0
    assert np.array_equal(t.record.row_hash != 0, t.fed)
    save_trajectories(tmp_path / "episodes.npz", t)
    assert np.array_equal(load_trajectories(tmp_path / "episodes.npz").sampled, t.sampled)


def test_refuses():
    with start() as engine:
        with pytest.raises(ValueError, match="0 environments and 0 seeds"):
            play(engine, [])
        with pytest.raises(ValueError, match="1 environments and 2 seeds"):
            play(engine, [Counting("a", 1)], seeds=[0, 1])
        engine.submit(Request(prompt=[1]))
        with pytest.raises(ValueError, match="the engine has other work"):
            play(engine, [Counting("a", 1)])
