"""Values that a reader would decode to others stop an export before anything is written."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels_pallas.arrays import Fp4Array
from tests.trace_jax import small
from trace_jax.hf import LAYOUTS, CheckpointFormatError, export_bf16, export_nvfp4
from trace_jax.quant import QuantPlan

PLAN = QuantPlan()


def with_weight(name: str, index: tuple[int, ...], value: float) -> nnx.State:
    """Masters with one weight of the experts changed."""
    flat = dict(nnx.to_flat_state(small.masters()[1]))
    (path,) = [path for path in flat if path[-2:] == ("moe", name)]
    changed = np.array(flat[path].get_value())
    changed[index] = value
    return nnx.from_flat_state(
        [(p, v.replace(jnp.asarray(changed)) if p == path else v) for p, v in flat.items()]
    )


def with_leaf(name: str, leaf: str, index: tuple[int, ...], value: int) -> nnx.State:
    """A rollout with one byte or word of its FP4 experts changed."""
    flat = dict(nnx.to_flat_state(small.sync(small.masters()[1], PLAN, "bfloat16")))
    (path,) = [path for path in flat if path[-2:] == ("moe", name)]
    packed = flat[path].get_value()
    leaves = {n: getattr(packed, n) for n in ("words", "scales", "row_exponent")}
    changed = np.array(leaves[leaf])
    changed[index] = value
    array = Fp4Array(**leaves | {leaf: jnp.asarray(changed)}, format=packed.format, axis=packed.axis)
    return nnx.from_flat_state([(p, v.replace(array) if p == path else v) for p, v in flat.items()])


def refused(tmp_path, rollout, *said, **options):
    for layout in LAYOUTS.values():
        with pytest.raises(CheckpointFormatError) as error:
            export_nvfp4(rollout, small.MODEL, PLAN, layout, tmp_path / "out", **options)
        for part in said:
            assert part in str(error.value), str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_weights_without_a_bf16_value(tmp_path, value):
    """3.4e38 is finite in FP32 and infinite in BF16."""
    # Column 40 is the 9th of the up projection.
    masters = with_weight("gate_up", (1, 3, 5, 40), value)
    with pytest.raises(
        CheckpointFormatError, match=r"layers\.1\.mlp\.experts\.3\.up_proj\.weight .*\[1, 3, 5, 40\]"
    ):
        export_bf16(masters, small.MODEL, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    # Quantized, the block is poisoned.
    rollout = small.sync(masters, PLAN, "bfloat16")
    refused(tmp_path, rollout, "layers.1.mlp.experts.3.up_proj.weight_scale", "is NaN")


def test_poison_is_found_for_native_fp4_too(tmp_path):
    rollout = small.sync(with_weight("down", (2, 0, 17, 3), np.nan), PLAN, "bfloat16")
    refused(tmp_path, rollout, "layers.2.mlp.experts.0.down_proj.weight_scale", "is NaN", native_fp4=True)


@pytest.mark.parametrize(
    ("leaf", "value", "said"),
    [
        ("scales", 0x85, "is negative"),
        ("words", 0x10800000, "the code of -0"),
        ("row_exponent", 0, "no normal"),
        ("row_exponent", 254, "no normal"),
    ],
)
def test_damaged_bytes(tmp_path, leaf, value, said):
    index = {"scales": (0, 1, 0, 2), "words": (0, 1, 0, 2), "row_exponent": (0, 1)}[leaf]
    refused(tmp_path, with_leaf("gate_up", leaf, index, value), "layers.0.mlp.experts.1.gate_proj", said)


def test_scales_that_weight_only_kernels_misread(tmp_path):
    """A block 2^-15 of its matrix's largest value has an E4M3 subnormal as its scale; 2^-30 has none, and is zero."""
    masters = with_weight("down", (0, 2, 3, 1), 2.0**15)
    rollout = small.sync(masters, PLAN, "bfloat16")
    refused(
        tmp_path, rollout, "layers.0.mlp.experts.2.down_proj.weight_scale", "below 2^-6", "native_fp4=true"
    )
    for layout in LAYOUTS.values():
        export_nvfp4(rollout, small.MODEL, PLAN, layout, tmp_path / layout.name, native_fp4=True)
        assert "GPUs that multiply FP4 only" in (tmp_path / layout.name / "README.md").read_text()


def test_matrix_scales_that_weight_only_kernels_overflow(tmp_path):
    """2^(119 + 8) is below FP32's and BF16's largest number, 2^(119 + 9) is not."""
    rollout = with_leaf("down", "row_exponent", (0, 0), 127 + 9)
    refused(tmp_path, rollout, "layers.0.mlp.experts.0.down_proj.weight", "is above 2^8")
    rollout = with_leaf("down", "row_exponent", (0, 0), 127 + 8)
    export_nvfp4(rollout, small.MODEL, PLAN, LAYOUTS["modelopt"], tmp_path / "out")


@pytest.mark.parametrize("scale", [0.3, 0.0, -1.0, np.inf, np.nan, 2.0**-140])
def test_input_scales_are_powers_of_two(tmp_path, scale):
    rollout = small.sync(small.masters()[1], PLAN, "bfloat16")
    scales = {"expert_input": scale, "down_input": 1.0}
    refused(tmp_path, rollout, "the input scale of expert_input", "power of two", input_scales=scales)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("param", "site"), [("gate_up", "expert_input"), ("down", "down_input")])
@pytest.mark.parametrize(("row", "kept", "lost"), [(-119, -7, -8), (8, 118, 119)])
def test_products_of_scales_that_fp32_holds(tmp_path, layout, param, site, row, kept, lost):
    """FP32's powers of two from 2^-126 to 2^126 are normal numbers, and so are their inverses."""
    rollout = with_leaf(param, "row_exponent", (1, 3), 127 + row)
    smallest = np.finfo(np.float32).smallest_normal

    def is_normal(input_scale):
        product = np.float32(2.0**row) * np.float32(input_scale)
        return bool(product >= smallest and 1 / product >= smallest)

    assert is_normal(2.0**kept) and not is_normal(2.0**lost)
    scales = {"expert_input": 1.0, "down_input": 1.0}
    with pytest.raises(CheckpointFormatError) as error:
        export_nvfp4(
            rollout, small.MODEL, PLAN, layout, tmp_path / "out", input_scales=scales | {site: 2.0**lost}
        )
    for part in (
        "layers.1.mlp.experts.3",
        f"moe.{param}.row_exponent[1, 3]",
        f"input scale {2.0**lost!r} is not between 2^-126 and 2^126",
        "Choose an input scale",
    ):
        assert part in str(error.value), str(error.value)
    assert not list(tmp_path.iterdir())
    export_nvfp4(
        rollout, small.MODEL, PLAN, layout, tmp_path / "out", input_scales=scales | {site: 2.0**kept}
    )


def test_input_scales_are_given_for_both_sites(tmp_path):
    rollout = small.sync(small.masters()[1], PLAN, "bfloat16")
    refused(tmp_path, rollout, "expected both of", input_scales={"expert_input": 1.0})
