"""Hostile inputs: a step whose memory is as unkind as an engine's may legally be.

Pages are shuffled, table columns behind a request's last block name other requests' pages or
nothing, and every byte that no token owns is NaN: page tails, unused pages, neighbouring layers,
the gaps of strided tensors. Whatever reads one of them shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from ..batch import UNMAPPED, Batch
from ..cache import CompactKeys, IndexCache, KVCache, Pool, Scale
from ..config import BLOCK_SIZE, MSAConfig
from ..kv_format import KVFormat
from ..plan import Plan, make_plan
from ..store import store_index_k, store_kv
from . import oracle
from .cases import DENSE, Case, Layout, ScaleKind

POISON = 0xFF
"""Bytes of it are NaN in every float type here, and in NVFP4 both as codes and as scales."""

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
GARBAGE = 0x7F7F7F7F
"""What an integer buffer holds that nobody has written."""

K_SCALE, V_SCALE, Q_SCALE = 0.3, 1.7, 0.7
"""No powers of two: a scale that is lost, applied twice or rounded to one is seen."""

SPARE_PAGES = 3
INTEGER_LIMIT = 3
"""Index queries and keys are integers up to this: sums over 128 of them are exact in any order."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """A step with all its tensors; the caches hold every position of every request."""

    case: Case
    layout: Layout
    batch: Batch
    cache: KVCache
    index: IndexCache
    q: torch.Tensor  # [T + spare, Hq, D]
    k: torch.Tensor  # [T + spare, Hkv, D]: the step's keys, as stored in the cache already
    v: torch.Tensor  # [T + spare, Hkv, D]
    index_q: torch.Tensor  # [T + spare, Hi, Di]
    index_k: torch.Tensor  # [T + spare, Di]
    slot_mapping: torch.Tensor  # [T + spare] int64, -1 for spare rows and negative positions
    owned: torch.Tensor  # [pages, 128] bool: slots that hold a position of a request
    q_scale: Scale | None  # for an fp8 query

    @property
    def config(self) -> MSAConfig:
        return self.case.config

    @property
    def cpu_batch(self) -> Batch:
        """The batch where the oracle wants it."""
        batch = self.batch
        return Batch(
            batch.cu_seqlens_q.cpu(),
            batch.seq_lens.cpu(),
            batch.page_table.cpu(),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )

    def plan(self) -> Plan:
        """A new plan of the batch."""
        return make_plan(self.batch, self.config, self.cache.format)

    def new_out(self) -> torch.Tensor:
        """A poisoned ``[T + spare, Hq, D]`` for attend, strided as the layout says."""
        dtype = torch.bfloat16 if self.q.dtype == torch.float8_e4m3fn else self.q.dtype
        return _rows(poisoned(self.q.shape, dtype, self.q.device), self.layout)

    def forget_step(self) -> None:
        """Poison the step's own slots: the caches then hold the earlier positions only."""
        slots = self.slot_mapping[self.slot_mapping >= 0]
        step = torch.zeros_like(self.owned).flatten()
        step[slots] = True
        fill_slots(self.cache, step.view_as(self.owned), math.nan)
        fill_index_slots(self.index, step.view_as(self.owned), math.nan)

    def fill_unowned(self, value: float) -> None:
        """Let all slots that no position owns hold ``value``."""
        fill_slots(self.cache, ~self.owned, value)
        fill_index_slots(self.index, ~self.owned, value)


def make(
    case: Case,
    *,
    seed: int = 0,
    page_seed: int | None = None,
    kv_format: object = "bf16",
    index_format: object = "bf16",
    query_dtype: torch.dtype = torch.bfloat16,
    integer_index: bool = True,
    compact: bool = False,
    layout: Layout = DENSE,
    scales: ScaleKind = "unit",
    device: torch.device | str = "cpu",
) -> Inputs:
    """The inputs of a case.

    Args:
        case: lengths and shapes.
        seed: of the numbers; they do not depend on pages, layout or device.
        page_seed: of the pages' order and of the unused table entries; default ``seed``.
        kv_format, index_format: of the two caches.
        query_dtype: bf16, fp16, fp32 or float8_e4m3fn. Keys and values are in it too, and in bf16
            for an fp8 query.
        integer_index: index queries and keys are small integers, so that scores are exact however
            they are summed, and ties frequent. Else they are normally distributed.
        compact: the index keys have their compact copy.
        layout: where the tensors lie.
        scales: form of the cache's and the query's scales.
        device: where everything goes.
    """
    fmt, config = KVFormat.parse(kv_format), case.config
    is_fp8 = query_dtype == torch.float8_e4m3fn
    dtype = torch.bfloat16 if is_fp8 else query_dtype
    generator = torch.Generator().manual_seed(seed)
    batch, num_pages = make_batch(case, seed if page_seed is None else page_seed, device)
    k_scale, v_scale = (
        make_scale(s, scales, config, num_pages, device) for s in (K_SCALE, V_SCALE)
    )
    pool = make_pool(fmt, config, num_pages, layout, device)
    cache = KVCache.from_tensor(pool, config, fmt, k_scale=k_scale, v_scale=v_scale)
    index = make_index_cache(config, num_pages, index_format, device, compact=compact)

    # Positions of all requests, one after the other: their numbers, and where they are stored.
    slots = position_slots(batch)
    count, kv_heads, index_dim = len(slots), config.num_kv_heads, config.index_head_dim
    k = torch.randn(count, kv_heads, config.head_dim, generator=generator)
    v = torch.randn(count, kv_heads, config.head_dim, generator=generator)
    index_k = _index_numbers((count, index_dim), integer_index, generator)
    k, v = k.to(device, dtype), v.to(device, dtype)
    index_k = index_k.to(device, dtype)
    slots = slots.to(device)
    store_kv(k, v, cache, slots, impl="reference")
    store_index_k(index_k, index, slots, impl="reference")
    owned = torch.zeros(num_pages * BLOCK_SIZE, dtype=torch.bool, device=device)
    owned[slots] = True

    q = 1.5 * torch.randn(case.num_rows, config.num_q_heads, config.head_dim, generator=generator)
    index_q = _index_numbers(
        (case.num_rows, config.num_index_heads, index_dim), integer_index, generator
    )
    rows = step_rows(case).to(device)

    def of_step(x: torch.Tensor) -> torch.Tensor:
        """The step's part of the numbers of all positions; rows without one (-1) are poison."""
        return torch.cat([x, poisoned((1, *x.shape[1:]), x.dtype, x.device)])[rows]

    q_scale = None
    if is_fp8:
        scale = Q_SCALE if scales != "unit" else 1.0
        q_scale = make_scale(scale, "slice" if scales == "slots" else scales, config, 0, device)
        q = (q / scale).clamp(-448, 448)
    return Inputs(
        case=case,
        layout=layout,
        batch=batch,
        cache=cache,
        index=index,
        q=_rows(_spare_poisoned(q, case).to(query_dtype).to(device), layout),
        k=_rows(of_step(k), layout),
        v=_rows(of_step(v), layout),
        index_q=_rows(_spare_poisoned(index_q, case).to(query_dtype).to(device), layout),
        index_k=_rows(of_step(index_k), layout),
        slot_mapping=of_step(slots),
        owned=owned.view(num_pages, BLOCK_SIZE),
        q_scale=q_scale,
    )


def make_batch(
    case: Case, page_seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[Batch, int]:
    """The batch of a case, its pages shuffled, and the number of pages of the pool."""
    random = Random(page_seed)
    num_pages = case.num_pages + SPARE_PAGES
    pages = random.sample(range(num_pages), num_pages)
    table = []
    for length in case.seq_lens:
        mine = [pages.pop() for _ in range(-(-length // BLOCK_SIZE))]
        unused = (0, UNMAPPED, num_pages, INT32_MAX, INT32_MIN, random.randrange(num_pages))
        rest = case.num_columns - len(mine)
        table.append(mine + random.choices(unused, k=rest))
    batch = Batch.from_lists(
        case.query_lens,
        case.seq_lens,
        torch.tensor(table, dtype=torch.int32).reshape(len(table), case.num_columns),
        device=device,
    )
    return batch, num_pages


def make_pool(
    fmt: KVFormat,
    config: MSAConfig,
    num_pages: int,
    layout: Layout = DENSE,
    device: torch.device | str | None = None,
) -> Pool:
    """A pool of NaN in the layout, with pages of NaN on both sides of it."""
    heads, tokens, content = fmt.page_shape(config)

    def pages(*shape: int) -> torch.Tensor:
        return poisoned((num_pages + 2, *shape), fmt.storage_dtype, device)[1:-1]

    if layout.pool == "layers":
        return pages(3, heads, tokens, content)[:, 1]
    if fmt.scale_group or layout.pool == "hnd":
        return pages(heads, tokens, content)
    if layout.pool == "nhd":
        return pages(tokens, heads, content).transpose(1, 2)
    dim = config.head_dim
    k = pages(heads, tokens, dim)
    if layout.pool == "unlike_pair":
        return k, pages(tokens, heads, dim).transpose(1, 2)
    return k, pages(heads, tokens, dim)


def make_index_cache(
    config: MSAConfig,
    num_pages: int,
    dtype: object,
    device: torch.device | str | None = None,
    *,
    compact: bool = False,
) -> IndexCache:
    """Index keys of NaN, with pages of NaN on both sides; so is their compact copy."""
    storage = KVFormat.parse(dtype).storage_dtype
    shape = (num_pages + 2, BLOCK_SIZE, config.index_head_dim)
    pool, copy = poisoned(shape, storage, device)[1:-1], None
    if compact:
        page = CompactKeys.page_bytes(config.index_head_dim)
        copy = poisoned((num_pages + 2, page), torch.uint8, device)[1:-1]
    return IndexCache.from_tensor(pool, config, dtype, compact=copy)


def make_scale(
    value: float,
    kind: ScaleKind,
    config: MSAConfig,
    num_pages: int,
    device: torch.device | str | None = None,
) -> Scale | None:
    """``value`` in one of the forms that a scale may have; per slot it is a range around it."""
    if kind == "unit":
        return None
    if kind == "float":
        return value
    if kind == "0d":
        return torch.tensor(value, device=device)
    if kind == "slice":
        # Four bytes into its storage, with a NaN on both sides.
        return torch.tensor([math.nan, value, math.nan], device=device)[1:2]
    slots = num_pages * BLOCK_SIZE
    spread = torch.linspace(0.8, 1.25, config.num_kv_heads * slots, device=device)
    return value * spread.view(config.num_kv_heads, slots)


def make_block_ids(inputs: Inputs, *, seed: int = 0, hostile: bool = True) -> torch.Tensor:
    """Block ids ``[T + spare, Hkv, topk]`` int32, drawn for each row and KV head on its own.

    Hostile ones are in any order, with duplicates, ids of blocks behind the visible ones, and wild
    integers in between; some rows have none that counts. Else they are ascending, -1 at the tail.
    Spare rows hold garbage.
    """
    random = Random(seed)
    config, topk = inputs.config, inputs.config.topk
    rows = []
    for _, position in oracle.tokens(inputs.batch):
        visible = position // BLOCK_SIZE + 1
        for _ in range(config.num_kv_heads):
            most = min(visible, topk)
            chosen = random.sample(range(visible), random.randint(0, most) if hostile else most)
            rows.append(
                _hostile_row(chosen, visible, topk, random)
                if hostile
                else sorted(chosen) + [-1] * (topk - most)
            )
    num_rows, heads = inputs.case.num_rows, config.num_kv_heads
    rows += [[GARBAGE] * topk] * (inputs.case.spare_rows * heads)
    block_ids = torch.tensor(rows, dtype=torch.int32).reshape(num_rows, heads, topk)
    block_ids = block_ids.to(inputs.q.device)
    return head_major(block_ids) if inputs.layout.head_major_ids else block_ids


def position_slots(batch: Batch) -> torch.Tensor:
    """Slot of every position of every request, request by request: ``[sum(seq_lens)]`` int64."""
    table, slots = batch.page_table.cpu().long(), [torch.empty(0, dtype=torch.int64)]
    for row, length in zip(table, batch.seq_lens.tolist(), strict=True):
        position = torch.arange(length)
        slots.append(row[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    return torch.cat(slots)


def step_rows(case: Case) -> torch.Tensor:
    """For each row of q its entry among the positions of all requests, -1 for none."""
    rows, start = [], 0
    for count, length in zip(case.query_lens, case.seq_lens, strict=True):
        positions = range(length - count, length)
        rows += [start + p if p >= 0 else -1 for p in positions]
        start += length
    return torch.tensor(rows + [-1] * case.spare_rows, dtype=torch.int64)


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    """A tensor all of whose bytes are poison: NaN, or -1 for integers."""
    size = math.prod(shape) * dtype.itemsize
    return torch.full((size,), POISON, dtype=torch.uint8, device=device).view(dtype).view(*shape)


def strided(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` with gaps of poison between its rows and its heads; the last stride is 1."""
    *outer, last = x.shape
    room = poisoned((*(size + 1 for size in outer), last + 16), x.dtype, x.device)
    view = room[tuple(slice(size) for size in x.shape)]
    return as_bytes(view).copy_(as_bytes(x)).view(x.dtype)


def head_major(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` ``[T, H, ...]`` as a view of ``[H, T, ...]``."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def fill_slots(cache: KVCache, where: torch.Tensor, value: float) -> None:
    """Let the slots ``where`` [pages, 128] bool of a KV cache hold ``value``, scales aside.

    In NVFP4 it is the block scale that holds it, under codes of every kind.
    """
    page, offset = where.nonzero(as_tuple=True)
    if not cache.format.scale_group:
        for pool in (cache.k, cache.v):
            _fill(pool, (page, slice(None), offset), value)
        return
    views = cache.nvfp4_views()
    codes = torch.arange(views.k_codes.shape[-1], dtype=torch.uint8, device=cache.device) * 37 + 1
    for pool in (views.k_codes, views.v_codes):
        pool[page, :, offset] = codes
    _fill(views.k_scales, (page, slice(None), offset), value)
    _fill(views.v_scales, (page, slice(None), offset // 4, slice(None), offset % 4), value)


def fill_index_slots(index: IndexCache, where: torch.Tensor, value: float) -> None:
    """Let the slots ``where`` [pages, 128] bool of an index cache hold ``value``.

    Their compact copy is poison then.
    """
    _fill(index.tensor, where.nonzero(as_tuple=True), value)
    if index.compact is not None:
        index.compact.codes[where], index.compact.words[where] = -1, -1


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """One-byte floats as uint8, anything else as it is: fp8 lacks many operators."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _fill(pool: torch.Tensor, where: tuple[torch.Tensor | slice, ...], value: float) -> None:
    stored = torch.tensor(value, dtype=torch.float32, device=pool.device).to(pool.dtype)
    as_bytes(pool)[where] = as_bytes(stored)


def _rows(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    return strided(x) if layout.strided_rows else x


def _spare_poisoned(x: torch.Tensor, case: Case) -> torch.Tensor:
    x[case.num_tokens :] = math.nan
    return x


def _index_numbers(
    shape: tuple[int, ...], integer: bool, generator: torch.Generator
) -> torch.Tensor:
    if integer:
        high = INTEGER_LIMIT + 1
        return torch.randint(-INTEGER_LIMIT, high, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def _hostile_row(chosen: list[int], visible: int, topk: int, random: Random) -> list[int]:
    """``chosen`` in any order, the rest of the row filled with what must not count."""
    ignored = [-1, -1, *chosen, visible, visible + 7, INT32_MAX, INT32_MIN, GARBAGE, -2]
    row = chosen + random.choices(ignored, k=topk - len(chosen))
    random.shuffle(row)
    return row
