"""An MoE made of a dense model: at the start it computes what the dense model does, and it has something to learn.

The MLP's F neurons are cut into g equal shards, each of them an expert, and every shard has num_experts / g copies. The
router has the same column for all shards of one copy of the MLP, so the top k = g * t experts are t whole copies, and
the shards of a copy have the same gate ("virtual groups": He et al. 2024, arXiv 2410.07524; g = 1 is the sparse
upcycling of Komatsuzaki et al. 2022, arXiv 2212.05055). Gates are a softmax over the chosen experts and sum to one: the
output would be the MLP's divided by g, so `down` is multiplied by it. This is exact for any router; in floating point,
sums change their order (and a g that is no power of two rounds `down`).

Why the experts come to differ: shards hold different neurons, so the router has gradients from the first step, and
copies see different tokens. Shards are runs of neighbouring neurons: FP4 blocks of `down` are those of the dense model.

Copies are equal at first, so it does not matter which of them a token takes, and routes that rollout and trainer choose
differently cost nothing until training has moved the copies apart.
"""

import numpy as np

from trace_jax.config import ConfigError
from trace_jax.models.config import ModelConfig
from trace_jax.models.gguf import Parameters

ROUTER_SEED = 0


def upcycle(dense: Parameters, model: ModelConfig) -> Parameters:
    """The MoE's parameters: those of the dense model with `moe` in the place of `dense`.

    Args:
      dense: parameters by path, with `dense` (`norm` `[L, D]`, `gate_up` `[L, D, 2F]`, `down` `[L, F, D]`).
      model: the MoE; E experts of f neurons, k for each token. k = F / f costs what the MLP did.

    Returns:
      The same arrays, not copied, but for `dense`, and `moe`: `norm` `[L, D]`, `router` `[L, D, E]`, `gate_up`
      `[L, E, D, 2f]` and `down` `[L, E, f, D]`. With g = F / f, expert e is shard e mod g of copy e // g.

    Raises:
      ConfigError: the MLP is no whole number of experts, E or k is no whole number of MLPs, k is 1, or the gates of k
        experts do not sum to one.
    """
    gate_up, down = dense["dense", "gate_up"], dense["dense", "down"]
    layers, neurons, hidden = down.shape
    width = model.expert_hidden_size
    if neurons % width:
        raise ConfigError(
            f"model.expert_hidden_size is {width}; expected a divisor of {neurons}, the width of the MLP to upcycle."
        )
    shards = neurons // width
    _check_experts(model, shards)
    copies = model.num_experts // shards
    # [L, D, 2F] -> [L, g, D, 2f]: a shard's gate columns, then its up columns.
    gate_up = gate_up.reshape(layers, hidden, 2, shards, width).transpose(0, 3, 1, 2, 4)
    gate_up = gate_up.reshape(layers, shards, hidden, 2 * width)
    down = down.reshape(layers, shards, width, hidden) * np.float32(shards)

    rng = np.random.default_rng(ROUTER_SEED)
    router = rng.standard_normal((layers, hidden, copies), np.float32) * np.float32(hidden**-0.5)
    moe = {
        ("moe", "norm"): dense["dense", "norm"],
        ("moe", "router"): np.repeat(router, shards, axis=-1),
        ("moe", "gate_up"): np.tile(gate_up, (1, copies, 1, 1)),
        ("moe", "down"): np.tile(down, (1, copies, 1, 1)),
    }
    return {path: array for path, array in dense.items() if path[0] != "dense"} | moe


def _check_experts(model: ModelConfig, shards: int) -> None:
    for name in ("num_experts", "experts_per_token"):
        if getattr(model, name) % shards:
            raise ConfigError(
                f"model.{name} is {getattr(model, name)}; expected a multiple of {shards}, the experts of "
                f"{model.expert_hidden_size} neurons that make up one MLP."
            )
    if model.experts_per_token == 1:
        raise ConfigError(
            "model.experts_per_token is 1; expected at least 2: the gate of a single expert is always 1, so its router "
            "would never learn."
        )
    if not model.router.normalize or model.router.scale != 1 or model.router.scores != "softmax":
        raise ConfigError(
            f"model.router is {model.router}; expected a softmax over the chosen experts, whose gates sum to one."
        )
