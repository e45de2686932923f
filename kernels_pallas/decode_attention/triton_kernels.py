"""Triton kernels of decode attention. Loaded only where they are called.

A program attends one chunk of one sequence for the query heads of one KV head, in tiles of positions: scores^T is
keys times queries, output^T is values^T times weights, so that keys, decoded in registers, are the tensor cores' first
operand as they lie in the cache. A second kernel joins the chunks. Exponentials are powers of two, the scores in units
of log 2.

FP4 programs are single warps: they share nothing, so none waits for another. The order of the head dimension within a
tile is free where queries and results follow it; it is chosen so that a renaming of registers makes the operand.
"""

import triton.language as tl

from kernels_pallas.triton_codes import E4M3_SHIFT, REGISTERS, RESULTS, eight_values, power_of_two, times
from kernels_pallas.triton_jit import jit

# Codes p and p + 4 of a word: three bits to 8..6, the sign to 15, in both halves. Of the first two in a half a product
# moves both; those of the last two are shifted.
_PLACES = (
    "and.b32 a, $8, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; "
    "and.b32 b, $8, 0x00F000F0; mul.lo.u32 b, b, 0x0104; and.b32 b, b, 0x81C081C0; "
    "shr.b32 c, $8, 2; and.b32 c, c, 0x01C001C0; shl.b32 t, $8, 4; and.b32 t, t, 0x80008000; or.b32 c, c, t; "
    "shr.b32 d, $8, 6; and.b32 d, d, 0x01C001C0; and.b32 t, $8, 0x80008000; or.b32 d, d, t; "
)
# A word of 8 codes times prepared scales.
DECODE_E4M3 = tl.constexpr("{ " + REGISTERS + _PLACES + times("$9") + RESULTS + "}")
DECODE_E8M0 = tl.constexpr(
    "{ " + REGISTERS + _PLACES + "mov.b32 t, 0x7E807E80; " + times("t") + times("$9") + RESULTS + "}"
)
# Scale bytes prepared, in both halves: E4M3 x 2^119 (codes are 2^-126 times their values), E8M0; NaN if poisoned.
PREPARE_E4M3 = tl.constexpr(
    "{ .reg .b32 s, m; .reg .pred p; setp.ge.u32 p, $1, 0x7F; mul.lo.u32 s, $1, 0x00100010; mov.b32 m, 0x7B807B80; "
    "mul.rn.bf16x2 s, s, m; mov.b32 m, 0x7B007B00; mul.rn.bf16x2 s, s, m; selp.b32 $0, 0x7FC07FC0, s, p; }"
)
PREPARE_E8M0 = tl.constexpr(
    "{ .reg .b32 s; .reg .pred p; setp.ge.u32 p, $1, 0xFF; mul.lo.u32 s, $1, 0x00800080; "
    "selp.b32 $0, 0x7FC07FC0, s, p; }"
)
UNSEEN = tl.constexpr(-1.0e38)  # the largest score of no position
LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def scale_bytes(
    ptr, rows, seen, MASKED: tl.constexpr, E4M3: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr = 0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Scale bytes of a part of `rows`, `[TILE, blocks / PARTS]`."""
    PITCH: tl.constexpr = D // 16 if E4M3 else D // 32
    BYTES: tl.constexpr = PITCH // PARTS
    if BYTES % 4 == 0:
        at = ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (PITCH // 4) + PART * (BYTES // 4)
        at += tl.arange(0, BYTES // 4)[None, :]
        packed = tl.load(at, mask=seen[:, None], other=0) if MASKED else tl.load(at)
        byte = ((packed[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 0xFF).reshape(TILE, BYTES)
    else:
        at = ptr + rows[:, None] * PITCH + PART * BYTES + tl.arange(0, BYTES)[None, :]
        byte = (tl.load(at, mask=seen[:, None], other=0) if MASKED else tl.load(at)).to(tl.int32)
    return byte


@jit
def of_words(scale, WORDS: tl.constexpr):
    """The scale of every word, `[TILE, WORDS]`, from that of every block."""
    TILE: tl.constexpr = scale.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    return tl.broadcast_to(scale[:, :, None], (TILE, BLOCKS, WORDS // BLOCKS)).reshape(TILE, WORDS)


@jit
def prepared(
    ptr, rows, seen, MASKED: tl.constexpr, E4M3: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr = 0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Prepared scales of every word of a part of `rows`, `[TILE, D / 8 / PARTS]`."""
    byte = scale_bytes(ptr, rows, seen, MASKED, E4M3, D, TILE, PART, PARTS)
    code: tl.constexpr = PREPARE_E4M3 if E4M3 else PREPARE_E8M0
    scale = tl.inline_asm_elementwise(code, "=r,r", [byte], dtype=tl.int32, is_pure=True, pack=1)
    return of_words(scale, D // 8 // PARTS)


@jit
def decoded(
    ptr, scales, rows, seen, MASKED: tl.constexpr, E4M3: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr = 0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Values of a part of `rows`, `[TILE, D / 8 / PARTS, i, p low, p high]` for code p + 4 i of a word."""
    WORDS: tl.constexpr = D // 8 // PARTS
    at = ptr + rows[:, None] * (D // 8) + PART * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(at, mask=seen[:, None], other=0) if MASKED else tl.load(at)
    code: tl.constexpr = DECODE_E4M3 if E4M3 else DECODE_E8M0
    a0, a1, b0, b1, c0, c1, d0, d1 = eight_values(code, words, scales)
    low = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    high = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    return tl.join(low, high)


@jit
def opaque(x):
    """x. Triton orders an operand by the narrowest type that it sees it come from; it does not see through this."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)


@jit
def exponents(ptr, rows, first, seen, MASKED: tl.constexpr, HEADS: tl.constexpr):
    """Row exponent bytes. Those of four heads are one word, which copies of at least 4 bytes can prefetch."""
    if HEADS % 4 == 0:
        at = ptr.to(tl.pointer_type(tl.int32)) + (rows >> 2)
        four = tl.load(at, mask=seen, other=0) if MASKED else tl.load(at)
        return (four >> ((first & 3).to(tl.int32) * 8)) & 0xFF
    return (tl.load(ptr + rows, mask=seen, other=0) if MASKED else tl.load(ptr + rows)).to(tl.int32)


@jit
def fp4_tile(
    acc, top, total, q, k_ptr, k_scale_ptr, k_exponent_ptr, v_ptr, v_scale_ptr, v_exponent_ptr,
    first, start, lowest, highest, scale,
    MASKED: tl.constexpr, E4M3: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Positions from `start`, in cache rows from `first`."""
    index = tl.arange(0, TILE)
    rows = first + index * HEADS
    seen = (start + index >= lowest) & (start + index <= highest)
    PARTS: tl.constexpr = len(q)
    scores = tl.zeros((TILE, G), tl.float32)
    for part in tl.static_range(PARTS):
        scales = prepared(k_scale_ptr, rows, seen, MASKED, E4M3, D, TILE, part, PARTS)
        k = decoded(k_ptr, scales, rows, seen, MASKED, E4M3, D, part, PARTS)
        k = k.reshape(TILE, 4, D // PARTS // 32, 2, 2, 2).permute(0, 2, 5, 4, 1, 3).reshape(TILE, D // PARTS)
        scores = tl.dot(opaque(k), q[part], scores)
    scores = scores * scale
    if E4M3:
        byte = exponents(k_exponent_ptr, rows, first, seen, MASKED, HEADS)
        scores = scores * power_of_two(byte)[:, None]
    if MASKED:
        scores = tl.where(seen[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    kept = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[None, :])
    total = total * kept + tl.sum(weights, 0)
    if E4M3:
        byte = exponents(v_exponent_ptr, rows, first, seen, MASKED, HEADS)
        weights = weights * power_of_two(byte)[:, None]
    scales = prepared(v_scale_ptr, rows, seen, MASKED, E4M3, D, TILE)
    v = decoded(v_ptr, scales, rows, seen, MASKED, E4M3, D).permute(0, 1, 4, 3, 2)
    if D >= 128:  # words 4 a + 2 b + c where shared memory has 8 b + 2 a + c: no two threads in one bank
        v = v.reshape(TILE, D // 128, 4, 2, 2, 8).permute(0, 1, 3, 2, 4, 5)
    v = opaque(v.reshape(TILE, D))
    acc = tl.dot(tl.trans(v), weights.to(tl.bfloat16), acc * kept[None, :])
    return acc, new_top, total


@jit
def bf16_tile(
    acc, top, total, q, k_ptr, v_ptr, first, start, lowest, highest, scale,
    MASKED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same for BF16 entries."""
    index = tl.arange(0, TILE)
    rows = first + index * HEADS
    seen = (start + index >= lowest) & (start + index <= highest)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + at, mask=seen[:, None], other=0.0) if MASKED else tl.load(k_ptr + at)
    v = tl.load(v_ptr + at, mask=seen[:, None], other=0.0) if MASKED else tl.load(v_ptr + at)
    scores = tl.dot(k, q) * scale
    if MASKED:
        scores = tl.where(seen[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    kept = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[None, :])
    total = total * kept + tl.sum(weights, 0)
    acc = tl.dot(tl.trans(v), weights.to(tl.bfloat16), acc * kept[None, :])
    return acc, new_top, total


@jit
def layer_index(layer_ptr, LAYERS: tl.constexpr):
    """The layer, held within a stack of LAYERS so that nothing else is read; 0 where there is no stack."""
    if LAYERS:
        return tl.minimum(tl.maximum(tl.load(layer_ptr), 0), LAYERS - 1).to(tl.int64)
    return tl.full((), 0, tl.int64)


@jit
def loaded_page(page_ptr, sequence, position, LENGTH: tl.constexpr, PAGES: tl.constexpr):
    """The page of a position; the sequence itself where there are no pages."""
    if PAGES:
        return tl.load(page_ptr + sequence * PAGES + position // LENGTH).to(tl.int64)
    else:  # Triton would compile what follows, too, with its other types
        return sequence


@jit
def near_page(near, pages, sequence, position, LENGTH: tl.constexpr, PAGES: tl.constexpr):
    """The same, one of `pages`, those at places `near` of the sequence: no tile waits for a load of its page."""
    if PAGES:
        return tl.sum(tl.where(near == position // LENGTH, pages, 0), 0).to(tl.int64)
    else:
        return sequence


@jit
def cache_row(page, position, layer, SEQUENCES: tl.constexpr, LENGTH: tl.constexpr, PAGES: tl.constexpr):
    """Row of (layer, page, position) in units of a position, and whether the page is mapped."""
    if PAGES:
        mapped = (page >= 0) & (page < SEQUENCES)
        return (layer * SEQUENCES + tl.where(mapped, page, 0)) * LENGTH + position % LENGTH, mapped
    else:
        return (layer * SEQUENCES + page) * LENGTH + position, True


@jit
def attention_kernel(
    q_ptr, position_ptr, page_ptr, layer_ptr,
    k_ptr, k_scale_ptr, k_exponent_ptr, v_ptr, v_scale_ptr, v_exponent_ptr,
    acc_ptr, top_ptr, total_ptr,
    SCALE: tl.constexpr, FORMAT: tl.constexpr, SEQUENCES: tl.constexpr, LENGTH: tl.constexpr, PAGES: tl.constexpr,
    LAYERS: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of one sequence and KV head: acc `[G, D]`, each query head's largest score and sum of weights."""
    sequence, head, chunk = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chunk
    capacity: tl.constexpr = PAGES * LENGTH if PAGES else LENGTH
    group = tl.arange(0, G)
    position = tl.load(position_ptr + sequence)
    highest = tl.minimum(position, capacity - 1)
    lowest = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    begin = chunk * CHUNK
    near = begin // LENGTH + tl.arange(0, NEAR)
    if PAGES:
        pages = tl.load(page_ptr + sequence * PAGES + near, mask=near < PAGES, other=-1)
    else:
        pages = near
    end = tl.minimum(begin + CHUNK, highest + 1)
    if WINDOW:
        begin = tl.maximum(begin, lowest // TILE * TILE)
    top = tl.full((G,), UNSEEN, tl.float32)
    total = tl.zeros((G,), tl.float32)
    if begin >= end:
        tl.store(top_ptr + part * G + group, top)
        tl.store(total_ptr + part * G + group, total)
        return
    column = tl.arange(0, D)
    query = ((sequence * HEADS + head) * QUERIES + group)[None, :] * D
    if FORMAT == "bf16":
        q = tl.load(q_ptr + query + column[:, None], mask=(group < QUERIES)[None, :], other=0.0)
    else:
        # Keys and queries in parts of at most 128: what the four threads of a row load at once, 4 words each, is what
        # they hold of an operand. Its order of the head dimension: (word of a quarter, p high, p low, quarter, i).
        PART: tl.constexpr = min(D, 128)
        j = tl.arange(0, PART)
        part_dim = (
            (PART // 4) * ((j >> 1) & 3) + 8 * (j >> 5) + 4 * (j & 1) + 2 * ((j >> 4) & 1) + ((j >> 3) & 1)
        )
        q = ()
        for i in tl.static_range(D // PART):
            at = query + i * PART + part_dim[:, None]
            q = q + (tl.load(q_ptr + at, mask=(group < QUERIES)[None, :], other=0.0),)
    acc = tl.zeros((D, G), tl.float32)
    sequence = sequence.to(tl.int64)
    layer = layer_index(layer_ptr, LAYERS)
    E4M3: tl.constexpr = FORMAT == "nvfp4"
    scale = SCALE * LOG2_E * E4M3_SHIFT if E4M3 else SCALE * LOG2_E
    whole = begin
    if not WINDOW:
        whole = begin + (end - begin) // TILE * TILE
        if PAGES:
            unmapped = ((pages < 0) | (pages >= SEQUENCES)) & (near * LENGTH < end)
            if tl.max(unmapped.to(tl.int32), 0) > 0:
                whole = begin  # tiles of a page that is not mapped are masked
        for start in tl.range(begin, whole, TILE, num_stages=STAGES):
            page = near_page(near, pages, sequence, start, LENGTH, PAGES)
            row, mapped = cache_row(page, start, layer, SEQUENCES, LENGTH, PAGES)
            if FORMAT == "bf16":
                acc, top, total = bf16_tile(
                    acc, top, total, q, k_ptr, v_ptr,
                    row * HEADS + head, start, lowest, highest, scale, False, HEADS, D, TILE,
                )  # fmt: skip
            else:
                acc, top, total = fp4_tile(
                    acc, top, total, q, k_ptr, k_scale_ptr, k_exponent_ptr, v_ptr, v_scale_ptr, v_exponent_ptr,
                    row * HEADS + head, start, lowest, highest, scale, False, E4M3, HEADS, G, D, TILE,
                )  # fmt: skip
    for start in tl.range(whole, end, TILE, num_stages=STAGES if WINDOW else 1):
        page = near_page(near, pages, sequence, start, LENGTH, PAGES)
        row, mapped = cache_row(page, start, layer, SEQUENCES, LENGTH, PAGES)
        last = tl.where(mapped, highest, -1) if PAGES else highest
        if FORMAT == "bf16":
            acc, top, total = bf16_tile(
                acc, top, total, q, k_ptr, v_ptr,
                row * HEADS + head, start, lowest, last, scale, True, HEADS, D, TILE,
            )  # fmt: skip
        else:
            acc, top, total = fp4_tile(
                acc, top, total, q, k_ptr, k_scale_ptr, k_exponent_ptr, v_ptr, v_scale_ptr, v_exponent_ptr,
                row * HEADS + head, start, lowest, last, scale, True, E4M3, HEADS, G, D, TILE,
            )  # fmt: skip
    dim = column
    if FORMAT != "bf16":
        word = column // 8
        if D >= 128:
            word = (word & ~15) | (((word >> 1) & 3) * 4 + ((word >> 3) & 1) * 2 + (word & 1))
        dim = word * 8 + ((column >> 1) & 3) + (column & 1) * 4
        if E4M3:
            acc = acc * E4M3_SHIFT
    tl.store(top_ptr + part * G + group, top)
    tl.store(total_ptr + part * G + group, total)
    tl.store(acc_ptr + part * G * D + group[None, :] * D + dim[:, None], acc)


@jit
def join_kernel(
    acc_ptr, top_ptr, total_ptr, sink_ptr, out_ptr,
    CHUNKS: tl.constexpr, CHUNKS_POW2: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The output of one query head from its chunks, a few at a time."""
    sequence_head, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, D)
    first = sequence_head * CHUNKS
    top, total = chunk_sums(top_ptr, total_ptr, first, query, 0, CHUNKS, CHUNKS_POW2, G)
    largest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sink_ptr + (sequence_head % HEADS) * QUERIES + query) * LOG2_E
        largest = tl.maximum(largest, sink)
    denominator = tl.sum(tl.exp2(top - largest) * total, 0)
    if SINKS:
        denominator += tl.exp2(sink - largest)
    FEW: tl.constexpr = 8 if CHUNKS_POW2 > 8 else CHUNKS_POW2
    out = tl.zeros((D,), tl.float32)
    for start in tl.range(0, CHUNKS, FEW):
        some_top, some_total = chunk_sums(top_ptr, total_ptr, first, query, start, CHUNKS, FEW, G)
        # A chunk that saw nothing wrote nothing; one that saw only NaN has no largest score, but its sum is NaN.
        written = (some_top > UNSEEN) | (some_total != 0.0)
        at = (first + start + tl.arange(0, FEW)) * G + query
        acc = tl.load(acc_ptr + at[:, None] * D + dim[None, :], mask=written[:, None], other=0.0)
        out += tl.sum(acc * tl.exp2(some_top - largest)[:, None], 0)
    out = out / tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(out_ptr + (sequence_head * QUERIES + query) * D + dim, out.to(tl.bfloat16))


@jit
def chunk_sums(
    top_ptr, total_ptr, first, query, start, CHUNKS: tl.constexpr, COUNT: tl.constexpr, G: tl.constexpr
):
    """Largest scores and sums of weights of COUNT chunks from `start`; of none beyond the last."""
    chunk = start + tl.arange(0, COUNT)
    at = (first + chunk) * G + query
    top = tl.load(top_ptr + at, mask=chunk < CHUNKS, other=UNSEEN)
    return top, tl.load(total_ptr + at, mask=chunk < CHUNKS, other=0.0)
