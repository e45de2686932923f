"""A ModelOpt export, converted by `compressed-tensors` itself, against the compressed-tensors export of the same model.

Runs in the environment of `transformers_logits.py`. Exports with input scales, since the converter expects them:

    python -m experiments.export_hf checkpoint=tests/data/hf_tiny/qwen3_moe format=modelopt out=/tmp/modelopt \
        expert_input_scale=0.0078125 down_input_scale=0.001953125
    (the same with format=compressed-tensors out=/tmp/export)
    /tmp/transformers/bin/python tests/scripts/convert_modelopt.py /tmp/modelopt /tmp/export
"""

import argparse
import json
import pathlib

import torch
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file


def tensors_of(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def as_bytes(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modelopt", type=pathlib.Path)
    parser.add_argument("compressed_tensors", type=pathlib.Path)
    arguments = parser.parse_args()
    stated = json.loads((arguments.compressed_tensors / "config.json").read_text())["quantization_config"]
    QuantizationConfig.model_validate(stated)
    converter = ModelOptNvfp4Converter(ignore=stated["ignore"], targets=["re:.*experts.*proj$"])
    tensors = tensors_of(arguments.modelopt)
    converter.validate(tensors)
    found, expected = converter.process(tensors), tensors_of(arguments.compressed_tensors)
    differ = sorted(set(found) ^ set(expected))
    differ += [
        n for n in set(found) & set(expected) if not torch.equal(as_bytes(found[n]), as_bytes(expected[n]))
    ]
    print(f"tensors {len(expected)}\ntensors_that_differ {len(differ)}")
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
