"""Expert weights: from FP32 masters to what the rollout holds."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kernels_pallas.arrays import Fp4Array, Fp4Codes
from kernels_pallas.grouped_matmul import arranged
from kernels_pallas.guided_round import Guide, guided_round
from kernels_pallas.quantize import quantize, quantize_codes
from trace_jax.quant.fake_quant import cast_weight
from trace_jax.quant.plan import QuantPlan

EXPERT_WEIGHTS = ("gate_up", "down")
KEPT_WIDE = ("router_correction", "log_rate", "output_norm")
"""Few values that stay FP32 in a rollout, as checkpoints hold them: they choose experts, and gate DeltaNet's state."""

PROJECTIONS = ("query", "key", "value", "output", "gate", "query_down", "query_up", "kv_down", "qkv")
"""Matrices of mixers in the compute dtype, beside those of dense layers and of shared experts."""

GATED = ("gate_up",)
"""Those whose columns are a gate's, then those of an up projection."""


def quantize_weight(w: jax.Array, plan: QuantPlan) -> Fp4Array:
    """Packs `[..., K, N]` expert matrices along K; one row scale per matrix. Masters are rounded to BF16 first."""
    return quantize(w, plan.fp4, axis=-2, row_axes=(-2, -1), scale_rule=plan.scale_rule)


def quantize_weight_codes(w: jax.Array, plan: QuantPlan) -> Fp4Codes:
    """The same codes, one byte each."""
    return quantize_codes(w, plan.fp4, axis=-2, row_axes=(-2, -1), scale_rule=plan.scale_rule)


def guided_weight_codes(w: jax.Array, recorded: Fp4Array, plan: QuantPlan) -> Fp4Codes:
    """Codes of `w` rounded in `full` mode under the codes and scales of an older weight version."""
    guide = Guide(
        scales=recorded.scales,
        row_exponent=recorded.row_exponent,
        words=recorded.words,
        valid=jnp.ones(recorded.row_exponent.shape, bool),
        mode="full",
    )
    return guided_round(w, guide, plan.fp4, axis=-2, row_axes=(-2, -1))


def is_expert_weight(path: tuple[Any, ...]) -> bool:
    """Whether a parameter holds routed experts' matrices; shared experts and dense layers stay in the compute dtype."""
    return path[-2:-1] == ("moe",) and path[-1] in EXPERT_WEIGHTS


def rollout_weights(masters: nnx.State, plan: QuantPlan | None, dtype: str) -> nnx.State:
    """Masters -> BF16 -> packed FP4 experts: the parameters the rollout runs on.

    Args:
        masters: FP32 state of a model.
        plan: FP4 plan; None keeps the experts in the compute dtype (BF16 rollouts).
        dtype: compute dtype.
    """

    def convert(path, variable):
        w = variable.get_value()
        if plan is not None and plan.experts and is_expert_weight(path):
            return variable.replace(quantize_weight(w, plan))
        if path[-1] in KEPT_WIDE:
            return variable.replace(jnp.copy(w))
        # A copy also where the dtype is the masters' own: the train step donates the masters' buffers.
        return variable.replace(jnp.copy(cast_weight(w, dtype)))

    flat = nnx.to_flat_state(masters)
    return nnx.from_flat_state([(path, convert(path, variable)) for path, variable in flat])


def expert_guides(rollout: nnx.State) -> dict[str, Fp4Array]:
    """The packed expert matrices of a rollout state, by name: the weight guides of its version."""
    flat = dict(nnx.to_flat_state(rollout))
    return {path[-1]: v.get_value() for path, v in flat.items() if isinstance(v.get_value(), Fp4Array)}


def is_projection(path: tuple[Any, ...]) -> bool:
    """Whether a parameter holds the matrices in the compute dtype that `models.layers.linear` multiplies by."""
    stack, name = path[-2:] if len(path) > 1 else (None, path[-1])
    return (
        (stack in ("attention", "delta", "latent") and name in PROJECTIONS)
        or (stack == "dense" and name in EXPERT_WEIGHTS)
        or (stack == "moe" and name in ("shared_gate_up", "shared_down"))
    )


def arranged_for_kernels(rollout: nnx.State) -> nnx.State:
    """Rollout parameters as this machine's kernels read them, experts and projections: kept nowhere else."""

    def convert(path, variable):
        if not (is_expert_weight(path) or is_projection(path)):
            return variable
        return variable.replace(
            arranged(variable.get_value(), gated=is_expert_weight(path) and path[-1] in GATED)
        )

    flat = nnx.to_flat_state(rollout)
    return nnx.from_flat_state([(path, convert(path, variable)) for path, variable in flat])
