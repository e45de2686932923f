"""Pipelines: order, sharding between processes, resume from JSON, masks, and what they refuse."""

import json

import numpy as np
import pytest

from trace_jax.data import CharTokenizer, DataError, Problem, prompt_iterator, sft_iterator


class Squares:
    """A source small enough to check by eye: 'i=' -> 'i*i'."""

    name = "squares"
    tokenizer = CharTokenizer("0123456789=")

    def __init__(self, size, max_prompt_tokens=8, worked=True):
        self.size = size
        self.max_prompt_tokens = max_prompt_tokens
        self.worked = worked

    def __len__(self):
        return self.size

    def sample(self, index):
        answer = str(index * index)
        return Problem(
            prompt=f"{index}=",
            answer=answer,
            worked=answer if self.worked else None,
            metadata={"index": index},
        )


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_prompt_batches_hold_tokens_index_and_problem(seed):
    source = Squares(20)
    batch = next(prompt_iterator(source, 4, seed=seed))
    assert batch["index"].shape == (4,)
    for tokens, index, problem in zip(batch["prompts"], batch["index"], batch["problems"], strict=True):
        assert tokens.dtype == np.int32 and tokens[0] == source.tokenizer.bos_id
        assert source.tokenizer.decode(tokens) == f"{index}=" == problem.prompt


def test_every_epoch_has_every_problem_in_another_order(seed):
    batches = take(prompt_iterator(Squares(20), 5, seed=seed), 8)
    order = np.concatenate([batch["index"] for batch in batches])
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert list(order[:20]) != list(order[20:])


def test_order_depends_on_the_seed_only(seed):
    first, again, other = (take(prompt_iterator(Squares(50), 10, seed=s), 5) for s in (seed, seed, seed + 1))
    same = [np.array_equal(a["index"], b["index"]) for a, b in zip(first, again, strict=True)]
    assert all(same)
    assert not all(np.array_equal(a["index"], b["index"]) for a, b in zip(first, other, strict=True))


def test_processes_share_the_global_batch(seed):
    whole = take(prompt_iterator(Squares(30), 6, seed=seed), 10)
    shares = [
        take(prompt_iterator(Squares(30), 2, seed=seed, process_index=p, process_count=3), 10)
        for p in range(3)
    ]
    for step, batch in enumerate(whole):
        parts = [share[step]["index"] for share in shares]
        assert sorted(np.concatenate(parts)) == sorted(batch["index"])


@pytest.mark.parametrize("make", ["prompts", "sft"])
@pytest.mark.parametrize("consumed", [0, 1, 7])
def test_resumes_from_json_state(seed, make, consumed):
    def build():
        if make == "prompts":
            return prompt_iterator(Squares(20), 6, seed=seed)
        return sft_iterator(Squares(20), 6, length=12, seed=seed)

    iterator = build()
    take(iterator, consumed)
    state = json.loads(json.dumps(iterator.get_state()))
    rest = take(iterator, 5)
    resumed = build()
    resumed.set_state(state)
    key = "index" if make == "prompts" else "tokens"
    for a, b in zip(rest, take(resumed, 5), strict=True):
        assert np.array_equal(a[key], b[key])


def test_evaluation_pass_is_in_order_and_complete():
    batches = list(prompt_iterator(Squares(10), 4, seed=0, shuffle=False, num_epochs=1))
    assert [list(batch["index"]) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_sft_rows(seed):
    source = Squares(100)
    batch = next(sft_iterator(source, 32, length=10, seed=seed))
    assert batch["tokens"].shape == batch["loss_mask"].shape == (32, 10)
    assert batch["tokens"].dtype == np.int32 and batch["loss_mask"].dtype == bool
    for tokens, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
        number, square = source.tokenizer.decode(tokens).split("=")
        assert int(number) ** 2 == int(square)
        response = [*source.tokenizer.encode(square), source.tokenizer.eos_id]
        assert list(tokens[mask]) == response
        start = 1 + len(number) + 1
        assert list(np.flatnonzero(mask)) == list(range(start, start + len(response)))
        assert (tokens[start + len(response) :] == source.tokenizer.pad_id).all()


def test_refuses_an_empty_source():
    with pytest.raises(DataError, match="task 'squares' is empty"):
        prompt_iterator(Squares(0), 2, seed=0)
    with pytest.raises(DataError, match="task 'squares' is empty"):
        sft_iterator(Squares(0), 2, length=10, seed=0)


def test_refuses_a_long_prompt_naming_both_lengths():
    with pytest.raises(DataError, match=r"has 4 tokens .* max_prompt_tokens is 3: '10='"):
        list(prompt_iterator(Squares(11, max_prompt_tokens=3), 11, seed=0, num_epochs=1))


def test_refuses_a_long_worked_answer_and_a_missing_one():
    with pytest.raises(DataError, match=r"needs 8 tokens \(4 of prompt, 4 of response\), length is 7"):
        next(sft_iterator(Squares(12), 12, length=7, seed=0))
    with pytest.raises(DataError, match="no worked answer for"):
        next(sft_iterator(Squares(5, worked=False), 2, length=10, seed=0))


def test_refuses_an_empty_batch():
    with pytest.raises(DataError, match="batch is 0"):
        prompt_iterator(Squares(5), 0, seed=0)
