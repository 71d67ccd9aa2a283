"""MetadataBuilder: once per step, before any layer runs and outside of captured graphs."""

from __future__ import annotations

import torch

from .. import env
from ..batch import Batch
from ..checks import fail, require_int, require_type
from ..config import BLOCK_SIZE, MSAConfig
from ..kv_format import KVFormat
from ..plan import Plan, make_plan
from .backends import DECODE_KERNELS, SPARSE_MSA, Backend
from .decode_plans import DEFAULT_CAPACITY, DecodePlan, DecodePlanCache, check_lengths
from .metadata import DecodeMetadata, PrefillMetadata, SparseMetadata, Step
from .split import Split, reorder_threshold, split_decodes_and_prefills


class MetadataBuilder:
    """Makes the metadata of a step, and owns what must outlive it: buffers and decode plans.

    An engine has one for the KV caches and one for the index caches, which have page tables and
    slots of their own; with the same thresholds, both split alike.

    One step at a time: a step's metadata holds until the next one is built, whose lengths and pages
    take the place of its own in the decode plan and in ``context_lens``. Steps that are under way
    together, as two micro-batches, have a builder each.
    """

    def __init__(
        self,
        config: MSAConfig,
        kv_format: object,
        *,
        max_num_tokens: int,
        max_seq_len: int,
        device: torch.device | str | None = None,
        backend: Backend = SPARSE_MSA,
        num_speculative_tokens: int = 0,
        parallel_drafting: bool = False,
        dcp_size: int = 1,
        min_batch: int | None = None,
        plan_capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        """
        Args:
            config: shapes of this rank.
            kv_format: of the caches.
            max_num_tokens: most rows of a step.
            max_seq_len: longest request that the engine admits; captured graphs hold for it.
            device: where the caches are; default: the CPU.
            backend: decides which decode kernel is planned.
            num_speculative_tokens, parallel_drafting, dcp_size: as for :func:`reorder_threshold`.
            min_batch: decode requests (padding included) from which the tensor-core decode is
                planned; default: ``MSATTN_DECODE_MIN_BATCH``, read now, else 1.
            plan_capacity: decode plans that are kept besides those of captured graphs.
        """
        require_type("config", config, MSAConfig)
        require_type("backend", backend, Backend)
        require_int("max_num_tokens", max_num_tokens, at_least=1)
        require_int("plan_capacity", plan_capacity, at_least=1)
        if min_batch is None:
            min_batch = env.decode_min_batch()
        require_int("min_batch", min_batch, at_least=0)
        self.config = config
        self.kv_format = KVFormat.parse(kv_format)
        self.backend = backend
        self.min_batch = min_batch
        self.threshold = reorder_threshold(
            num_speculative_tokens, parallel_drafting=parallel_drafting, dcp_size=dcp_size
        )
        self.decode_plans = DecodePlanCache(config, self.kv_format, max_seq_len, plan_capacity)
        # At one address, so that captured kernels find each step's values.
        self.context_lens = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)

    def build(self, step: Step) -> SparseMetadata:
        """The step's metadata; decode requests first, as the engine ordered them.

        Raises:
            ValueError: the step is larger than the builder was made for, or its rows or its page
                table do not fit its lengths. What an earlier step left is unchanged then.
        """
        self._check(step)
        split = split_decodes_and_prefills(
            step.query_lens, threshold=self.threshold, num_tokens=step.num_tokens
        )
        context_lens = self.context_lens[: step.num_requests]
        metadata = SparseMetadata(
            seq_lens=step.seq_lens,
            slot_mapping=step.slot_mapping,
            max_seq_len=step.max_seq_len,
            num_tokens=step.num_tokens,
            num_decodes=split.num_decodes,
            num_decode_tokens=split.num_decode_tokens,
            num_prefills=split.num_prefills,
            num_prefill_tokens=split.num_prefill_tokens,
            prefill=self._prefill(step, split, context_lens) if split.num_prefills else None,
            # Last: it writes into a plan that an earlier step left.
            decode=self._decode(step, split) if split.decode_query_len else None,
        )
        starts = step.query_start_loc
        torch.sub(step.seq_lens, starts[1:] - starts[:-1], out=context_lens)
        return metadata

    def should_use_tensor_core(self, num_decodes: int) -> bool:
        """Whether a decode of so many requests is planned for the tensor-core kernel."""
        return self.backend.decode == DECODE_KERNELS[0] and num_decodes >= self.min_batch

    def _check(self, step: Step) -> None:
        require_type("step", step, Step)
        limit = self.context_lens.shape[0]
        if step.num_tokens > limit or step.num_requests > limit:
            got = f"{step.num_tokens} rows of {step.num_requests} requests"
            raise fail("step", f"at most max_num_tokens={limit} rows and requests", got)
        if step.max_seq_len > self.decode_plans.max_seq_len:
            expected = f"max_seq_len at most {self.decode_plans.max_seq_len}"
            raise fail("step", expected, step.max_seq_len)
        if step.device != self.context_lens.device:
            raise fail("step", f"device {self.context_lens.device}", step.device)
        _check_lengths(step)

    def _prefill(self, step: Step, split: Split, context_lens: torch.Tensor) -> PrefillMetadata:
        first, rows = split.num_decodes, split.num_decode_tokens
        seq_lens, page_table = step.seq_lens[first:], step.page_table[first:]
        lengths = step.seq_lens_cpu[first:]
        cu_seqlens_q = step.query_start_loc[first:] - rows
        cu_seqlens_k = torch.zeros_like(cu_seqlens_q)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        batch = Batch(
            cu_seqlens_q,
            seq_lens,
            page_table,
            max_query_len=max(step.query_lens[first:]),
            max_seq_len=int(lengths.max()),
            num_tokens=sum(step.query_lens[first:]),
        )
        return PrefillMetadata(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seq_lens=seq_lens,
            context_lens=context_lens[first:],
            page_table=page_table,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            total_kv_blocks=int(((lengths + BLOCK_SIZE - 1) // BLOCK_SIZE).sum()),
            plan=make_plan(batch, self.config, self.kv_format),
        )

    def _decode(self, step: Step, split: Split) -> DecodeMetadata:
        count, query_len = split.num_decodes, split.decode_query_len
        seq_lens, page_table = step.seq_lens[:count], step.page_table[:count]
        if split.num_decode_tokens == count * query_len:
            planned = self.decode_plans.prepare(seq_lens, page_table, query_len)
        else:
            planned = DecodePlan(self._ragged_plan(step, split))
        return DecodeMetadata(
            seq_lens=seq_lens,
            page_table=page_table,
            decode_query_len=query_len,
            use_tensor_core=self.should_use_tensor_core(count),
            planned=planned,
        )

    def _ragged_plan(self, step: Step, split: Split) -> Plan:
        """Requests without rows stand among the decodes: the step's own offsets count."""
        count = split.num_decodes
        batch = Batch(
            step.query_start_loc[: count + 1],
            step.seq_lens[:count],
            step.page_table[:count],
            max_query_len=split.decode_query_len,
            max_seq_len=step.max_seq_len,
            num_tokens=sum(step.query_lens[:count]),
        )
        return make_plan(batch, self.config, self.kv_format)


def _check_lengths(step: Step) -> None:
    """The lengths, as far as the host knows them.

    Of decode requests ``seq_lens_cpu`` is a bound, which may lie beyond the page table and
    ``max_seq_len``. The lengths themselves are compared with both where that needs no sync.
    """
    bounds = step.seq_lens_cpu
    if (bounds < 0).any():
        raise fail("seq_lens_cpu", "lengths >= 0", bounds.tolist())
    if step.device.type != "cpu":
        return
    lengths = step.seq_lens
    if (lengths > bounds).any():
        raise fail("seq_lens_cpu", f"at least seq_lens={lengths.tolist()}", bounds.tolist())
    check_lengths(lengths, step.page_table, step.max_seq_len)
