"""Batch: built from tensors or lists, checked on the CPU, padded, ragged and empty."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from msattn import Batch
from msattn.batch import UNMAPPED


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fields(**changes: object) -> dict[str, object]:
    """Arguments of a good batch: a decode row, three drafts to verify, a prompt chunk."""
    good = {
        "cu_seqlens_q": int32(0, 1, 5, 305),
        "seq_lens": int32(4096, 131, 500),
        "page_table": torch.arange(96, dtype=torch.int32).reshape(3, 32),
        "max_query_len": 300,
        "max_seq_len": 4096,
    }
    return {**good, **changes}


def test_fields() -> None:
    given = fields()
    batch = Batch(**given)
    for name, value in given.items():
        assert getattr(batch, name) is value, "tensors are taken as they are, not copied"
    assert (batch.num_requests, batch.num_tokens, batch.device) == (3, 305, torch.device("cpu"))
    with pytest.raises(FrozenInstanceError):
        batch.max_seq_len = 1  # type: ignore[misc]


def test_bounds_are_bounds() -> None:
    batch = Batch(**fields(max_query_len=8192, max_seq_len=1 << 20, num_tokens=305))
    assert (batch.max_query_len, batch.max_seq_len, batch.num_tokens) == (8192, 1 << 20, 305)


REFUSED = [
    ({"seq_lens": [4096, 131, 500]}, TypeError, "seq_lens: expected a torch.Tensor, got list"),
    (
        {"seq_lens": torch.tensor([4096, 131, 500])},
        TypeError,
        "seq_lens: expected dtype torch.int32, got torch.int64",
    ),
    ({"seq_lens": int32()}, ValueError, "cu_seqlens_q: expected shape [R+1=1], got [4]"),
    ({"seq_lens": int32(4096, -1, 5)}, ValueError, "seq_lens: expected lengths >= 0, got "),
    (
        {"seq_lens": int32(1).reshape(1, 1)},
        ValueError,
        "seq_lens: expected shape [R], got [1, 1]",
    ),
    (
        {"cu_seqlens_q": torch.tensor([0, 1, 5, 305])},
        TypeError,
        "cu_seqlens_q: expected dtype torch.int32, got torch.int64",
    ),
    (
        {"cu_seqlens_q": int32(0, 1, 5)},
        ValueError,
        "cu_seqlens_q: expected shape [R+1=4], got [3]",
    ),
    (
        {"cu_seqlens_q": int32(1, 1, 5, 305)},
        ValueError,
        "cu_seqlens_q: expected 0 first, then a non-decreasing sequence, got [1, 1, 5, 305]",
    ),
    (
        {"cu_seqlens_q": int32(0, 5, 1, 305)},
        ValueError,
        "cu_seqlens_q: expected 0 first, then a non-decreasing sequence, got [0, 5, 1, 305]",
    ),
    (
        {"page_table": torch.zeros(3, 32)},
        TypeError,
        "page_table: expected dtype torch.int32, got torch.float32",
    ),
    (
        {"page_table": torch.zeros(2, 32, dtype=torch.int32)},
        ValueError,
        "page_table: expected shape [R=3, B], got [2, 32]",
    ),
    (
        {"page_table": torch.zeros(3, 31, dtype=torch.int32)},
        ValueError,
        "page_table: expected at least 32 columns, got [3, 31]",
    ),
    (
        {"page_table": torch.zeros(3, 32, dtype=torch.int32, device="meta")},
        ValueError,
        "page_table: expected device cpu, got meta",
    ),
    ({"max_query_len": 299}, ValueError, "max_query_len: expected at least 300, got 299"),
    ({"max_query_len": -1}, ValueError, "max_query_len: expected an int >= 0, got -1"),
    ({"max_query_len": 3e2}, TypeError, "max_query_len: expected an int, got float 300.0"),
    ({"max_seq_len": 4095}, ValueError, "max_seq_len: expected at least 4096, got 4095"),
    (
        {"max_seq_len": torch.tensor(4096)},
        TypeError,
        "max_seq_len: expected an int, got Tensor tensor(4096)",
    ),
    (
        {"num_tokens": 304},
        ValueError,
        "num_tokens: expected cu_seqlens_q's last entry 305, got 304",
    ),
    ({"num_tokens": "305"}, TypeError, "num_tokens: expected an int, got str '305'"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_what_is_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        Batch(**fields(**changes))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", ["max_query_len", "max_seq_len"])
def test_bounds_are_given_by_name(name: str) -> None:
    given = fields()
    bound = given.pop(name)
    with pytest.raises(TypeError):
        Batch(*given.values(), bound)  # type: ignore[call-arg,misc]
    with pytest.raises(TypeError, match=name):
        Batch(**given)


def test_values_on_a_device_are_not_read() -> None:
    """They could only be read by waiting for the device: shapes and host numbers are checked."""
    given = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in fields(max_query_len=1).items()
    }
    assert Batch(**given).num_tokens is None
    assert Batch(**given, num_tokens=7).num_tokens == 7
    with pytest.raises(ValueError, match=r"^num_tokens: expected an int >= 0, got -7$"):
        Batch(**given, num_tokens=-7)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: expected device meta, got cpu$"):
        Batch(**{**given, "cu_seqlens_q": int32(0, 1, 5, 305)})


def test_padding_requests() -> None:
    """Rows of no tokens and no keys, wherever they stand; their table may hold anything."""
    batch = Batch(
        int32(0, 1, 1, 2, 4),
        int32(5, 0, 0, 1),  # the third has a token that sees nothing, the last one token too many
        int32(0, 2**31 - 1, -(2**31), -7).reshape(4, 1),
        max_query_len=2,
        max_seq_len=5,
    )
    assert (batch.num_requests, batch.num_tokens) == (4, 4)


def test_columns_behind_the_longest_request_are_optional() -> None:
    one_page = torch.zeros(1, 1, dtype=torch.int32)
    assert Batch(int32(0, 1), int32(128), one_page, max_query_len=1, max_seq_len=9999)
    with pytest.raises(ValueError, match=r"^page_table: expected at least 2 columns"):
        Batch(int32(0, 1), int32(129), one_page, max_query_len=1, max_seq_len=9999)


REFUSED_LISTS = [
    (
        ([1, 1], [5], [[0], [0]]),
        ValueError,
        "seq_lens: expected 2 lengths, as query_lens has, got 1",
    ),
    (([-1], [5], [[0]]), ValueError, "query_lens: expected an int >= 0, got -1"),
    (([1.0], [5], [[0]]), TypeError, "query_lens: expected an int, got float 1.0"),
    (([1], [-5], [[0]]), ValueError, "seq_lens: expected an int >= 0, got -5"),
    (([1], [True], [[0]]), TypeError, "seq_lens: expected an int, got bool True"),
    ((1, [5], [[0]]), TypeError, "query_lens: expected a sequence of ints, got int"),
    (([1], None, [[0]]), TypeError, "seq_lens: expected a sequence of ints, got NoneType"),
    (([1], [5], 0), TypeError, "page_table: expected a sequence of rows, got int"),
    (([1], [5], [0]), TypeError, "page_table: expected a sequence of pages, got int"),
    (([1], [5], [[0.5]]), TypeError, "page_table: expected rows of ints, got float 0.5"),
    (([1], [5], [["0"]]), TypeError, "page_table: expected rows of ints, got str '0'"),
    (
        ([1], [5], torch.zeros(1, 1)),
        TypeError,
        "page_table: expected an int32 or int64 tensor, got torch.float32",
    ),
    (
        ([1], [5], torch.zeros(1, dtype=torch.int32)),
        ValueError,
        "page_table: expected shape [R=1, B], got [1]",
    ),
    (([1], [5], [[0], [0]]), ValueError, "page_table: expected shape [R=1, B], got [2, 1]"),
    (
        ([1], [129], [[0]]),
        ValueError,
        "page_table: expected at least 2 columns, got [1, 1]",
    ),
]


class TestFromLists:
    def test_numbers_become_tensors(self) -> None:
        table = torch.arange(96, dtype=torch.int32).reshape(3, 32)
        batch = Batch.from_lists([1, 4, 300], [4096, 131, 500], table)
        assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 305]
        assert batch.seq_lens.tolist() == [4096, 131, 500]
        assert batch.page_table is table
        assert batch.cu_seqlens_q.dtype == batch.seq_lens.dtype == torch.int32
        assert (batch.max_query_len, batch.max_seq_len, batch.num_tokens) == (300, 4096, 305)

    def test_ragged_rows_are_padded(self) -> None:
        batch = Batch.from_lists([1, 0, 2], [300, 0, 2], [[7, 5, 3], [], (4,)])
        assert batch.page_table.dtype == torch.int32
        assert batch.page_table.tolist() == [
            [7, 5, 3],
            [UNMAPPED, UNMAPPED, UNMAPPED],
            [4, UNMAPPED, UNMAPPED],
        ]

    def test_any_sequences(self) -> None:
        batch = Batch.from_lists((1, 1), range(1, 3), [torch.tensor([3]), iter([4])])
        assert batch.seq_lens.tolist() == [1, 2]
        assert batch.page_table.tolist() == [[3], [4]]

    def test_int64_table(self) -> None:
        batch = Batch.from_lists([1], [200], torch.tensor([[9, 8]]))
        assert batch.page_table.dtype == torch.int32
        assert batch.page_table.tolist() == [[9, 8]]

    @pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
    def test_pages_beyond_int32_stay_beyond_every_pool(self, as_tensor: bool) -> None:
        """Cut to 32 bits, 2^32 would be page 0."""
        rows = [[2**32, 2**32 + 1, -(2**32), 2**62]]
        table = Batch.from_lists([1], [1], torch.tensor(rows) if as_tensor else rows).page_table
        assert table.tolist() == [[2**31 - 1, 2**31 - 1, UNMAPPED, 2**31 - 1]]

    def test_bounds_can_be_given(self) -> None:
        batch = Batch.from_lists([1], [5], [[0]], max_query_len=16, max_seq_len=1024)
        assert (batch.max_query_len, batch.max_seq_len) == (16, 1024)
        with pytest.raises(ValueError, match=r"^max_query_len: expected at least 2, got 1$"):
            Batch.from_lists([2], [5], [[0]], max_query_len=1)

    def test_bounds_of_zero_are_given_bounds(self) -> None:
        with pytest.raises(ValueError, match=r"^max_seq_len: expected at least 5, got 0$"):
            Batch.from_lists([1], [5], [[0]], max_seq_len=0)

    @pytest.mark.parametrize(
        "table", [[], torch.empty(0, 0, dtype=torch.int32), torch.empty(0, 4, dtype=torch.int64)]
    )
    def test_empty_batch(self, table: object) -> None:
        batch = Batch.from_lists([], [], table)
        assert batch.cu_seqlens_q.tolist() == [0]
        assert (batch.num_requests, batch.num_tokens) == (0, 0)
        assert (batch.max_query_len, batch.max_seq_len) == (0, 0)

    def test_requests_without_keys_need_no_table(self) -> None:
        batch = Batch.from_lists([0, 0], [0, 0], [[], []])
        assert list(batch.page_table.shape) == [2, 0]

    def test_device(self) -> None:
        batch = Batch.from_lists([1], [5], [[0]], device="meta")
        assert batch.device == batch.page_table.device == torch.device("meta")
        assert batch.num_tokens == 1, "known on the host, whatever the device"
        table = torch.zeros(1, 1, dtype=torch.int32, device="meta")
        assert Batch.from_lists([1], [5], table).device == torch.device("meta")

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        REFUSED_LISTS,
        ids=[message for *_, message in REFUSED_LISTS],
    )
    def test_what_is_refused(
        self, arguments: tuple[object, ...], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error) as raised:
            Batch.from_lists(*arguments)  # type: ignore[arg-type]
        assert str(raised.value) == message
