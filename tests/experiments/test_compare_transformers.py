"""What compare_transformers makes of two generations, by logits that are known; running it needs torch."""

import numpy as np

from experiments.compare_transformers import differences, noise, prompts


def logits(tokens, *, wide):
    """After n tokens, token n is likeliest, then n + 1, by 0.5; in BF16 the gap is 0.25 smaller."""
    values = np.zeros((len(tokens), 10), np.float32)
    for n in range(len(tokens)):
        values[n, n + 1], values[n, n + 2] = 3, 2.5 if wide else 2.75
    return values


def test_only_the_first_difference_of_a_sequence_counts():
    asked = [[7], [7, 7], [7]]
    mine, theirs = np.array([[1, 2, 3], [2, 9, 9], [2, 4, 4]]), np.array([[1, 2, 3], [3, 1, 1], [2, 3, 4]])
    found = differences(asked, mine, theirs, logits, 0.25)
    assert [(d["sequence"], d["token"]) for d in found] == [(1, 0), (2, 1)]
    assert found[0] == {
        "sequence": 1,
        "token": 0,
        "gap": 0.5,
        "by noise": 2.0,
        "FP32 prefers": "here",
    }
    assert found[1]["gap"] == 2.5 and found[1]["FP32 prefers"] == "transformers"


def test_noise_is_how_far_bf16_moves_the_gap():
    assert noise([[1, 2], [1, 2, 3]], logits) == 0.25


def test_prompts_differ():
    found = prompts(60)
    assert len({tuple(p) for p in found}) == 60 and len({len(p) for p in found}) > 5
