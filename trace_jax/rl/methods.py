"""The methods that are compared: what the rollout and the trainer round, and what guides the trainer."""

import dataclasses

from trace_jax.config import ConfigError
from trace_jax.guidance import GuidanceSpec, resolve_layers
from trace_jax.models import ModelConfig
from trace_jax.quant import SITES, Bf16Numerics, FakeQuantNumerics, Numerics, QuantPlan

ROLLOUTS = ("bf16", "fp4")
TRAINERS = ("bf16", "fake_quant", "guided")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """One row of the methods table.

    `rollout`: `bf16` or `fp4`. `trainer`: `bf16`; `fake_quant` (own scales and rounding); `guided` (under the
    rollout's record, described by `mode`, `layers`, `sites`, `compact_scales`).
    """

    name: str
    rollout: str = "fp4"
    trainer: str = "guided"
    format: str = "nvfp4"
    mode: str = "mantissa"
    layers: str | tuple[int, ...] = "last_half"
    sites: tuple[str, ...] = ("expert_input", "key", "value")
    compact_scales: bool = False

    def __post_init__(self):
        if self.rollout not in ROLLOUTS:
            raise ConfigError(f"method.rollout is {self.rollout!r}; expected one of {ROLLOUTS}.")
        if self.trainer not in TRAINERS:
            raise ConfigError(f"method.trainer is {self.trainer!r}; expected one of {TRAINERS}.")
        if self.rollout == "bf16" and self.trainer == "guided":
            raise ConfigError(
                "method.trainer 'guided' needs an FP4 rollout to record; method.rollout is 'bf16'."
            )
        for site in self.sites:
            if site not in SITES:
                raise ConfigError(f"method.sites has {site!r}; expected some of {SITES}.")
        QuantPlan(format=self.format)

    def rollout_plan(self) -> QuantPlan | None:
        """FP4 plan of the rollout, None for BF16."""
        return QuantPlan(format=self.format) if self.rollout == "fp4" else None

    def record_spec(self, model: ModelConfig) -> GuidanceSpec | None:
        """What the rollout records, None for unguided methods."""
        if self.trainer != "guided":
            return None
        layers = resolve_layers(self.layers, model.num_layers)
        having = {
            site: tuple(layer for layer in model.site_layers(site) if layer in layers) for site in self.sites
        }
        # A family may lack a site, or have it in some layers only.
        having = {site: found for site, found in having.items() if found}
        return GuidanceSpec(
            format=self.format,
            mode=self.mode,
            layers=layers,
            sites=tuple(having),
            compact_scales=self.compact_scales,
            site_layers=None if all(found == layers for found in having.values()) else tuple(having.values()),
        )

    def trainer_numerics(self, audit_rows: int) -> Numerics:
        """Arithmetic of the trainer; `audit_rows` leading sequences of a minibatch report their codes."""
        if self.trainer == "bf16":
            return Bf16Numerics(audit_plan=self.rollout_plan(), audit_rows=audit_rows)
        return FakeQuantNumerics(plan=QuantPlan(format=self.format), audit_rows=audit_rows)
