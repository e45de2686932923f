"""Multi-digit addition and multiplication with worked steps, one token per character.

A worked answer goes digit by digit from the low end, as on paper, each step one fact of the tables plus the carry:

    47+85=  7+5=12;4+8+1=13;132
    47*6=   7*6=42;4*6+4=28;282
    47*36=  7*6=42;4*6+4=28;282;7*3=21;4*3+2=14;1410;2+0=2;8+1=9;2+4=6;0+1=1;1692

so that a model of a few narrow layers can learn it. Only the text after the last `;` is scored.
"""

import dataclasses
import random

from trace_jax.data.problem import Problem
from trace_jax.data.tokenizer import CharTokenizer
from trace_jax.tasks.base import Split, TaskError, in_split

ALPHABET = "0123456789+*=;"
SEPARATOR = ";"
OPERATIONS = {"add": "+", "mul": "*"}
_MAX_DRAWS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Difficulty of the task.

    Attributes:
      operations: of "add" and "mul", drawn with equal chance.
      min_digits, max_digits: of both summands and of the multiplicand; every number of digits is equally likely.
      multiplier_digits: of the multiplier (2 to 9 when 1).
      eval_share: share of all problems that belong to the evaluation split.
      partial_credit: reward of a wrong answer, times the share of its digits that are right. 0: only exact answers.
    """

    operations: tuple[str, ...] = ("add", "mul")
    min_digits: int = 2
    max_digits: int = 2
    multiplier_digits: int = 1
    eval_share: float = 0.1
    partial_credit: float = 0.0

    def __post_init__(self):
        unknown = set(self.operations) - set(OPERATIONS)
        if unknown or not self.operations:
            raise ValueError(f"operations are {self.operations}; expected some of {tuple(OPERATIONS)}")
        if not 1 <= self.min_digits <= self.max_digits:
            raise ValueError(
                f"min_digits is {self.min_digits} and max_digits {self.max_digits}; expected 1 <= min <= max"
            )
        if self.multiplier_digits < 1:
            raise ValueError(f"multiplier_digits is {self.multiplier_digits}; expected at least 1")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share is {self.eval_share}; expected between 0 and 1")
        if not 0 <= self.partial_credit < 1:
            raise ValueError(f"partial_credit is {self.partial_credit}; expected at least 0 and below 1")


class ArithmeticTask:
    """Problems drawn by (seed, split, index); a sum and its mirror image are one problem to the split."""

    name = "arithmetic"

    def __init__(
        self, config: ArithmeticConfig, *, split: Split, size: int, seed: int, max_prompt_tokens: int
    ):
        self.config = config
        self.split = split
        self.size = size
        self.seed = seed
        self.max_prompt_tokens = max_prompt_tokens
        self.tokenizer = CharTokenizer(ALPHABET)

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Problem:
        """The problem of this index: the first draw of its own random stream that lies in the split.

        Raises:
          IndexError: outside the task.
          TaskError: the space of problems is so small that the split is empty.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"problem {index} of a task of {self.size}")
        # Python's generator, seeded with text: the same problems on every platform and library version.
        rng = random.Random(f"arithmetic/{self.seed}/{self.split}/{index}")
        for _ in range(_MAX_DRAWS):
            operation, a, b = self._draw(rng)
            identity = f"{min(a, b)}{OPERATIONS[operation]}{max(a, b)}"
            if in_split(identity, self.split, self.config.eval_share):
                worked = worked_answer(operation, a, b)
                return Problem(
                    prompt=f"{a}{OPERATIONS[operation]}{b}=",
                    answer=worked.rsplit(SEPARATOR, 1)[-1],
                    worked=worked,
                    metadata={"operation": operation, "a": a, "b": b},
                )
        raise TaskError(
            f"no {self.split} problem among {_MAX_DRAWS} draws of {self.config}: raise max_digits, or change eval_share"
        )

    def score(self, completion: str, problem: Problem) -> float:
        """1 if the text after the last separator is exactly the answer, else 0 or the configured partial credit."""
        given = completion.rsplit(SEPARATOR, 1)[-1]
        if given == problem.answer:
            return 1.0
        # Compared from the low digit, where the work starts.
        right = sum(x == y for x, y in zip(reversed(given), reversed(problem.answer), strict=False))
        return self.config.partial_credit * right / max(len(given), len(problem.answer))

    def _draw(self, rng: random.Random) -> tuple[str, int, int]:
        config = self.config
        operation = rng.choice(config.operations)
        a = _number(rng, rng.randint(config.min_digits, config.max_digits))
        if operation == "add":
            return operation, a, _number(rng, rng.randint(config.min_digits, config.max_digits))
        return operation, a, max(2, _number(rng, config.multiplier_digits))


def worked_answer(operation: str, a: int, b: int) -> str:
    """The steps and the answer of `a` + `b` or `a` * `b`, joined by the separator."""
    if operation == "add":
        return SEPARATOR.join([*_add_steps(a, b), str(a + b)])
    steps: list[str] = []
    total = 0
    for place, digit in enumerate(_digits(b)):
        if digit == 0:
            continue
        partial = a * digit * 10**place
        steps += [*_multiply_steps(a, digit), str(partial)]
        if total:
            steps += [*_add_steps(total, partial), str(total + partial)]
        total += partial
    return SEPARATOR.join(steps or ["0"])


def _add_steps(a: int, b: int) -> list[str]:
    length = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(_digits(a, length), _digits(b, length), strict=True):
        steps.append(_step(f"{x}+{y}", carry, x + y + carry))
        carry = (x + y + carry) // 10
    return steps


def _multiply_steps(a: int, digit: int) -> list[str]:
    steps, carry = [], 0
    for x in _digits(a):
        steps.append(_step(f"{x}*{digit}", carry, x * digit + carry))
        carry = (x * digit + carry) // 10
    return steps


def _step(fact: str, carry: int, value: int) -> str:
    return f"{fact}+{carry}={value}" if carry else f"{fact}={value}"


def _digits(number: int, length: int = 0) -> list[int]:
    """Low digit first, with zeros up to `length`."""
    return [int(char) for char in reversed(str(number).zfill(length))]


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)
