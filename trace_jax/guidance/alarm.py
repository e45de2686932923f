"""Health alarm: a record that no longer fits its tokens overrules the trainer's own rounding far too often."""

import dataclasses

# Records of the right rows overrule little at the first guided layer; the low bits of foreign rows agree with the
# trainer's own only by chance. FACTOR tells the two apart without being tripped by drift of the policy, MIN_COUNT
# keeps a handful of flips on a small batch from counting as a rise. CEILING caps the limit for methods whose
# baseline is high because unguided layers come first: chance alone overrules about half of the values.
FACTOR = 8.0
MIN_COUNT = 50
CEILING = 0.3


@dataclasses.dataclass
class HealthAlarm:
    """Compares the share of overruled values, per site, with the run's first step.

    `baseline` maps site to (overruled, total) of that step and is part of the checkpoint.
    """

    baseline: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def limit(self, site: str, total: int) -> float:
        """Largest share of overruled values that counts as healthy, for `total` values."""
        overruled, seen = self.baseline[site]
        share = max(overruled, MIN_COUNT) / max(seen, 1)
        return max(min(FACTOR * share, CEILING), MIN_COUNT / max(total, 1))

    def observe(self, counts: dict[str, tuple[int, int]]) -> list[str]:
        """Checks one step's (overruled, total) per site at the first guided layer; the first step sets the baseline.

        Returns:
            One message for each site over its limit.
        """
        messages = []
        for site, (overruled, total) in counts.items():
            if total == 0:
                continue
            if site not in self.baseline:
                self.baseline[site] = (int(overruled), int(total))
                if overruled > CEILING * total:
                    messages.append(self._message(site, overruled, total, CEILING))
                continue
            limit = self.limit(site, total)
            if overruled > limit * total:
                messages.append(self._message(site, overruled, total, limit))
        return messages

    def _message(self, site: str, overruled: int, total: int, limit: float) -> str:
        return (
            f"guidance alarm at {site!r}: the record overrules {overruled / total:.1%} of the trainer's own rounding at "
            f"the first guided layer, limit {limit:.1%}. The record is probably shifted, stale or foreign."
        )
