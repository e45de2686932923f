"""Static shapes and limits of an engine."""

import dataclasses

from trace_jax.config import ConfigError, check_range

SYNCS = ("finish", "continue")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Static shapes and limits of an engine.

    Attributes:
        slots: sequences that decode side by side.
        max_length: tokens of the longest sequence.
        page_size: positions of a page of the cache: on GPUs a multiple of 64, on TPUs of 128.
        pages: in all; `capacity.sequences_that_fit` says for how many sequences a device has room.
        chunk: decode steps of one device call. Slots are refilled, and weights change, between calls.
        buckets: lengths that a prefill is padded to; a longer prompt goes in several calls.
        prefill_tokens: of one prefill call at most, padding included: decoding waits no longer than for these.
        audit_slots: slots, and lanes of a prefill, whose full codes are kept for those that ask for it.
        host_bytes: of the host's memory for sequences that have been admitted and not been handed over yet. New ones
            wait until the consumer has taken finished ones.
        sync: sequences in flight `finish` under the weights that they began with, both versions being held, or
            `continue` with the new ones upon the cache that they have, their rows saying which version made them.
    """

    slots: int
    max_length: int
    page_size: int = 128
    pages: int
    chunk: int = 16
    buckets: tuple[int, ...] = (32, 128, 512, 2048)
    prefill_tokens: int = 2048
    audit_slots: int = 0
    host_bytes: int = 2**33
    sync: str = "finish"

    def __post_init__(self):
        names = ("slots", "max_length", "page_size", "pages", "chunk", "prefill_tokens", "host_bytes")
        check_range("engine", self, *names, at_least=1)
        if self.sync not in SYNCS:
            raise ConfigError(f"engine.sync is {self.sync!r}; expected one of {SYNCS}.")
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise ConfigError(
                f"engine.buckets are {self.buckets}; expected increasing lengths of at least 1."
            )
        if not 0 <= self.audit_slots <= self.slots:
            raise ConfigError(
                f"engine.audit_slots is {self.audit_slots}; expected 0 to the {self.slots} slots."
            )

    @property
    def pages_per_sequence(self) -> int:
        """Of the longest sequence."""
        return -(-self.max_length // self.page_size)

    def lanes(self, bucket: int) -> int:
        """Sequences of one prefill call."""
        return max(1, min(self.slots, self.prefill_tokens // bucket))

    def bucket(self, tokens: int) -> int:
        """The call that feeds `tokens`, or the first of several: it depends on the sequence's own length alone."""
        return next((b for b in self.buckets if b >= tokens), self.buckets[-1])
