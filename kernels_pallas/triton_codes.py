"""Words of 8 codes in Triton kernels that multiply them: what the layouts of weights and of caches have in common.

A layout's instructions put the codes of a word, operand $8, into four registers a to d of BF16 pairs that are
2^-126 times the values, and multiply them by scales made of operand $9.
"""

import triton.language as tl

from kernels_pallas.triton_jit import jit

REGISTERS = ".reg .b32 a, b, c, d, t; "
RESULTS = "mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d; "
E4M3_SHIFT = tl.constexpr(
    128.0
)  # E4M3 scales multiply as 2^119 times themselves: what is missing from the products


def times(*factors: str) -> str:
    """Pairs a to d times `factors`, in turns."""
    scales = (factors * 4)[:4]
    return (
        " ".join(
            f"mul.rn.bf16x2 {pair}, {pair}, {scale};" for pair, scale in zip("abcd", scales, strict=True)
        )
        + " "
    )


@jit
def eight_values(code: tl.constexpr, words, scales):
    """The 8 BF16 values of each word, as 8 tensors, pair by pair."""
    return tl.inline_asm_elementwise(
        code,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, scales],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@jit
def power_of_two(byte):
    """2^(byte - 127) of bytes 1 to 254."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
