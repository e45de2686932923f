"""Model configuration and what derives from it."""

import jax
import pytest
from flax import nnx

from tests.trace_jax import small
from trace_jax.models import ModelConfig, Transformer, abstract, logical_axes, parameter_count
from trace_jax.models.config import Layer
from trace_jax.models.runs import layer_runs
from trace_jax.parallel import LOGICAL_AXES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gpt"}, r"model.family is 'gpt'; expected one of .*'tiny_moe'"),
        ({"dtype": "float16"}, "model.dtype is 'float16'; expected one of"),
        ({"num_layers": 0}, "model.num_layers is 0; expected a positive size"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token 5 exceeds num_experts 4"),
        ({"head_dim": 33}, "model.head_dim is 33; RoPE rotates pairs"),
        ({"vocab_size": -1}, "model.vocab_size is -1"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_a_model_needs_a_vocabulary():
    with pytest.raises(ValueError, match="vocab_size is 0; set it to the tokenizer's vocabulary size"):
        Transformer(ModelConfig(), rngs=nnx.Rngs(0))


def test_every_parameter_names_its_axes():
    state = abstract(small.MODEL)[1]
    leaves = jax.tree.leaves(state)
    axes = jax.tree.leaves(logical_axes(state), is_leaf=lambda a: isinstance(a, tuple))
    assert len(leaves) == len(axes)
    for leaf, names in zip(leaves, axes, strict=True):
        assert len(names) == leaf.ndim and set(names) <= set(LOGICAL_AXES)
        assert leaf.dtype == "float32"  # masters
    assert parameter_count(state) == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize(
    ("layers", "guided", "expected"),
    [
        ("aaaa", (), [(0, 1, 4, False)]),
        ("aaaa", (0, 1, 2, 3), [(0, 1, 4, True)]),
        ("aaaa", (2, 3), [(0, 1, 2, False), (2, 1, 2, True)]),
        ("aaaaa", (1, 3), [(i, 1, 1, i in (1, 3)) for i in range(5)]),
        ("a", (0,), [(0, 1, 1, True)]),
        ("dddfdddf", (), [(0, 4, 2, False)]),
        ("dddfdddf", (4, 5, 6, 7), [(0, 3, 1, False)]),
        ("sfsf", (2, 3), [(0, 1, 1, False)]),
    ],
)
def test_layer_runs(layers, guided, expected):
    """Whatever the split, every layer is in one run and is what its place in the period says."""
    layers = tuple(Layer(mixer, None, "moe") for mixer in layers)
    runs = layer_runs(layers, guided)
    covered = [
        (run.start + r * run.period + i, layers[run.start + i], run.guided)
        for run in runs
        for r in range(run.repeats)
        for i in range(run.period)
    ]
    assert covered == [(i, layer, i in guided) for i, layer in enumerate(layers)]
    if len(set(layers)) == 1 or not guided:
        assert runs == expected
