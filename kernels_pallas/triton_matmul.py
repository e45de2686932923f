"""The Triton kernel of grouped matmuls. Loaded only where it is called.

It computes the transpose, weights times activations: the weights, decoded in registers, are the operand that Hopper's
tensor cores take from there. `tiled` says how the words are laid out. K is never split and always walked in the same
order, in FP32, so that a row's result does not depend on the rows beside it.
"""

import triton.language as tl

from kernels_pallas.triton_codes import E4M3_SHIFT, REGISTERS, RESULTS, eight_values, power_of_two, times
from kernels_pallas.triton_jit import jit

_PAIRS = """
and.b32 a, $8, 0x81C081C0;
shl.b32 b, $8, 6;
and.b32 b, b, 0x81C081C0;
shf.r.wrap.b32 c, $8, $8, 4;
and.b32 c, c, 0x81C081C0;
shl.b32 d, $8, 2;
and.b32 d, d, 0x80C080C0;
shr.b32 t, $8, 6;
and.b32 t, t, 0x01000100;
or.b32 d, d, t;
"""
# The scale bytes of two columns in the halves of a register; then, multiplied out, each in both halves of one.
_SCALES = "prmt.b32 s0, $9, 0, 0x4140;"
_SPREAD = "mov.b32 {l, h}, s0; mov.b32 s0, {l, l}; mov.b32 s1, {h, h};"
# Times E4M3 scales x 2^119, which their widened bytes are under the exponent bits 111: exact, 2^-7 times the operand.
DECODE_E4M3 = tl.constexpr(
    "{ .reg .b32 s0, s1; .reg .b16 l, h; "
    + REGISTERS
    + _SCALES
    + "mad.lo.u32 s0, s0, 16, 0x70007000;"
    + _SPREAD
    + _PAIRS
    + times("s0", "s1")
    + RESULTS
    + "}"
)
# Times scales whose bytes are exponents already: exact, the operand.
DECODE_E8M0 = tl.constexpr(
    "{ .reg .b32 s0, s1; .reg .b16 l, h; "
    + REGISTERS
    + _SCALES
    + "shl.b32 s0, s0, 7;"
    + _SPREAD
    + _PAIRS
    + times("s0", "s1")
    + RESULTS
    + "}"
)


@jit
def unit_offsets(COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr, units):
    """Offsets of a tile's words, `[columns / 16 / WARPS, DEPTH / 64, WARPS, 128]`: every warp reads units of its own,
    every thread 16 bytes; and of its scale bytes in pairs, for units that are `units` to a column.

    The four threads of a row share its pairs: they are loaded once, `[..., 8, 4]`, but where that leaves a thread 2
    bytes, for which there is no asynchronous copy. There each thread has its own, `[..., 128]`.
    """
    outer: tl.constexpr = COLUMNS // (16 * WARPS)
    unit = (tl.arange(0, outer)[:, None, None] * WARPS + tl.arange(0, WARPS)[None, None, :]) * units
    unit = unit + tl.arange(0, DEPTH // 64)[None, :, None]
    inner = tl.arange(0, 128)
    words = unit[:, :, :, None] * 128 + inner[None, None, None, :]
    if outer * (DEPTH // 64) == 1:
        scales = unit[:, :, :, None] * 32 + (inner // 16 * 4 + inner % 4)[None, None, None, :]
    else:
        pairs = tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
        scales = unit[:, :, :, None, None] * 32 + pairs[None, None, None, :, :]
    return words, scales


@jit
def decoded(
    words, scales, E4M3: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr
):
    """BF16 `[COLUMNS, DEPTH]` of a tile of words and their scale bytes: registers are decoded and renamed."""
    code: tl.constexpr = DECODE_E4M3 if E4M3 else DECODE_E8M0
    outer: tl.constexpr = COLUMNS // (16 * WARPS)
    if outer * (DEPTH // 64) > 1:
        scales = tl.broadcast_to(scales[:, :, :, :, None, :], (outer, DEPTH // 64, WARPS, 8, 4, 4))
        scales = scales.reshape(outer, DEPTH // 64, WARPS, 128)
    a0, a1, b0, b1, c0, c1, d0, d1 = eight_values(code, words, scales.to(tl.int32))
    first = tl.join(tl.join(a0, a1), tl.join(c0, c1))
    second = tl.join(tl.join(b0, b1), tl.join(d0, d1))
    x = tl.join(first, second)
    # outer, depth, warp, row, quad, tile of K, pair, half of K, half of columns
    x = x.reshape(COLUMNS // (16 * WARPS), DEPTH // 64, WARPS, 8, 4, 4, 2, 2, 2)
    return x.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(COLUMNS, DEPTH)


@jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """`ClampedSwiglu`; NaN stays NaN."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))


@jit
def grouped_kernel(
    x_ptr,
    x_exponent_ptr,
    w_ptr,
    scales_ptr,
    w_exponent_ptr,
    sizes_ptr,
    layer_ptr,
    bias_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    N_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    FORMAT: tl.constexpr,
    GATED: tl.constexpr,
    X_SCALED: tl.constexpr,
    LAYERED: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program: BLOCK_M rows of one group by BLOCK_N columns, over K / SPLIT.

    Rows past the last group are one more group, of zeros. Programs are more than any group sizes need.
    """
    column_blocks: tl.constexpr = (N_PADDED + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    row_block = program // column_blocks
    column_block = program % column_blocks

    index = tl.arange(0, GROUPS_POW2)
    sizes = tl.load(sizes_ptr + index, mask=index < GROUPS, other=0)
    sizes = tl.where(index == GROUPS, ROWS - tl.sum(sizes, 0), sizes)
    blocks = (sizes + BLOCK_M - 1) // BLOCK_M
    group = tl.sum((tl.cumsum(blocks, 0) <= row_block).to(tl.int32), 0)
    if group > GROUPS:
        return
    first_row = tl.sum(tl.where(index < group, sizes, 0), 0)
    first_block = tl.sum(tl.where(index < group, blocks, 0), 0)
    size = tl.sum(tl.where(index == group, sizes, 0), 0)
    within = (row_block - first_block) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Sizes whose sum exceeds the rows reach no memory of others.
    live = (within < size) & (first_row + within < ROWS)
    rows = (first_row + within).to(tl.int64)

    matrix = tl.minimum(group, GROUPS - 1).to(tl.int64)
    if LAYERED:
        matrix += tl.load(layer_ptr).to(tl.int64) * GROUPS
    steps: tl.constexpr = (K_PADDED // SPLIT + BLOCK_K - 1) // BLOCK_K
    first_k = tl.program_id(1) * (K_PADDED // SPLIT)
    k = first_k + tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None] * K + k[None, :]

    if FORMAT == "bf16":
        width: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
        half: tl.constexpr = N // 2 if GATED else N
        columns = column_block * width + tl.arange(0, width)
        inside = (columns < half)[None, :]
        w_at = w_ptr + matrix * K * N + k[:, None] * N + columns[None, :]
        first = tl.zeros((width, BLOCK_M), tl.float32)
        second = tl.zeros((width, BLOCK_M), tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            if K % BLOCK_K == 0:
                w = tl.load(w_at, mask=inside, other=0.0)
                x = tl.load(x_at, mask=live[:, None], other=0.0)
            else:
                deep = k + step * BLOCK_K < K
                w = tl.load(w_at, mask=inside & deep[:, None], other=0.0)
                x = tl.load(x_at, mask=live[:, None] & deep[None, :], other=0.0)
            x = tl.trans(x)
            first = tl.dot(tl.trans(w), x, first)
            if GATED:
                if K % BLOCK_K == 0:
                    w = tl.load(w_at + half, mask=inside, other=0.0)
                else:
                    w = tl.load(w_at + half, mask=inside & deep[:, None], other=0.0)
                second = tl.dot(tl.trans(w), x, second)
            w_at += BLOCK_K * N
            x_at += BLOCK_K
    else:
        units: tl.constexpr = K_PADDED // 64
        DEPTH: tl.constexpr = BLOCK_K // PARTS
        word, scale = unit_offsets(BLOCK_N, DEPTH, WARPS, units)
        k = first_k + tl.arange(0, DEPTH)
        x_at = x_ptr + rows[:, None] * K + k[None, :]
        unit = matrix * (N_PADDED // 16) * units + column_block * (BLOCK_N // 16) * units + first_k // 64
        word_at = w_ptr + unit * 128 + word
        scale_at = scales_ptr.to(tl.pointer_type(tl.uint16)) + unit * 32 + scale
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            for part in tl.static_range(PARTS):
                words = tl.load(word_at + part * (DEPTH // 64 * 128))
                scales = tl.load(scale_at + part * (DEPTH // 64 * 32))
                if K == K_PADDED:
                    x = tl.load(x_at + part * DEPTH, mask=live[:, None], other=0.0)
                else:
                    inside = live[:, None] & (k + step * BLOCK_K + part * DEPTH < K)[None, :]
                    x = tl.load(x_at + part * DEPTH, mask=inside, other=0.0)
                w = decoded(words, scales, FORMAT == "nvfp4", BLOCK_N, DEPTH, WARPS)
                acc = tl.dot(w, tl.trans(x), acc)
            word_at += BLOCK_K // 64 * 128
            scale_at += BLOCK_K // 64 * 32
            x_at += BLOCK_K
        if FORMAT == "nvfp4":
            acc = acc * E4M3_SHIFT
        acc = acc * power_of_two(tl.load(w_exponent_ptr + matrix))
        if GATED:
            first, second = tl.split(acc.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1))
            first = first.reshape(BLOCK_N // 2, BLOCK_M)
            second = second.reshape(BLOCK_N // 2, BLOCK_M)
        else:
            first = acc

    out_width: tl.constexpr = N // 2 if GATED else N
    out_block: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if X_SCALED:
        exponent = tl.load(x_exponent_ptr + rows, mask=live, other=127)
        first = first * power_of_two(exponent)[None, :]
        if GATED:
            second = second * power_of_two(exponent)[None, :]
    columns = column_block * out_block + tl.arange(0, out_block)
    kept = columns < out_width
    if BIASED:
        bias_at = bias_ptr + tl.minimum(group, GROUPS - 1) * N + columns
        first += tl.load(bias_at, mask=kept, other=0.0).to(tl.float32)[:, None]
        if GATED:
            second += tl.load(bias_at + out_width, mask=kept, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if CLAMPED:
            first = clamped_swiglu(first, second, ALPHA, LIMIT)
        else:
            first = silu(first) * second
    first = tl.where(group < GROUPS, first, 0.0)
    out_at = out_ptr + tl.program_id(1).to(tl.int64) * ROWS * out_width
    out_at += rows[None, :] * out_width + columns[:, None]
    tl.store(out_at, first, mask=live[None, :] & kept[:, None])


@jit
def operand_kernel(
    w_ptr,
    scales_ptr,
    out_ptr,
    K_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Decoded weights, transposed: `[N', K']`; programs over columns and K."""
    units: tl.constexpr = K_PADDED // 64
    word, scale = unit_offsets(BLOCK_N, BLOCK_K, WARPS, units)
    unit = tl.program_id(0).to(tl.int64) * (BLOCK_N // 16) * units + tl.program_id(1) * (BLOCK_K // 64)
    words = tl.load(w_ptr + unit * 128 + word)
    scales = tl.load(scales_ptr.to(tl.pointer_type(tl.uint16)) + unit * 32 + scale)
    w = decoded(words, scales, FORMAT == "nvfp4", BLOCK_N, BLOCK_K, WARPS)
    if FORMAT == "nvfp4":
        w = (w.to(tl.float32) * E4M3_SHIFT).to(tl.bfloat16)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    tl.store(out_ptr + rows[:, None] * K_PADDED + k[None, :], w)
