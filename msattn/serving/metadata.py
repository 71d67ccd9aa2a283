"""What an engine knows of a step, and what the stages of its decode and prefill rows need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..batch import Batch
from ..checks import fail, require_int, require_tensor
from ..plan import Plan
from .decode_plans import DecodePlan


@dataclass(frozen=True, eq=False)
class Step:
    """A step as an engine describes it, decode requests first; lengths on device and host.

    Padding requests, at the end, have no query tokens on the host, length 0 and slots of -1. With
    them, ``num_tokens`` is that of the captured graph.
    """

    query_start_loc: torch.Tensor = field(repr=False)  # [R + 1] int32: first row of each request
    query_start_loc_cpu: torch.Tensor = field(repr=False)  # the same on the host
    seq_lens: torch.Tensor = field(repr=False)  # [R] int32: KV length, this step's tokens included
    # [R] int32 on the host: exact for prefill, at least the truth for decode.
    seq_lens_cpu: torch.Tensor = field(repr=False)
    page_table: torch.Tensor = field(repr=False)  # [R, B] int32
    slot_mapping: torch.Tensor = field(repr=False)  # [T] int64 or int32
    num_tokens: int  # T: rows of the step, padding included
    max_query_len: int  # at least every request's query tokens
    max_seq_len: int  # at least every seq_lens entry

    def __post_init__(self) -> None:
        for name in ("num_tokens", "max_query_len", "max_seq_len"):
            require_int(name, getattr(self, name), at_least=0)
        int32 = [torch.int32]
        lengths = require_tensor("seq_lens", self.seq_lens, dtypes=int32, shape={"R": None})
        rows, device, host = lengths.shape[0], lengths.device, torch.device("cpu")
        starts = {"R+1": rows + 1}
        require_tensor(
            "query_start_loc", self.query_start_loc, dtypes=int32, shape=starts, device=device
        )
        require_tensor(
            "query_start_loc_cpu", self.query_start_loc_cpu, dtypes=int32, shape=starts, device=host
        )
        require_tensor(
            "seq_lens_cpu", self.seq_lens_cpu, dtypes=int32, shape={"R": rows}, device=host
        )
        table = {"R": rows, "B": None}
        require_tensor("page_table", self.page_table, dtypes=int32, shape=table, device=device)
        slots = [torch.int64, torch.int32]
        require_tensor("slot_mapping", self.slot_mapping, dtypes=slots, device=device)
        if self.slot_mapping.shape[0] < self.num_tokens:
            got = list(self.slot_mapping.shape)
            raise fail("slot_mapping", f"at least num_tokens={self.num_tokens} slots", got)

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def query_lens(self) -> list[int]:
        starts = self.query_start_loc_cpu
        lens: list[int] = (starts[1:] - starts[:-1]).tolist()
        return lens

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_table: torch.Tensor | Sequence[Sequence[int]],
        slot_mapping: torch.Tensor,
        *,
        num_tokens: int | None = None,
        max_seq_len: int | None = None,
    ) -> Step:
        """A step from Python numbers, on the device of ``slot_mapping``.

        Args:
            query_lens, seq_lens, page_table: as for :meth:`msattn.Batch.from_lists`.
            slot_mapping: ``[T]`` int64.
            num_tokens: default: the sum of ``query_lens``.
            max_seq_len: default: the longest.
        """
        batch = Batch.from_lists(
            query_lens,
            seq_lens,
            page_table,
            max_seq_len=max_seq_len,
            device=require_tensor("slot_mapping", slot_mapping).device,
        )
        assert batch.num_tokens is not None
        return cls(
            batch.cu_seqlens_q,
            batch.cu_seqlens_q.cpu(),
            batch.seq_lens,
            batch.seq_lens.cpu(),
            batch.page_table,
            slot_mapping,
            num_tokens=batch.num_tokens if num_tokens is None else num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )


@dataclass(frozen=True, eq=False)
class PrefillMetadata:
    """The P prefill requests of a step, their rows counted from 0."""

    cu_seqlens_q: torch.Tensor = field(repr=False)  # [P + 1] int32
    cu_seqlens_k: torch.Tensor = field(repr=False)  # [P + 1] int32: sums of whole KV lengths
    seq_lens: torch.Tensor = field(repr=False)  # [P] int32
    context_lens: torch.Tensor = field(repr=False)  # [P] int32: tokens that were cached before
    page_table: torch.Tensor = field(repr=False)  # [P, B] int32
    max_query_len: int  # of the whole step: a bound
    max_seq_len: int  # of the whole step: a bound
    total_kv_blocks: int  # blocks of all P requests, by the host's lengths
    plan: Plan = field(repr=False)


@dataclass(frozen=True, eq=False)
class DecodeMetadata:
    """The D decode requests of a step; row ``t`` is request ``t // decode_query_len``'s."""

    seq_lens: torch.Tensor = field(repr=False)  # [D] int32
    page_table: torch.Tensor = field(repr=False)  # [D, B] int32
    decode_query_len: int
    use_tensor_core: bool  # of the two decode kernels, the planned one
    planned: DecodePlan = field(repr=False)


@dataclass(frozen=True, eq=False)
class SparseMetadata:
    """A step's rows, split: ``[:num_decode_tokens]`` decode, those up to num_tokens prefill."""

    seq_lens: torch.Tensor = field(repr=False)  # [R] int32
    slot_mapping: torch.Tensor = field(repr=False)  # [T]
    max_seq_len: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    prefill: PrefillMetadata | None
    decode: DecodeMetadata | None
