"""FP4 quantization of models: the plan, the sites, fake-quant, and weight packing."""

from trace_jax.quant.fake_quant import cast_weight, straight_through
from trace_jax.quant.numerics import (
    Bf16Numerics,
    FakeQuantNumerics,
    Numerics,
    PackedNumerics,
    SiteAudit,
    SiteCounts,
    guides_of,
)
from trace_jax.quant.plan import DOWN_INPUT, EXPERT_INPUT, KEY, SITES, VALUE, PlanError, QuantPlan
from trace_jax.quant.weights import (
    KEPT_WIDE,
    arranged_for_kernels,
    expert_guides,
    is_expert_weight,
    quantize_weight,
    rollout_weights,
)

__all__ = [
    "DOWN_INPUT",
    "EXPERT_INPUT",
    "KEPT_WIDE",
    "KEY",
    "SITES",
    "VALUE",
    "Bf16Numerics",
    "FakeQuantNumerics",
    "Numerics",
    "PackedNumerics",
    "PlanError",
    "QuantPlan",
    "SiteAudit",
    "SiteCounts",
    "arranged_for_kernels",
    "cast_weight",
    "expert_guides",
    "guides_of",
    "is_expert_weight",
    "quantize_weight",
    "rollout_weights",
    "straight_through",
]
