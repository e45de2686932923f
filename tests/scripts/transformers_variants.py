"""Folders as `transformers` 5 writes them and MXFP4 as it reads it, with reference logits for `experiments.check_hf`.

Runs in an environment of its own, see transformers_logits.py:

    python -m experiments.export_hf checkpoint=tests/data/hf_tiny/gpt_oss format=mxfp4 out=/tmp/variants/gpt_oss
    /tmp/transformers/bin/python tests/scripts/transformers_variants.py tests/data/hf_tiny /tmp/variants
    for DIR in /tmp/variants/*; do
        python -m experiments.check_hf --checkpoint $DIR --reference $DIR/reference.npz; done

Writes every tiny checkpoint with fused experts, and a random Qwen3.5 with its vision tower, as it is published, with
fused experts and with them apart; beside each, and in `gpt_oss`, `reference.npz` with the logits of the FP32 forward.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Mxfp4Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

FUSED = ("qwen3_moe", "qwen3_5_moe_text", "olmoe", "mixtral", "deepseek_v3")
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}


def write_reference(model, tokens, folder):
    with torch.no_grad():
        logits = model.float().eval()(input_ids=torch.tensor(tokens, dtype=torch.int64)).logits
    np.savez(folder / "reference.npz", input_ids=tokens, logits=logits.numpy())


def published(text_config):
    """Random, with the tensors that are FP32 in published checkpoints in FP32, of values that BF16 would round."""
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=text_config, vision_config=VISION | {"patch_size": 4})
    model = Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16)
    for name, value in model.named_parameters():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            value.data = value.data.float() + 2.0**-13
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tiny", type=pathlib.Path, help="tests/data/hf_tiny")
    parser.add_argument(
        "out", type=pathlib.Path, help="folder of folders; gpt_oss in it is an export in MXFP4"
    )
    arguments = parser.parse_args()
    tokens = np.load(arguments.tiny / "gpt_oss" / "reference.npz")["input_ids"]
    for name in FUSED:
        model = AutoModelForCausalLM.from_pretrained(arguments.tiny / name, dtype=torch.bfloat16)
        model.save_pretrained(arguments.out / f"{name}_fused", save_original_format=False)
        write_reference(model, tokens, arguments.out / f"{name}_fused")
    text_config = json.loads((arguments.tiny / "qwen3_5_moe_text" / "config.json").read_text())
    for name, apart in (("qwen3_5_moe", False), ("qwen3_5_moe_apart", True)):
        model = published(text_config)
        model.save_pretrained(arguments.out / name, save_original_format=apart)
        write_reference(model, tokens, arguments.out / name)
    folder = arguments.out / "gpt_oss"
    dequantized = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=dequantized, dtype=torch.bfloat16
    )
    write_reference(model, tokens, folder)


if __name__ == "__main__":
    main()
