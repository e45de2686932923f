"""A decode step reads each layer's experts and cache where they lie: nothing of a layer's size is made for a kernel."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace_jax.rollout import decode_hlo

REPOSITORY = Path(__file__).resolve().parents[3]
GPU_COMPILERS = REPOSITORY / ".compilers" / "gpu"
# A loop over layers that slices, copies and prefetches, as XLA writes it; what fusions hold inside does not count.
COPYING = """
%fused_computation.1 (p: u32[4,32,64,768]) -> u32[1,32,64,768] {
  ROOT %d = u32[1,32,64,768]{3,2,1,0:T(8,128)} dynamic-slice(%p, %i), dynamic_slice_sizes={1,32,64,768}
}

%body.2 (arg: (u32[4,32,64,768], bf16[8,512])) -> (u32[4,32,64,768], bf16[8,512]) {
  %w = u32[4,32,64,768]{3,2,1,0:T(8,128)} get-tuple-element(%arg), index=0
  %of_layer = u32[1,32,64,768]{3,2,1,0:T(8,128)} fusion(%w), kind=kLoop, calls=%fused_computation.1
  %copy-start.1 = (u8[4,8,2,4]{3,2,1,0}, u8[4,8,2,4]{3,2,1,0:S(1)}, u32[]{:S(2)}) copy-start(%s)
  %k = (u8[4,8,24576]) custom-call(%w), output_to_operand_aliasing={}, metadata={op_name="/kv_append/pallas_call"}
  %g = f32[8,512]{1,0} custom-call(%of_layer), metadata={op_name="jit(f)/moe/grouped/pallas_call"}
}

ENTRY %main.3 (x: bf16[4,512,256]) -> bf16[4,512,256] {
  ROOT %copy.9 = bf16[4,512,256]{1,2,0} copy(%x)
}
"""


def test_the_report_names_what_is_large():
    found = decode_hlo.report(COPYING, 100_000)
    assert found["large"] == ["fusion u32[1,32,64,768]"]
    assert found["large_outside_loops"] == ["copy bf16[4,512,256]"]
    assert found["kernels"] == {"kv_append": 1, "grouped": 1}
    assert decode_hlo.report(COPYING, 256)["large"][1].startswith("copy-start u8[4,8,2,4]")


def run(platform: str, *options: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.trace_jax.rollout.decode_hlo", platform, *options],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install .[tpu]",
)
def test_a_decode_step_on_a_tpu_copies_no_layer_of_weights_or_cache():
    found = run("tpu")
    # One loop over all layers. Norm, quantization and low bits of the expert input come from one kernel, those of keys
    # and values from theirs; the input of the down projection is not recorded.
    assert found["kernels"] == {
        "quantize_recorded_nvfp4": 2,
        "kv_append": 1,
        "decode_attention_nvfp4": 1,
        "rms_norm_quantize_recorded_nvfp4": 1,
        "grouped_matmul_nvfp4_2": 1,
        "quantize_nvfp4": 1,
        "grouped_matmul_nvfp4_1": 1,
    }
    assert found["large"] == []
    # Before the loop XLA may lay dense weights out anew; packed ones and the cache are taken as they come.
    assert all(" bf16[" in line for line in found["large_outside_loops"]), found["large_outside_loops"]


@pytest.mark.slow
@pytest.mark.skipif(
    not GPU_COMPILERS.is_dir() or importlib.util.find_spec("triton") is None,
    reason="compiling for GPUs needs JAX's plugin for CUDA: make test-all installs it",
)
@pytest.mark.parametrize(("options", "kernels"), [((), 11), (("--bf16",), 9)], ids=["nvfp4", "bf16"])
def test_a_decode_step_on_a_gpu_copies_no_layer_of_weights_or_cache(options, kernels):
    path = os.pathsep.join(filter(None, [str(GPU_COMPILERS), os.environ.get("PYTHONPATH")]))
    found = run("gpu", *options, PYTHONPATH=path)
    # Keys and values with their bits, attention and the join of its parts, the expert input with norm and bits, the
    # down projection's input, two grouped matmuls, and four of the attention's projections. BF16 quantizes nothing.
    assert found["kernels"] == {"triton": kernels}
    # Attention leaves FP32 parts, one to a chunk; nothing is as large that holds weights or entries.
    large = [line for key in ("large", "large_outside_loops") for line in found[key]]
    assert [line for line in large if re.search(r"\b(u8|u32|bf16)\[\d", line)] == []
