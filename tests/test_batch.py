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
        batch.max_seq_len = 1


def test_bounds_are_bounds() -> None:
    batch = Batch(**fields(max_query_len=8192, max_seq_len=1 << 20, num_tokens=305))
    assert (batch.max_query_len, batch.max_seq_len, batch.num_tokens) == (8192, 1 << 20, 305)


@pytest.mark.parametrize("name", ["max_query_len", "max_seq_len"])
def test_bounds_are_given_by_name(name: str) -> None:
    given = fields()
    bound = given.pop(name)
    with pytest.raises(TypeError):
        Batch(*given.values(), bound)
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

    @pytest.mark.parametrize(("bound", "least"), [("max_query_len", 1), ("max_seq_len", 5)])
    def test_bounds_of_zero_are_given_bounds(self, bound: str, least: int) -> None:
        with pytest.raises(ValueError, match=rf"^{bound}: expected at least {least}, got 0$"):
            Batch.from_lists([1], [5], [[0]], **{bound: 0})

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
