"""Layouts of FP4 checkpoints: names and kinds of the tensors that hold packed expert matrices.

NVFP4 for serving engines, one matrix per expert. Sources: vllm-project/compressed-tensors (`compressors/nvfp4`,
`nvfp4-pack-quantized`) and vLLM's loaders of it and of NVIDIA ModelOpt's checkpoints (`quantization/modelopt.py`). Both
hold two codes in a byte, low nibble first, and E4M3 block scales; they differ in names, and in that compressed-tensors
divides by the matrix scale.

MXFP4 as gpt-oss is published, all experts of a layer in one array of `_blocks` and one of `_scales`:
https://huggingface.co/openai/gpt-oss-20b
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from trace_jax.hf.codecs import BlockWords, Bytes, Codec, E4M3Bytes, RowScale, Words
from trace_jax.hf.config import MAPPING, NAME, HfConfig
from trace_jax.hf.families import Family
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.table import Link
from trace_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What stands in the place of `.weight` for a matrix in NVFP4, and how its scale is held.

    Attributes:
      inverse: scales of a whole matrix and of activations are held as what one divides by.
      ndim: axes of such a scale, 0 or 1 (of one element).
    """

    name: str
    codes: str
    scales: str
    matrix_scale: str
    input_scale: str
    inverse: bool
    ndim: int
    format: ClassVar[Fp4Format] = NVFP4

    def ignores(self, name: str) -> bool:
        """Whether the name is of a tensor that rollouts here do not use."""
        return name.endswith(f".{self.input_scale}")

    def table(self, family: Family, config: ModelConfig, packed: frozenset[str]) -> list[Link]:
        """The table of a model whose parameters `packed` are in FP4."""
        return packed_links(family.engine_table(config), packed, self)

    def leaves(self) -> tuple[tuple[str, str, Codec], ...]:
        """(leaf of an Fp4Array, suffix of its tensor, codec)."""
        return (
            ("words", self.codes, Words()),
            ("scales", self.scales, E4M3Bytes()),
            ("row_exponent", self.matrix_scale, RowScale(inverse=self.inverse, ndim=self.ndim)),
        )


class BlockLayout:
    """MXFP4 in the way of gpt-oss: `[E, out, in]`, the codes of 32 inputs in 16 bytes and their scale in one."""

    name = "mxfp4"
    format: ClassVar[Fp4Format] = MXFP4

    def ignores(self, name: str) -> bool:
        return False

    def table(self, family: Family, config: ModelConfig, packed: frozenset[str]) -> list[Link]:
        """The table of a model whose parameters `packed` are in FP4.

        Raises:
            CheckpointFormatError: a family that has no such checkpoints.
        """
        return block_links(family.table(config), packed, self)


COMPRESSED_TENSORS = Layout(
    name="compressed-tensors",
    codes="weight_packed",
    scales="weight_scale",
    matrix_scale="weight_global_scale",
    input_scale="input_global_scale",
    inverse=True,
    ndim=1,
)
MODELOPT = Layout(
    name="modelopt",
    codes="weight",
    scales="weight_scale",
    matrix_scale="weight_scale_2",
    input_scale="input_scale",
    inverse=False,
    ndim=0,
)
LAYOUTS = {layout.name: layout for layout in (COMPRESSED_TENSORS, MODELOPT)}
"""Of NVFP4, by `quant_method`."""

MXFP4_BLOCKS = BlockLayout()


def layout_of(hf_config: Mapping[str, Any], path: object) -> Layout | BlockLayout:
    """The layout that a `config.json` states.

    Raises:
        CheckpointFormatError: none, or one that is not read here.
    """
    layouts = {**LAYOUTS, MXFP4_BLOCKS.name: MXFP4_BLOCKS}
    stated = HfConfig(hf_config).get("quantization_config", kind=MAPPING, default={})
    method = HfConfig(stated, "quantization_config").get("quant_method", kind=NAME)
    if method not in layouts:
        raise CheckpointFormatError(
            f"{path} has quant_method {method!r}; expected one of {', '.join(sorted(layouts))}."
        )
    return layouts[method]


def packed_links(links: list[Link], packed: frozenset[str], layout: Layout) -> list[Link]:
    """The table of a model whose parameters `packed` are FP4 arrays: three tensors in the place of each of theirs.

    Raises:
        CheckpointFormatError: a packed parameter whose experts do not have an `[out, in]` tensor each.
    """
    found: list[Link] = []
    for link in links:
        if link.param not in packed:
            found.append(link)
            continue
        module, _, last = link.tensor.rpartition(".")
        if last != "weight" or "{expert}" not in link.tensor or link.transpose != (1, 0) or link.axis != -1:
            raise CheckpointFormatError(
                f"{link.tensor} holds {link.param} in a way that has no NVFP4 counterpart in the {layout.name} layout, "
                "which takes one [out, in] matrix per expert."
            )
        for leaf, suffix, codec in layout.leaves():
            param, tensor = f"{link.param}.{leaf}", f"{module}.{suffix}"
            if leaf == "row_exponent":
                # Gate and up are one matrix here, hence one scale; each of their tensors says it.
                same = any(other.param == param for other in found)
                found.append(Link(param=param, tensor=tensor, codec=codec, same=same))
            else:
                found.append(dataclasses.replace(link, param=param, tensor=tensor, codec=codec))
    return found


def block_links(links: list[Link], packed: frozenset[str], layout: BlockLayout) -> list[Link]:
    """The table of a model whose parameters `packed` are MXFP4 arrays: blocks and scales in the place of each tensor.

    Raises:
        CheckpointFormatError: a packed parameter that is not in one `[E, in, out]` tensor of a layer.
    """
    found: list[Link] = []
    for link in links:
        if link.param not in packed:
            found.append(link)
            continue
        if "{expert}" in link.tensor or link.transpose is not None:
            raise CheckpointFormatError(
                f"{link.tensor} holds {link.param} in a way that has no counterpart in the {layout.name} layout, which "
                "is gpt-oss's. Export NVFP4 or BF16 instead."
            )
        for leaf, codec in (("words", BlockWords()), ("scales", Bytes())):
            param, tensor = f"{link.param}.{leaf}", f"{link.tensor}_{'blocks' if leaf == 'words' else leaf}"
            # Rows are outputs: what the plain tensor has last.
            found.append(
                dataclasses.replace(link, param=param, tensor=tensor, transpose=(0, 2, 1), codec=codec)
            )
    return found
