"""Which tensors are FP4."""

import dataclasses

from kernels_pallas.formats import Fp4Format, get_format
from kernels_pallas.quantize import SCALE_RULES

EXPERT_INPUT = "expert_input"
DOWN_INPUT = "down_input"
KEY = "key"
VALUE = "value"
SITES = (EXPERT_INPUT, DOWN_INPUT, KEY, VALUE)


class PlanError(ValueError):
    """A model whose tensors cannot be quantized as planned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantPlan:
    """Routed-expert weights and activations and the KV cache in one FP4 format; everything else stays BF16.

    `scale_rule="4over6"` picks each NVFP4 block scale of expert weights and activations by error, for the evaluation of
    a finished policy; the KV cache keeps the plain rule.
    """

    format: str = "nvfp4"
    experts: bool = True
    kv: bool = True
    scale_rule: str = "amax"

    def __post_init__(self):
        get_format(self.format)
        if self.scale_rule not in SCALE_RULES:
            raise ValueError(f"scale_rule is {self.scale_rule!r}; expected one of {SCALE_RULES}.")
        if self.scale_rule == "4over6" and self.format != "nvfp4":
            raise ValueError(f"scale_rule '4over6' is defined for nvfp4 blocks, not for {self.format!r}.")

    @property
    def fp4(self) -> Fp4Format:
        return get_format(self.format)

    @property
    def kv_format(self) -> Fp4Format | None:
        """Of the KV cache; None where it stays BF16."""
        return self.fp4 if self.kv else None

    def quantizes(self, site: str) -> bool:
        """Whether the activation `site` is FP4."""
        if site not in SITES:
            raise ValueError(f"unknown quantization site {site!r}; expected one of {SITES}.")
        return self.kv if site in (KEY, VALUE) else self.experts

    def check(self, *, experts: dict[str, int], kv: dict[str, int]) -> None:
        """Raises PlanError when a contraction of the experts or of the cache does not split into whole blocks.

        The sizes come with their names in the model's configuration.
        """
        sizes = (experts if self.experts else {}) | (kv if self.kv else {})
        for name, size in sizes.items():
            if size % self.fp4.block:
                raise PlanError(
                    f"model.{name} is {size}, not a multiple of the {self.format} block of {self.fp4.block}. Choose "
                    f"{-(-size // self.fp4.block) * self.fp4.block}, or a format with smaller blocks."
                )
