"""An engine small enough for tests: a model of one layer in FP32, its weights by version, ids as letters."""

import functools

from tests.trace_jax import small
from trace_jax.models import ModelConfig
from trace_jax.rollout import Engine, EngineConfig, Programs

MODEL = ModelConfig(
    vocab_size=17,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=2,
    experts_per_token=1,
    expert_hidden_size=32,
    dtype="float32",
)
CONFIG = EngineConfig(
    slots=4,
    max_length=64,
    page_size=8,
    pages=48,
    chunk=4,
    buckets=(8, 16),
    prefill_tokens=32,
    host_bytes=10**6,
)
LETTERS = "abcdefghijklmnopq"


def text(tokens) -> str:
    return "".join(LETTERS[token] for token in tokens)


@functools.cache
def programs(config: EngineConfig = CONFIG, model=MODEL) -> Programs:
    return Programs(small.masters(model)[0], model, config)


@functools.cache
def weights(version: int):
    return small.sync(small.perturbed(small.masters(MODEL)[1], 0.05, version), None, "float32")


def start(config: EngineConfig = CONFIG, **options) -> Engine:
    engine = Engine(programs(config), **options)
    engine.sync(weights(0), 0)
    return engine
