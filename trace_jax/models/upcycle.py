"""An MoE made of a dense model: at the start it computes what the dense model does, and it has something to learn.

The MLP's F neurons are cut into `granularity` equal shards, and every shard has num_experts / granularity copies. The
router has the same column for all shards of one copy of the MLP, so the top k = granularity * t experts are t whole
copies, and the shards of a copy have the same gate ("virtual groups": He et al. 2024, arXiv 2410.07524; granularity 1
is the sparse upcycling of Komatsuzaki et al. 2022, arXiv 2212.05055). Gates are a softmax over the chosen experts and
sum to one: the output would be the MLP's divided by `granularity`, so `down` is multiplied by it. This is exact for any
router; in floating point, sums change their order (and a granularity that is no power of two rounds `down`).

Why the experts come to differ: shards hold different neurons, so the router has gradients from the first step, and
copies see different tokens. Shards are runs of neighbouring neurons: FP4 blocks of `down` are those of the dense model.

Copies are equal at first, so it does not matter which of them a token takes, and routes that rollout and trainer choose
differently cost nothing until training has moved the copies apart. `noise` does that at once, but moves the function.
"""

import dataclasses

import numpy as np

from trace_jax.config import ConfigError, check_range
from trace_jax.models.gguf import Parameters

_BLOCK = 32  # the larger FP4 block, MXFP4's


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleConfig:
    """How experts are made of an MLP.

    Attributes:
      num_experts: experts of every layer, a multiple of `granularity`.
      experts_per_token: experts that a token takes, a multiple of `granularity`; as many as that cost what the MLP did.
      granularity: shards that the MLP's neurons are cut into.
      noise: standard deviation of what is added to every weight of an expert, as a share of that of the layer's matrix;
        0 keeps the function.
      seed: of the router and the noise.
    """

    num_experts: int = 16
    experts_per_token: int = 4
    granularity: int = 4
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check_range("upcycle", self, "num_experts", "granularity", at_least=1)
        check_range("upcycle", self, "experts_per_token", at_least=1, below=self.num_experts + 1)
        check_range("upcycle", self, "noise", "seed", at_least=0)
        for name in ("num_experts", "experts_per_token"):
            if getattr(self, name) % self.granularity:
                raise ConfigError(
                    f"upcycle.{name} is {getattr(self, name)}; expected a multiple of granularity {self.granularity}: "
                    "experts come in whole copies of the MLP."
                )
        if self.experts_per_token == 1:
            raise ConfigError(
                "upcycle.experts_per_token is 1; expected at least 2: the gate of a single expert is always 1, and its "
                "router never learns."
            )


def upcycle(dense: Parameters, config: UpcycleConfig) -> Parameters:
    """The MoE's parameters: those of the dense model with `moe` in the place of `dense`.

    Args:
      dense: parameters by path, with `dense` (`norm` `[L, D]`, `gate_up` `[L, D, 2F]`, `down` `[L, F, D]`).
      config: what to make of them; E experts of f = F / granularity neurons.

    Returns:
      The same arrays, not copied, but for `dense`, and `moe`: `norm` `[L, D]`, `router` `[L, D, E]`, `gate_up`
      `[L, E, D, 2f]` and `down` `[L, E, f, D]`. Expert e is shard e mod granularity of copy e // granularity.

    Raises:
      ConfigError: shards would be unequal or cut an FP4 block.
    """
    gate_up, down = dense["dense", "gate_up"], dense["dense", "down"]
    layers, neurons, hidden = down.shape
    shards, copies = config.granularity, config.num_experts // config.granularity
    width = neurons // shards
    if neurons % (shards * _BLOCK):
        raise ConfigError(
            f"upcycle.granularity is {shards}: a shard of the MLP's {neurons} neurons would have {neurons / shards:g}; "
            f"expected a multiple of the FP4 block, {_BLOCK}."
        )
    # [L, D, 2F] -> [L, shards, D, 2f]: a shard's gate columns, then its up columns.
    gate_up = gate_up.reshape(layers, hidden, 2, shards, width).transpose(0, 3, 1, 2, 4)
    gate_up = gate_up.reshape(layers, shards, hidden, 2 * width)
    down = down.reshape(layers, shards, width, hidden) * np.float32(shards)

    rng = np.random.default_rng(config.seed)
    router = rng.standard_normal((layers, hidden, copies), np.float32) * np.float32(hidden**-0.5)
    moe = {
        ("moe", "norm"): dense["dense", "norm"],
        ("moe", "router"): np.repeat(router, shards, axis=-1),
        ("moe", "gate_up"): _noisy(np.tile(gate_up, (1, copies, 1, 1)), config.noise, rng),
        ("moe", "down"): _noisy(np.tile(down, (1, copies, 1, 1)), config.noise, rng),
    }
    return {path: array for path, array in dense.items() if path[0] != "dense"} | moe


def _noisy(experts: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Adds noise to `[L, E, ...]` in place, layer by layer: the noise of all at once would double the memory."""
    if noise:
        for layer in experts:
            layer += rng.standard_normal(layer.shape, np.float32) * np.float32(noise * layer.std())
    return experts
