"""Which implementation runs: by platform, best first; never over a mesh that XLA partitions; by name if named."""

import importlib
import importlib.metadata

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from kernels_pallas import triton_bridge
from kernels_pallas.activations import ClampedSwiglu
from kernels_pallas.arrays import Stacked
from kernels_pallas.formats import NVFP4
from kernels_pallas.grouped_matmul import arranged
from kernels_pallas.grouped_matmul.api import IMPLEMENTATIONS as GROUPED
from kernels_pallas.implementations import (
    Implementation,
    chooses_kernels,
    default_implementation,
    explain,
    select,
)
from kernels_pallas.quantize import quantize

TABLES = [
    ("decode_attention", "IMPLEMENTATIONS"),
    ("grouped_matmul", "IMPLEMENTATIONS"),
    ("guided_round", "IMPLEMENTATIONS"),
    ("guided_round", "VALUES_IMPLEMENTATIONS"),
    ("kv_cache", "IMPLEMENTATIONS"),
    ("matmul", "IMPLEMENTATIONS"),
    ("quantize", "IMPLEMENTATIONS"),
    ("quantize", "RECORDED_IMPLEMENTATIONS"),
    ("quantize", "NORM_IMPLEMENTATIONS"),
]


def runs(name):
    return lambda *args, **options: name


def odd(x):
    return None if x % 2 else f"{x} is even"


TABLE = {
    "best": Implementation(run=runs("best"), refusal=odd, platform="gpu"),
    "second": Implementation(
        run=runs("second"), refusal=lambda x: None if x < 10 else "large", platform="gpu"
    ),
    "tpu": Implementation(run=runs("tpu"), platform="tpu"),
    "reference": Implementation(run=runs("reference")),
}


def chosen(x, implementation=None):
    return select("op", implementation, TABLE, x)(x)


@pytest.fixture
def backend(monkeypatch):
    return lambda name: monkeypatch.setattr(jax, "default_backend", lambda: name)


@pytest.mark.parametrize(
    ("platform", "x", "expected"),
    [
        ("cpu", 1, "reference"),
        ("tpu", 2, "tpu"),
        ("gpu", 1, "best"),
        ("gpu", 2, "second"),
        ("gpu", 12, "reference"),
    ],
)
def test_the_first_of_the_platform_that_serves_is_chosen(backend, platform, x, expected):
    backend(platform)
    assert chosen(x) == expected


def test_explain_says_what_is_against_each(backend):
    backend("gpu")
    assert explain(TABLE, 12) == {
        "best": "12 is even",
        "second": "large",
        "tpu": "it is for tpu, the default backend is gpu",
        "reference": None,
    }


@pytest.mark.parametrize(
    ("shape", "kinds", "expected"),
    [
        ((2, 1), (AxisType.Auto, AxisType.Auto), "reference"),
        ((1, 1), (AxisType.Auto, AxisType.Auto), "best"),
        ((2, 2), (AxisType.Manual, AxisType.Manual), "best"),
        ((2, 2), (AxisType.Manual, AxisType.Auto), "reference"),
        ((2, 1), (AxisType.Explicit, AxisType.Explicit), "reference"),
    ],
)
def test_a_program_that_xla_partitions_takes_the_reference(backend, shape, kinds, expected):
    backend("gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh(shape, ("data", "tensor"), axis_types=kinds)):
        assert chosen(1) == expected
        assert chosen(1, "best") == "best"  # inside a partitioned program too, a name is taken at its word
        if expected == "reference":
            assert explain(TABLE, 1)["best"] == "XLA cannot partition its kernel over this mesh"
    assert chosen(1) == "best"


def test_a_name_is_used_on_any_platform_or_refused_with_the_reason(backend):
    backend("cpu")
    assert chosen(1, "best") == "best" and chosen(1, "tpu") == "tpu"
    with pytest.raises(
        ValueError, match=r"op: implementation 'best' does not serve this: 2 is even; use 'reference'"
    ):
        chosen(2, "best")
    with pytest.raises(ValueError, match=r"op has no implementation 'cuda'; available: .*'reference'.*None"):
        chosen(1, "cuda")


@pytest.mark.parametrize(("op", "table"), TABLES, ids="/".join)
def test_every_table_ends_with_the_reference_and_names_platforms(op, table):
    entries = getattr(importlib.import_module(f"kernels_pallas.{op}.api"), table)
    platforms = {"reference": None, "pallas_tpu": "tpu", "pallas_gpu": "gpu", "triton": "gpu"}
    assert list(entries)[-1] == "reference"
    assert {name: entry.platform for name, entry in entries.items()} == {n: platforms[n] for n in entries}


def test_triton_needs_an_nvidia_gpu_and_both_packages(backend, monkeypatch):
    backend("cpu")
    assert triton_bridge.unavailable() == "it needs an NVIDIA GPU, the default backend is cpu"
    backend("gpu")
    versions = {}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert triton_bridge.unavailable() == "it needs triton >= 3.6, < 3.7, which is not installed"
    versions |= {"triton": "3.6.0+git1234", "jax-triton": "0.3.0"}
    assert triton_bridge.unavailable() == "it needs jax-triton >= 0.3.1, < 0.4, installed is 0.3.0"
    versions["jax-triton"] = "0.3.1"
    assert triton_bridge.unavailable() is None
    versions["triton"] = "3.10.0rc1"  # not before 3.6
    assert triton_bridge.unavailable() == "it needs triton >= 3.6, < 3.7, installed is 3.10.0rc1"


def test_a_default_stands_in_for_a_choice_left_open_also_in_programs_traced_before(backend):
    backend("gpu")
    program = jax.jit(lambda x: x + len(chosen(1)))
    assert int(program(0)) == len("best") and chooses_kernels("gpu")
    with default_implementation("reference"):
        assert chosen(1) == "reference" and not chooses_kernels("gpu")
        assert chosen(1, "second") == "second"  # a name is still taken at its word
        assert int(program(0)) == len("reference")
    assert int(program(0)) == len("best")


def test_a_trainers_matrices_are_left_to_xla_and_a_rollouts_are_not(backend, monkeypatch):
    backend("gpu")
    monkeypatch.setattr(triton_bridge, "unavailable", lambda: None)
    x, w, sizes = (jnp.zeros(shape, jnp.bfloat16) for shape in ((8, 64), (2, 4, 64, 32), (4,)))

    def against(w, activation="swiglu"):
        return explain(GROUPED, x, w, sizes.astype(jnp.int32), activation=activation)["triton"]

    assert "a trainer's" in against(w[0])
    layers = arranged(w, gated=True)
    assert against(Stacked(layers.array, jnp.int32(1))) is None
    packed = quantize(w, NVFP4, axis=-2, row_axes=(-2, -1), implementation="reference")
    tiled = arranged(packed, gated=True)
    assert tiled.gated and tiled.shape == w.shape
    for activation in ("swiglu", ClampedSwiglu(alpha=1.702, limit=7.0)):
        assert against(Stacked(tiled, jnp.int32(1)), activation) is None
    assert "gated=True" in against(Stacked(tiled, jnp.int32(1)), None)
    assert "gated=False" in against(Stacked(arranged(packed, gated=False), jnp.int32(1)))
    backend("cpu")
    assert arranged(packed, gated=True) is packed and arranged(w, gated=True) is w
