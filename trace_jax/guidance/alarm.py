"""Health alarm: a record that no longer fits its tokens overrules the trainer's own rounding far too often."""

import dataclasses

# Records of the right rows overrule few values at the first guided layer, foreign ones about CHANCE: their low bits
# agree with the trainer's own only by chance. The limit is FACTOR times the run's own baseline; not below FLOOR, which
# drift of the policy stays under; not above the middle between baseline and chance, for where unguided layers come
# first, right records overrule many values too. FIRST is the limit of the step that sets the baseline. MIN_COUNT keeps
# a handful of flips in a small batch from counting as a rise.
FACTOR = 8.0
FLOOR, FIRST, CHANCE = 0.05, 0.42, 0.5
MIN_COUNT = 50


@dataclasses.dataclass
class HealthAlarm:
    """Compares the share of overruled values, per site, with the first step that reported the site.

    `baseline` maps site to (overruled, total) of that step and is part of the checkpoint. Callers whose weights are
    ahead of the rollout's by a varying number of versions name that lag in the site: the shares differ.
    """

    baseline: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def limit(self, site: str) -> float:
        """Largest share of overruled values that counts as healthy."""
        overruled, total = self.baseline[site]
        share = overruled / total
        return min(max(FACTOR * share, FLOOR), (share + CHANCE) / 2)

    def observe(self, counts: dict[str, tuple[int, int]]) -> list[str]:
        """Checks one step's (overruled, total) per site at the first guided layer; the first step sets the baseline.

        Returns:
            One message for each site over its limit.
        """
        messages = []
        for site, (overruled, total) in counts.items():
            if total == 0:
                continue
            # The first step has no baseline of its own yet: only chance level is unhealthy there.
            limit = self.limit(site) if site in self.baseline else FIRST
            self.baseline.setdefault(site, (int(overruled), int(total)))
            if overruled >= MIN_COUNT and overruled > limit * total:
                messages.append(self._message(site, overruled, total, limit))
        return messages

    def _message(self, site: str, overruled: int, total: int, limit: float) -> str:
        return (
            f"guidance alarm at {site!r}: the record overrules {overruled / total:.1%} of the trainer's own rounding "
            f"at the first guided layer, limit {limit:.1%}. The record is probably shifted, stale or foreign."
        )
