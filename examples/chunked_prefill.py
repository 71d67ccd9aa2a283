"""A prompt in chunks, one plan for all of them; the same blocks as in one pass.

Run: python examples/chunked_prefill.py
"""

from __future__ import annotations

import torch

import msattn

TOKENS, CHUNK = 2000, 500  # chunks need not end where a block does


def main() -> None:
    torch.manual_seed(0)
    config = msattn.MSAConfig(num_q_heads=8, num_kv_heads=1, num_index_heads=1, topk=4)
    q, index_q = randn(TOKENS, 8, 128), randn(TOKENS, 1, 128)
    k, v, index_k = randn(TOKENS, 1, 128), randn(TOKENS, 1, 128), randn(TOKENS, 128)

    def prefill(chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block ids and out of all tokens, computed ``chunk`` of them at a time."""
        pages = -(-TOKENS // msattn.BLOCK_SIZE)
        cache = msattn.KVCache.allocate(pages, config, "bf16")
        index = msattn.IndexCache.allocate(pages, config)
        out = torch.empty_like(q)
        block_ids = torch.empty((TOKENS, 1, config.topk), dtype=torch.int32)
        plan = None
        for start in range(0, TOKENS, chunk):
            stop = min(start + chunk, TOKENS)
            batch = msattn.Batch.from_lists([stop - start], [stop], [list(range(pages))])
            if plan is None:
                plan = msattn.make_plan(batch, config, cache.format)
            plan.update(batch)  # the plan's tensors stay where they are
            part = slice(start, stop)
            slots = torch.arange(start, stop)  # page i holds block i
            msattn.store_kv(k[part], v[part], cache, slots)
            msattn.store_index_k(index_k[part], index, slots)
            msattn.index_select(index_q[part], index, plan, out=block_ids[part])
            msattn.attend(q[part], cache, block_ids[part], plan, out=out[part])
            seen = torch.arange(start, stop) // msattn.BLOCK_SIZE + 1
            share = int((block_ids[part] >= 0).sum()) / int(seen.sum())
            print(f"tokens {start:4} to {stop - 1:4} read {share:4.0%} of the blocks they see")
        return block_ids, out

    ids, out = prefill(CHUNK)
    ids_at_once, out_at_once = prefill(TOKENS)
    gap = (out.float() - out_at_once.float()).abs().max()
    print(f"same blocks: {torch.equal(ids, ids_at_once)}; largest difference of out: {gap:.1e}")


def randn(*shape: int) -> torch.Tensor:
    """What a model would compute here."""
    return torch.randn(*shape).bfloat16()


if __name__ == "__main__":
    main()
