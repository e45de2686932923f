"""Which layers are guided, and what a spec refuses."""

import pytest

from trace_jax.guidance import GuidanceSpec, resolve_layers


@pytest.mark.parametrize(
    ("layers", "num_layers", "expected"),
    [
        ("all", 4, (0, 1, 2, 3)),
        ("first_half", 4, (0, 1)),
        ("last_half", 4, (2, 3)),
        ("last_half", 5, (3, 4)),
        ("last_half", 40, tuple(range(20, 40))),
        ("last_quarter", 40, tuple(range(30, 40))),
        ("last_eighth", 40, tuple(range(35, 40))),
        ("last_eighth", 4, (3,)),  # never empty
        ([0, 3], 4, (0, 3)),
    ],
)
def test_resolve_layers(layers, num_layers, expected):
    assert resolve_layers(layers, num_layers) == expected


@pytest.mark.parametrize("layers", [[0, 4], [-1], [1, 1], [2, 1]])
def test_refuses_layers_outside_or_out_of_order(layers):
    with pytest.raises(ValueError, match=r"expected increasing, distinct indices from 0 to 3"):
        resolve_layers(layers, 4)


def test_refuses_an_unknown_layer_set():
    with pytest.raises(ValueError, match=r"'deep'; expected one of \('all', 'first_half'"):
        resolve_layers("deep", 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "bits"}, "guidance mode is 'bits'; expected one of"),
        ({"layers": ()}, r"guidance has layers \(\)"),
        ({"sites": ()}, r"sites \(\); expected at least one each"),
        ({"format": "int4"}, "unknown FP4 format 'int4'"),
    ],
)
def test_spec_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        GuidanceSpec(**{"layers": (0,)} | changes)
