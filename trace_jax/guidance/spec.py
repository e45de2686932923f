"""What is recorded: sites, layers, bits."""

import dataclasses
from collections.abc import Sequence

from kernels_pallas.formats import get_format
from trace_jax.config import ConfigError

MODES = ("scale", "mantissa", "full")
LAYER_SETS = ("all", "first_half", "last_half", "last_quarter", "last_eighth")
RECORD_VERSION = 1


def resolve_layers(layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Static set of guided layers.

    Args:
        layers: one of `LAYER_SETS`, or layer indices.
        num_layers: depth of the model.

    Raises:
        ValueError: an unknown name, an index outside the model, or a repeated index.
    """
    if isinstance(layers, str):
        shares = {"all": num_layers, "last_half": num_layers // 2, "last_quarter": num_layers // 4}
        shares["last_eighth"] = num_layers // 8
        if layers == "first_half":
            return tuple(range(num_layers // 2))
        if layers not in shares:
            raise ConfigError(
                f"guidance layers {layers!r}; expected one of {LAYER_SETS} or a list of indices."
            )
        count = max(shares[layers], 1)
        return tuple(range(num_layers - count, num_layers))
    chosen = tuple(int(layer) for layer in layers)
    if list(chosen) != sorted(set(chosen)) or not all(0 <= layer < num_layers for layer in chosen):
        raise ConfigError(
            f"guidance layers {list(chosen)}; expected increasing, distinct indices from 0 to {num_layers - 1}."
        )
    return chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidanceSpec:
    """The static description of a record; two sides must agree on it exactly.

    `mode`: `scale` (block scales only), `mantissa` (plus 1 bit per value), `full` (plus the 4-bit code).
    `compact_scales` keeps the two low bits of each scale byte. `layers` are those of the model that are recorded;
    `site_layers` says for each of `sites` which of them have it, None where all do.
    """

    format: str = "nvfp4"
    mode: str = "mantissa"
    layers: tuple[int, ...]
    sites: tuple[str, ...] = ("expert_input", "key", "value")
    compact_scales: bool = False
    site_layers: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        get_format(self.format)
        if self.mode not in MODES:
            raise ConfigError(f"guidance mode is {self.mode!r}; expected one of {MODES}.")
        if len(set(self.sites)) < len(self.sites):
            raise ConfigError(f"guidance sites {self.sites} name one twice; expected distinct sites.")
        if not self.layers or not self.sites:
            raise ConfigError(
                f"guidance has layers {self.layers} and sites {self.sites}; expected at least one each."
            )

        if self.site_layers is not None:
            if len(self.site_layers) != len(self.sites):
                raise ConfigError(
                    f"guidance names the layers of {len(self.site_layers)} sites, it has {self.sites}."
                )
            for site, layers in zip(self.sites, self.site_layers, strict=True):
                if not layers or not set(layers) <= set(self.layers) or list(layers) != sorted(set(layers)):
                    raise ConfigError(
                        f"guidance site {site!r} has layers {layers}; expected some of {self.layers}, increasing."
                    )

    def layers_of(self, site: str) -> tuple[int, ...]:
        """The recorded layers of the model that have a site."""
        return self.layers if self.site_layers is None else self.site_layers[self.sites.index(site)]

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Sites that the same layers have, together."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for site in self.sites:
            groups.setdefault(self.layers_of(site), []).append(site)
        return tuple(tuple(sites) for sites in groups.values())

    def bits_per_value(self, width: int) -> float:
        """Recorded bits per value of rows of `width` values, without the one byte a row.

        Compact scales come four to a byte, so a row whose number of blocks is no multiple of four pays for padding.
        """
        blocks = width // get_format(self.format).block
        scale_bits = 8 * -(-blocks // 4) if self.compact_scales else 8 * blocks
        return {"scale": 0, "mantissa": 1, "full": 4}[self.mode] + scale_bits / width
