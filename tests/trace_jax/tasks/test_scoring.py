"""Scores by name: what counts as right, and what a callable may be and return."""

import sys
import types

import numpy as np
import pytest

from trace_jax.tasks import Problem, TaskError
from trace_jax.tasks.scoring import make_scorer, number


def score(name, completion, answer="x"):
    problem = Problem(prompt="?", answer=answer, worked=None, metadata={})
    return make_scorer(name).score(completion, problem)


def test_exact():
    assert score("exact", " 4 2\n", "4 2") == 1.0
    assert score("exact", "42", "4 2") == 0.0 == score("exact", "", "4 2") == score("exact", "A", "a")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        ("so 3 + 4 = 7.", "7"),
        ("-3", "-3"),
        ("it is +2.50 dollars", "2.5"),
        ("10-4", "4"),
        ("x = -4", "-4"),
        ("1,234,567.8", "1234567.8"),
        ("1,23", "23"),
        ("1,2345", "2345"),
        (".5", "0.5"),
        ("6.02e23", "6.02e23"),
        ("1E-3 m", "0.001"),
        ("12%", "12"),
        ("$\\boxed{007}$", "7"),
        ("9 and 8e", "8"),
        ("e5", "5"),
        ("1e99999999999", None),
    ],
)
def test_the_last_number(text, value):
    if value is not None:
        assert number(text) == number(value)
    number(text).as_tuple()  # also of absurd exponents


@pytest.mark.parametrize("text", ["", "none", ".", "-", "²"])
def test_no_number(text):
    with pytest.raises(ValueError, match="no number in"):
        number(text)
    assert score("number", text, "5") == 0.0


def test_numbers_are_compared_by_value():
    assert score("number", "about 1,000.0", "1000") == 1.0
    assert score("number", "1000.0001", "1000") == 0.0


def test_mathematics():
    pytest.importorskip("math_verify")
    assert score("math", "so it is $\\frac{2}{4}$", "1/2") == 1.0
    assert score("math", "\\boxed{0.5}", "\\frac{1}{2}") == 1.0
    assert score("math", "$2x + x$", "3x") == 1.0
    assert score("math", "0.51", "1/2") == 0.0 == score("math", "", "1/2")
    with pytest.raises(ValueError, match="finds no expression in ''"):
        make_scorer("math").check("")


def test_mathematics_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(TaskError, match=r"pip install 'trace-jax\[math\]'"):
        make_scorer("math")


class Half:
    @staticmethod
    def score(completion, problem):
        return 0.5 * len(completion)


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("my_scores")
    monkeypatch.setitem(sys.modules, "my_scores", module)
    module.same = lambda completion, problem: completion == problem.answer
    module.Half = Half
    return module


def test_callables_by_dotted_name(module):
    assert score("my_scores:same", "x") == 1.0 == score("my_scores.same", "x")
    assert score("my_scores:Half.score", "abc") == 1.5
    module.numpy = lambda completion, problem: np.float32(0.25)
    assert type(score("my_scores.numpy", "")) is float


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exactly",
            "unknown score 'exactly'; expected one of exact, number, math, or package.module:function",
        ),
        ("", "unknown score ''"),
        (
            "no_such_package:score",
            "cannot be imported: No module named 'no_such_package'. Is its folder on PYTHONPATH",
        ),
        ("my_scores:missing", "does not name anything: .*missing"),
        ("my_scores:1+1", "does not name anything"),
        ("my_scores:__name__", "is 'my_scores'; expected a callable"),
        ("my_scores:one", "must take a completion and a problem: too many positional arguments"),
    ],
)
def test_callables_that_are_refused(module, name, message):
    module.one = lambda completion: 1.0
    with pytest.raises(TaskError, match=message):
        make_scorer(name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", [1.0, 2.0], 1j])
def test_a_reward_is_a_finite_number(module, value):
    module.bad = lambda completion, problem: value
    with pytest.raises(
        TaskError, match=r"score 'my_scores:bad' returned .* for 'text' to '\?'; expected a finite"
    ):
        score("my_scores:bad", "text")


def test_errors_of_a_callable_are_its_own(module):
    module.bug = lambda completion, problem: 1 / 0
    with pytest.raises(ZeroDivisionError):
        score("my_scores:bug", "")
