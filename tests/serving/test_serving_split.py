"""The decode-first split: worked examples, and that it always covers the batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msattn.serving import Split, reorder_threshold, split_decodes_and_prefills


@pytest.mark.parametrize(
    ("query_lens", "threshold", "expected"),
    [
        ((1, 1, 1), 1, Split(3, 0, 3, 0, 1)),
        ((1, 1, 300), 1, Split(2, 1, 2, 300, 1)),
        ((300, 20), 1, Split(0, 2, 0, 320, 0)),
        # The short request has another length than the first: a prefill.
        ((4, 4, 2, 900), 4, Split(2, 2, 8, 902, 4)),
        # Fewer tokens than the threshold, but all the same.
        ((2, 2, 2), 4, Split(3, 0, 6, 0, 2)),
        # A first chunk of at most the threshold counts as decode.
        ((4,), 4, Split(1, 0, 4, 0, 4)),
        ((5, 4), 4, Split(0, 2, 0, 9, 0)),
        # Requests without tokens are decodes.
        ((1, 0, 1), 1, Split(3, 0, 2, 0, 1)),
        ((4, 0, 900), 4, Split(2, 1, 4, 900, 4)),
        ((0, 0), 1, Split(2, 0, 0, 0, 0)),
        ((), 1, Split(0, 0, 0, 0, 0)),
    ],
)
def test_examples(query_lens: tuple[int, ...], threshold: int, expected: Split) -> None:
    assert split_decodes_and_prefills(query_lens, threshold=threshold) == expected


@pytest.mark.parametrize(
    ("query_lens", "num_tokens", "expected"),
    [
        # A graph of four requests with 2 drafts, two of them padding: they own rows, too.
        ((3, 3, 0, 0), 12, Split(4, 0, 12, 0, 3)),
        # Nothing but padding: the graph's rows are shared out.
        ((0, 0), 6, Split(2, 0, 6, 0, 3)),
        # Rows behind a prefill are spare.
        ((1, 30), 40, Split(1, 1, 1, 39, 1)),
    ],
)
def test_padding(query_lens: tuple[int, ...], num_tokens: int, expected: Split) -> None:
    got = split_decodes_and_prefills(query_lens, threshold=3, num_tokens=num_tokens)
    assert got == expected


def test_without_uniformity_every_short_request_decodes() -> None:
    got = split_decodes_and_prefills((4, 1, 3, 900, 2), threshold=4, require_uniform=False)
    assert got == Split(3, 2, 8, 902, 4)


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 5),
)
def test_the_parts_cover_the_step(
    query_lens: list[int], threshold: int, require_uniform: bool, spare: int
) -> None:
    rows = sum(query_lens) + spare
    split = split_decodes_and_prefills(
        query_lens, threshold=threshold, require_uniform=require_uniform, num_tokens=rows
    )
    assert split.num_decodes + split.num_prefills == len(query_lens)
    assert split.num_decode_tokens + split.num_prefill_tokens == rows
    decodes = query_lens[: split.num_decodes]
    assert all(length <= threshold for length in decodes)
    if require_uniform and any(query_lens):
        assert set(decodes) <= {0, split.decode_query_len}
    if split.num_prefills:  # it is the first one that does not fit
        first = query_lens[split.num_decodes]
        alike = first in (0, split.decode_query_len) if decodes else first <= threshold
        assert first > threshold or (require_uniform and not alike)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 1),
        ({"num_speculative_tokens": 3}, 4),
        ({"num_speculative_tokens": 3, "parallel_drafting": True}, 7),
        ({"num_speculative_tokens": 3, "dcp_size": 2}, 1),
    ],
)
def test_thresholds(arguments: dict[str, int], expected: int) -> None:
    assert reorder_threshold(**arguments) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_decodes_and_prefills((1, -1)), "query_lens: expected an int >= 0, got -1"),
        (lambda: split_decodes_and_prefills((1,), threshold=0), "threshold: expected an int >= 1"),
        (
            lambda: split_decodes_and_prefills((4, 4), threshold=4, num_tokens=7),
            "num_tokens: expected at least 8, the sum of query_lens, got 7",
        ),
        (lambda: reorder_threshold(-1), "num_speculative_tokens: expected an int >= 0"),
    ],
)
def test_errors(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
