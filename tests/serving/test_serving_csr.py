"""build_k2q_csr against loops over lists, and its schedule against the CSR."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from msattn.serving import Csr, Schedule, build_k2q_csr

INT32 = torch.int32


def naive(
    q2k: torch.Tensor, query_lens: list[int], seq_lens: list[int], columns: int
) -> tuple[list[tuple[int, int]], list[list[list[tuple[int, int]]]]]:
    """(request, block) of each row, level by level; and per head and row, (query, slot)."""
    blocks = [-(-length // 128) for length in seq_lens]
    rows = [(r, b) for b in range(columns) for r in range(len(blocks)) if b < blocks[r]]
    number = {row: n for n, row in enumerate(rows)}
    entries: list[list[list[tuple[int, int]]]] = [[[] for _ in rows] for _ in range(q2k.shape[0])]
    for head in range(q2k.shape[0]):
        token = 0
        for request, count in enumerate(query_lens):
            for query in range(count):
                slot = 0
                for block in q2k[head, token].tolist():
                    if (request, block) in number:
                        entries[head][number[request, block]].append((query, slot))
                        slot += 1
                token += 1
    return rows, entries


def make(seed: int, heads: int, topk: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Lists in any order with -1, duplicates and blocks that the request does not have."""
    generator = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = [5, 0, 1, 40], [129, 500, 1, 640]
    shape = (heads, sum(query_lens), topk)
    q2k = torch.randint(-1, 8, shape, dtype=INT32, generator=generator)
    return q2k, query_lens, seq_lens


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=INT32).cumsum(0).int()


def build(
    q2k: torch.Tensor, query_lens: list[int], seq_lens: list[int], **options: object
) -> tuple[Csr, Schedule]:
    return build_k2q_csr(  # type: ignore[call-overload, no-any-return]
        q2k,
        starts(query_lens),
        starts(seq_lens),
        **{
            "total_k": 0,
            "max_seqlen_k": max(seq_lens),
            "max_seqlen_q": max(query_lens),
            "total_rows": sum(-(-length // 128) for length in seq_lens),
            "return_schedule": True,
            **options,
        },
    )


@pytest.mark.parametrize("topk", [4, 8, 16, 32])
@pytest.mark.parametrize("heads", [1, 4])
def test_rows_are_the_queries_that_chose_the_block(heads: int, topk: int) -> None:
    q2k, query_lens, seq_lens = make(topk + heads, heads, topk)
    csr, schedule = build(q2k, query_lens, seq_lens)
    rows, expected = naive(q2k, query_lens, seq_lens, columns=5)
    assert csr.row_ptr.shape == (heads, len(rows) + 1)
    assert csr.q_indices.shape == (heads, sum(query_lens) * topk)
    for head in range(heads):
        edges = csr.row_ptr[head].tolist()
        assert edges[0] == 0
        for (begin, end), entries in zip(pairwise(edges), expected[head], strict=True):
            assert csr.q_indices[head, begin:end].tolist() == [query for query, _ in entries]
            packed = schedule.qsplit_indices[head, begin:end].tolist()
            assert packed == [query | slot << 24 for query, slot in entries]
        assert set(csr.q_indices[head, edges[-1] :].tolist()) <= {-1}
        assert set(schedule.qsplit_indices[head, edges[-1] :].tolist()) <= {-1}
    valid = [[sum(len(e) for e in expected[h])] for h in range(heads)]
    assert schedule.split_counts.sum(0).tolist() == [v for [v] in valid]


def test_every_entry_is_in_one_work_item() -> None:
    """Hot blocks are cut: every query of 900 chose block 0."""
    query_lens, seq_lens, heads, topk = [900, 3], [1000, 131], 2, 4
    q2k = torch.full((heads, 903, topk), -1, dtype=INT32)
    q2k[..., 2] = 0
    q2k[0, :, 0] = torch.arange(903) % 8
    csr, schedule = build(q2k, query_lens, seq_lens, qhead_per_kv=16)
    rows, _ = naive(q2k, query_lens, seq_lens, columns=8)
    target = schedule.target_q_per_cta
    assert target % 8 == 0
    count = int(schedule.work_count)
    assert count <= len(schedule.scheduler_metadata)
    assert schedule.scheduler_metadata[count:].eq(0).all()
    seen: dict[tuple[int, int], list[int]] = {}
    for head, row, first, size, request, block in schedule.scheduler_metadata[:count].tolist():
        assert 0 < size <= target
        assert rows[row] == (request, block)
        seen.setdefault((head, row), []).extend(range(first, first + size))
    for head in range(heads):
        for row, length in enumerate(csr.row_ptr[head].diff().tolist()):
            assert sorted(seen.get((head, row), [])) == list(range(length))


def test_queries_of_a_request_are_counted_from_its_start() -> None:
    csr, _ = build(torch.zeros(1, 5, 4, dtype=INT32), [2, 3], [128, 128])
    assert csr.row_ptr.tolist() == [[0, 8, 20]]  # duplicates are kept
    assert csr.q_indices.tolist() == [[0] * 4 + [1] * 4 + [0] * 4 + [1] * 4 + [2] * 4]


def test_strides_do_not_matter() -> None:
    q2k, query_lens, seq_lens = make(0, 4, 8)
    token_major = q2k.transpose(0, 1).contiguous().transpose(0, 1)
    for got, want in zip(
        build(token_major, query_lens, seq_lens)[0],
        build(q2k, query_lens, seq_lens)[0],
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("total_k", "rows"), [(256, 3), (257, -(-(257 + 2 * 127) // 128)), (384, 4)]
)
def test_default_total_rows(total_k: int, rows: int) -> None:
    csr = build_k2q_csr(
        torch.full((1, 2, 4), -1, dtype=INT32), starts([1, 1]), starts([128, 128]), total_k=total_k
    )
    assert csr.row_ptr.shape == (1, rows + 1)


def test_blocks_that_are_not_full_have_rows_by_default() -> None:
    """Two of them add up to one block of keys."""
    q2k = torch.tensor([[[0, -1, -1, -1]] * 2], dtype=INT32)
    csr = build_k2q_csr(q2k, starts([1, 1]), starts([64, 64]), total_k=128)
    assert csr.row_ptr.tolist() == [[0, 1, 2]]
    assert build_k2q_csr(q2k[:, :0], starts([0]), starts([0]), total_k=0).row_ptr.shape == (1, 1)


@pytest.mark.parametrize(
    ("heads", "query_lens", "seq_lens"),
    [(0, [2], [128]), (2, [0], [128]), (2, [], []), (2, [3], [0])],
)
def test_empty(heads: int, query_lens: list[int], seq_lens: list[int]) -> None:
    q2k = torch.zeros(heads, sum(query_lens), 4, dtype=INT32)
    total_rows = sum(-(-length // 128) for length in seq_lens)
    csr, schedule = build_k2q_csr(
        q2k,
        starts(query_lens),
        starts(seq_lens),
        total_k=0,
        max_seqlen_k=128,
        max_seqlen_q=3,
        total_rows=total_rows,
        return_schedule=True,
    )
    assert csr.row_ptr.shape == (heads, total_rows + 1) and csr.row_ptr.eq(0).all()
    assert csr.q_indices.eq(-1).all()
    assert schedule.work_count.tolist() == [0]
    assert schedule.split_counts.shape == (sum(query_lens), heads)
    assert schedule.split_counts.eq(0).all()


Q2K, CU = torch.zeros(1, 2, 4, dtype=INT32), torch.tensor([0, 2], dtype=INT32)
ERRORS = {
    "q2k_dtype": (dict(q2k=Q2K.long()), TypeError, "q2k: expected dtype torch.int32"),
    "q2k_rank": (dict(q2k=Q2K[0]), ValueError, r"q2k: expected shape \[Hkv, T, K\]"),
    "topk": (dict(q2k=Q2K[..., :3]), ValueError, "q2k: expected 4, 8, 16 or 32 blocks"),
    "block_size": (dict(kv_block_size=64), ValueError, "kv_block_size: expected 128, got 64"),
    "total_k": (dict(total_k=None), ValueError, "total_k: expected an int"),
    "negative": (dict(total_k=-1), ValueError, "total_k: expected an int >= 0"),
    "total_rows": (dict(total_rows=-1), ValueError, "total_rows: expected an int >= 0"),
    "group": (dict(qhead_per_kv=0), ValueError, "qhead_per_kv: expected an int >= 1"),
    "starts_dtype": (dict(cu_seqlens_q=CU.long()), TypeError, "cu_seqlens_q: expected dtype"),
    "starts_shape": (
        dict(cu_seqlens_k=torch.zeros(3, dtype=INT32)),
        ValueError,
        r"cu_seqlens_k: expected shape \[B\+1=2\]",
    ),
    "no_starts": (
        dict(cu_seqlens_q=CU[:0], cu_seqlens_k=CU[:0]),
        ValueError,
        "cu_seqlens_q: expected at least one entry",
    ),
    "negative_k": (dict(max_seqlen_k=-1), ValueError, "max_seqlen_k: expected an int >= 0"),
    "negative_q": (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q: expected an int >= 0"),
    "few_keys": (
        dict(cu_seqlens_k=torch.tensor([0, 300], dtype=INT32)),
        ValueError,
        "total_k: expected a bound of the longest request's 3 blocks, got 1",
    ),
    "short_bound": (
        dict(cu_seqlens_k=torch.tensor([0, 300], dtype=INT32), max_seqlen_k=256, total_rows=3),
        ValueError,
        "max_seqlen_k: expected a bound of the longest request's 3 blocks, got 2",
    ),
    "few_rows_of_total_k": (
        dict(cu_seqlens_k=torch.tensor([0, 300], dtype=INT32), max_seqlen_k=300),
        ValueError,
        "total_k: expected rows for the 3 blocks of cu_seqlens_k, got 1 rows",
    ),
    "few_rows": (
        dict(cu_seqlens_k=torch.tensor([0, 300], dtype=INT32), max_seqlen_k=300, total_rows=2),
        ValueError,
        "total_rows: expected rows for the 3 blocks of cu_seqlens_k, got 2 rows",
    ),
    "bounds": (dict(return_schedule=True), ValueError, "max_seqlen_k, max_seqlen_q: expected"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    arguments, error, message = ERRORS[name]
    given = {"q2k": Q2K, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "total_k": 128, **arguments}
    with pytest.raises(error, match=message):
        build_k2q_csr(**given)  # type: ignore[call-overload]
