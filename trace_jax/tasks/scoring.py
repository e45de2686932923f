"""Scores of a completion against a reference answer, by name: as text, as a number, as mathematics, by any callable."""

import functools
import inspect
import math
import pkgutil
import re
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

from trace_jax.data.problem import Problem
from trace_jax.tasks.base import TaskError

SCORES = ("exact", "number", "math")
# A sign after a digit is an operation. Exponents are short: Decimal refuses absurd ones.
_NUMBER = re.compile(
    r"(?:(?<!\d)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d{1,4})?",
    re.ASCII | re.IGNORECASE,
)


class Scorer(NamedTuple):
    """How answers are scored.

    `score(completion, problem)` is a reward; `check(answer)` raises ValueError for an answer that is of no use to it.
    `check` is None where the answer is the scorer's own affair.
    """

    score: Callable[[str, Problem], float]
    check: Callable[[str], object] | None


def make_scorer(name: str) -> Scorer:
    """The scorer of a name.

    Args:
      name: `exact` (the whole text, without white space around it), `number` (the last number of the text has the value
        of the answer's), `math` (math-verify finds an expression equal to the answer's), or the dotted name of a
        callable of completion and `Problem`: `package.module:function` or `package.module.function`.

    Raises:
      TaskError: there is no such scorer, what it needs is not installed, or it does not take two arguments.
    """
    if name == "exact":
        return Scorer(_exact, str)
    if name == "number":
        return Scorer(_number, number)
    if name == "math":
        _math_verify()
        return Scorer(_math, _gold)
    return Scorer(_checked(name, _resolve(name)), None)


def number(text: str) -> Decimal:
    """The last number of a text: digits with an optional sign, thousands separators, fraction and power of ten.

    Raises:
      ValueError: there is none.
    """
    found = _NUMBER.findall(text)
    if not found:
        raise ValueError(f"no number in {text!r}")
    return Decimal(found[-1].replace(",", ""))


def _exact(completion: str, problem: Problem) -> float:
    return float(completion.strip() == problem.answer.strip())


def _number(completion: str, problem: Problem) -> float:
    try:
        return float(number(completion) == number(problem.answer))
    except ValueError:
        return 0.0


def _math(completion: str, problem: Problem) -> float:
    library = _math_verify()
    return float(library.verify(_gold(problem.answer), library.parse(completion)))


@functools.cache  # parsing takes milliseconds, and every response to a prompt is compared with the same answer
def _gold(answer: str) -> list:
    parsed = _math_verify().parse(f"\\boxed{{{answer}}}")
    if not parsed:
        raise ValueError(f"math-verify finds no expression in {answer!r}")
    return parsed


def _math_verify():
    try:
        import math_verify
    except ImportError as error:
        raise TaskError(
            f"score 'math' needs the package math-verify, which is not installed ({error}): "
            "pip install 'trace-jax[math]'"
        ) from error
    return math_verify


def _resolve(name: str) -> Callable[[str, Problem], float]:
    if "." not in name and ":" not in name:
        raise TaskError(
            f"unknown score {name!r}; expected one of {', '.join(SCORES)}, or package.module:function"
        )
    try:
        found = pkgutil.resolve_name(name)
    except ImportError as error:
        raise TaskError(
            f"score {name!r} cannot be imported: {error}. Is its folder on PYTHONPATH?"
        ) from error
    except (AttributeError, ValueError) as error:
        raise TaskError(f"score {name!r} does not name anything: {error}") from error
    if not callable(found):
        raise TaskError(f"score {name!r} is {found!r}; expected a callable")
    try:
        inspect.signature(found).bind("completion", "problem")
    except TypeError as error:
        raise TaskError(f"score {name!r} must take a completion and a problem: {error}") from error
    except ValueError:
        pass  # a builtin without a signature shows when it is called
    return found


def _checked(name: str, function: Callable[[str, Problem], float]) -> Callable[[str, Problem], float]:
    def score(completion: str, problem: Problem) -> float:
        value = function(completion, problem)
        try:
            reward = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise TaskError(
                f"score {name!r} returned {value!r} ({type(value).__name__}) for {completion!r} to {problem.prompt!r}; "
                "expected a finite number"
            )
        return reward

    return score
