"""One decode step over an NVFP4 cache: three requests, what each selects, and how much it reads.

Run: python examples/decode_step.py
"""

from __future__ import annotations

import torch

import msattn

SEQ_LENS = [4096, 3000, 200]  # this step's token included


def main() -> None:
    torch.manual_seed(0)
    # One tensor-parallel rank of four: 16 query heads share one KV head.
    config = msattn.MSAConfig(num_q_heads=16, num_kv_heads=1, num_index_heads=1)
    blocks = [-(-length // msattn.BLOCK_SIZE) for length in SEQ_LENS]
    pages = torch.randperm(sum(blocks)).split(blocks)  # an engine's pages lie anywhere
    cache = msattn.KVCache.allocate(sum(blocks), config, "nvfp4")
    index = msattn.IndexCache.allocate(sum(blocks), config)

    # The requests' past: keys, values and index keys of all tokens but the last.
    for mine, length in zip(pages, SEQ_LENS, strict=True):
        slots = (mine[:, None] * msattn.BLOCK_SIZE + torch.arange(msattn.BLOCK_SIZE)).flatten()
        past = slots[: length - 1]
        msattn.store_kv(randn(length - 1, 1, 128), randn(length - 1, 1, 128), cache, past)
        msattn.store_index_k(randn(length - 1, 128), index, past)

    # The step: one token of each request.
    requests = len(SEQ_LENS)
    table = [mine.tolist() for mine in pages]
    batch = msattn.Batch.from_lists([1] * requests, SEQ_LENS, table)
    plan = msattn.make_plan(batch, config, cache.format)
    slot_mapping = torch.tensor(
        [row[-1] * 128 + (n - 1) % 128 for row, n in zip(table, SEQ_LENS, strict=True)]
    )
    q, index_q, out = randn(requests, 16, 128), randn(requests, 1, 128), randn(requests, 16, 128)
    msattn.store_kv(randn(requests, 1, 128), randn(requests, 1, 128), cache, slot_mapping)
    msattn.store_index_k(randn(requests, 128), index, slot_mapping)
    block_ids = msattn.index_select(index_q, index, plan)
    msattn.attend(q, cache, block_ids, plan, out=out)

    for length, seen, ids in zip(SEQ_LENS, blocks, block_ids[:, 0].tolist(), strict=True):
        read = [i for i in ids if i >= 0]
        print(f"KV length {length}: reads {len(read)} of {seen} blocks: {read}")
    print(
        f"out {list(out.shape)} {out.dtype}, {cache.format.bytes_per_token(config)} bytes a token"
    )


def randn(*shape: int) -> torch.Tensor:
    """What a model would compute here."""
    return torch.randn(*shape).bfloat16()


if __name__ == "__main__":
    main()
