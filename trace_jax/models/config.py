"""Model configuration."""

import dataclasses

from trace_jax.config import check_range

FAMILIES = ("tiny_moe", "qwen3_moe")
DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Mixture-of-Experts transformer of Qwen3-MoE layers.

    Sizes count elements. `expert_hidden_size` is the width of one expert, `dtype` the compute dtype (masters are
    always FP32 or wider); `float32` and `float64` serve gradient and equality tests.
    """

    family: str = "tiny_moe"
    vocab_size: int = 0  # 0: taken from the task's tokenizer when the run is wired
    hidden_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    experts_per_token: int = 2
    expert_hidden_size: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    dtype: str = "bfloat16"
    remat: bool = False

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"model.family is {self.family!r}; expected one of {FAMILIES}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype is {self.dtype!r}; expected one of {DTYPES}.")
        sizes = (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_experts",
            "experts_per_token",
            "expert_hidden_size",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; expected a positive size.")
        check_range("model", self, "rope_theta", "norm_eps", above=0)
        if self.vocab_size < 0:
            raise ValueError(
                f"model.vocab_size is {self.vocab_size}; expected 0 (from the tokenizer) or more."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "every KV head must serve the same number of query heads."
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}."
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even.")

    @property
    def contractions(self) -> dict[str, int]:
        """Sizes that FP4 blocks must divide, as `QuantPlan.check` takes them."""
        return {name: getattr(self, name) for name in ("hidden_size", "expert_hidden_size", "head_dim")}
