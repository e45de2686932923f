"""Tasks from JSON Lines files, alone and in a chat template."""

import json

import pytest

from trace_jax.config import ConfigError, from_mapping, to_mapping
from trace_jax.data import HfTokenizer, TokenizerError, prompt_iterator
from trace_jax.tasks import ChatConfig, ChatTask, Task, TaskConfig, TaskError, make_task
from trace_jax.tasks.chat import Problem


@pytest.fixture
def write(tmp_path):
    def file(rows, name="problems.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return file


def build(path, split="train", sizes=None, **params):
    return make_task(
        TaskConfig(name="jsonl", params={"path": path} | params, max_prompt_tokens=64, **(sizes or {})), split
    )


SUMS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(200)]


def test_problems_in_the_order_of_the_file(write):
    rows = [
        {"q": "a", "a": "A", "steps": "so A", "level": 2, "unused": 0},
        {"q": "b", "a": 1.5, "steps": "", "level": None},
    ]
    task = build(write(rows), eval_share=1e-9, prompt="q", answer="a", worked="steps", metadata=["level"])
    assert isinstance(task, Task) and len(task) == 2 and task.name == "jsonl"
    assert task.sample(0) == Problem(prompt="a", answer="A", worked="so A", metadata={"line": 1, "level": 2})
    assert task.sample(1) == Problem(prompt="b", answer="1.5", worked="", metadata={"line": 2, "level": None})
    assert task.score(" A ", task.sample(0)) == 1.0 and task.score("B", task.sample(0)) == 0.0
    with pytest.raises(IndexError, match="problem 2 of a task of 2"):
        task.sample(2)


def test_splits_share_no_problem_and_hold_all(write):
    path = write(SUMS * 2)

    def prompts(split):
        task = build(path, split, score="number")
        return [task.sample(index).prompt for index in range(len(task))]

    train, evaluation = prompts("train"), prompts("eval")
    assert not set(train) & set(evaluation)
    assert len(train) + len(evaluation) == 400 and 10 <= len(evaluation) <= 80


def test_sizes_are_upper_bounds(write):
    sizes = {"train_size": 7, "eval_size": 3}
    assert len(build(write(SUMS), sizes=sizes)) == 7 and len(build(write(SUMS), "eval", sizes)) == 3


def test_a_file_of_its_own_for_evaluation(write):
    train, held_out = write(SUMS[:5]), write(SUMS[5:8], "held_out.jsonl")
    assert len(build(train, eval_path=held_out)) == 5
    assert [build(train, "eval", eval_path=held_out).sample(i).prompt for i in range(3)] == [
        "5+1=",
        "6+1=",
        "7+1=",
    ]
    both = write(SUMS[4:6], "both.jsonl")
    for split in ("train", "eval"):
        with pytest.raises(
            TaskError, match=r"line 1 of .*both\.jsonl is line 5 of .*: '4\+1='.*must not be trained"
        ):
            build(train, split, eval_path=both)


def test_a_callable_needs_no_answer(write, monkeypatch):
    path = write([{"prompt": "a", "tests": ["x"]}])
    task = build(path, eval_share=1e-9, answer=None, metadata=["tests"], score="operator:eq")
    assert task.sample(0).answer is None and task.score("a", task.sample(0)) == 0.0
    with pytest.raises(TaskError, match="score 'number' compares with an answer; name its field"):
        build(path, answer=None, score="number")


@pytest.mark.parametrize(
    ("rows", "params", "message"),
    [
        (
            [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "x"}],
            {"score": "number"},
            "line 2: score 'number' cannot use the answer: no number in 'x'",
        ),
        ([{"prompt": " ", "answer": "1"}], {}, "line 1: 'prompt' is blank"),
        ([{"prompt": "a", "answer": "1"}], {"eval_share": 1 - 1e-9}, "has no train problem: add rows"),
        ([{"prompt": "a", "answer": "1"}], {"score": "excat"}, "unknown score 'excat'"),
    ],
)
def test_files_that_are_refused(write, rows, params, message):
    with pytest.raises(TaskError, match=message):
        build(write(rows), **params)


def test_options_are_checked(write):
    with pytest.raises(ConfigError, match=r"task\.params\.path: required"):
        make_task(TaskConfig(name="jsonl"))
    with pytest.raises(ConfigError, match=r"unknown key 'task\.params\.answers'.*Did you mean 'answer'"):
        build(write(SUMS), answers="a")
    with pytest.raises(ConfigError, match=r"task\.params: eval_share is 1\.0"):
        build(write(SUMS), eval_share=1.0)


@pytest.fixture
def chat_tokenizer():
    import tokenizers

    vocab = {token: id_ for id_, token in enumerate(["<s>", "</s>", "?", "2025-01-01", "5+1="])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>", "</s>"])
    template = (
        "{{ bos_token }} {{ strftime_now('%Y-%m-%d') }} "
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if thinking is false %}</s>{% endif %}"
    )
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return HfTokenizer(library, special_tokens=special_tokens, add_bos_token=True, chat_template=template)


def test_chat(write, chat_tokenizer):
    task = build(write(SUMS[5:6]), eval_share=1e-9, score="number")
    task.tokenizer = chat_tokenizer
    chat = ChatTask(task, ChatConfig(system="Add."))
    assert isinstance(chat, Task) and len(chat) == 1 and chat.max_prompt_tokens == 64
    problem = chat.sample(0)
    assert problem.prompt == "<s> 2025-01-01 system Add. user 5+1= "
    assert problem.answer == "6" and chat.score("6", problem) == 1.0
    (prompt,) = next(prompt_iterator(chat, 1, seed=0, num_epochs=1))["prompts"]
    assert prompt.tolist() == [0, 3, 2, 2, 2, 4]  # the template's begin token is not doubled
    task.tokenizer.bos_id = None
    (prompt,) = next(prompt_iterator(task, 1, seed=0, num_epochs=1))["prompts"]
    assert prompt.tolist() == [4]


def test_chat_variables(write, chat_tokenizer):
    task = build(write(SUMS[5:6]), eval_share=1e-9, score="number")
    task.tokenizer = chat_tokenizer
    task_config = from_mapping(TaskConfig, {"chat": {"variables": {"thinking": False}}})
    prompt = ChatTask(task, task_config.chat).sample(0).prompt
    assert prompt == "<s> 2025-01-01 user 5+1= </s>"
    assert to_mapping(task_config)["chat"]["variables"] == {"thinking": False}
    with pytest.raises(TokenizerError, match=r"takes no variable 'thinkin'; expected one of .*'thinking'"):
        ChatTask(task, ChatConfig(variables={"thinkin": False})).sample(0)


def test_chat_needs_a_template(write):
    config = TaskConfig(name="jsonl", params={"path": write(SUMS)}, tokenizer="bytes", chat=ChatConfig())
    with pytest.raises(TaskError, match=r"that of task 'jsonl' is ByteTokenizer: set task\.tokenizer"):
        make_task(config)
    with pytest.raises(ValueError, match="Invalid isoformat string: 'today'"):
        ChatConfig(date="today")
