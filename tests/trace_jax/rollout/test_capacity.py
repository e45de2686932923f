"""How many sequences a device has room for: as many as the bytes of the arrays say."""

import jax
import pytest

from tests.trace_jax import families, small
from trace_jax.config import ConfigError
from trace_jax.models import init_cache
from trace_jax.quant import QuantPlan
from trace_jax.rollout.capacity import cache_bytes, free_bytes, nbytes, sequences_that_fit


@pytest.mark.parametrize("kv_format", [None, QuantPlan().fp4], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text", "deepseek_v3"])
def test_a_cache_of_so_many_sequences_fits_and_of_one_more_does_not(family, kv_format):
    model, budget = families.config_of(family), 10**7
    count = sequences_that_fit(model, kv_format, length=100, page_size=32, budget=budget)

    def size(sequences):
        return nbytes(
            jax.eval_shape(lambda: init_cache(model, sequences, 32, kv_format, pages=4 * sequences))
        )

    assert size(count) <= budget < size(count + 1) and count > 1


def test_a_token_of_the_cache_is_its_codes_scales_and_exponents():
    per_head = 32 // 2 + 32 // 16 + 1
    assert cache_bytes(small.MODEL, QuantPlan().fp4) == (3 * 2 * 2 * per_head, 0)


def test_free_memory_is_what_nothing_holds_but_for_the_reserve():
    class Device:
        device_kind = "a device"

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 300}

    assert free_bytes(Device()) == 600 and free_bytes(Device(), reserve=0.5) == 200


def test_refuses():
    with pytest.raises(ConfigError, match="5 bytes are left for the cache, a sequence of 100 tokens takes"):
        sequences_that_fit(small.MODEL, None, length=100, page_size=32, budget=5)
    with pytest.raises(ConfigError, match="does not say how much memory it has"):
        free_bytes(jax.devices("cpu")[0])
