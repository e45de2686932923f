"""One sequence on its way through an engine."""

import dataclasses
import enum
from collections.abc import Callable

import numpy as np

from trace_jax.rollout.programs import LIMIT, LIVE, POSITION, STOPS, TOKEN, TOP_K, Slots
from trace_jax.rollout.requests import DecodeText, Finish, Request, Result


class State(enum.Enum):
    """Where a sequence is. It holds pages from its first PREFILL on, unless they were taken from it."""

    WAITING = "waiting"  # for pages, to be fed what it has
    PREFILL = "prefill"
    READY = "ready"  # for a slot, to be decoded
    RUNNING = "running"
    PAUSED = "paused"  # between turns
    DONE = "done"


@dataclasses.dataclass(eq=False)
class Sequence:
    """A sequence's tokens so far, what is known of them, and where its rows lie.

    Invariants:
        * `count` tokens are known; the cache holds the rows of the first `fed`, on the device in `pages`.
        * Rows of the first `recorded` tokens are, or are about to be, in `rows`; `versions` are theirs.
        * Until it is admitted it holds no more memory than its prompt takes.
        * While it decodes `fed` is `count` - 1: its last token was drawn and is fed next. Its arrays then are rows of
          a `SlotTable`.
    """

    id: int
    request: Request
    index: int
    key: np.ndarray
    row_bytes: int
    audit_bytes: int
    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    count: int
    limit: int
    rows: np.ndarray | None = None
    audit: np.ndarray | None = None
    state: State = State.WAITING
    fed: int = 0
    recorded: int = 0
    started: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    version: int | None = None
    finish: Finish | None = None
    fed_beyond: bool = False
    """Tokens were fed that a stop string then took away."""

    @classmethod
    def of(
        cls, id: int, request: Request, index: int, key: np.ndarray, row_bytes: int, audit_bytes: int
    ) -> "Sequence":
        """Response `index` of a request; `audit_bytes` is 0 where its codes are not kept."""
        count = len(request.prompt)
        return cls(
            id=id,
            request=request,
            index=index,
            key=key,
            row_bytes=row_bytes,
            audit_bytes=audit_bytes,
            tokens=np.array(request.prompt, np.int32),
            sampled=np.zeros(count, bool),
            logprobs=np.zeros((2, count), np.float32),
            versions=np.full(count, -1, np.int32),
            count=count,
            limit=min(request.length, count + request.sampling.max_new_tokens),
        )

    def begin(self, order: int, take: Callable[[tuple[int, ...]], np.ndarray]) -> None:
        """It is admitted, as number `order`, and gets memory for all tokens that it may have from `take`."""
        self.started = order
        prompt, length = self.tokens, self.length
        self.tokens = np.zeros(length, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.sampled = np.zeros(length, bool)
        self.logprobs = np.zeros((2, length), np.float32)
        self.versions = np.full(length, -1, np.int32)
        given = self.request.rows
        self.rows = take((self.length, self.row_bytes)) if given is None else given[self.index]
        if self.audit_bytes:
            self.audit = take((self.length, self.audit_bytes))

    @property
    def audited(self) -> bool:
        return self.audit_bytes > 0

    @property
    def length(self) -> int:
        """Tokens that it may have."""
        return self.request.length

    @property
    def draws(self) -> bool:
        """Whether a prefill ends with a token being drawn; else the last token was, and is fed by decoding."""
        return not self.sampled[self.count - 1]

    @property
    def target(self) -> int:
        """Tokens that a prefill has to feed in all."""
        return self.count if self.draws else self.count - 1

    @property
    def nbytes(self) -> int:
        """Of the host's memory that it holds, or will once it is admitted."""
        return self.length * (self.row_bytes + self.audit_bytes + 4 + 1 + 8 + 4)

    def fill(self, slots: Slots, at: int) -> None:
        """Writes what programs need to know of it to entry `at`."""
        sampling = self.request.sampling
        columns = [TOKEN, POSITION, LIMIT, LIVE, TOP_K]
        slots.ints[at, columns] = (
            self.tokens[self.count - 1],
            self.count - 1,
            self.limit,
            True,
            sampling.top_k,
        )
        slots.ints[at, STOPS:] = -1
        slots.ints[at, STOPS : STOPS + len(sampling.stop_tokens)] = sampling.stop_tokens
        slots.floats[at] = sampling.inverse_temperature, sampling.top_p, sampling.min_p
        slots.keys[at] = self.key
        slots.table[at] = -1
        slots.table[at, : len(self.pages)] = self.pages

    def advance(self, tokens: int) -> None:
        """Decoding has fed, and drawn, so many tokens: they are in its arrays already."""
        self.count += tokens
        self.fed = self.count - 1
        self.recorded = max(self.recorded, self.fed)

    def feed(self, upto: int) -> None:
        """Tokens up to `upto` are fed by weights of `version`."""
        self.versions[self.fed : upto] = self.version
        self.fed = upto
        self.recorded = max(self.recorded, upto)

    def draw(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Appends drawn tokens, `logprobs` `[2, n]`; `finish` says if the response ends with them."""
        new = slice(self.count, self.count + len(tokens))
        self.tokens[new], self.sampled[new], self.logprobs[:, new] = tokens, True, logprobs
        self.count = new.stop
        if self.tokens[self.count - 1] in self.request.sampling.stop_tokens:
            self.finish = "stop"
        elif self.count >= self.limit:
            self.finish = "length"

    def stop_at_strings(self, decode_text: DecodeText | None, before: int) -> None:
        """Forgets what follows the token that completes a stop string, of what was drawn since `before` tokens.

        A string may span tokens, and a token's text may depend on those before it: the whole response is read.
        """
        strings = self.request.sampling.stop_strings
        if not strings:
            return
        observed = np.flatnonzero(~self.sampled[: self.count])[-1] + 1

        def stops(count: int) -> bool:
            text = decode_text(self.tokens[observed:count].tolist())
            return any(string in text for string in strings)

        if not stops(self.count):
            return
        low, high = max(before, observed), self.count  # it was not there at `low`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if stops(middle) else (middle, high)
        self._cut(high)

    def _cut(self, count: int) -> None:
        self.sampled[count : self.count], self.logprobs[:, count : self.count] = False, 0
        self.tokens[count : self.count] = 0
        self.count, self.finish = count, "stop"
        self.fed_beyond = self.fed > count - 1
        self.fed, self.recorded = min(self.fed, count - 1), min(self.recorded, count - 1)

    def observe(self, tokens: np.ndarray) -> None:
        """Appends tokens that the policy did not draw, and begins another turn."""
        self.tokens[self.count : self.count + len(tokens)] = tokens
        self.count += len(tokens)
        self.limit = min(self.length, self.count + self.request.sampling.max_new_tokens)
        self.finish, self.fed_beyond = None, False

    def result(self) -> Result:
        """What there is of it now; with rows if it has ended."""
        count, recorded = self.count, min(self.recorded, self.count - 1)
        ended = self.state is State.DONE
        return Result(
            id=self.id,
            tokens=self.tokens[:count],
            prompt_length=len(self.request.prompt),
            sampled=self.sampled[:count],
            logprobs=self.logprobs[0, :count],
            raw_logprobs=self.logprobs[1, :count],
            finish=self.finish if ended else None,
            versions=self.versions[:recorded] if ended else None,
            rows=self.rows[:recorded] if ended and self.rows is not None else None,
            audit=self.audit[:recorded] if ended and self.audit is not None else None,
        )
