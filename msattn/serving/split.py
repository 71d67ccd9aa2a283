"""The decode-first split: which of a step's requests decode, and which prefill."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from ..checks import fail, require_int


class Split(NamedTuple):
    """Requests ``[:num_decodes]`` decode, and so do rows ``[:num_decode_tokens]``; others prefill.

    Every decode request has ``decode_query_len`` rows (1, or 1 + drafts), so that row ``t`` belongs
    to request ``t // decode_query_len``; without ``require_uniform`` they have that many at most.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    decode_query_len: int  # 0 where nothing decodes


def reorder_threshold(
    num_speculative_tokens: int = 0, *, parallel_drafting: bool = False, dcp_size: int = 1
) -> int:
    """The most query tokens of a request that counts as decode.

    Args:
        num_speculative_tokens: drafts that a step verifies for each request.
        parallel_drafting: drafts are made in one pass, which gives a request ``1 + 2 * drafts``.
        dcp_size: ranks of decode context parallelism; with more than one, only single tokens
            decode.
    """
    require_int("num_speculative_tokens", num_speculative_tokens, at_least=0)
    require_int("dcp_size", dcp_size, at_least=1)
    if dcp_size > 1:
        return 1
    return 1 + num_speculative_tokens * (2 if parallel_drafting else 1)


def split_decodes_and_prefills(
    query_lens: Sequence[int],
    *,
    threshold: int = 1,
    require_uniform: bool = True,
    num_tokens: int | None = None,
) -> Split:
    """Where the first prefill stands in a batch ordered decode, short extend, long.

    The rules are vLLM's. With ``require_uniform``, a request decodes while it has as many query
    tokens as the first one, or none: ``(4, 4, 2, 900)`` with threshold 4 are two decodes and two
    prefills, ``(2, 2, 2)`` are three decodes of two tokens, and ``(4, 4, 0)`` is a graph's batch of
    three, padded. A first chunk of at most ``threshold`` tokens counts as decode, which is right:
    causality is a matter of positions.

    Args:
        query_lens: query tokens of each request, on the host.
        threshold: :func:`reorder_threshold`.
        require_uniform: all decodes have the same number of query tokens, padding apart.
        num_tokens: rows of the step, default: as the lengths say. A padded graph has more: where
            all decode, its requests without query tokens own ``decode_query_len`` rows each, which
            nobody reads. Others are spare rows at the end.

    Raises:
        ValueError: fewer rows than query tokens, or a negative length.
    """
    require_int("threshold", threshold, at_least=1)
    for length in query_lens:
        require_int("query_lens", length, at_least=0)
    count, rows = len(query_lens), sum(query_lens)
    first = next((length for length in query_lens if length), 0)
    if not require_uniform:
        decodes = len(list(takewhile(lambda length: length <= threshold, query_lens)))
    elif first > threshold:
        decodes = 0
    else:
        decodes = len(list(takewhile(lambda length: length in (0, first), query_lens)))
    num_tokens = rows if num_tokens is None else num_tokens
    if num_tokens < rows:
        raise fail("num_tokens", f"at least {rows}, the sum of query_lens", num_tokens)
    decode_rows = num_tokens if decodes == count else sum(query_lens[:decodes])
    longest = max(query_lens[:decodes], default=0)
    if not rows and count and num_tokens % count == 0:
        longest = num_tokens // count  # a graph of padding alone
    return Split(decodes, count - decodes, decode_rows, num_tokens - decode_rows, longest)
