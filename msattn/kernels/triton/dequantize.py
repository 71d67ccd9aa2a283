"""Pages of an fp8 or NVFP4 pool in 16 bits, once for all the query tiles that will read them.

A prompt's tokens read each page many times, and converting it costs more than reading it twice as
wide. Blocks that no token chose are left out. The scratch is bounded: longer contexts convert in
the attention kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...cache import KVCache
from ...config import BLOCK_SIZE
from ...kv_format import KVFormat
from ...plan import Plan
from . import launch
from .attend_union import Lists
from .recording import start
from .tiles import BLOCK, NVFP4, NVFP4_FACTOR, follow, load_narrow_tile, shares_little

MIN_QUERY_LEN = 32
"""Query tokens of a request from which a page is read by several tiles."""
COPY_BYTES = 344 << 20
"""The 16 bit copy: 1,376 blocks of M3's 4 KV heads, 172K tokens of context."""


@triton.jit(do_not_specialize=["stride_table", "num_blocks", "num_pages"])
def _dequantize_kernel(
    k_ptr,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    v_ptr,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    chosen_ptr,  # [Hkv, R, B] int32: 1 for a block that a token chose
    scratch_ptr,  # [R * B, Hkv, 128, 2 * D] 16 bit
    scratch_table_ptr,  # [R, B] int32
    overlap_ptr,  # [2] int32: entries and picks of the union lists, UNION_TOKENS > 0 only
    num_blocks,
    num_pages,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    UNION_TOKENS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """scratch[request, block] = page of a chosen block; one program: one block of one KV head.

    The cache's factors stay outside, with the softmax scale and the output. With UNION_TOKENS, only
    where union tiles of that cost yield to KV-major.
    """
    follow(FOLLOWS)
    if UNION_TOKENS > 0 and not shares_little(overlap_ptr, UNION_TOKENS):
        return
    block, request, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_keys = tl.load(seq_lens_ptr + request) - block * BLOCK
    page = tl.load(page_table_ptr + request * stride_table + block).to(tl.int64)
    used = (num_keys > 0) & (page >= 0) & (page < num_pages)
    scratch_page = request * num_blocks + block
    if head == 0:
        tl.store(scratch_table_ptr + scratch_page, tl.where(used, scratch_page, -1))
    if not used or tl.load(chosen_ptr + head * tl.num_programs(1) * num_blocks + scratch_page) == 0:
        return
    k_base = k_ptr + page * stride_k_page + head.to(tl.int64) * stride_k_head
    v_base = v_ptr + page * stride_v_page + head.to(tl.int64) * stride_v_head
    k = load_narrow_tile(
        k_base, stride_k_token, num_keys, False, True, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D
    )
    v = load_narrow_tile(
        v_base, stride_v_token, num_keys, True, True, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D
    )
    if FORMAT == NVFP4:
        k, v = k.to(tl.float32) * NVFP4_FACTOR, v.to(tl.float32) * NVFP4_FACTOR
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    scratch_page = scratch_page.to(tl.int64) * tl.num_programs(2) + head
    at = scratch_ptr + scratch_page * (BLOCK * 2 * D) + n[:, None] * (2 * D) + d[None, :]
    tl.store(at, k.to(scratch_ptr.dtype.element_ty))
    tl.store(at + D, v.to(scratch_ptr.dtype.element_ty))


def pays(cache: KVCache, plan: Plan) -> bool:
    """The pool is narrow, several tiles of a prompt read its pages, and the copy is not too large.

    Pools with a factor for each slot are converted by the attention: the product would be rounded
    in 16 bits.
    """
    narrow = cache.format.is_fp8 or bool(cache.format.scale_group)
    slot_scales = any(
        isinstance(scale, torch.Tensor) and scale.dim() == 2
        for scale in (cache.k_scale, cache.v_scale)
    )
    blocks = plan.num_requests * plan.num_blocks
    page_bytes = plan.config.num_kv_heads * BLOCK_SIZE * 4 * plan.config.head_dim
    fits = 0 < blocks * page_bytes <= COPY_BYTES
    return narrow and fits and not slot_scales and plan.max_query_len >= MIN_QUERY_LEN


def dequantize(
    cache: KVCache, plan: Plan, query_dtype: torch.dtype, lists: Lists, *, union_tokens: float = 0
) -> tuple[KVCache, torch.Tensor]:
    """A 16 bit cache of the listed blocks, and the page table ``[R, B]`` that goes with it.

    In the queries' own dtype where that has 16 bits: fp8 and NVFP4 numbers are exact in both.

    Args:
        union_tokens: of the tiles that read the pool itself; the copy is made where they yield.
    """
    fmt = KVFormat.parse("bf16" if query_dtype == torch.bfloat16 else "fp16")
    config = plan.config
    requests, blocks = plan.num_requests, plan.num_blocks
    shape = (requests * blocks, *fmt.page_shape(config))
    scratch = plan.workspace("dequantized", shape, fmt.storage_dtype)
    table = plan.workspace("dequantized_table", (requests, blocks), torch.int32)
    start(
        _dequantize_kernel,
        (blocks, requests, config.num_kv_heads),
        *launch.pool_arguments(cache),
        seq_lens_ptr=plan.seq_lens,
        page_table_ptr=plan.page_table,
        stride_table=plan.page_table.stride(0),
        chosen_ptr=lists.chosen,
        scratch_ptr=scratch,
        scratch_table_ptr=table,
        overlap_ptr=lists.overlap,
        num_blocks=blocks,
        num_pages=cache.num_pages,
        D=config.head_dim,
        **launch.format_arguments(cache.format, cache.device),
        UNION_TOKENS=union_tokens,
        **launch.follow_arguments(cache.device),
        num_warps=8,
    )
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    return KVCache.from_tensor(scratch, config, fmt, **scales), table
