"""The methods table: what each side rounds and what is recorded."""

import pytest

from tests.trace_jax import small
from trace_jax.quant import Bf16Numerics, FakeQuantNumerics
from trace_jax.rl import MethodConfig


@pytest.mark.parametrize(
    ("name", "rollout", "numerics", "layers"),
    [
        ("bf16", None, Bf16Numerics, None),
        ("fp4_rollout", "nvfp4", Bf16Numerics, None),
        ("qat", "nvfp4", FakeQuantNumerics, None),
        ("trace", "nvfp4", FakeQuantNumerics, (2,)),
        ("trace_all_layers", "nvfp4", FakeQuantNumerics, (0, 1, 2)),
        ("trace_all_sites", "nvfp4", FakeQuantNumerics, (0, 1, 2)),
    ],
)
def test_table(name, rollout, numerics, layers):
    method = small.method(name)
    plan, spec = method.rollout_plan(), method.record_spec(small.MODEL)
    assert (plan.format if plan else None) == rollout
    assert isinstance(method.trainer_numerics(2), numerics)
    assert (spec.layers if spec else None) == layers
    assert spec is None or ("down_input" in spec.sites) == (name == "trace_all_sites")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": "fp8"}, r"method.rollout is 'fp8'; expected one of \('bf16', 'fp4'\)"),
        ({"trainer": "qat"}, "method.trainer is 'qat'; expected one of"),
        ({"rollout": "bf16"}, "'guided' needs an FP4 rollout to record"),
        ({"sites": ("query",)}, "method.sites has 'query'; expected some of"),
        ({"format": "int4"}, "unknown FP4 format 'int4'"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        MethodConfig(name="wrong", **changes)
