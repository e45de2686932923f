"""Logits of a compressed-tensors export by `transformers`, as a reference for `experiments.check_hf`.

Runs in an environment of its own; the project itself needs neither torch nor transformers:

    python3 -m venv /tmp/transformers && /tmp/transformers/bin/pip install torch==2.13.0 "transformers>=5,<6" \
        "compressed-tensors>=0.20,<0.21"
    python -m experiments.export_hf checkpoint=tests/data/hf_tiny/qwen3_moe format=compressed-tensors out=/tmp/export
    /tmp/transformers/bin/python tests/scripts/transformers_logits.py /tmp/export /tmp/export.npz
    python -m experiments.check_hf --checkpoint /tmp/export --reference /tmp/export.npz

Writes `input_ids` and the FP32 `logits` of its eager forward, and prints how far its own BF16 forward is from that,
which is what BF16 rounding amounts to. Experts are set to what `compressed-tensors` itself decompresses: transformers
(seen with 5.24) leaves out the scale of a whole matrix, `weight_global_scale`, where it fuses experts.
"""

import argparse
import pathlib

import numpy as np
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
LEAVES = ("weight_packed", "weight_scale", "weight_global_scale")


def decompressed(tensors, module, scheme):
    """One expert's dense matrix by the format's own library."""
    state = {leaf: tensors[f"{module}.{leaf}"] for leaf in LEAVES}
    return NVFP4PackedCompressor.decompress(state, scheme)["weight"].to(torch.bfloat16)


def load(folder):
    """The dense FP32 model with every fused expert matrix set to its decompressed parts; how many were right before."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tensors = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    config = AutoConfig.from_pretrained(folder)
    quantization = QuantizationConfig.model_validate(config.quantization_config)
    (scheme,) = quantization.config_groups.values()
    right = []
    for name, module in loaded.named_modules():
        for fused, parts in FUSED.items() if name.endswith(".experts") else ():
            weight = getattr(module, fused).data
            for expert in range(weight.shape[0]):
                sources = [f"{name}.{expert}.{part}" for part in parts]
                dense = torch.cat([decompressed(tensors, source, scheme) for source in sources])
                right.append(torch.equal(weight[expert], dense))
                scale = tensors[f"{sources[0]}.weight_global_scale"].to(dense.dtype)
                if not right[-1] and not torch.equal(weight[expert] / scale, dense):
                    raise SystemExit(
                        f"{name}.{expert}.{fused}: transformers loaded other codes or block scales"
                    )
                weight[expert] = dense
    # A model that was loaded quantized keeps its dtype: the weights move to one that is not.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(loaded.state_dict())
    return model.eval(), right


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=pathlib.Path, help="folder of format=compressed-tensors")
    parser.add_argument("out", help="npz file to write")
    arguments = parser.parse_args()
    model, right = load(arguments.export)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (2, 40), generator=generator, dtype=torch.int32)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        bf16 = model.bfloat16()(tokens, use_cache=False).logits.float()
    np.savez(arguments.out, input_ids=tokens.numpy(), logits=logits.numpy(), logits_bf16=bf16.numpy())
    print(f"experts_loaded_right {sum(right)}/{len(right)}")
    print(f"own_bf16_max_abs_diff {(bf16 - logits).abs().max():.3e}")


if __name__ == "__main__":
    main()
