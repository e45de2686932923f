"""Group-normalised advantages."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

EPSILON = 1e-6


class Advantages(NamedTuple):
    """`values` one per response; `degenerate_groups` counts groups whose rewards are all equal."""

    values: Float[np.ndarray, "P G"]
    degenerate_groups: int


def group_advantages(rewards: Float[np.ndarray, "P G"]) -> Advantages:
    """(reward - mean) / (std + eps) within each prompt's group (GRPO, Shao et al. 2024, arXiv 2402.03300).

    A group whose rewards are all equal says nothing about the policy and gets advantages of exactly 0.

    Raises:
        ValueError: a reward is not finite, or groups have fewer than 2 responses.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards have shape {rewards.shape}; expected [prompts, responses >= 2].")
    if not np.all(np.isfinite(rewards)):
        p, g = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(
            f"reward of response {g} to prompt {p} is {rewards[p, g]}; the task's score must be finite."
        )
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    equal = np.ptp(rewards, axis=1) == 0
    values = centred / (rewards.std(axis=1, keepdims=True) + EPSILON)
    values[equal] = 0.0
    return Advantages(values.astype(np.float32), int(equal.sum()))
