"""What another method would have recorded of the same rollout, from its audit sample."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.guidance import GuidanceSpec, RecordError, SiteRecord, capture_site
from trace_jax.rollout.trajectories import Trajectories


def rerecord(trajectories: Trajectories, spec: GuidanceSpec | None) -> Trajectories:
    """The audited sequences alone, with the record that `spec` keeps of them; None records routes only.

    The audit sample holds full codes of every site and layer, and a record is a function of the codes: this is the
    record that a rollout under `spec` would have left, so records can be compared on one rollout.

    Raises:
        RecordError: there is no audit sample, or it lacks a site of `spec` or has another format.
    """
    t, rows = trajectories, np.asarray(trajectories.audit_rows, int)
    if not t.audit or not rows.size:
        raise RecordError(
            "the trajectories have no audit sample; sample them with an FP4 rollout and rl.audit_sequences >= 1."
        )

    layers = dict(t.audit_layers)

    def recorded(site: str) -> SiteRecord:
        if site not in t.audit or t.audit[site].format.name != spec.format:
            found = {name: codes.format.name for name, codes in t.audit.items()}
            raise RecordError(f"the audit sample holds {found}, the record needs {site!r} in {spec.format}.")
        audited = layers.get(site, tuple(range(t.audit[site].words.shape[0])))
        missing = sorted(set(spec.layers_of(site)) - set(audited))
        if missing:
            raise RecordError(
                f"the audit sample has {site!r} in layers {audited}, the record needs {missing} too."
            )
        places = [audited.index(layer) for layer in spec.layers_of(site)]
        codes = jax.tree.map(lambda leaf: jnp.asarray(leaf[places]), t.audit[site])
        fed = jnp.asarray(t.fed[rows])
        return jax.device_get(jax.vmap(lambda layer: capture_site(site, layer, fed, spec))(codes))

    return Trajectories(
        **{name: getattr(t, name)[rows] for name in ("tokens", "prompt_length", "length", "logprobs")},
        record=dataclasses.replace(
            t.record,
            sites={site: recorded(site) for site in (spec.sites if spec else ())},
            routes=t.record.routes[:, rows],
            row_hash=t.record.row_hash[rows],
            weight_version=t.record.weight_version[rows],
        ),
        observed=None if t.observed is None else t.observed[rows],
        audit=t.audit,
        audit_layers=t.audit_layers,
        audit_rows=tuple(range(len(rows))),
    )
