"""Named steps and memory layouts: one list for tests, benchmarks and acceptance tests.

A case says which lengths and which shapes; :mod:`msattn.testing.make` fills it with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..config import BLOCK_SIZE, MSAConfig
from ..kv_format import KVFormat

PoolLayout = Literal["hnd", "nhd", "layers", "pair", "unlike_pair"]
# No scale; a float; a tensor without axes; an element inside a tensor; one for each head and slot.
ScaleKind = Literal["unit", "float", "0d", "slice", "slots"]


@dataclass(frozen=True, slots=True)
class Case:
    """The lengths and shapes of one step."""

    name: str
    query_lens: tuple[int, ...]  # query tokens of each request
    seq_lens: tuple[int, ...]  # KV length of each request, its query tokens included
    config: MSAConfig
    spare_rows: int = 0  # rows of q, out, ids behind the last query token's, as graph padding has
    extra_columns: int = 2  # page-table columns behind the longest request's, never to be read

    def __str__(self) -> str:
        return self.name

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(self.query_lens)

    @property
    def num_rows(self) -> int:
        """Rows of q: query tokens and spare rows."""
        return self.num_tokens + self.spare_rows

    @property
    def num_pages(self) -> int:
        """Pages that the requests own."""
        return sum(-(-length // BLOCK_SIZE) for length in self.seq_lens)

    @property
    def num_columns(self) -> int:
        """Columns of the page table."""
        return -(-max(self.seq_lens, default=0) // BLOCK_SIZE) + self.extra_columns


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a step's tensors lie in memory. All are legal, and no result depends on the choice."""

    name: str
    # hnd: [pages, H, 128, C]; nhd: [pages, 128, H, C] transposed; layers: one of several layers
    # that share a page; pair: K and V in tensors of their own; unlike_pair: K as hnd, V as nhd.
    pool: PoolLayout = "hnd"
    strided_rows: bool = False  # q, k, v, index_q and outputs with gaps between rows and heads
    head_major_ids: bool = False  # block_ids as a view of [Hkv, T, K], else of [T, Hkv, K]

    def __str__(self) -> str:
        return self.name


DENSE = Layout("dense")
LAYOUTS = {
    layout.name: layout
    for layout in (
        DENSE,
        Layout("nhd", pool="nhd"),
        Layout("layers", pool="layers"),
        Layout("pair", pool="pair"),
        Layout("unlike_pair", pool="unlike_pair"),
        Layout("strided_rows", strided_rows=True),
        Layout("head_major_ids", head_major_ids=True),
        Layout("all_strided", pool="layers", strided_rows=True, head_major_ids=True),
    )
}
"""Every layout by name."""


def layouts_of(fmt: KVFormat) -> list[Layout]:
    """The layouts that a cache of the format can have: an NVFP4 slot is one run of bytes."""
    plain = ("nhd", "pair", "unlike_pair")
    return [x for x in LAYOUTS.values() if not (fmt.scale_group and x.pool in plain)]


def scale_kinds_of(fmt: KVFormat) -> list[ScaleKind]:
    """The forms that the scales of a cache of the format can have."""
    return [kind for kind in get_args(ScaleKind) if fmt.slot_scales or kind != "slots"]


def make_config(
    group: int = 2,
    kv_heads: int = 2,
    topk: int = 4,
    *,
    head_dim: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
) -> MSAConfig:
    """A config of few heads, for cases that an fp64 oracle finishes in no time."""
    return MSAConfig(
        num_q_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        num_index_heads=kv_heads,
        head_dim=head_dim,
        index_head_dim=head_dim,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )


SMALL = make_config()
ONE_HEAD = make_config(group=4, kv_heads=1, topk=3)
M3 = MSAConfig()
M3_TP4 = MSAConfig(num_q_heads=16, num_kv_heads=1, num_index_heads=1)

EDGE_LENGTHS = (1, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 900)
"""KV lengths around the edges of one, two and ``topk`` (4) blocks, and well behind them."""

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("decode_edges", (1,) * len(EDGE_LENGTHS), EDGE_LENGTHS, SMALL),
        # Graph padding: requests of no keys, and of one, among real ones.
        Case("decode_padded", (1, 1, 1, 1, 1), (1024, 0, 513, 0, 1), SMALL),
        Case("decode_spare_rows", (1,) * 5, (700, 128, 1, 129, 640), SMALL, spare_rows=3),
        Case("decode_one_block", (1,), (100,), make_config(topk=16)),
        Case("decode_all_empty", (1, 1, 1), (0, 0, 0), SMALL),
        # T = Hkv = 4: shapes that cannot give a transposed ids buffer away.
        Case("decode_square", (1,) * 4, (600, 700, 800, 900), make_config(2, 4, topk=4)),
        Case("decode_wide_table", (1, 1), (900, 77), SMALL, extra_columns=249),
        Case("verify", (2, 3, 4, 8), (640, 131, 4, 900), SMALL),
        Case("prefill", (300,), (300,), ONE_HEAD),
        Case("prefill_short", (1, 5, 14, 127), (1, 5, 14, 127), SMALL),
        # A prefix that ends inside a block, and one that ends with it.
        Case("prefill_after_prefix", (210, 130), (400, 642), ONE_HEAD, spare_rows=1),
        # Token counts on both sides of topk, over more blocks than topk.
        Case("prefill_beyond_topk", (70,), (900,), SMALL),
        Case("empty_in_the_middle", (5, 0, 7), (5, 300, 390), SMALL),
        # More query tokens than keys: the first positions are negative.
        Case("more_queries_than_keys", (3, 2), (1, 0), SMALL),
        Case("mixed", (33, 1, 4, 0, 1, 3, 20), (900, 257, 131, 128, 0, 640, 20), SMALL, 2),
        Case(
            "forced_blocks",
            (1, 9, 1),
            (1000, 781, 300),
            make_config(topk=4, init_blocks=1, local_blocks=2),
        ),
        Case("no_local_block", (1, 9), (1000, 781), make_config(topk=4, local_blocks=0)),
        Case("topk_1", (1, 6), (900, 390), make_config(topk=1)),
        Case("topk_32", (1, 6), (4500, 390), make_config(1, 1, topk=32)),
        Case("m3_mixed", (1, 3, 10), (2400, 131, 2200), M3),
        Case("m3_tp4_mixed", (1, 2, 20), (2400, 131, 150), M3_TP4),
        Case("no_requests", (), (), SMALL),
    )
}
"""The steps that every implementation of every stage is tested on."""

LARGE_CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("decode_32_at_32k", (1,) * 32, (32768,) * 32, M3),
        Case("decode_1_at_1m", (1,), (1 << 20,), M3),
        Case("verify_16_at_16k", (4,) * 16, tuple(16000 + 37 * i for i in range(16)), M3),
        Case("prefill_4k", (4096,), (4096,), M3),
        Case("prefill_4k_after_60k", (4096,), (65536 + 77,), M3),
        # One row more than a grid axis of 65,535 can hold, and one more than a multiple of 65,536.
        Case("prefill_65536", (65536,), (65536,), M3_TP4),
        Case("prefill_65537", (65537,), (65537,), M3_TP4),
    )
}
"""Steps for a GPU, where the fp64 oracle judges a sample of the rows."""
