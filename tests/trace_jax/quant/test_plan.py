"""Which tensors are FP4, and sizes that no block divides."""

import pytest

from trace_jax.quant import DOWN_INPUT, EXPERT_INPUT, KEY, SITES, VALUE, QuantPlan
from trace_jax.rollout import RolloutConfig, Sampler, SamplingConfig

EXPERTS, KV = {"hidden_size": 64, "expert_hidden_size": 32}, {"head_dim": 32}


@pytest.mark.parametrize(("format", "block"), [("nvfp4", 16), ("mxfp4", 32)])
@pytest.mark.parametrize("name", [*EXPERTS, *KV])
def test_size_that_is_no_multiple_of_the_block(format, block, name):
    plan = QuantPlan(format=format)
    plan.check(experts=EXPERTS, kv=KV)
    experts, kv = (
        {key: 40 if key == name else size for key, size in sizes.items()} for sizes in (EXPERTS, KV)
    )
    with pytest.raises(
        ValueError, match=rf"model\.{name} is 40, not a multiple of the {format} block of {block}"
    ):
        plan.check(experts=experts, kv=kv)


def test_sizes_of_tensors_that_stay_bf16_do_not_matter():
    QuantPlan(kv=False).check(experts=EXPERTS, kv={"head_dim": 24})
    QuantPlan(experts=False).check(experts={"hidden_size": 24, "expert_hidden_size": 8}, kv=KV)


def test_sampler_refuses_a_model_that_no_block_divides():
    from tests.trace_jax import small
    from trace_jax.models import ModelConfig, abstract

    model = ModelConfig(vocab_size=7, head_dim=24)
    rollout = RolloutConfig(num_prompts=1, group_size=1, prompt_length=2)
    with pytest.raises(ValueError, match=r"model\.head_dim is 24.*Choose 32, or a format with smaller"):
        Sampler(abstract(model)[0], model, rollout, SamplingConfig(), plan=QuantPlan())
    with pytest.raises(ValueError, match="a BF16 rollout has no FP4 codes to record"):
        Sampler(
            abstract(model)[0],
            model,
            rollout,
            SamplingConfig(),
            record=small.method("trace").record_spec(model),
        )


def test_sites():
    plan = QuantPlan(kv=False)
    assert [site for site in SITES if plan.quantizes(site)] == [EXPERT_INPUT, DOWN_INPUT]
    assert [site for site in SITES if QuantPlan(experts=False).quantizes(site)] == [KEY, VALUE]
    with pytest.raises(ValueError, match="unknown quantization site 'query'; expected one of"):
        plan.quantizes("query")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "fp8"}, r"unknown FP4 format 'fp8'; expected one of \['mxfp4', 'nvfp4'\]"),
        ({"scale_rule": "max"}, "scale_rule is 'max'; expected one of"),
        (
            {"format": "mxfp4", "scale_rule": "4over6"},
            "'4over6' is defined for nvfp4 blocks, not for 'mxfp4'",
        ),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantPlan(**changes)
