"""The reasoning-gym adapter: its problems and scorer, splits that share no question, clear refusals."""

import sys

import pytest

from trace_jax.data import prompt_iterator
from trace_jax.tasks import Task, TaskConfig, TaskError, make_task

pytest.importorskip("reasoning_gym", reason="the optional extra `reasoning` is not installed")

# gsm_symbolic draws from a list of its own size, needle_haystack and modulo_grid use characters beyond ASCII.
NAMES = ["chain_sum", "spell_backward", "gcd", "gsm_symbolic", "modulo_grid", "countdown"]


def build(name, split="train", **kwargs):
    return make_task(TaskConfig(name=f"reasoning_gym/{name}", max_prompt_tokens=4096, **kwargs), split)


@pytest.mark.parametrize("name", NAMES)
def test_problems_are_scored_by_their_own_scorer(name):
    task = build(name)
    assert isinstance(task, Task)
    for index in range(5):
        problem = task.sample(index)
        assert problem == task.sample(index)
        assert problem.prompt == problem.metadata["question"] + "\n"
        assert task.score(f" {problem.worked}\n", problem) == 1.0
        assert task.score("", problem) < 0.5
        assert task.tokenizer.decode(task.tokenizer.encode(problem.prompt)) == problem.prompt


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic"])
def test_splits_share_no_question(name):
    params = {"max_terms": 2, "max_digits": 1} if name == "chain_sum" else {}
    train, evaluation = build(name, params=params), build(name, "eval", seed=7, params=params)
    questions = [{task.sample(i).prompt for i in range(150)} for task in (train, evaluation)]
    assert questions[0] and questions[1] and not questions[0] & questions[1]


def test_options_reach_the_generator():
    task = build("chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    batch = next(prompt_iterator(task, 3, seed=0))
    assert all(problem.metadata["metadata"]["difficulty"]["num_terms"] for problem in batch["problems"])
    assert all(len(problem.answer) <= 2 for problem in batch["problems"])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chain_sums", {}, r"no task 'chain_sums'. Did you mean 'chain_sum'"),
        ("chain_sum", {"terms": 2}, r"'chain_sum' refused the options \{'terms': 2\}"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "refused the options"),
        ("composite", {}, "refused the options"),
    ],
)
def test_refuses(name, params, message):
    with pytest.raises(TaskError, match=message):
        build(name, params=params)


def test_a_missing_extra_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(
        TaskError, match=r"needs the package reasoning-gym.*pip install 'trace-jax\[reasoning\]'"
    ):
        build("chain_sum")
