"""What differs between BF16, packed-FP4 rollout and fake-quant training, as one explicit argument of the model.

A model calls `activation` at every quantization site and `expert_weight` for every expert matrix; it never asks in
which mode it runs. Objects are static (hashable); everything that changes from step to step is an argument.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.arrays import Fp4Array, Fp4Codes, Stacked
from kernels_pallas.guided_round import Guide, guided_round, guided_values, usable_rows
from kernels_pallas.quantize import dequantize, quantize, quantize_codes
from trace_jax.guidance import GuidanceSpec, SiteRecord, capture_site, pack_layer, take_rows
from trace_jax.quant.fake_quant import cast_weight, straight_through
from trace_jax.quant.plan import SITES, QuantPlan
from trace_jax.quant.weights import guided_weight_codes, quantize_weight_codes

Guides = dict[str, Guide] | None

COMPARED_SEQUENCES = 32
"""Sequences of a batch whose guided codes are compared with the trainer's own rounding, for the health alarm."""


@runtime_checkable
class Numerics(Protocol):
    """The seam between a model and its arithmetic."""

    def activation(self, site: str, x: jax.Array, guides: Guides) -> tuple[Any, Any]:
        """Operand for the GEMM at `site`, and what to keep of it. `x` is `[B, T, ..., K]`."""

    def expert_weight(self, name: str, w: Any, guides: dict[str, Fp4Array] | None, dtype: str) -> Any:
        """Operand of the expert matrices `[E, K, N]`; packed ones come as one layer of the stack (`Stacked`)."""

    def collect(
        self, captured: dict[str, Any], valid: jax.Array, guided: bool
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """What leaves a layer, by keys: (of guided layers only, of every layer). Layers may differ in their keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedNumerics:
    """The rollout: packed FP4 expert weights, activations quantized on the fly, records captured.

    Args:
        plan: which tensors are FP4.
        record: what guided layers keep; None when nothing is recorded.
        audit_rows: sequences of the batch whose full codes are kept at every site and layer.
    """

    plan: QuantPlan
    record: GuidanceSpec | None = None
    audit_rows: tuple[int, ...] = ()

    def activation(self, site, x, guides):
        if not self.plan.quantizes(site):
            return x, None
        q = quantize(x, self.plan.fp4, scale_rule=self.plan.scale_rule)
        return q, q

    def expert_weight(self, name, w, guides, dtype):
        return w

    def collect(self, captured, valid, guided):
        codes = {site: captured[site] for site in SITES if isinstance(captured.get(site), Fp4Array)}
        record = None
        if guided and self.record is not None:
            # By groups of sites, since a layer may lack some: each group leaves in one write.
            record = {
                group[0]: pack_layer({s: capture_site(s, codes[s], valid, self.record) for s in group})
                for group in self.record.groups
                if set(group) <= set(codes)
            }
        audit = (
            {site: take_rows(q, self.audit_rows) for site, q in codes.items()} if self.audit_rows else None
        )
        return record, audit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteCounts:
    """How one layer's site was rounded: rows with and without a record, values whose own rounding was overruled.

    `totals` int32 `[..., 4]` holds guided rows, unguided rows, overruled values and the guided rows among which these
    were counted, in one array (a layer scan writes every output with a kernel of its own); `width` is the number of
    values in a row.
    """

    totals: Any
    width: int = dataclasses.field(metadata={"static": True})

    @property
    def guided_rows(self) -> jax.Array | np.ndarray:
        return self.totals[..., 0]

    @property
    def unguided_rows(self) -> jax.Array | np.ndarray:
        return self.totals[..., 1]

    @property
    def overruled(self) -> jax.Array | np.ndarray:
        return self.totals[..., 2]

    @property
    def values(self) -> jax.Array | np.ndarray:
        """Values among which `overruled` was counted."""
        return self.totals[..., 3] * self.width


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteAudit:
    """Full codes of the audited sequences: by the trainer's own rounding, and as used. `[A, T, ..., K]`.

    `guided` marks the rows that had a record; `saturated` counts a row's values beyond the largest code.
    """

    own: Any
    used: Any
    guided: Any
    saturated: Any


def audit_site(used: Fp4Codes, x: jax.Array, guide: Guide | None, plan: QuantPlan) -> SiteAudit:
    """Audit of rows `x` `[A, T, ..., K]` that were rounded to `used`, under their record `guide` if there is one."""
    guided = jnp.zeros(used.row_exponent.shape, bool) if guide is None else usable_rows(guide, plan.fp4)
    beyond = (used.codes & 7 == 7) & (jnp.abs(x) > jnp.abs(dequantize(used, x.dtype)))
    return SiteAudit(
        own=quantize(x, plan.fp4),
        used=Fp4Array.from_codes(used, -1),
        guided=guided,
        saturated=jnp.sum(beyond, axis=-1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bf16Numerics:
    """No quantization: the yardstick, and the trainer of `bf16` and `fp4_rollout`.

    Args:
        audit_plan: FP4 plan under which the inputs of the first `audit_rows` sequences are rounded for the audit
            only: what this trainer's values would be next to an FP4 rollout's. None reports nothing.
        audit_rows: how many leading sequences of the batch report their codes.
    """

    audit_plan: QuantPlan | None = None
    audit_rows: int = 0

    def activation(self, site, x, guides):
        return x, x

    def expert_weight(self, name, w, guides, dtype):
        return w if isinstance(w, Stacked) else cast_weight(w, dtype)

    def collect(self, captured, valid, guided):
        if self.audit_plan is None or not self.audit_rows:
            return None, None
        plan, rows = self.audit_plan, slice(0, self.audit_rows)
        inputs = {site: lax.stop_gradient(x[rows]) for site, x in captured.items() if x is not None}
        codes = {site: quantize_codes(x, plan.fp4) for site, x in inputs.items() if plan.quantizes(site)}
        return None, {site: audit_site(codes[site], inputs[site], None, plan) for site in codes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeQuantNumerics:
    """The trainer: fake-quantized experts and KV, guided where `guides` holds a record.

    Args:
        plan: which tensors are FP4.
        audit_rows: how many leading sequences of the batch report their codes.
    """

    plan: QuantPlan
    audit_rows: int = 0

    def activation(self, site, x, guides):
        if not self.plan.quantizes(site):
            return x, None
        frozen = lax.stop_gradient(x)
        guide = guides.get(site) if guides else None
        operand = straight_through(x, guided_values(frozen, guide, self.plan.fp4))
        return operand, (frozen, guide)

    def expert_weight(self, name, w, guides, dtype):
        if not self.plan.experts:
            return cast_weight(w, dtype)
        frozen = lax.stop_gradient(w)
        guide = guides.get(name) if guides else None
        if guide is None:
            codes = quantize_weight_codes(frozen, self.plan)
        else:
            # Between syncs the masters move, but the rollout's FP4 codes are those of its own version.
            codes = guided_weight_codes(frozen, guide, self.plan)
        return straight_through(w, dequantize(codes, w.dtype)).astype(dtype)

    def collect(self, captured, valid, guided):
        audit, counts = {}, {}
        for site in SITES:
            if captured.get(site) is None:
                continue
            # The operand is all that every row needs; codes are made again for the few sequences that report them.
            x, guide = captured[site]
            if guide is not None:
                counts[site] = _count(x, guide, valid, self.plan)
            if self.audit_rows:
                head = jax.tree.map(lambda leaf: leaf[: self.audit_rows], (x, guide))
                audit[site] = audit_site(_rounded(*head, self.plan), *head, self.plan)
        return (counts if guided else None), (audit or None)


def _compared_sequences(tree: Any) -> Any:
    """Evenly spaced sequences, at most `COMPARED_SEQUENCES`, of arrays that lead with the batch axis."""
    return jax.tree.map(lambda leaf: leaf[:: -(-leaf.shape[0] // COMPARED_SEQUENCES)], tree)


def _own_rounding(x: jax.Array, guide: Guide, plan: QuantPlan) -> Fp4Codes:
    """What a record overrules: rounding to nearest under its scales; without a bit, the scales themselves."""
    if guide.mode == "scale":
        return quantize_codes(x, plan.fp4)
    return guided_round(x, dataclasses.replace(guide, mode="scale"), plan.fp4)


def _rounded(x: jax.Array, guide: Guide | None, plan: QuantPlan) -> Fp4Codes:
    """The codes whose values `guided_values` gives."""
    return quantize_codes(x, plan.fp4) if guide is None else guided_round(x, guide, plan.fp4)


def _count(x: jax.Array, guide: Guide, valid: jax.Array, plan: QuantPlan) -> SiteCounts:
    usable = usable_rows(guide, plan.fp4)
    fed = valid.reshape(*valid.shape, *(1,) * (usable.ndim - 2))
    guided, unguided = usable & fed, ~usable & fed
    compared, x, guide = _compared_sequences((guided, x, guide))
    differs = _rounded(x, guide, plan).codes != _own_rounding(x, guide, plan).codes
    totals = [
        jnp.sum(mask, dtype=jnp.int32) for mask in (guided, unguided, differs & compared[..., None], compared)
    ]
    return SiteCounts(totals=jnp.stack(totals), width=x.shape[-1])


def guides_of(records: dict[str, SiteRecord] | None) -> Guides:
    """Kernel arguments of a record's sites; None stays None."""
    return None if not records else {site: record.guide() for site, record in records.items()}
