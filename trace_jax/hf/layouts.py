"""NVFP4 layouts of serving engines: names and kinds of the tensors that hold a packed expert matrix.

Sources: vllm-project/compressed-tensors (`compressors/nvfp4`, `nvfp4-pack-quantized`) and vLLM's loaders of it and of
NVIDIA ModelOpt's checkpoints (`quantization/modelopt.py`). Both hold two codes in a byte, low nibble first, and E4M3
block scales; they differ in names, and in that compressed-tensors divides by the matrix scale.
"""

import dataclasses

from trace_jax.hf.codecs import Codec, E4M3Bytes, RowScale, Words
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.table import Link


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

    def leaves(self) -> tuple[tuple[str, str, Codec], ...]:
        """(leaf of an Fp4Array, suffix of its tensor, codec)."""
        return (
            ("words", self.codes, Words()),
            ("scales", self.scales, E4M3Bytes()),
            ("row_exponent", self.matrix_scale, RowScale(inverse=self.inverse, ndim=self.ndim)),
        )


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
