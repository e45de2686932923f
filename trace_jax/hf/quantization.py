"""What an NVFP4 export says of itself: to engines in `config.json`, to people in its README."""

from collections.abc import Mapping
from typing import Any

from trace_jax.hf.layouts import Layout
from trace_jax.models import ModelConfig
from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, QuantPlan

PACKED_FORMAT = "nvfp4-pack-quantized"


def quantization_config(
    layout: Layout, ignored: list[str], input_scales: Mapping[str, float] | None
) -> dict[str, Any]:
    """`quantization_config` of `config.json`: all linear modules but `ignored` are NVFP4."""
    if layout.name == "modelopt":
        group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        groups = {"targets": ["Linear"], "weights": group}
        if input_scales is not None:
            groups["input_activations"] = dict(group)
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4" if input_scales is None else "NVFP4",
            "group_size": 16,
            "config_groups": {"group_0": groups},
            "ignore": ignored,
            "producer": {"name": "modelopt", "version": "trace-jax"},
        }
    args = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args,
                "input_activations": None if input_scales is None else {**args, "dynamic": "local"},
                "output_activations": None,
                "format": PACKED_FORMAT,
            }
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def modelopt_file(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_quant_config.json`, where older readers look."""
    return {
        "producer": quantization["producer"],
        "quantization": {
            "quant_algo": quantization["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": quantization["ignore"],
        },
    }


def readme(
    layout: Layout,
    plan: QuantPlan,
    config: ModelConfig,
    input_scales: Mapping[str, float] | None,
    *,
    native_fp4: bool,
) -> str:
    """README.md of an export: what the target engine does otherwise than the rollouts here."""
    scale = f"`{layout.input_scale}`"
    inverse = "as its inverse 2^-e" if layout.inverse else "as 2^e"
    activations = (
        f"**Exported for BF16 activations** (weights only): there is no {scale}. Rollouts of the policy had FP4\n"
        "inputs of experts, so an engine's tokens are those of another, more precise model. For FP4 activations\n"
        "export again with input scales."
    )
    if input_scales is not None:
        stated = ", ".join(f"`{site}` {value!r}" for site, value in sorted(input_scales.items()))
        activations = f"**Exported for FP4 activations** with the input scales {stated}."
    kernels = "Values are within the limits of weight-only kernels too, which GPUs without FP4 use."
    if native_fp4:
        kernels = (
            "Checked for GPUs that multiply FP4 only: weight-only kernels may decode this export wrongly."
        )
    kv = "quantize keys and values to NVFP4" if plan.kv else "keep keys and values in BF16"
    return f"""# NVFP4 export in the {layout.name} layout

Model family `{config.family}`. Routed experts are NVFP4: E2M1 codes, an E4M3 scale for each 16 values along the
input, and one power of two 2^e for each expert's matrix (gate and up have the same one, since engines fuse them).
Codes and scales are those that rollouts hold, bit for bit, quantized by the rule `{plan.scale_rule}`. All other
modules are BF16 and listed in `ignore`. `{layout.matrix_scale}` holds the matrix scale {inverse}, exactly.
{kernels}

## What the target engine does otherwise

**Activations of experts.** Rollouts here scale every token's row by a power of two of its own, taken from its largest
value. Engines take one number for all tokens of a module from the checkpoint, {scale}, held {inverse}.
{activations}

Which number: for `{EXPERT_INPUT}` (gate and up projections) and `{DOWN_INPUT}` (down projection) the largest row scale
of recorded or audited rollouts: the smallest power of two that is not below the largest activation / 2688. It has to be
a power of two: an engine's block scales then differ from the rollout's by a power of two only, and the codes are the
same (but for ties that its approximate reciprocals decide otherwise), unless a block scale leaves E4M3's normal range:
inputs above 2688 x scale are clipped, blocks whose largest value is below 6/64 x scale lose bits of their scale, and
below 6/1024 x scale they become 0. All experts of a layer have the same number, since some engines take one for all.

**KV cache.** Rollouts here {kv}, one row scale per token and head. The export says nothing of
the cache (no scheme, no `k_scale`, no `v_scale`): an engine keeps it in its own dtype, BF16 unless told otherwise. FP8
or NVFP4 caches of engines have static or per-tensor scales and are another rounding.

**Readers that forget the matrix scale.** `transformers` (seen with 5.24) leaves `{layout.matrix_scale}` out where it
fuses the experts of a layer into one array: its experts are right only after they are set to what the layout's own
library decompresses.

**Arithmetic.** Sums in another order and other attention kernels: log-probs differ by about what two BF16
implementations differ by. Under tensor parallelism a device's part of the expert's width has to be a multiple of 16, or
a block would be cut.
"""


def mxfp4_config() -> dict[str, Any]:
    """`quantization_config` of gpt-oss's layout: what stays BF16, in the words of the published checkpoints."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def mxfp4_readme(plan: QuantPlan) -> str:
    """README.md of an MXFP4 export: what the target engine does otherwise than the rollouts here."""
    kv = "quantize keys and values to MXFP4" if plan.kv else "keep keys and values in BF16"
    return f"""# MXFP4 export in the layout of gpt-oss

Routed experts are MXFP4: E2M1 codes and an E8M0 scale for each 32 values along the input, those that rollouts hold, bit
for bit. A block's scale is the smallest power of two that is not below its largest value / 6, so that nothing is
clipped. Everything else, the experts' biases too, is BF16.

## What the target engine does otherwise

**Activations of experts.** Rollouts here quantize inputs of experts to MXFP4. Engines keep them in BF16, or take FP8
where the hardware multiplies it with FP4.

**KV cache.** Rollouts here {kv}. The export says nothing of the cache: an engine keeps it in its own dtype.

**Arithmetic.** Sums in another order and other attention kernels: log-probs differ by about what two BF16
implementations differ by. Under tensor parallelism a device's part of the expert's width has to be a multiple of 32, or
a block would be cut.
"""
