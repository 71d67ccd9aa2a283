"""Inputs of one case: several sets over one pool of pages, so that none stays in a cache."""

from __future__ import annotations

import math
import time
from functools import cached_property

import torch

from ..batch import Batch
from ..cache import IndexCache, KVCache
from ..config import BLOCK_SIZE, MSAConfig
from ..kv_format import KVFormat
from ..plan import Plan, make_plan
from ..store import store_kv
from ..testing.cases import Case
from ..testing.selections import Rows, make_block_ids, rows_of
from .workloads import Workload

CHUNK_BYTES = 128 << 20  # of KV pages that are filled once and then repeated
POOL_SHARE = 0.5  # of the device's memory that the KV pool may take
CPU_POOL_BYTES = 1 << 30
OTHER_ORDER = 7919  # a prime: pages by which the tables of two sets are shifted
UNMAPPED_PER_SECOND = 200e9  # bytes that a driver takes back

# Index keys and queries that select about as the published figures say: some blocks are stronger
# than others, queries drift from token to token, and the heads resemble one another.
BLOCK_SPREAD = 0.3
DRIFT = 0.98
HEADS_SHARE = 0.85
DRIFT_WINDOW = 256  # 0.98 ** 256 < 0.006: older noise does not matter


class Pools:
    """The pages, kept from case to case; they only grow, and one format is held at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kv: tuple[object, KVCache] | None = None
        self._index: tuple[object, IndexCache] | None = None

    def limit(self, page_bytes: int) -> int:
        """Pages that may be allocated."""
        if self.device.type != "cuda":
            return CPU_POOL_BYTES // page_bytes
        total = torch.cuda.get_device_properties(self.device).total_memory
        return int(POOL_SHARE * total) // page_bytes

    def kv(self, config: MSAConfig, fmt: KVFormat, pages: int) -> KVCache:
        """At least ``pages`` pages of random numbers."""
        key = (config, fmt)
        if self._kv is None or self._kv[0] != key or self._kv[1].num_pages < pages:
            self._kv = None
            release(self.device)
            self._kv = (key, _random_kv(config, fmt, pages, self.device))
        return self._kv[1]

    def index(self, config: MSAConfig, fmt: KVFormat, pages: int) -> IndexCache:
        """At least ``pages`` pages of random index keys, no two alike."""
        key = (config.index_head_dim, fmt)
        if self._index is None or self._index[0] != key or self._index[1].num_pages < pages:
            self._index = None
            release(self.device)
            self._index = (key, _random_index(config, fmt, pages, self.device))
        return self._index[1]


class Inputs:
    """``sets`` independent inputs of one step; what an op does not use is never made."""

    def __init__(
        self,
        workload: Workload,
        config: MSAConfig,
        fmt: KVFormat,
        pattern: str,
        sets: int,
        pools: Pools,
        seed: int = 0,
    ) -> None:
        self.workload, self.config, self.format, self.pattern = workload, config, fmt, pattern
        self.sets, self.pools, self.device = sets, pools, pools.device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.seed = seed
        self.case: Case = workload.case(config)

    @property
    def index_format(self) -> KVFormat:
        """Of the index cache: the KV cache's, or bf16 where index keys cannot have that."""
        return self.format if self.format.in_index else KVFormat.parse("bf16")

    @property
    def model_dtype(self) -> torch.dtype:
        """Of queries and new keys: the cache's where that is a model's dtype, else bf16."""
        dtype = self.format.storage_dtype
        return dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16

    @property
    def num_tokens(self) -> int:
        return self.case.num_tokens

    @cached_property
    def rows(self) -> Rows:
        return rows_of(self.case.query_lens, self.case.seq_lens, self.device)

    @cached_property
    def num_pages(self) -> int:
        """Pages of the pools: different ones for each set, as far as memory goes."""
        page = self.format.bytes_per_page(self.config)
        wanted = min(self.case.num_pages * self.sets, self.pools.limit(page))
        return max(self.case.num_pages, wanted)

    @cached_property
    def cache(self) -> KVCache:
        return self.pools.kv(self.config, self.format, self.num_pages)

    @cached_property
    def index(self) -> IndexCache:
        return self.pools.index(self.config, self.index_format, self.num_pages)

    @cached_property
    def tables(self) -> list[torch.Tensor]:
        """``[R, B]`` int32 of each set; unused columns name page 0, as an engine's do."""
        counts = torch.tensor([-(-s // BLOCK_SIZE) for s in self.case.seq_lens])
        # A multiple of 16, as the widths of engines' tables are.
        width = -(-int(counts.max()) // 16) * 16
        used = (torch.arange(width) < counts[:, None]).to(self.device)
        need = self.case.num_pages
        # Where not every set can have pages of its own, each has them in another order.
        shift = need if need * self.sets <= self.num_pages else OTHER_ORDER
        order = torch.randperm(self.num_pages, generator=self.generator, device=self.device)
        tables = []
        for r in range(self.sets):
            place = (torch.arange(need, device=self.device) + r * shift) % self.num_pages
            table = torch.zeros(used.shape, dtype=torch.int32, device=self.device)
            table[used] = order[place].int()
            tables.append(table)
        return tables

    @cached_property
    def plans(self) -> list[Plan]:
        return [make_plan(batch, self.config, self.format) for batch in self.batches]

    @cached_property
    def batches(self) -> list[Batch]:
        lengths = self.case.query_lens, self.case.seq_lens
        return [Batch.from_lists(*lengths, table) for table in self.tables]

    @cached_property
    def q(self) -> torch.Tensor:
        return self._normal(self.sets, self.num_tokens, self.config.num_q_heads, self._dim)

    @cached_property
    def out(self) -> torch.Tensor:
        """``[sets, T, Hq, D]``: what attend, merge and the layer write."""
        return torch.empty_like(self.q)

    @cached_property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the step, ``[sets, T, Hkv, D]`` each."""
        shape = self.sets, self.num_tokens, self.config.num_kv_heads, self._dim
        return self._normal(*shape), self._normal(*shape)

    @cached_property
    def index_k(self) -> torch.Tensor:
        return self._normal(self.sets, self.num_tokens, self.config.index_head_dim)

    @cached_property
    def slots(self) -> list[torch.Tensor]:
        """slot_mapping of each set."""
        request, position = self.rows
        block, offset = position // BLOCK_SIZE, position % BLOCK_SIZE
        return [t[request, block].long() * BLOCK_SIZE + offset for t in self.tables]

    @cached_property
    def block_ids(self) -> torch.Tensor:
        """``[sets, T, Hkv, K]`` int32."""
        ids = make_block_ids(
            self.pattern,
            self.case.query_lens * self.sets,
            self.case.seq_lens * self.sets,
            num_kv_heads=self.config.num_kv_heads,
            topk=self.config.topk,
            seed=self.seed,
            device=self.device,
        )
        return ids.view(self.sets, self.num_tokens, self.config.num_kv_heads, self.config.topk)

    @cached_property
    def block_ids_by_head(self) -> torch.Tensor:
        """``[sets, Hkv, T, K]``, contiguous: the peers' layout."""
        return self.block_ids.transpose(1, 2).contiguous()

    @cached_property
    def index_q(self) -> torch.Tensor:
        """``[sets, T, Hi, Di]`` in the dtype of the index cache."""
        shape = self.sets, self.num_tokens, self.config.num_index_heads, self.config.index_head_dim
        dtype = self.index_format.storage_dtype
        if self.pattern == "uniform":
            return self._normal(*shape).to(dtype)
        return _drifting(self._normal(*shape), self._normal(*shape[:2], 1, shape[3]), self.rows).to(
            dtype
        )

    @cached_property
    def scores(self) -> torch.Tensor:
        """Scores to select from, ``[sets, Hi, T, B]`` fp32."""
        shape = self.sets, self.config.num_index_heads, self.num_tokens, self.num_blocks
        return torch.randn(shape, generator=self.generator, device=self.device)

    @property
    def num_blocks(self) -> int:
        return -(-self.workload.context // BLOCK_SIZE)

    @cached_property
    def scores_out(self) -> torch.Tensor:
        shape = self.config.num_index_heads, self.num_tokens, self.num_blocks
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    @cached_property
    def ids_out(self) -> torch.Tensor:
        """``[T, Hkv, K]`` int32, for a selection."""
        return torch.empty_like(self._ids_like)

    @cached_property
    def ids_out_by_head(self) -> torch.Tensor:
        """``[Hkv, T, K]`` int32, for a peer's selection."""
        return torch.empty_like(self._ids_like.transpose(0, 1), memory_format=_CONTIGUOUS)

    @cached_property
    def parts(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Two partial results of each set, for merge."""
        out = []
        for r in range(self.sets):
            outs = [self.q[r], self._normal(*self.q.shape[1:])]
            lses = [self._normal(*self.q.shape[1:3]).float() for _ in outs]
            out.append((outs, lses))
        return out

    @cached_property
    def lse_out(self) -> torch.Tensor:
        return torch.empty(self.q.shape[:3], dtype=torch.float32, device=self.device)

    def poison(self) -> None:
        """Let every output that exists hold what no result is."""
        made = self.__dict__
        for name in ("out", "scores_out", "lse_out"):
            if name in made:
                made[name].fill_(math.nan)
        for name in ("ids_out", "ids_out_by_head"):
            if name in made:
                made[name].fill_(-7)

    @property
    def _dim(self) -> int:
        return self.config.head_dim

    @property
    def _ids_like(self) -> torch.Tensor:
        shape = self.num_tokens, self.config.num_kv_heads, self.config.topk
        return torch.empty(shape, dtype=torch.int32, device=self.device)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(
            shape, generator=self.generator, device=self.device, dtype=self.model_dtype
        )


_CONTIGUOUS = torch.contiguous_format


def _random_kv(config: MSAConfig, fmt: KVFormat, pages: int, device: torch.device) -> KVCache:
    """Pages quantised once and repeated: attention does not notice, and nothing else is slow."""
    cache = KVCache.allocate(pages, config, fmt, device=device)
    few = min(pages, max(8, CHUNK_BYTES // fmt.bytes_per_page(config)))
    shape = few * BLOCK_SIZE, config.num_kv_heads, config.head_dim
    generator = torch.Generator(device=device).manual_seed(1)
    k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in "kv"
    )
    store_kv(k, v, cache, torch.arange(len(k), device=device), impl="reference")
    assert isinstance(cache.tensor, torch.Tensor)
    raw = cache.tensor.view(torch.uint8)
    for start in range(few, pages, few):
        count = min(few, pages - start)
        raw[start : start + count].copy_(raw[:count])
    return cache


def _random_index(config: MSAConfig, fmt: KVFormat, pages: int, device: torch.device) -> IndexCache:
    index = IndexCache.allocate(pages, config, fmt, device=device)
    generator = torch.Generator(device=device).manual_seed(2)
    for page in range(0, pages, 4096):
        part = index.tensor[page : page + 4096]
        strength = torch.randn((len(part), 1, 1), generator=generator, device=device)
        keys = torch.randn(part.shape, generator=generator, device=device)
        part.copy_((keys * (BLOCK_SPREAD * strength).exp()).to(part.dtype))
    return index


def _drifting(own: torch.Tensor, shared: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Unit-variance noise ``[sets, T, H, Di]`` that drifts along the tokens of each request."""
    noise = HEADS_SHARE**0.5 * shared.float() + (1 - HEADS_SHARE) ** 0.5 * own.float()
    out, tokens = torch.empty_like(noise), noise.shape[1]
    for start in range(0, tokens, DRIFT_WINDOW):
        here = slice(start, min(start + DRIFT_WINDOW, tokens))
        seen = slice(max(0, start - DRIFT_WINDOW), here.stop)
        to, since = (torch.arange(s.start, s.stop, device=noise.device) for s in (here, seen))
        age = to[:, None] - since
        mine = (age >= 0) & (rows.request[here, None] == rows.request[None, seen])
        decay = (DRIFT ** age.clamp(min=0).float()).where(mine, 0.0)
        # Rows near a request's first token have less behind them, and are scaled up.
        decay /= decay.square().sum(1, keepdim=True).sqrt()
        out[:, here] = torch.einsum("ts,nshd->nthd", decay, noise[:, seen])
    return out


def release(device: torch.device) -> None:
    """Give unused memory back, and wait: what is timed while gigabytes are unmapped is slower."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()
        time.sleep((before - torch.cuda.memory_reserved(device)) / UNMAPPED_PER_SECOND)
