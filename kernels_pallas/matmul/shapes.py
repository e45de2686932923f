"""Realistic shapes, by name, for benchmarks and tests."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """[m, k] times [k, n]."""

    m: int
    k: int
    n: int


SHAPES = {
    "tiny": MatmulShape(m=24, k=128, n=96),
    "decode_1": MatmulShape(m=1, k=4096, n=4096),
    "decode_16": MatmulShape(m=16, k=8192, n=28672),
    "decode_64": MatmulShape(m=64, k=8192, n=28672),
    "prefill_2048": MatmulShape(m=2048, k=4096, n=4096),
}
