"""Extra memory of the stages, and offsets beyond 32 bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import msattn
from msattn.testing.cases import M3, M3_TP4, Case, make_config
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import GARBAGE, Inputs, make, make_block_ids, position_slots

MIB = 1 << 20
LIMIT = 384 * MIB
"""What a stage may hold besides its arguments and results, whatever the batch."""

CLEAR_REFS = Path("/proc/self/clear_refs")


def _status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def growth(stage: Callable[[], object]) -> int:
    """By how much the process grows at most while the stage runs."""
    try:
        gc.collect()
        CLEAR_REFS.write_text("5")  # the peak starts again from now
    except OSError:
        pytest.skip("the kernel does not let a process reset its peak memory")
    before = _status("VmRSS")
    stage()
    return _status("VmHWM") - before


def test_the_measure_sees_an_allocation() -> None:
    size = 200 * MIB
    assert growth(lambda: torch.ones(size, dtype=torch.uint8)) > 0.9 * size


def endless_cache(num_pages: int, config: msattn.MSAConfig, fmt: str) -> msattn.KVCache:
    """A cache of many pages that are one and the same, so that it takes no memory itself."""
    page = msattn.KVCache.allocate(1, config, fmt).tensor
    return msattn.KVCache.from_tensor(page.expand(num_pages, -1, -1, -1), config, fmt)


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize("group", [1, 16])
def test_attend_of_many_decode_rows(group: int, fmt: str) -> None:
    """Rows that share no page: as many tiles as there are selected blocks."""
    rows, topk = 256, 16
    config = make_config(group=group, kv_heads=1, topk=topk)
    cache = endless_cache(rows * topk, config, fmt)
    table = torch.randperm(rows * topk, dtype=torch.int32).view(rows, topk)
    batch = msattn.Batch.from_lists([1] * rows, [128 * topk] * rows, table)
    plan = msattn.make_plan(batch, config, fmt)
    ids = torch.arange(topk, dtype=torch.int32).expand(rows, 1, topk)
    q = torch.zeros(rows, group, 128)
    assert growth(lambda: msattn.attend(q, cache, ids, plan)) < LIMIT


def test_attend_of_a_prompt() -> None:
    """Nothing is held for each pair of a query and a key, or of a query and a selected block."""
    tokens, blocks = 4096, 64
    cache = endless_cache(blocks, M3_TP4, "bf16")
    table = torch.arange(blocks).unsqueeze(0)
    batch = msattn.Batch.from_lists([tokens], [128 * blocks], table)
    plan = msattn.make_plan(batch, M3_TP4, "bf16")
    ids = torch.rand(tokens, 1, 40).argsort(-1)[..., :16].int()
    q = torch.zeros(1, 16, 128).expand(tokens, 16, 128)
    # Partial outputs of all pairs would be 4096 * 16 * 16 * 128 * 4 bytes = 512 MiB.
    assert growth(lambda: msattn.attend(q, cache, ids, plan)) < LIMIT


def test_index_select_of_a_long_context() -> None:
    """All scores at once would take 256 MiB, the products 32 GiB."""
    tokens, blocks = 2048, 8192
    config = make_config(group=1, kv_heads=4, topk=16, head_dim=16)
    keys = torch.zeros(1, 128, 16, dtype=torch.bfloat16).expand(blocks, -1, -1)
    index = msattn.IndexCache.from_tensor(keys, config)
    # The first rows see nothing: only the memory of a large step is wanted, not its time.
    batch = msattn.Batch.from_lists(
        [tokens - 8, 8], [0, 128 * blocks], torch.zeros(2, blocks, dtype=torch.int32)
    )
    plan = msattn.make_plan(batch, config, "bf16")
    index_q = torch.zeros(1, 4, 16).expand(tokens, -1, -1)
    assert growth(lambda: msattn.index_select(index_q, index, plan)) < LIMIT


def test_index_select_of_many_tokens() -> None:
    """256K queries of one short request each: the queries as fp64 would take 1 GiB."""
    tokens = 1 << 18
    config = make_config(group=1, kv_heads=4, topk=4)
    index = msattn.IndexCache.allocate(1, config)
    batch = msattn.Batch.from_lists([tokens], [128], [[0]])
    plan = msattn.make_plan(batch, config, "bf16")
    index_q = torch.zeros(1, 4, 128, dtype=torch.bfloat16).expand(tokens, -1, -1)
    ids = torch.empty(tokens, 4, 4, dtype=torch.int32).fill_(GARBAGE)
    assert growth(lambda: msattn.index_select(index_q, index, plan, out=ids)) < LIMIT
    assert (ids[:-128] == -1).all() and (ids[-128:, :, 0] == 0).all()


def test_select_blocks_of_a_large_step() -> None:
    tokens, blocks = 1024, 8192
    plan = msattn.make_plan(
        msattn.Batch.from_lists([tokens], [128 * blocks], torch.zeros(1, blocks).int()), M3, "bf16"
    )
    scores = torch.zeros(1, 1, blocks).expand(4, tokens, blocks)
    assert growth(lambda: msattn.select_blocks(scores, plan)) < LIMIT


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "nvfp4"])
def test_store_of_many_tokens(fmt: str) -> None:
    tokens = 1 << 16
    cache = msattn.KVCache.allocate(tokens // 128, M3_TP4, fmt)
    cache.tensor.fill_(1)
    x = torch.ones(1, 1, 128, dtype=torch.bfloat16).expand(tokens, 1, 128)
    slots = torch.arange(tokens)
    assert growth(lambda: msattn.store_kv(x, x, cache, slots)) < LIMIT
    assert (cache.dequantize()[1][-1, 0, -1] > 0.9).all()


def test_merge_of_many_parts() -> None:
    outs = [torch.ones(1, 1, 128, dtype=torch.bfloat16).expand(4096, 64, 128)] * 8
    lses = [torch.zeros(1, 1).expand(4096, 64)] * 8
    out = torch.ones(4096, 64, 128, dtype=torch.bfloat16)
    assert growth(lambda: msattn.merge_states(outs, lses, out=out)) < LIMIT


@pytest.fixture
def sparse(tmp_path: Path) -> Callable[[int, torch.dtype], torch.Tensor]:
    """Large tensors that take the memory of their touched pages only: mapped files with holes."""
    count = 0

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal count
        count += 1
        size, name = numel * dtype.itemsize, str(tmp_path / f"{count}")
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8).view(dtype)

    return allocate


CONFIG = make_config(group=2, kv_heads=2, topk=3)


def far_table(num_pages: int, width: int) -> torch.Tensor:
    """Pages at the far end of a pool, and its first one."""
    return torch.tensor([[0, *range(num_pages - width + 1, num_pages)]])[:, torch.randperm(width)]


def layer(
    near: Inputs, cache: msattn.KVCache, index: msattn.IndexCache, table: torch.Tensor
) -> list[torch.Tensor]:
    """block_ids, out, LSE of a prompt that is stored and computed in other caches."""
    batch = msattn.Batch.from_lists(near.case.query_lens, near.case.seq_lens, table)
    plan = msattn.make_plan(batch, near.config, cache.format)
    slots = position_slots(batch)
    msattn.store_kv(near.k, near.v, cache, slots)
    msattn.store_index_k(near.index_k, index, slots)
    ids = msattn.index_select(near.index_q, index, plan)
    return [ids, *msattn.attend(near.q, cache, ids, plan, return_lse=True)]


@pytest.mark.parametrize(
    ("fmt", "page_stride", "num_pages"),
    [
        # One page id, one stride: products on both sides of 2^31, then beyond 2^32 elements.
        ("fp8_e4m3", 1_077_120, 2100),
        ("bf16", 1_077_248, 2100),
        ("nvfp4", 1_077_120, 2100),
        ("fp8_e5m2", 1 << 20, (1 << 12) + 9),
    ],
)
def test_pages_beyond_2_31_elements(
    fmt: str,
    page_stride: int,
    num_pages: int,
    sparse: Callable[[int, torch.dtype], torch.Tensor],
    seed: int,
) -> None:
    """Contract 10: a layer of a pool whose page record holds many; compared with a small pool."""
    near = make(Case("far", (600,), (600,), CONFIG), seed=seed, kv_format=fmt)
    form = msattn.KV_FORMATS[fmt]
    shape = form.page_shape(CONFIG)
    content = shape[0] * shape[1] * shape[2]
    memory = sparse(num_pages * page_stride, form.storage_dtype).view(num_pages, page_stride)
    pool = memory[:, 512 : 512 + content].unflatten(1, shape)
    cache = msattn.KVCache.from_tensor(pool, CONFIG, fmt)
    index_stride = (1 << 31) // num_pages + 128 * 128
    index_memory = sparse(num_pages * index_stride, torch.uint8).view(num_pages, index_stride)
    keys = index_memory[:, 256 : 256 + 128 * 128].unflatten(1, (128, 128))
    index = msattn.IndexCache.from_tensor(keys, CONFIG, "fp8_e4m3")
    assert memory.numel() > 2**31 and index_memory.numel() > 2**31
    want = layer(
        near, near.cache, msattn.IndexCache.allocate(9, CONFIG, "fp8"), near.batch.page_table
    )
    got = layer(near, cache, index, far_table(num_pages, 5))
    for name, a, b in zip(("block_ids", "out", "lse"), got, want, strict=True):
        assert_bitwise_equal(name, a, b)
    # Nothing wrapped around into another page.
    assert not memory[1 : num_pages - 4].view(torch.uint8)[::97].any()


def test_heads_and_sides_beyond_2_31_elements(
    sparse: Callable[[int, torch.dtype], torch.Tensor], seed: int
) -> None:
    """Heads outermost: head 1 lies more than 2^31 elements behind head 0; K and V are apart."""
    near = make(Case("far", (300,), (300,), CONFIG), seed=seed, kv_format="fp8_e4m3")
    head_stride = (1 << 31) + 4096
    pools = []
    for _ in "kv":
        memory = sparse(head_stride + 4 * 128 * 128, torch.uint8)
        pools.append(memory.as_strided((4, 2, 128, 128), (128 * 128, head_stride, 128, 1)))
    cache = msattn.KVCache.from_tensor(tuple(pools), CONFIG, "fp8_e4m3")
    want = layer(near, near.cache, msattn.IndexCache.allocate(9, CONFIG), near.batch.page_table)
    got = layer(near, cache, msattn.IndexCache.allocate(4, CONFIG), torch.tensor([[3, 0, 2]]))
    for name, a, b in zip(("block_ids", "out", "lse"), got, want, strict=True):
        assert_bitwise_equal(name, a, b)


def test_rows_beyond_2_31_elements(
    sparse: Callable[[int, torch.dtype], torch.Tensor], seed: int
) -> None:
    """T * Hq * D beyond 2^31, by strides: queries, outputs, LSE, scores and ids."""
    inputs = make(Case("rows", (9,), (700,), CONFIG), seed=seed)
    plan, stride = inputs.plan(), (1 << 28) + 640

    def far(x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, ...] with rows so far apart that the last ones lie beyond 2^31 elements."""
        memory = sparse(9 * stride, x.dtype)
        assert 8 * stride > 2**31
        inner = [x[0].stride(i) for i in range(x.dim() - 1)]
        return memory.as_strided(x.shape, (stride, *inner)).copy_(x)

    scores = msattn.index_scores(inputs.index_q, inputs.index, plan)
    ids = make_block_ids(inputs, seed=seed)
    selected = msattn.select_blocks(scores, plan)
    out, lse = msattn.attend(inputs.q, inputs.cache, ids, plan, return_lse=True)

    far_scores = far(torch.zeros_like(scores.transpose(0, 1)).contiguous()).transpose(0, 1)
    msattn.index_scores(far(inputs.index_q), inputs.index, plan, out=far_scores)
    assert_bitwise_equal("scores", far_scores, scores)
    far_ids = far(torch.zeros_like(selected))
    msattn.select_blocks(far_scores, plan, out=far_ids)
    assert_bitwise_equal("block_ids", far_ids, selected)
    far_out, far_lse = far(torch.zeros_like(out)), far(torch.zeros_like(lse))
    msattn.attend(far(inputs.q), inputs.cache, far(ids), plan, out=far_out, lse_out=far_lse)
    assert_bitwise_equal("out", far_out, out)
    assert_bitwise_equal("lse", far_lse, lse)
    merged, merged_lse = msattn.merge_states([far_out, out], [far_lse, lse])
    want, want_lse = msattn.merge_states([out, out], [lse, lse])
    assert_bitwise_equal("merged out", merged, want)
    assert_bitwise_equal("merged lse", merged_lse, want_lse)
