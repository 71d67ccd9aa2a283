"""The serving layer on a GPU: whole steps in every format, and decode graphs that are replayed."""

from __future__ import annotations

import pytest
import torch
from gpu_layer import DEVICE, capture
from serving_steps import check_step, layer_of, make_builder, make_step

import msattn
from msattn.serving import (
    TRITON_MSA,
    Indexer,
    LayerState,
    MetadataBuilder,
    SparseImpl,
    SparseMetadata,
    Step,
    allocate_block_ids,
    build_k2q_csr,
)
from msattn.testing.cases import Case, make_config
from msattn.testing.compare import (
    assert_attention,
    assert_bitwise_equal,
    assert_same_ids,
    expected_block_ids,
)
from msattn.testing.make import Inputs, as_bytes, make, poisoned

pytestmark = pytest.mark.gpu

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")
CONFIG = make_config(group=8, kv_heads=2, topk=4)
M3 = msattn.MSAConfig()

# Name -> query lengths, KV lengths, drafts + 1, shapes: decode requests first.
STEPS = {
    "decode": ((1,) * 20, tuple(range(1, 2500, 125)), 1, CONFIG),
    "verify_2": ((2, 2, 2), (900, 127, 2), 2, CONFIG),
    "verify_8": ((8,) * 5, (2300, 131, 8, 1024, 1025), 8, CONFIG),
    "mixed": ((1, 1, 400, 3), (700, 128, 1300, 640), 1, CONFIG),
    "mixed_verify": ((4, 4, 2, 150), (700, 131, 640, 150), 4, CONFIG),
    "padded": ((4, 4, 0, 0), (700, 4, 0, 0), 4, CONFIG),
    "m3_mixed": ((1, 1, 1, 300), (5000, 2300, 129, 2500), 1, M3),
}


def case_of(name: str) -> tuple[Case, int]:
    query_lens, seq_lens, most, config = STEPS[name]
    return Case(name, query_lens, seq_lens, config, spare_rows=1), most


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_what_the_oracle_says(name: str, kv_format: str) -> None:
    case, most = case_of(name)
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    inputs = make(case, kv_format=kv_format, query_dtype=dtype, scales="0d", device=DEVICE)
    check_step(inputs, make_builder(inputs, max_query_len=most).build(make_step(inputs)))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_an_fp8_query(kv_format: str) -> None:
    case, most = case_of("mixed_verify")
    inputs = make(
        case,
        kv_format=kv_format,
        query_dtype=torch.float8_e4m3fn,
        index_format="fp8_e4m3",
        scales="0d",
        device=DEVICE,
    )
    check_step(inputs, make_builder(inputs, max_query_len=most).build(make_step(inputs)))


class Engine:
    """A layer at fixed addresses, its decode captured for so many requests and tokens of each."""

    def __init__(self, requests: int, query_len: int, kv_format: str, num_pages: int) -> None:
        self.requests, self.query_len = requests, query_len
        rows, self.columns = requests * query_len, num_pages // 2
        self.builder = MetadataBuilder(
            CONFIG,
            kv_format,
            max_num_tokens=512,
            max_seq_len=self.columns * 128,
            device=DEVICE,
            num_speculative_tokens=query_len - 1,
        )
        fmt = msattn.KV_FORMATS[kv_format]
        self.scale = torch.ones((), device=DEVICE)
        shape = (num_pages, *fmt.page_shape(CONFIG))
        self.pool = torch.zeros(shape, dtype=fmt.storage_dtype, device=DEVICE)
        self.index_pool = torch.zeros((num_pages, 128, 128), dtype=torch.bfloat16, device=DEVICE)
        self.ids = allocate_block_ids(rows, CONFIG, DEVICE)
        dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
        self.q, self.out = (
            torch.zeros(rows, CONFIG.num_q_heads, 128, dtype=dtype, device=DEVICE) for _ in range(2)
        )
        self.index_q = torch.zeros(rows, CONFIG.num_index_heads, 128, dtype=dtype, device=DEVICE)
        self.indexer, self.attention = Indexer(CONFIG), SparseImpl(CONFIG, kv_format)
        self.layer = LayerState(self.pool, self.ids, self.scale, self.scale)
        empty = torch.zeros(requests, dtype=torch.int32).tolist()
        self.metadata = self.build(empty, torch.zeros(0, 0, dtype=torch.int32))
        self.replay = capture(self.launch)

    def build(self, seq_lens: list[int], table: torch.Tensor) -> SparseMetadata:
        """The step of these requests, padded to the graph's."""
        padded = torch.full((self.requests, self.columns), -1, dtype=torch.int32)
        width = min(self.columns, table.shape[1])
        padded[: len(table), :width] = table[:, :width]
        count = self.requests - len(seq_lens)
        rows = self.requests * self.query_len
        step = Step.from_lists(
            [self.query_len] * len(seq_lens) + [0] * count,
            [*seq_lens, *[0] * count],
            padded,
            torch.full((rows,), -1, dtype=torch.int64, device=DEVICE),
            num_tokens=rows,
        )
        return self.builder.build(step)

    def launch(self) -> None:
        self.indexer.forward(self.index_q, self.index_pool, self.metadata, self.ids)
        self.attention.forward(self.layer, self.q, self.out, self.metadata)

    def check(self, x: Inputs) -> None:
        """The replay gives the step's ids and attention, and zeros for padding."""
        assert isinstance(x.cache.tensor, torch.Tensor)
        for mine, step in ((self.pool, x.cache.tensor), (self.index_pool, x.index.tensor)):
            as_bytes(mine).fill_(0xFF)
            as_bytes(mine)[: len(step)].copy_(as_bytes(step))
        rows = x.case.num_tokens
        for buffer, step in ((self.q, x.q), (self.index_q, x.index_q)):
            buffer.copy_(poisoned(buffer.shape, buffer.dtype, DEVICE))
            buffer[:rows].copy_(step[:rows])
        planned = self.build(list(x.case.seq_lens), x.batch.page_table.cpu()).decode
        assert planned is not None and self.metadata.decode is not None
        assert planned.planned is self.metadata.decode.planned and planned.planned.pinned
        self.out.fill_(torch.nan)
        self.replay()
        torch.cuda.synchronize()
        assert_same_ids("ids", self.ids[:rows], expected_block_ids(x)[:rows])
        assert_attention(x, self.ids[:rows], self.out[:rows])
        assert self.out[rows:].eq(0).all() and self.ids[rows : len(self.q)].eq(-1).all()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
def test_a_captured_decode_is_replayed_for_other_steps(query_len: int, kv_format: str) -> None:
    """Captured on empty requests; then lengths, pages, ids and the number of requests change."""
    engine = Engine(5, query_len, kv_format, num_pages=80)
    dtype = engine.q.dtype
    steps = [(900, 130, 512), (128, 129, 1, 2500, 8), (3000,), (8, 8, 8, 8, 8), (5120,)]
    for seed, lengths in enumerate(steps):
        case = Case(f"step {seed}", (query_len,) * len(lengths), lengths, CONFIG)
        x = make(case, seed=seed, kv_format=kv_format, query_dtype=dtype, device=DEVICE)
        engine.check(x)
    engine.build([], torch.zeros(0, 0, dtype=torch.int32))  # all of it padding
    engine.replay()
    assert engine.out.eq(0).all() and engine.ids[: len(engine.q)].eq(-1).all()


def test_both_decode_kernels_agree_with_the_oracle() -> None:
    case, most = case_of("verify_8")
    inputs = make(case, kv_format="fp8_e4m3", scales="0d", device=DEVICE)
    for options in ({"min_batch": 6}, {"backend": TRITON_MSA}, {}):
        builder = make_builder(inputs, max_query_len=most, **options)
        check_step(inputs, builder.build(make_step(inputs)))


def test_the_csr_is_the_cpu_s() -> None:
    generator = torch.Generator().manual_seed(0)
    q2k = torch.randint(-1, 12, (2, 403, 4), dtype=torch.int32, generator=generator)
    starts = torch.tensor([[0, 400, 403], [0, 1300, 1940]], dtype=torch.int32)
    options = {
        "total_k": 0,
        "total_rows": 16,
        "max_seqlen_k": 1300,
        "max_seqlen_q": 400,
        "return_schedule": True,
    }
    csr, schedule = build_k2q_csr(q2k, *starts, **options)  # type: ignore[call-overload]
    on_gpu, schedule_on_gpu = build_k2q_csr(
        q2k.to(DEVICE),
        *starts.to(DEVICE),
        **options,  # type: ignore[call-overload]
    )
    for got, want in zip(on_gpu, csr, strict=True):
        assert torch.equal(got.cpu(), want)
    assert torch.equal(schedule_on_gpu.qsplit_indices.cpu(), schedule.qsplit_indices)
    assert torch.equal(schedule_on_gpu.split_counts.cpu(), schedule.split_counts)


def test_two_runs_give_the_same_bits() -> None:
    case, most = case_of("m3_mixed")
    inputs = make(case, kv_format="nvfp4", device=DEVICE)
    metadata = make_builder(inputs, max_query_len=most).build(make_step(inputs))
    ids = allocate_block_ids(case.num_rows, case.config, DEVICE)
    Indexer(M3).forward(inputs.index_q, inputs.index.tensor, metadata, ids)
    outs = [
        SparseImpl(M3, "nvfp4").forward(layer_of(inputs, ids), inputs.q, inputs.new_out(), metadata)
        for _ in range(3)
    ]
    for out in outs[1:]:
        assert_bitwise_equal("out", out, outs[0])
