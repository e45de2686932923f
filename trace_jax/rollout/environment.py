"""Episodes of several turns: many environments, each in a thread of its own, driven over one engine."""

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from trace_jax.rollout.engine import Engine
from trace_jax.rollout.requests import NoRoomError, Request, RequestError, Result
from trace_jax.rollout.sampling import SamplingConfig


class Step(NamedTuple):
    """An environment's answer: the text that the policy reads next, the turn's reward, and whether it was the last."""

    observation: str
    reward: float
    done: bool


@runtime_checkable
class Environment(Protocol):
    """What an episode is played against. Called from a thread, one call at a time."""

    def reset(self) -> str:
        """Begins an episode: the text of the first prompt."""

    def step(self, text: str) -> Step:
        """Answers a response."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """One environment's episode.

    Attributes:
        index: which of the environments.
        result: the sequence of all turns; None where it failed before there was one.
        rewards: one for each answered turn.
        failure: what went wrong, None if nothing did. A failed episode's `result` is what there was of it, cancelled.
    """

    index: int
    result: Result | None
    rewards: tuple[float, ...]
    failure: str | None


@dataclasses.dataclass
class _Playing:
    """An episode under way. `call` counts its calls, so that an answer that comes too late is known as such.

    `result` is set where the sequence has ended, but not its environment: it answers the last turn.
    """

    environment: Environment
    rewards: list[float] = dataclasses.field(default_factory=list)
    id: int | None = None
    call: int = 0
    deadline: float = math.inf
    failure: str | None = None
    result: Result | None = None


def run_episodes(
    engine: Engine,
    environments: Sequence[Environment],
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
    sampling: SamplingConfig,
    seeds: Sequence[int],
    max_length: int,
    step_seconds: float = 60.0,
) -> Iterator[Episode]:
    """Plays one episode with each environment, all at once; yields them as they end.

    Responses of those that decode, answers of the others and prefills of observations go on at the same time. An
    environment that raises, answers with something else than a `Step` or with text that cannot be encoded, or takes
    longer than `step_seconds` fails its episode, the others go on; the thread of one that never comes back is left to
    itself and does not keep the process alive. An episode whose next observation does not fit within `max_length` ends
    with the turns that it has.

    Args:
        engine: without other work; it has none afterwards.
        encode, decode: text to token ids, called from threads, and back.
        sampling: `max_new_tokens` is for a turn.
        seeds: one for each environment.
        max_length: tokens of an episode.

    Raises:
        ValueError: there are no environments, or not a seed for each, or the engine has other work.
    """
    if engine.busy:
        raise ValueError("the engine has other work, whose results would be lost here; run it first.")
    if not environments or len(seeds) != len(environments):
        raise ValueError(
            f"{len(environments)} environments and {len(seeds)} seeds; expected one seed for each, and at least one."
        )
    driver = _Driver(engine, environments, encode, decode, sampling, seeds, max_length, step_seconds)
    yield from driver.run()


class _Driver:
    """State of `run_episodes`, whose arguments it takes."""

    def __init__(self, engine, environments, encode, decode, sampling, seeds, max_length, step_seconds):
        self.engine, self.encode, self.decode, self.sampling = engine, encode, decode, sampling
        self.seeds, self.max_length, self.step_seconds = seeds, max_length, step_seconds
        self.playing = {index: _Playing(environment) for index, environment in enumerate(environments)}
        self.by_id: dict[int, int] = {}
        self.answers: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self.episodes: list[Episode] = []

    def run(self) -> Iterator[Episode]:
        for index, playing in self.playing.items():
            self._ask(index, self._reset, playing.environment)
        while self.playing:
            for result in self.engine.step() if self.engine.busy else ():
                self._take(result)
            self._answers(wait=not self.engine.busy)
            self._time_out()
            yield from self.episodes
            self.episodes.clear()

    # -- calls of environments, from threads ----------------------------------------------------------------------

    def _reset(self, environment: Environment) -> Sequence[int]:
        """Token ids of the first prompt."""
        prompt = environment.reset()
        if not isinstance(prompt, str):
            raise TypeError(f"reset returned {prompt!r}; expected the text of the first prompt")
        return self.encode(prompt)

    def _step(self, environment: Environment, result: Result) -> tuple[Sequence[int], float, bool]:
        """Token ids of the observation, none after the last turn, the reward, and whether it was the last."""
        answer = environment.step(self.decode(result.turn.tolist()))
        if not (isinstance(answer, tuple) and len(answer) == 3 and isinstance(answer[0], str)):
            raise TypeError(f"step returned {answer!r}; expected (observation, reward, done)")
        observation, reward, done = answer
        if not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise ValueError(f"step returned the reward {reward!r}; expected a finite number")
        tokens = () if done else self.encode(observation)
        if len(tokens) == 0 and not done:
            raise ValueError("the observation has no tokens; expected text for the policy to go on from")
        return tokens, float(reward), bool(done)

    def _ask(self, index: int, call: Callable[..., Any], *args: Any) -> None:
        """Calls an environment in a thread; its answer, or error, comes to `answers`."""
        playing = self.playing[index]
        playing.call += 1
        playing.deadline = time.monotonic() + self.step_seconds
        number = playing.call

        def run() -> None:
            try:
                answer = call(*args)
            except Exception as error:  # whatever an environment raises is its episode's failure
                answer = error
            self.answers.put((index, number, answer))

        # A daemon: a thread that hangs must not keep the process from ending.
        threading.Thread(target=run, daemon=True, name=f"environment {index}").start()

    def _answers(self, wait: bool) -> None:
        """Takes the answers that are there; where nothing else is to be done, waits for one or the next deadline."""
        deadline = min((p.deadline for p in self.playing.values()), default=math.inf)
        while True:
            try:
                if wait and math.isfinite(deadline):
                    answer = self.answers.get(timeout=max(deadline - time.monotonic(), 0))
                else:
                    answer = self.answers.get_nowait()
            except queue.Empty:
                return
            wait = False
            index, number, value = answer
            playing = self.playing.get(index)
            if playing is not None and playing.call == number and math.isfinite(playing.deadline):
                playing.deadline = math.inf
                self._answered(index, playing, value)

    def _time_out(self) -> None:
        now = time.monotonic()
        for index, playing in list(self.playing.items()):
            if playing.deadline <= now:
                self._fail(index, f"the environment took longer than {self.step_seconds} s")

    # -- turns --------------------------------------------------------------------------------------------------

    def _answered(self, index: int, playing: _Playing, answer: Any) -> None:
        if isinstance(answer, Exception):
            return self._fail(index, f"{type(answer).__name__}: {answer}")
        if playing.id is None:
            return self._begin(index, playing, answer)
        tokens, reward, done = answer
        playing.rewards.append(reward)
        if playing.result is not None:
            return self._finish(index, playing.result)
        try:
            if not done:
                return self.engine.extend(playing.id, tokens)
        except NoRoomError:
            pass  # the episode ends with the turns it has
        except RequestError as error:
            return self._fail(index, str(error))
        self.engine.end(playing.id)

    def _begin(self, index: int, playing: _Playing, prompt: Sequence[int]) -> None:
        try:
            request = Request(
                prompt=prompt,
                sampling=self.sampling,
                seeds=(self.seeds[index],),
                turns=True,
                max_length=self.max_length,
            )
            (playing.id,) = self.engine.submit(request)
        except RequestError as error:
            return self._fail(index, str(error))
        self.by_id[playing.id] = index

    def _take(self, result: Result) -> None:
        index = self.by_id[result.id]
        playing = self.playing[index]
        if result.finish is None:
            self._ask(index, self._step, playing.environment, result)
        elif result.finish in ("stop", "length") and playing.failure is None:
            playing.result = result  # no room for another turn, but this one has its reward
            self._ask(index, self._step, playing.environment, result)
        else:
            self._finish(index, result)

    def _fail(self, index: int, why: str) -> None:
        playing = self.playing[index]
        playing.failure, playing.deadline = why, math.inf
        playing.call += 1  # whatever still comes is not wanted
        if playing.id is None or playing.result is not None:
            self._finish(index, playing.result)
        else:
            self.engine.cancel(playing.id)

    def _finish(self, index: int, result: Result | None) -> None:
        playing = self.playing.pop(index)
        self.episodes.append(
            Episode(index=index, result=result, rewards=tuple(playing.rewards), failure=playing.failure)
        )
