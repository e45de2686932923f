"""The arithmetic task: true steps, exact scores, fixed problems, and splits that share none."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.config import ConfigError
from trace_jax.tasks import ArithmeticConfig, ArithmeticTask, Task, TaskConfig, TaskError, make_task
from trace_jax.tasks.arithmetic import worked_answer


def build(split="train", size=2000, seed=0, **options):
    return ArithmeticTask(
        ArithmeticConfig(**options), split=split, size=size, seed=seed, max_prompt_tokens=32
    )


@pytest.mark.parametrize(
    ("operation", "a", "b", "worked"),
    [
        ("add", 47, 85, "7+5=12;4+8+1=13;132"),
        ("add", 42, 31, "2+1=3;4+3=7;73"),
        ("add", 95, 7, "5+7=12;9+0+1=10;102"),
        ("mul", 47, 6, "7*6=42;4*6+4=28;282"),
        ("mul", 47, 36, "7*6=42;4*6+4=28;282;7*3=21;4*3+2=14;1410;2+0=2;8+1=9;2+4=6;0+1=1;1692"),
        ("mul", 47, 30, "7*3=21;4*3+2=14;1410"),
        ("mul", 47, 0, "0"),
    ],
)
def test_worked_answers(operation, a, b, worked):
    assert worked_answer(operation, a, b) == worked


@given(st.sampled_from(["add", "mul"]), st.integers(0, 9999), st.integers(0, 999))
def test_every_step_is_true_and_the_last_is_the_answer(operation, a, b):
    *steps, answer = worked_answer(operation, a, b).split(";")
    assert int(answer) == (a + b if operation == "add" else a * b)
    for step in steps:
        left, _, right = step.partition("=")
        assert re.fullmatch(r"\d[+*]\d(\+\d)?", left) or step.isdigit()
        if right:
            assert eval(left) == int(right)  # a digit, a sign, a digit: checked above


def test_problem_and_score():
    task = build()
    assert isinstance(task, Task)
    for index in range(200):
        problem = task.sample(index)
        a, operator, b = re.fullmatch(r"(\d+)([+*])(\d+)=", problem.prompt).groups()
        assert int(problem.answer) == (int(a) + int(b) if operator == "+" else int(a) * int(b))
        assert 10 <= int(a) <= 99 and (10 <= int(b) <= 99 if operator == "+" else 2 <= int(b) <= 9)
        assert task.score(problem.worked, problem) == 1.0
        assert task.score(problem.answer, problem) == 1.0
        for wrong in (
            "",
            ";",
            problem.worked + ";",
            problem.worked[:-1],
            problem.worked + "0",
            problem.answer + ";7",
        ):
            assert task.score(wrong, problem) == 0.0, wrong


def test_partial_credit_is_small_and_off_by_default():
    task = build(partial_credit=0.3)
    problem = next(p for p in map(task.sample, range(99)) if p.answer[0] != "9" and len(p.answer) == 3)
    assert task.score(problem.worked, problem) == 1.0
    assert task.score("9" + problem.answer[1:], problem) == pytest.approx(0.2)
    assert task.score("", problem) == 0.0


def test_problems_are_a_function_of_seed_split_and_index():
    def prompts(**kwargs):
        return [task.sample(i).prompt for task in [build(**kwargs)] for i in range(50)]

    assert prompts() == prompts() == prompts(size=50)
    assert prompts() != prompts(seed=1)
    assert prompts() != prompts(split="eval")
    # Fixed for good: runs of different versions are compared on the same problems.
    assert prompts()[:4] == PINNED


PINNED = ["81+94=", "42+83=", "88+12=", "97*8="]


def test_splits_share_no_problem_whatever_the_seeds():
    def identities(split, seed):
        task = build(split=split, size=3000, seed=seed)
        found = [task.sample(i).metadata for i in range(3000)]
        return {(m["operation"], *sorted((m["a"], m["b"]))) for m in found}

    train, evaluation = identities("train", 0), identities("eval", 1)
    assert not train & evaluation
    assert len(train) > 1000 and len(evaluation) > 100


def test_evaluation_problems_look_like_training_problems():
    """A held-out set that differed in kind (say, in its carries) would measure something else."""

    def carries(split):
        task = build(split=split, operations=("add",))
        return sum("+1=" in task.sample(i).worked for i in range(2000)) / 2000

    assert abs(carries("train") - carries("eval")) < 0.06


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"operations": ("add", "sub")},
            r"operations are \('add', 'sub'\); expected some of \('add', 'mul'\)",
        ),
        ({"operations": ()}, "expected some of"),
        ({"min_digits": 3}, "min_digits is 3 and max_digits 2"),
        ({"multiplier_digits": 0}, "multiplier_digits is 0"),
        ({"eval_share": 1.0}, "eval_share is 1.0"),
        ({"partial_credit": 1.0}, "partial_credit is 1.0"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig(**options)


def test_index_outside_the_task():
    with pytest.raises(IndexError, match="problem 10 of a task of 10"):
        build(size=10).sample(10)


def test_an_empty_split_is_an_error_not_a_hang():
    task = build(split="eval", min_digits=1, max_digits=1, operations=("mul",), eval_share=1e-9)
    with pytest.raises(TaskError, match=r"no eval problem .* raise max_digits"):
        task.sample(0)


def test_make_task():
    config = TaskConfig(params={"operations": ["add"], "max_digits": 3}, train_size=5, eval_size=3, seed=4)
    train, evaluation = make_task(config), make_task(config, "eval")
    assert (len(train), len(evaluation)) == (5, 3)
    assert train.config.operations == ("add",)
    with pytest.raises(
        TaskError, match=r"unknown task 'arithmetics'; expected one of arithmetic, jsonl, reasoning_gym/"
    ):
        make_task(TaskConfig(name="arithmetics"))
    with pytest.raises(TaskError, match=r"task 'arithmetic' is empty: eval_size is 0"):
        make_task(TaskConfig(eval_size=0), "eval")
    with pytest.raises(ConfigError, match=r"unknown key 'task.params.digits'.*max_digits"):
        make_task(TaskConfig(params={"digits": 3}))
    with pytest.raises(ValueError, match="train_size is -1"):
        TaskConfig(train_size=-1)
