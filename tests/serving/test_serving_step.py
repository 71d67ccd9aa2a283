"""A step through builder, indexer and attention, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from weakref import ref

import pytest
import torch
from serving_steps import check_step, layer_of, make_builder, make_step

import msattn
from msattn.serving import LayerState, MetadataBuilder, SparseImpl, Step, allocate_block_ids
from msattn.serving.pools import LIMIT, WrappedPools
from msattn.testing.cases import LAYOUTS, Case
from msattn.testing.compare import assert_attention, assert_bitwise_equal
from msattn.testing.make import make, make_block_ids

CONFIG = msattn.MSAConfig(4, 2, 2, topk=4)
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")

# Name -> query lengths, KV lengths, drafts + 1: decode requests first.
STEPS = {
    "decode": ((1, 1, 1, 1), (900, 1, 128, 129), 1),
    "verify_2": ((2, 2, 2), (900, 127, 2), 2),
    "verify_8": ((8, 8), (1000, 131), 8),
    "mixed": ((1, 1, 40, 3), (700, 128, 300, 640), 1),
    "mixed_verify": ((4, 4, 2, 150), (700, 131, 640, 150), 4),
    "prefill": ((70, 129), (900, 129), 1),
    "padded": ((4, 4, 0, 0), (700, 4, 0, 0), 4),
    "empty_in_between": ((4, 0, 4, 30), (700, 0, 131, 30), 4),
}


def case_of(name: str, config: msattn.MSAConfig = CONFIG) -> tuple[Case, int]:
    query_lens, seq_lens, most = STEPS[name]
    return Case(name, query_lens, seq_lens, config, spare_rows=1), most


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_what_the_oracle_says(name: str, kv_format: str) -> None:
    case, most = case_of(name)
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    inputs = make(case, kv_format=kv_format, query_dtype=dtype, scales="0d")
    metadata = make_builder(inputs, max_query_len=most).build(make_step(inputs))
    check_step(inputs, metadata)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_an_fp8_query(kv_format: str) -> None:
    case, most = case_of("mixed_verify")
    inputs = make(
        case, kv_format=kv_format, query_dtype=torch.float8_e4m3fn, scales="0d", index_format="bf16"
    )
    ids = make_block_ids(inputs)
    metadata = make_builder(inputs, max_query_len=most).build(make_step(inputs))
    out = inputs.new_out()
    _, lse = SparseImpl(case.config, kv_format).forward(
        layer_of(inputs, ids), inputs.q, out, metadata, return_lse=True
    )
    assert_attention(inputs, ids, out, lse)


def test_an_fp8_query_is_dequantised_where_no_kernel_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_wide(problem: msattn.dispatch.Problem) -> list[str]:
        return ["no fp8 queries"] if problem.query_dtype == torch.float8_e4m3fn else []

    rows = tuple(
        replace(row, why_not=only_wide) if row.name == "reference" else row
        for row in msattn.dispatch.TABLE["attend"]
    )
    case, most = case_of("mixed_verify")
    inputs = make(case, query_dtype=torch.float8_e4m3fn, scales="0d")
    ids = make_block_ids(inputs)
    metadata = make_builder(inputs, max_query_len=most).build(make_step(inputs))
    monkeypatch.setitem(msattn.dispatch.TABLE, "attend", rows)
    out = SparseImpl(case.config, "bf16").forward(
        layer_of(inputs, ids), inputs.q, inputs.new_out(), metadata
    )
    monkeypatch.undo()
    assert_attention(inputs, ids, out)


@pytest.mark.parametrize("layout", ["nhd", "layers"])
def test_an_engine_s_pool_is_read_as_it_lies(layout: str) -> None:
    case, most = case_of("mixed")
    inputs = make(case, layout=LAYOUTS[layout])
    check_step(inputs, make_builder(inputs, max_query_len=most).build(make_step(inputs)))


@pytest.mark.parametrize("scales", ["float", "slice", "slots"])
def test_scales_apply_alike_to_decode_and_prefill(scales: str) -> None:
    case, _ = case_of("mixed")
    inputs = make(case, kv_format="fp8_e4m3", scales=scales)
    check_step(inputs, make_builder(inputs).build(make_step(inputs)))


@pytest.mark.parametrize("shift", [0, 3, 7])
def test_every_block_scale_shift_gives_the_same_numbers(shift: int) -> None:
    case, _ = case_of("mixed")
    inputs = make(case, kv_format="nvfp4", scales="0d")
    ids = make_block_ids(inputs)
    metadata = make_builder(inputs).build(make_step(inputs))
    outs = [
        SparseImpl(CONFIG, "nvfp4", block_scale_shift=s).forward(
            layer_of(inputs, ids), inputs.q, inputs.new_out(), metadata
        )
        for s in (0, shift)
    ]
    assert_bitwise_equal("out", outs[1], outs[0])


def test_a_run_that_measures_memory_touches_nothing() -> None:
    case, _ = case_of("mixed")
    inputs = make(case)
    out, ids = inputs.new_out(), make_block_ids(inputs)
    before = out.clone()
    impl = SparseImpl(CONFIG, "bf16")
    assert impl.forward(layer_of(inputs, ids), inputs.q, out, None) is out
    assert_bitwise_equal("out", out, before)
    indexer = msattn.serving.Indexer(CONFIG)
    assert indexer.forward(inputs.index_q, inputs.index.tensor, None, ids) == (None, None)


def test_rows_behind_the_step_are_not_written() -> None:
    case, _ = case_of("mixed")
    inputs = make(case)
    ids = allocate_block_ids(case.num_rows, CONFIG)
    assert ids.shape == (48, 2, 4) and case.num_rows == 46  # a multiple of four rows
    ids.fill_(77)
    metadata = make_builder(inputs).build(make_step(inputs))
    decode, prefill = msattn.serving.Indexer(CONFIG).forward(
        inputs.index_q, inputs.index.tensor, metadata, ids
    )
    assert decode is not None and prefill is not None
    assert decode.data_ptr() == ids.data_ptr() and decode.shape[0] == 2
    assert prefill.data_ptr() == ids[2].data_ptr() and prefill.shape[0] == 43
    assert ids[:45].lt(77).all() and ids[45:].eq(77).all()
    out = inputs.new_out()
    before = out.clone()
    SparseImpl(CONFIG, "bf16").forward(layer_of(inputs, ids), inputs.q, out, metadata)
    assert_bitwise_equal("spare rows", out[45:], before[45:])


def test_index_keys_that_come_again_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans keep their launches for a cache; another layer's is another one."""
    case, _ = case_of("decode")
    inputs, other = make(case), make(case, seed=1)
    ids = allocate_block_ids(case.num_rows, CONFIG)
    metadata = make_builder(inputs).build(make_step(inputs))
    seen: list[msattn.IndexCache] = []
    module = import_module("msattn.serving.indexer")
    prepare = module.prepare_index_select

    def watched(query: torch.Tensor, index: msattn.IndexCache, *rest: object, **named: object):  # type: ignore[no-untyped-def]
        seen.append(index)
        return prepare(query, index, *rest, **named)

    monkeypatch.setattr(module, "prepare_index_select", watched)
    indexer = msattn.serving.Indexer(CONFIG)
    for index in (inputs.index, other.index, inputs.index):
        indexer.forward(inputs.index_q, index.tensor, metadata, ids)
    assert seen[0] is seen[2] and seen[1] is not seen[0]
    assert seen[1].tensor.data_ptr() == other.index.tensor.data_ptr()


def test_pools_that_two_steps_did_not_use_are_let_go() -> None:
    """A wrapped cache keeps memory alive that an engine may have given back."""
    pools: WrappedPools[set[int]] = WrappedPools()
    inputs = make(case_of("decode")[0])
    builder, step = make_builder(inputs), make_step(inputs)
    first, second, third = (builder.build(step) for _ in range(3))
    kept, gone = pools.get("kept", first, set), ref(pools.get("gone", first, set))
    assert pools.get("kept", second, set) is kept and gone() is not None
    assert pools.get("kept", third, set) is kept and gone() is None
    many = [ref(pools.get(number, third, set)) for number in range(3 * LIMIT)]
    assert sum(pool() is not None for pool in many) <= 2 * LIMIT  # of one step, too


def test_a_scale_of_another_shape_is_another_one() -> None:
    """One number in the place where a scale for each slot was."""
    case, _ = case_of("mixed")
    inputs = make(case, kv_format="fp8_e4m3", scales="slots")
    ids = make_block_ids(inputs)
    metadata = make_builder(inputs).build(make_step(inputs))
    layer = layer_of(inputs, ids)
    assert isinstance(layer.k_scale, torch.Tensor) and layer.k_scale.dim() == 2
    one = replace(layer, k_scale=layer.k_scale[0, 0])
    assert one.k_scale.data_ptr() == layer.k_scale.data_ptr()  # type: ignore[union-attr]
    used = SparseImpl(CONFIG, "fp8_e4m3")
    used.forward(layer, inputs.q, inputs.new_out(), metadata)
    new = SparseImpl(CONFIG, "fp8_e4m3")
    assert_bitwise_equal(
        "out",
        used.forward(one, inputs.q, inputs.new_out(), metadata),
        new.forward(one, inputs.q, inputs.new_out(), metadata),
    )


def test_a_padded_graph_s_rows_see_nothing() -> None:
    """Two requests of four, padded to four: rows 8 to 15 are garbage in and zeros out."""
    case = Case("padded", (4, 4, 0, 0), (700, 131, 0, 0), CONFIG, spare_rows=8)
    inputs = make(case)
    metadata = make_builder(inputs, max_query_len=4).build(make_step(inputs, num_tokens=16))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (4, 16)
    out = check_step(inputs, metadata)
    assert out[8:16].eq(0).all()


def test_the_metadata_s_numbers() -> None:
    inputs = make(case_of("mixed_verify")[0])
    builder = make_builder(inputs, max_query_len=4)
    metadata = builder.build(make_step(inputs))
    assert (metadata.num_tokens, metadata.max_seq_len) == (160, 700)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 8)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (2, 152)
    assert metadata.decode is not None and metadata.prefill is not None
    assert metadata.decode.seq_lens.tolist() == [700, 131]
    assert metadata.decode.decode_query_len == 4
    prefill = metadata.prefill
    assert prefill.cu_seqlens_q.tolist() == [0, 2, 152]
    assert prefill.cu_seqlens_k.tolist() == [0, 640, 790]
    assert prefill.context_lens.tolist() == [638, 0]
    assert prefill.total_kv_blocks == 5 + 2  # each request rounded up, not their sum
    assert (prefill.max_query_len, prefill.max_seq_len) == (150, 700)  # the whole step's
    assert torch.equal(prefill.page_table, inputs.batch.page_table[2:])
    assert builder.context_lens[:4].tolist() == [696, 127, 638, 0]
    assert prefill.context_lens.data_ptr() == builder.context_lens[2:].data_ptr()


def test_the_csr_of_a_step_s_prefill_rows() -> None:
    case, _ = case_of("mixed_verify")
    inputs = make(case)
    ids = allocate_block_ids(case.num_rows, CONFIG)
    metadata = make_builder(inputs, max_query_len=4).build(make_step(inputs))
    msattn.serving.Indexer(CONFIG).forward(inputs.index_q, inputs.index.tensor, metadata, ids)
    csr, schedule = SparseImpl(CONFIG, "bf16").build_prefill_csr(ids, metadata)
    prefill = metadata.prefill
    assert prefill is not None
    assert csr.row_ptr.shape == (2, prefill.total_kv_blocks + 1)
    assert csr.row_ptr[:, -1].tolist() == ids[8:160].ge(0).sum((0, 2)).tolist()
    assert torch.equal(schedule.split_counts, ids[8:160].ge(0).sum(2).int())


def test_partial_attention_over_shards_of_pages_merges() -> None:
    """Decode context parallelism: each rank's table maps its own pages, the LSE joins them."""
    case, _ = case_of("decode")
    inputs = make(case)
    ids = make_block_ids(inputs, hostile=False)
    table = inputs.batch.page_table
    outs, lses = [], []
    for rank in range(2):
        mine = torch.arange(table.shape[1]) % 2 == rank
        step = replace(make_step(inputs), page_table=torch.where(mine, table, -1))
        out, lse = SparseImpl(CONFIG, "bf16").forward(
            layer_of(inputs, ids),
            inputs.q,
            inputs.new_out(),
            make_builder(inputs).build(step),
            return_lse=True,
        )
        outs.append(out[:4])
        lses.append(lse)
    assert any(lse.isneginf().any() for lse in lses)  # short requests have keys on one rank only
    out, lse = msattn.merge_states(outs, lses)
    whole = inputs.new_out()
    whole[:4] = out
    assert_attention(inputs, ids, whole, lse)


def make_errors() -> dict[str, tuple[object, type[Exception], str]]:
    inputs = make(case_of("mixed")[0])
    builder, step = make_builder(inputs), make_step(inputs)
    impl, ids = SparseImpl(CONFIG, "bf16"), make_block_ids(inputs)
    metadata, layer = builder.build(step), layer_of(inputs, ids)
    out, q = inputs.new_out(), inputs.q
    only_decode = make_builder(inputs, max_query_len=1).build(make_step(make(case_of("decode")[0])))
    small = MetadataBuilder(CONFIG, "bf16", max_num_tokens=8, max_seq_len=1000)
    short = MetadataBuilder(CONFIG, "bf16", max_num_tokens=80, max_seq_len=128)

    def forward(**changes: object) -> object:
        given = {"layer": layer, "query": q, "out": out, "metadata": metadata, **changes}
        return lambda: impl.forward(**given)  # type: ignore[call-overload]

    def select(**changes: object) -> object:
        given = {"index_query": inputs.index_q, "index_cache": inputs.index.tensor}
        given |= {"metadata": metadata, "block_ids": ids, **changes}  # type: ignore[dict-item]
        return lambda: msattn.serving.Indexer(CONFIG).forward(**given)  # type: ignore[arg-type]

    def make_impl(**changes: object) -> object:
        return lambda: SparseImpl(CONFIG, "bf16", **changes)  # type: ignore[arg-type]

    def lengths(**changes: object) -> object:
        return lambda: builder.build(replace(step, **changes))  # type: ignore[arg-type]

    value, kind = ValueError, TypeError
    seen = step.seq_lens
    long = seen.clone()
    long[2] = 900
    return {
        "metadata": (
            forward(metadata=3),
            kind,
            "metadata: expected msattn.SparseMetadata, got int",
        ),
        "index_metadata": (
            select(metadata=5),
            kind,
            "metadata: expected msattn.SparseMetadata, got int",
        ),
        "query_dtype": (forward(query=q.int()), kind, "query: expected dtype"),
        "index_query_dtype": (
            select(index_query=inputs.index_q.int()),
            kind,
            "index_query: expected dtype",
        ),
        "index_query_heads": (
            select(index_query=inputs.index_q[:, :1]),
            value,
            "index_query: expected shape",
        ),
        "index_pool": (
            select(index_cache=inputs.index.tensor[:, :64]),
            value,
            "index_cache: expected shape",
        ),
        "index_format": (
            lambda: msattn.serving.Indexer(CONFIG, "mxfp4"),
            NotImplementedError,
            "index_format: expected bf16, .* got 'mxfp4'",
        ),
        "softmax_scale": (
            make_impl(softmax_scale=float("nan")),
            value,
            "softmax_scale: expected a finite number",
        ),
        "softmax_scale_type": (
            make_impl(softmax_scale="x"),
            kind,
            "softmax_scale: expected a finite number, got str",
        ),
        "impl": (make_impl(impl="cuda"), value, "impl: expected auto, .* got 'cuda'"),
        "index_impl": (
            lambda: msattn.serving.Indexer(CONFIG, impl="cuda"),
            value,
            "impl: expected auto, ",
        ),
        "backend": (make_impl(backend="x"), kind, "backend: expected msattn.Backend, got str"),
        "builder_backend": (
            lambda: make_builder(inputs, backend="x"),
            kind,
            "backend: expected msattn.Backend",
        ),
        "negative_lengths": (
            lengths(seq_lens_cpu=seen - 301),
            value,
            "seq_lens_cpu: expected lengths >= 0",
        ),
        "low_bounds": (
            lengths(seq_lens_cpu=seen - 1),
            value,
            "seq_lens_cpu: expected at least seq_lens=",
        ),
        "beyond_max_seq_len": (
            lengths(seq_lens=long, seq_lens_cpu=long),
            value,
            "seq_lens: expected at most max_seq_len=700",
        ),
        "beyond_the_table": (
            lengths(page_table=step.page_table[:, :5]),
            value,
            "page_table: expected at least 6 columns",
        ),
        "query_width": (forward(query=q.flatten(1)[:, 1:]), value, "query: expected shape"),
        "query_heads": (forward(query=q[:, :2]), value, r"query: expected shape \[T, Hq=4"),
        "query_rows": (forward(query=q[:3]), value, "query: expected at least 45 rows"),
        "out_rows": (forward(out=out[:3]), value, "out: expected at least 45 rows"),
        "out_dtype": (forward(out=out.half()), kind, "out: expected dtype"),
        "layer": (forward(layer=None), kind, "layer: expected msattn.LayerState"),
        "ids_dtype": (
            forward(layer=replace(layer, block_ids=ids.long())),
            kind,
            "block_ids: expected dtype torch.int32",
        ),
        "ids_rows": (
            forward(layer=replace(layer, block_ids=ids[:9])),
            value,
            "block_ids: expected at least 45 rows",
        ),
        "pool": (
            forward(layer=LayerState(torch.zeros(3, 2, 128, 128, dtype=torch.bfloat16), ids)),
            value,
            "kv_cache: expected shape",
        ),
        "shift": (
            lambda: SparseImpl(CONFIG, "bf16", block_scale_shift=8),
            value,
            "block_scale_shift: expected at most 7, got 8",
        ),
        "selection": (
            lambda: msattn.serving.Indexer(replace(CONFIG, init_blocks=1)).forward(
                inputs.index_q, inputs.index.tensor, metadata, ids
            ),
            value,
            "metadata: expected a step planned for init_blocks=1, got init_blocks=0",
        ),
        "index_rows": (
            lambda: msattn.serving.Indexer(CONFIG).forward(
                inputs.index_q[:7], inputs.index.tensor, metadata, ids
            ),
            value,
            "index_query: expected at least 45 rows",
        ),
        "no_prefill": (
            lambda: impl.build_prefill_csr(ids, only_decode),
            value,
            "metadata: expected a step with prefill rows",
        ),
        "rows": (lambda: small.build(step), value, "step: expected at most max_num_tokens=8 rows"),
        "length": (lambda: short.build(step), value, "step: expected max_seq_len at most 128"),
        "slots": (
            lambda: replace(step, slot_mapping=inputs.slot_mapping[:4]),
            value,
            "slot_mapping: expected at least num_tokens=45 slots",
        ),
        "lengths": (
            lambda: replace(step, seq_lens_cpu=step.seq_lens_cpu.long()),
            kind,
            "seq_lens_cpu: expected dtype torch.int32",
        ),
        "min_batch": (
            lambda: make_builder(inputs, min_batch=-1),
            value,
            "min_batch: expected an int >= 0",
        ),
    }


ERRORS = make_errors()


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]


def test_an_error_leaves_nothing_half_written() -> None:
    """The prefill rows are refused; the decode rows before them must not have been written."""
    inputs = make(case_of("mixed")[0])
    metadata = make_builder(inputs).build(make_step(inputs))
    assert metadata.prefill is not None
    other = msattn.make_plan(inputs.batch, CONFIG, "nvfp4")
    broken = replace(metadata, prefill=replace(metadata.prefill, plan=other))
    out = inputs.new_out()
    before = out.clone()
    layer = layer_of(inputs, make_block_ids(inputs))
    with pytest.raises(ValueError, match="cache: expected the plan's format nvfp4"):
        SparseImpl(CONFIG, "bf16").forward(layer, inputs.q, out, broken)
    assert_bitwise_equal("out", out, before)


@pytest.mark.parametrize("refused", ["page_table", "prefill"])
def test_a_refused_step_leaves_what_an_earlier_one_left(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make(case_of("mixed")[0])
    builder, step = make_builder(inputs), make_step(inputs)
    decode = builder.build(step).decode
    assert decode is not None
    kept = [x.clone() for x in (builder.context_lens, *decode.planned.plan.tensors)]
    shorter = replace(step, seq_lens=step.seq_lens - 1, seq_lens_cpu=step.seq_lens_cpu)
    if refused == "page_table":
        shorter = replace(shorter, page_table=step.page_table[:, :5])
    else:
        monkeypatch.setattr("msattn.serving.builder.PrefillMetadata", None)
    with pytest.raises((ValueError, TypeError)):
        builder.build(shorter)
    for now, before in zip((builder.context_lens, *decode.planned.plan.tensors), kept, strict=True):
        assert torch.equal(now, before)


def test_the_host_s_lengths_of_decodes_may_lie_beyond_the_table() -> None:
    """An engine's bound takes every draft for accepted."""
    inputs = make(case_of("decode")[0])
    step = make_step(inputs)
    beyond = step.seq_lens_cpu + 4000
    check_step(inputs, make_builder(inputs).build(replace(step, seq_lens_cpu=beyond)))


def test_the_step_of_a_list_may_be_padded() -> None:
    step = Step.from_lists([1, 0], [5, 0], [[0], []], torch.tensor([4, -1]), num_tokens=2)
    assert step.query_lens == [1, 0] and step.num_requests == 2
