"""Pages on their way into the ring: the producer of decode and verification on Hopper.

A place in the ring is one side of a page, K or V of one block and KV head, as it is stored; NVFP4's
block scales are in a ring beside it. On the host: which pools it can read, and what both kernels
are told of a step.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...cache import KVCache, Scale
from ...plan import Plan, Tiles
from ..triton import launch
from ..triton.tiles import NVFP4
from .attend_union import BLOCK, HALF, D
from .shares import CUT_COST, MIN_SHARE, unit_size

MAX_TOKENS = gl.constexpr(8)
"""Query tokens of a tile whose consumers are told of its entries."""


@gluon.jit
def _slots(SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Numbers of a row's slots, in one warp where there are not more of them than lanes."""
    return gl.arange(0, SLOTS, layout=gl.BlockedLayout([max(SLOTS // 32, 1)], [32], [WARPS], [0]))


@gluon.jit
def own_pages(
    ids,
    position,
    table,
    num_slots,
    num_blocks,
    num_pages,
    stride_ids_k,
    SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Page of each slot's block; -1 where the row sees none, or an earlier slot has it."""
    slot = _slots(SLOTS, WARPS)
    block = gl.load(ids + slot * stride_ids_k, mask=slot < num_slots, other=-1)
    is_new = slot < num_slots
    for i in gl.static_range(SLOTS - 1):
        earlier = gl.load(ids + i * stride_ids_k, mask=i < num_slots, other=-1)
        is_new = is_new & ((block != earlier) | (slot <= i))
    # Looked up before the position is there: a load less to wait for.
    page = gl.load(table + block, mask=is_new & (block >= 0) & (block < num_blocks), other=-1)
    # An arithmetic shift: position -1 sees blocks up to -1, which is none.
    return gl.where((block <= (position >> 7)) & (page < num_pages), page, -1)


@gluon.jit
def load_entry(
    i,
    pages,
    ids,
    stride_ids_k,
    entries,
    entry_pages,
    count,
    SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
    DIRECT: gl.constexpr,
):
    """Page, block and set of tokens of a unit's entry; page -1: it names no block."""
    if DIRECT:
        page = gl.sum(gl.where(_slots(SLOTS, WARPS) == i, pages, 0), 0)
        block = gl.load(ids + i * stride_ids_k, mask=page >= 0, other=0)
        return page, block, 1
    else:
        page = gl.load(entry_pages + i, mask=i < count, other=-1)
        entry = gl.load(entries + i, mask=i < count, other=0)
        return page, entry >> 16, entry & 0xFFFF


@gluon.jit
def first_token_of(num_keys, FORMAT: gl.constexpr):
    """Of a page as it is loaded: it ends with the sequence, behind which may be anything, NaN too.

    What lies before the page's first token, the engine fills with zeros. NVFP4 pages are whole:
    codes are never NaN, and the scales of tokens behind the sequence become 0 where they are used.
    """
    if FORMAT == NVFP4:
        return 0
    else:
        return gl.minimum(num_keys, BLOCK) - BLOCK


@gluon.jit
def _tell(fact, position, num_keys, tokens):
    """What consumers are told of an entry: see :func:`read_fact`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # Sees all of the page, or nothing of it, at the latest.
    last = gl.maximum(gl.minimum(position, BLOCK), -MAX_TOKENS) + MAX_TOKENS
    keys = gl.maximum(gl.minimum(num_keys, BLOCK), 0)
    word = tokens << 16 | last << 8 | keys
    fact.store(gl.full([1], word, gl.int32, layout=layout))


@gluon.jit
def read_fact(fact):
    """Of an entry: which tokens chose it, the first one's position, and the keys of its page.

    The position is one in the page, and right where that matters; no token chose what is no page.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    word = gl.max(fact.load(layout), 0)
    return word >> 16, (word >> 8 & 0xFF) - MAX_TOKENS, word & 0xFF


@gluon.jit
def _load_page(
    k_desc,
    v_desc,
    k_scales_desc,
    v_scales_desc,
    page,
    head,
    first_token,
    ring,
    scales,
    full,
    step,
    STAGES: gl.constexpr,
    SIDE_BYTES: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """K and V of a page into the next two places; of page -1 nothing, which is there at once."""
    is_there = page >= 0
    for side in gl.static_range(2):
        slot = (step + side) % STAGES
        mbarrier.expect(full.index(slot), SIDE_BYTES, pred=is_there)
        tma.async_copy_global_to_shared(
            k_desc if side == 0 else v_desc,
            [page, head, first_token, 0],
            full.index(slot),
            ring.index(slot),
            pred=is_there,
        )
        if FORMAT == NVFP4:
            tma.async_copy_global_to_shared(
                k_scales_desc if side == 0 else v_scales_desc,
                [page, head, 0, 0],
                full.index(slot),
                scales.index(slot),
                pred=is_there,
            )
        mbarrier.arrive(full.index(slot), count=1, pred=page < 0)


@gluon.jit
def load_pages(
    k_desc,
    v_desc,
    k_scales_desc,
    v_scales_desc,
    requests,
    blocks,
    work,
    ring,
    scales,
    facts,
    full,
    empty,
    SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    SIDE_BYTES: gl.constexpr,
    FORMAT: gl.constexpr,
    DIRECT: gl.constexpr,
    TELLS: gl.constexpr,  # consumers of each entry, else they know
):
    """The producer: K and V of each entry of the program's share."""
    # fmt: off
    tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr = requests
    (
        block_ids_ptr, stride_ids_t, stride_ids_h, stride_ids_k, page_table_ptr, stride_table,
        entries_ptr, pages_ptr, counts_ptr, max_list, num_slots, num_blocks, num_pages,
    ) = blocks
    _share, at, end, unit, before, num_heads = work
    # fmt: on
    step = 0
    while at < end:
        size = unit_size(unit, counts_ptr, tile_request_ptr, num_heads, num_slots, True, DIRECT)
        tile, head = unit // num_heads, unit % num_heads
        # A tile of one token has that token's number: its ids can be asked for at once.
        row = tile if DIRECT else gl.load(tile_row_ptr + tile)
        ids = block_ids_ptr + row.to(gl.int64) * stride_ids_t + head * stride_ids_h
        request = gl.maximum(gl.load(tile_request_ptr + tile), 0)
        seq_len = gl.load(seq_lens_ptr + request)
        position = seq_len - (gl.load(cu_seqlens_ptr + request + 1) - row)
        group = unit.to(gl.int64) * max_list
        pages, count = 0, 0
        if DIRECT:
            pages = own_pages(
                ids, position, page_table_ptr + request * stride_table,
                num_slots, num_blocks, num_pages, stride_ids_k, SLOTS, 1,
            )  # fmt: skip
        else:
            count = gl.load(counts_ptr + unit)
        for i in range(at - before, gl.minimum(end - before, size)):
            page, block, tokens = load_entry(
                i, pages, ids, stride_ids_k, entries_ptr + group, pages_ptr + group, count,
                SLOTS, 1, DIRECT,
            )  # fmt: skip
            if TELLS or page >= 0:
                # Both together: K and V of a token may be neighbours, in the same row of memory.
                for side in gl.static_range(2):
                    phase = ((step + side) // STAGES) & 1
                    mbarrier.wait(empty.index((step + side) % STAGES), phase ^ 1)
                if TELLS:
                    _tell(
                        facts.index(step % STAGES), position - block * BLOCK,
                        seq_len - block * BLOCK, gl.where(page >= 0, tokens, 0),
                    )  # fmt: skip
                _load_page(
                    k_desc, v_desc, k_scales_desc, v_scales_desc, page, head,
                    first_token_of(seq_len - block * BLOCK, FORMAT), ring, scales, full, step,
                    STAGES, SIDE_BYTES, FORMAT,
                )  # fmt: skip
                step += 2
        before += size
        at = gl.minimum(before, end)
        unit += 1


@gluon.jit
def page_of(ring, scales, slot, FORMAT: gl.constexpr):
    """A side of a page in the ring, and its block scales."""
    if FORMAT == NVFP4:
        return ring.index(slot).reshape((BLOCK, HALF)), scales.index(slot).reshape((8, BLOCK))
    else:
        page = ring.index(slot).reshape((BLOCK, D))
        return page, page


@gluon.jit
def pass_over(full, empty, k_slot, v_slot, v_phase):
    """In a consumer none of whose tokens chose the page: K is there, V is waited for."""
    mbarrier.arrive(empty.index(k_slot), count=1)
    mbarrier.wait(full.index(v_slot), v_phase)
    mbarrier.arrive(empty.index(v_slot), count=1)


def can_read(cache: KVCache) -> bool:
    """The copy engine can fetch the pool's pages as they lie, and no slot has a factor."""
    scales = (cache.k_scale, cache.v_scale)
    if any(isinstance(s, torch.Tensor) and s.dim() for s in scales):
        return False
    return all(launch.can_copy_in_bulk(side) for side in sides_of(cache))


def sides_of(cache: KVCache) -> tuple[torch.Tensor, ...]:
    """K and V as the engine copies them, bytes where narrow; of NVFP4 the block scales, too."""
    if not cache.format.scale_group:
        return launch.raw(cache.k), launch.raw(cache.v)
    views = cache.nvfp4_views()
    lines = (len(views.k_codes), cache.num_kv_heads, 8, BLOCK.value)
    scales = [
        side.view(torch.uint8).as_strided(lines, (*side.stride()[:2], BLOCK.value, 1))
        for side in (views.k_scales, views.v_scales)
    ]
    return views.k_codes, views.v_codes, *scales


def descriptor_of(side: torch.Tensor) -> TensorDescriptor:
    """A side of a pool; what it has of a page and head is a box."""
    row = side.shape[3] * side.element_size()
    layout = gl.NVMMASharedLayout(min(row, 128), 8 * side.element_size(), rank=4)
    box = [1, 1, *side.shape[2:]]
    return TensorDescriptor(side, list(side.shape), list(side.stride()), box, layout)


def step_arguments(
    q: torch.Tensor,
    cache: KVCache,
    plan: Plan,
    tiles: Tiles,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> dict[str, object]:
    """What a kernel is told of a step: all that does not follow from its choice of a tile."""
    config = plan.config
    k, v, *scales = (descriptor_of(side) for side in sides_of(cache))
    k_scales, v_scales = scales or (None, None)
    constants = launch.format_arguments(cache.format, q.device)
    q_strides, out_strides = q.stride(), out.stride()
    lse_strides = (0, 0) if lse is None else lse.stride()
    return {
        "q_ptr": launch.raw(q),
        "stride_q_t": q_strides[0],
        "stride_q_h": q_strides[1],
        "stride_q_d": q_strides[2],
        "k_desc": k,
        "v_desc": v,
        "k_scales_desc": k_scales,
        "v_scales_desc": v_scales,
        **launch.scale_arguments("q_scale", q_scale, slots=False),
        **launch.scale_arguments("k_scale", cache.k_scale, slots=False),
        **launch.scale_arguments("v_scale", cache.v_scale, slots=False),
        **launch.softmax_arguments(softmax_scale),
        "tile_request_ptr": tiles.request,
        "tile_row_ptr": tiles.first_row,
        "cu_seqlens_ptr": plan.cu_seqlens_q,
        "seq_lens_ptr": plan.seq_lens,
        "out_ptr": out,
        "stride_out_t": out_strides[0],
        "stride_out_h": out_strides[1],
        "stride_out_d": out_strides[2],
        "lse_ptr": plan.seq_lens if lse is None else lse,  # not read, not written without
        "stride_lse_t": lse_strides[0],
        "stride_lse_h": lse_strides[1],
        "num_units": len(tiles.request) * config.num_kv_heads,
        "num_heads": config.num_kv_heads,
        "min_share": MIN_SHARE,
        "cut_cost": CUT_COST,
        "GROUP": config.group_size,
        "FORMAT": constants["FORMAT"],
        "E5M2": constants["E5M2"],
        "DTYPE": gl.bfloat16 if cache.format.storage_dtype == torch.bfloat16 else gl.float16,
        "FP8_QUERY": q.dtype == torch.float8_e4m3fn,
        "HAS_LSE": lse is not None,
    }
