"""Tables: every transformation is its own inverse's inverse, reads only what it needs, and has no gaps."""

import itertools
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.trace_jax.hf.folders import InMemory
from trace_jax.hf.load import read_block
from trace_jax.hf.save import build
from trace_jax.hf.table import Link, Mapping, TableError, gated, linear

D, F, E = 6, 4, 3
LAYERS = {"attention": (1, 3), "moe": (0, 1, 3)}
LAYER = "layers.{layer}."
EXPERT = LAYER + "experts.{expert}."
HEADS = tuple(head * 4 + i for head in range(2) for i in (0, 1))  # the first halves of two heads' columns
OTHERS = tuple(i for i in range(8) if i not in HEADS)

# Links, shapes of their parameters, and for some elements: (parameter index, tensor, tensor index).
CASES = {
    "whole": (
        [Link(param="embedding", tensor="embed")],
        {"embedding": (5, D)},
        [((2, 3), "embed", (2, 3))],
    ),
    "transposed, of some layers": (
        [linear("attention.query", LAYER + "q")],
        {"attention.query": (2, D, F)},
        [((0, 5, 2), "layers.1.q", (2, 5)), ((1, 0, 3), "layers.3.q", (3, 0))],
    ),
    "gate and up per expert": (
        gated("moe.gate_up", EXPERT + "gate", EXPERT + "up", F),
        {"moe.gate_up": (3, E, D, 2 * F)},
        [
            ((2, 1, 5, 0), "layers.3.experts.1.gate", (0, 5)),
            ((2, 1, 5, F), "layers.3.experts.1.up", (0, 5)),
        ],
    ),
    "fused [E, D, 2F], interleaved": (
        [
            Link(param="moe.gate_up", tensor=LAYER + "gate_up", ours=range(F), theirs=range(0, 2 * F, 2)),
            Link(
                param="moe.gate_up", tensor=LAYER + "gate_up", ours=range(F, 2 * F), theirs=range(1, 2 * F, 2)
            ),
        ],
        {"moe.gate_up": (3, E, D, 2 * F)},
        [
            ((0, 2, 1, 3), "layers.0.gate_up", (2, 1, 6)),
            ((0, 2, 1, F + 3), "layers.0.gate_up", (2, 1, 7)),
        ],
    ),
    "fused [E, 2F, D]": (
        [Link(param="moe.gate_up", tensor=LAYER + "gate_up", transpose=(0, 2, 1))],
        {"moe.gate_up": (3, E, D, 2 * F)},
        [((1, 2, 5, 7), "layers.1.gate_up", (2, 7, 5))],
    ),
    "convolution": (
        [Link(param="attention.conv", tensor=LAYER + "conv", squeeze=1, transpose=(1, 0))],
        {"attention.conv": (2, 4, 10)},
        [((1, 3, 8), "layers.3.conv", (8, 0, 3))],
    ),
    "rows permuted": (
        [
            Link(
                param="attention.query",
                tensor=LAYER + "q",
                transpose=(1, 0),
                theirs=(0, 4, 1, 5, 2, 6, 3, 7),
            )
        ],
        {"attention.query": (2, D, 8)},
        [((0, 2, 3), "layers.1.q", (5, 2))],
    ),
    "one tensor, two parameters": (
        [
            linear("attention.query", LAYER + "q", theirs=HEADS),
            linear("attention.gate", LAYER + "q", theirs=OTHERS),
        ],
        {"attention.query": (2, D, 4), "attention.gate": (2, D, 4)},
        [((1, 0, 2), "layers.3.q", (4, 0)), ((1, 0, 2), "layers.3.q", (4, 0))],
    ),
    "reversed": (
        [Link(param="final_norm", tensor="norm", theirs=range(D - 1, -1, -1))],
        {"final_norm": (D,)},
        [((1,), "norm", (4,))],
    ),
    "parts of rows": (
        [
            Link(param="embedding", tensor="a", axis=0, ours=range(2)),
            Link(param="embedding", tensor="b", axis=0, ours=range(2, 5)),
        ],
        {"embedding": (5, D)},
        [((4, 1), "b", (2, 1))],
    ),
}


def laid_out(case: str):
    """Mapping, parameters with every element different, and the tensors that are built of them."""
    links, shapes, _ = CASES[case]
    mapping = Mapping(links, shapes, LAYERS)
    starts = itertools.accumulate((math.prod(s) for s in shapes.values()), initial=0)
    params = {
        name: np.arange(start, start + math.prod(shape), dtype=np.float32).reshape(shape)
        for (name, shape), start in zip(shapes.items(), starts, strict=False)
    }

    def block(param, layer):
        return params[param] if layer is None else params[param][layer]

    tensors = {name: build(mapping, tensor, block) for name, tensor in mapping.tensors.items()}
    return mapping, params, tensors


@pytest.mark.parametrize("case", CASES)
def test_elements_are_where_the_link_says(case):
    mapping, params, tensors = laid_out(case)
    for index, tensor, place in CASES[case][2][:1] if len(params) > 1 else CASES[case][2]:
        assert tensors[tensor][place] == next(iter(params.values()))[index]
    for name, tensor in tensors.items():
        assert tensor.shape == mapping.tensors[name].shape
    # Every element of the parameters is in the tensors, once.
    values = np.concatenate([x.ravel() for x in tensors.values()])
    assert sorted(values) == list(range(sum(x.size for x in params.values())))


@pytest.mark.parametrize("case", CASES)
def test_every_block_is_read_back_and_nothing_else_is_read(case):
    mapping, params, tensors = laid_out(case)
    for param, expected in params.items():
        leading = ((0,), (1,)) if mapping.links[param][0].per_layer else ((),)
        for index in leading:
            layer = expected[index]
            # All blocks whose bounds are at the ends or in the middle of each axis.
            bounds = [sorted({(0, n), (0, (n + 1) // 2), (n // 2, n)}) for n in layer.shape]
            for block in itertools.product(*bounds):
                wanted = [range(*b) for b in block]
                folder = InMemory(tensors)
                found = read_block(folder, mapping, param, index, wanted, expected.dtype)
                assert np.array_equal(found, layer[tuple(slice(*b) for b in block)])
                # Scattered positions are read as one range.
                if all(link.theirs is None for link in mapping.links[param]):
                    assert folder.elements_read == found.size


def test_dtypes_of_experts_may_differ():
    """A block is as wide as the widest of them, whichever comes first."""
    mapping, params, tensors = laid_out("gate and up per expert")
    first = [name for name in tensors if ".experts.0." in name]
    exact = params["moe.gate_up"][0][1:]
    for name in tensors:
        if name not in first:
            tensors[name] += np.float32(2.0**-12)
    for name in first:
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    wanted = [range(E), range(D), range(2 * F)]
    found = read_block(InMemory(tensors), mapping, "moe.gate_up", (0,), wanted, jnp.dtype("float32"))
    assert np.array_equal(found[1:], exact + np.float32(2.0**-12))


def test_dtypes_of_one_parameter_may_differ():
    mapping, params, tensors = laid_out("gate and up per expert")
    for name in tensors:
        if name.endswith("gate"):
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    wanted = [range(E), range(D), range(2 * F)]
    found = read_block(InMemory(tensors), mapping, "moe.gate_up", (0,), wanted, jnp.dtype("float32"))
    assert found.dtype == np.float32
    assert np.array_equal(found[..., F:], params["moe.gate_up"][0][..., F:])
    assert np.array_equal(
        found[..., :F], params["moe.gate_up"][0][..., :F].astype(ml_dtypes.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([linear("attention.key", LAYER + "k")], "attention.key, which the model does not have"),
        ([], "attention.query is mapped by"),
        ([linear("attention.query", LAYER + "q", ours=range(3))], "do not cover it exactly once"),
        (
            [
                linear("attention.query", LAYER + "q", ours=range(3)),
                linear("attention.query", LAYER + "r", ours=range(2, 4)),
            ],
            "do not cover it exactly once",
        ),
        ([linear("attention.query", LAYER + "q", theirs=range(1, 5))], "do not cover it exactly once"),
        ([linear("attention.query", LAYER + "q", theirs=range(3))], "of unequal length"),
        ([linear("attention.query", "q")], "expected an order of the 3 axes"),
    ],
)
def test_a_table_with_gaps_is_refused(links, message):
    with pytest.raises(TableError, match=message):
        Mapping(links, {"attention.query": (2, D, 4)}, LAYERS)


def test_a_stack_of_another_depth_is_refused():
    with pytest.raises(TableError, match="has 3 layers, its stack 'attention'"):
        Mapping([linear("attention.query", LAYER + "q")], {"attention.query": (3, D, 4)}, LAYERS)
