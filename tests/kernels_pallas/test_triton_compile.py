"""Every Triton kernel compiles for Hopper and Blackwell, on any machine, and keeps its values in registers."""

import importlib
import importlib.util
import pkgutil
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest

import kernels_pallas
from kernels_pallas import triton_bridge
from tests.kernels_pallas.triton_types import TYPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: pip install 'triton>=3.6,<3.7'",
    ),
]
ARCHITECTURES = (90, 100)
SHARED_BYTES = 227 * 1024  # of a program, on either
MODULES = [
    f"kernels_pallas.{op.name}.triton"
    for op in pkgutil.iter_modules(kernels_pallas.__path__)
    if op.ispkg and importlib.util.find_spec(f"kernels_pallas.{op.name}.triton") is not None
]
CASES = [case for module in MODULES for case in importlib.import_module(module).compile_cases()]


def recorded(case, monkeypatch):
    """What the case passes to `triton_bridge.call`, call by call: kernel, arguments, options."""
    calls = []

    def call(kernel, *arguments, outputs, **options):
        types = [TYPES[a.dtype.name] if hasattr(a, "dtype") else a for a in (*arguments, *outputs)]
        calls.append((kernel, types, options))
        return [jnp.zeros(o.shape, o.dtype) for o in outputs]

    monkeypatch.setattr(triton_bridge, "call", call)
    jax.eval_shape(
        lambda *arguments: case.run(*arguments), *case.arguments
    )  # a new function: nothing is cached
    return calls


def compiled(kernel, types, options, architecture):
    """The kernel as jax_triton compiles it: pointers to 16 bytes, numbers not specialised but for 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    settings = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    constants = {name: value for name, value in options.items() if name not in ("grid", "aliases")}
    signature = dict.fromkeys(constants, "constexpr")
    for name, kind in zip(kernel.arg_names, types, strict=False):
        if isinstance(kind, str):
            signature[name] = f"*{kind}"
        elif kind == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, {n: signature[n] for n in kernel.arg_names}, constants, attributes)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={**settings, "enable_fp_fusion": False})


def local_bytes(cubin, path):
    """Bytes of local memory of a thread: its stack frame, where registers go that do not fit."""
    from triton import knobs

    path.write_bytes(cubin)
    tool = knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    stack, local = re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage).groups()
    return int(stack) + int(local)


def test_every_module_lists_cases():
    assert {"quantize", "guided_round", "kv_cache"} <= {name.split(".")[1] for name in MODULES}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles_without_spilling(case, architecture, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    calls = recorded(case, monkeypatch)
    assert calls
    for call in calls:
        result = compiled(*call, architecture)
        assert result.metadata.shared <= SHARED_BYTES
        assert local_bytes(result.asm["cubin"], tmp_path / "kernel.cubin") <= case.local_bytes
