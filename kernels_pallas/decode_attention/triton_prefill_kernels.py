"""Triton kernel of attention with many queries a sequence: prefill, whole or in chunks. Loaded only where it is called.

Flash attention (arXiv 2307.08691): a program has M queries of one sequence and KV head, several heads of each token,
and goes through the entries that they see in tiles. Keys and values of a tile are decoded once for all its queries,
into shared memory, from where tensor cores read them. Scores are in units of log 2 where they become weights.

A query's result depends on no other: tiles are aligned, a tile of which it sees nothing changes none of its sums, and
poison of an entry that only others see is kept from it.
"""

import triton.language as tl

from kernels_pallas.decode_attention.triton_kernels import (
    LOG2_E,
    PREPARE_E8M0,
    UNSEEN,
    cache_row,
    decoded,
    exponents,
    layer_index,
    loaded_page,
    of_words,
    scale_bytes,
)
from kernels_pallas.triton_jit import jit

# E4M3 scale bytes $1 times 2^($2 - 127), row exponent bytes, in both halves of a word; NaN if poisoned. Exact: a byte
# as a BF16's upper bits is 2^-120 of its value.
PREPARE_E4M3_OF_ROW = tl.constexpr(
    "{ .reg .b32 s, m; .reg .pred p; setp.ge.u32 p, $1, 0x7F; mul.lo.u32 s, $1, 0x00100010; mov.b32 m, 0x7B807B80; "
    "mul.rn.bf16x2 s, s, m; mul.lo.u32 m, $2, 0x00800080; mul.rn.bf16x2 s, s, m; selp.b32 $0, 0x7FC07FC0, s, p; }"
)


@jit
def natural_order(x, M: tl.constexpr, D: tl.constexpr):
    """`[M, D]` whose columns are in the order of decoded words: code p + 4 i of a word at 2 p + i."""
    return x.reshape(M, D // 8, 4, 2).permute(0, 1, 3, 2).reshape(M, D)


@jit
def fp4_values(
    entries, base, rows, head, seen, LOADED: tl.constexpr, CLEAN: tl.constexpr, E4M3: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Values `[TILE, D]`, columns in the order of decoded words; with CLEAN 0 for NaN, and whether there was any."""
    words, scales, row_exponents = entries
    PITCH: tl.constexpr = D // 16 if E4M3 else D // 32
    byte = scale_bytes(scales + base * PITCH, rows, seen, LOADED, E4M3, D, TILE)
    if E4M3:
        exponent = exponents(row_exponents + base, rows, head, seen, LOADED, HEADS)
        exponent = tl.broadcast_to(exponent[:, None], (TILE, PITCH))
        scale = tl.inline_asm_elementwise(
            PREPARE_E4M3_OF_ROW, "=r,r,r", [byte, exponent], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        scale = tl.inline_asm_elementwise(PREPARE_E8M0, "=r,r", [byte], dtype=tl.int32, is_pure=True, pack=1)
    poisoned = 0
    if CLEAN:
        bad = byte >= (0x7F if E4M3 else 0xFF)
        scale = tl.where(bad, 0, scale)
        poisoned = tl.max(tl.max(bad.to(tl.int32), 1), 0)
    # Row exponents are in the scales, which are not shifted then: the decoding is that of E8M0 scales.
    values = decoded(words + base * (D // 8), of_words(scale, D // 8), rows, seen, LOADED, False, D)
    return values.permute(0, 1, 4, 3, 2).reshape(TILE, D), poisoned


@jit
def bf16_values(
    entries, base, rows, seen, LOADED: tl.constexpr, CLEAN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The same of BF16 entries, in natural order; CLEAN removes infinities, too."""
    at = entries[0] + base * D + (rows[:, None] * D + tl.arange(0, D)[None, :])
    values = tl.load(at, mask=seen[:, None], other=0.0) if LOADED else tl.load(at)
    poisoned = 0
    if CLEAN:
        bits = values.to(tl.int16, bitcast=True)
        bad = (bits & 0x7F80) == 0x7F80
        values = tl.where(bad, 0, bits).to(tl.bfloat16, bitcast=True)
        poisoned = tl.max(tl.max(bad.to(tl.int32), 1), 0)
    return values, poisoned


@jit
def with_poison(
    acc, weights, entries, page_ptr, sequence, layer, head, start, lowest, last, FORMAT: tl.constexpr,
    SEQUENCES: tl.constexpr, LENGTH: tl.constexpr, PAGES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """acc and the values that `CLEAN` removed, entry by entry, for the queries that see them: 0 x NaN is NaN."""
    capacity: tl.constexpr = PAGES * LENGTH if PAGES else LENGTH
    column, index = tl.arange(0, D), tl.arange(0, TILE)
    for i in tl.range(0, TILE):
        entry = start + i
        place = tl.minimum(entry, capacity - 1)
        page = loaded_page(page_ptr, sequence, place, LENGTH, PAGES)
        row, mapped = cache_row(page, place, layer, SEQUENCES, LENGTH, PAGES)
        seen = (entry >= lowest) & (entry <= last)
        if PAGES:
            seen = seen & mapped
        row = row * HEADS + head
        if FORMAT == "bf16":
            value = tl.load(entries[0] + row * D + column).to(tl.float32)
            weight = tl.sum(tl.where((index == i)[None, :], weights.to(tl.float32), 0.0), 1)
            finite = tl.abs(value) < float("inf")
            taken = seen[:, None] & (finite == 0)[None, :]
            acc = tl.where(taken, acc + weight[:, None] * value[None, :], acc)
        else:
            BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
            bad = tl.load(entries[1] + row * (D // BLOCK) + column // BLOCK) >= (
                0x7F if BLOCK == 16 else 0xFF
            )
            acc = tl.where(seen[:, None] & bad[None, :], float("nan"), acc)
    return acc


@jit
def attend_tiles(
    acc, top, total, q, keys, values, page_ptr, sequence, layer, head, begin, end, lowest, last, scale,
    MASKED: tl.constexpr, FORMAT: tl.constexpr, SEQUENCES: tl.constexpr, LENGTH: tl.constexpr, PAGES: tl.constexpr,
    HEADS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles from `begin` to `end`, of which every query sees all entries in mapped pages, unless MASKED.

    `lowest` and `last` `[M]` are the first and the last entry that each query sees.
    """
    capacity: tl.constexpr = PAGES * LENGTH if PAGES else LENGTH
    SCATTERED: tl.constexpr = PAGES > 0 and LENGTH % TILE > 0  # a tile lies in several pages
    LOADED: tl.constexpr = MASKED or PAGES > 0  # some entries may not be loaded
    E4M3: tl.constexpr = FORMAT == "nvfp4"
    index = tl.arange(0, TILE)
    least, highest = tl.min(tl.where(last < 0, capacity, lowest), 0), tl.max(last, 0)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        entry = start + index
        if SCATTERED:
            place = tl.minimum(entry, capacity - 1)
            page = loaded_page(page_ptr, sequence, place, LENGTH, PAGES)
            row, mapped = cache_row(page, place, layer, SEQUENCES, LENGTH, PAGES)
            base, rows = tl.full((), 0, tl.int64), row * HEADS + head
        else:
            page = loaded_page(page_ptr, sequence, start, LENGTH, PAGES)
            row, mapped = cache_row(page, start, layer, SEQUENCES, LENGTH, PAGES)
            base, rows = row * HEADS, index * HEADS + head
        # What no query sees is not read: it may be stale, or lie past the end.
        seen = (entry >= least) & (entry <= highest)
        if PAGES:
            seen = seen & mapped
        if FORMAT == "bf16":
            k, _ = bf16_values(keys, base, rows, seen, LOADED, False, D)
        else:
            k, _ = fp4_values(keys, base, rows, head, seen, LOADED, False, E4M3, HEADS, D, TILE)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            sees = (entry[None, :] >= lowest[:, None]) & (entry[None, :] <= last[:, None])
            if PAGES:
                sees = sees & seen[None, :]
            scores = tl.where(sees, scores, float("-inf"))
        elif PAGES:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        kept = tl.exp2(top - new_top)
        weights = tl.exp2(tl.fma(scores, scale, -new_top[:, None]))
        total = total * kept + tl.sum(weights, 1)
        top = new_top
        if FORMAT == "bf16":
            v, poisoned = bf16_values(values, base, rows, seen, LOADED, MASKED, D)
        else:
            v, poisoned = fp4_values(values, base, rows, head, seen, LOADED, MASKED, E4M3, HEADS, D, TILE)
        weights = weights.to(tl.bfloat16)
        acc = tl.dot(weights, v, acc * kept[:, None])
        if MASKED:  # noqa: SIM102  # known when the kernel is compiled
            if poisoned > 0:
                acc = with_poison(
                    acc, weights, values, page_ptr, sequence, layer, head, start, lowest, last,
                    FORMAT, SEQUENCES, LENGTH, PAGES, HEADS, D, TILE,
                )  # fmt: skip
    return acc, top, total


@jit
def query_offsets(row, sequence, head, tokens, HEADS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr):
    """Offsets `[M, D]` of rows [token, query head of the KV head] in the queries, and which rows exist."""
    token = row // QUERIES
    at = ((sequence * tokens + token) * HEADS + head) * QUERIES + row % QUERIES
    return at[:, None] * D + tl.arange(0, D)[None, :], (token < tokens)[:, None]


@jit
def prefill_kernel(
    q_ptr, position_ptr, page_ptr, layer_ptr,
    k_ptr, k_scale_ptr, k_exponent_ptr, v_ptr, v_scale_ptr, v_exponent_ptr, sink_ptr, tokens, out_ptr,
    SCALE: tl.constexpr, FORMAT: tl.constexpr, SEQUENCES: tl.constexpr, LENGTH: tl.constexpr, PAGES: tl.constexpr,
    LAYERS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The outputs of M queries, rows [token, query head of the KV head] of one sequence and KV head.

    Queries for an FP4 cache have their columns in the order of decoded words.
    """
    capacity: tl.constexpr = PAGES * LENGTH if PAGES else LENGTH
    # The last blocks see most entries: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    row = block * M + tl.arange(0, M)
    token, query = row // QUERIES, row % QUERIES
    inside = token < tokens
    position = tl.load(position_ptr + sequence * tokens + token, mask=inside, other=-1)
    last = tl.minimum(tl.maximum(position, -1), capacity - 1)
    valid = last >= 0
    lowest = tl.zeros((M,), tl.int32)
    if WINDOW:
        lowest = tl.minimum(tl.maximum(tl.maximum(position, -1) - WINDOW + 1, 0), capacity)
    end = tl.max(last, 0) + 1
    # Every query sees all of the tiles from `whole` to `part`; those without a position take no part in this.
    begin, whole = 0, 0
    if WINDOW:
        begin = tl.min(tl.where(valid, lowest, capacity), 0) // TILE * TILE
        whole = (tl.max(tl.where(valid, lowest, 0), 0) + TILE - 1) // TILE * TILE
    part = tl.maximum((tl.min(tl.where(valid, last, capacity - 1), 0) + 1) // TILE * TILE, whole)
    part = tl.minimum(part, tl.maximum((end + TILE - 1) // TILE * TILE, whole))
    at, exists = query_offsets(row, sequence, head, tokens, HEADS, QUERIES, D)
    q = tl.load(q_ptr + at, mask=exists, other=0.0)
    scale = SCALE * LOG2_E  # > 0: a tile's largest score is taken before it is scaled
    layer = layer_index(layer_ptr, LAYERS)
    keys, values = (k_ptr, k_scale_ptr, k_exponent_ptr), (v_ptr, v_scale_ptr, v_exponent_ptr)
    acc = tl.zeros((M, D), tl.float32)
    top = tl.full((M,), UNSEEN, tl.float32)
    total = tl.zeros((M,), tl.float32)
    if WINDOW:
        acc, top, total = attend_tiles(
            acc, top, total, q, keys, values, page_ptr, sequence, layer, head, begin, tl.minimum(whole, end), lowest,
            last, scale, True, FORMAT, SEQUENCES, LENGTH, PAGES, HEADS, M, D, TILE, 1,
        )  # fmt: skip
    acc, top, total = attend_tiles(
        acc, top, total, q, keys, values, page_ptr, sequence, layer, head, whole, part, lowest,
        last, scale, False, FORMAT, SEQUENCES, LENGTH, PAGES, HEADS, M, D, TILE, STAGES,
    )  # fmt: skip
    acc, top, total = attend_tiles(
        acc, top, total, q, keys, values, page_ptr, sequence, layer, head, part, end, lowest,
        last, scale, True, FORMAT, SEQUENCES, LENGTH, PAGES, HEADS, M, D, TILE, 1,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sink_ptr + head * QUERIES + query) * LOG2_E
        largest = tl.maximum(top, sink)
        kept = tl.exp2(top - largest)
        acc, total = acc * kept[:, None], total * kept + tl.exp2(sink - largest)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = tl.where(valid[:, None], out, 0.0).to(tl.bfloat16)
    if FORMAT != "bf16":
        out = natural_order(out, M, D)
    # Computed again, which the compiler does not see: it would keep the offsets in registers from the beginning.
    block = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [block], dtype=tl.int32, is_pure=False, pack=1
    )
    at, exists = query_offsets(block * M + tl.arange(0, M), sequence, head, tokens, HEADS, QUERIES, D)
    tl.store(out_ptr + at, out, mask=exists)
