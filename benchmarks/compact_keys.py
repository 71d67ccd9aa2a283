"""What the compact copy of index keys spares: bytes on any machine, time on a GPU.

    python benchmarks/compact_keys.py [--requests 32] [--blocks 256,1024,4096] [--query-len 1]

A decode step of MiniMax-M3's indexer, for each kind of keys in ``msattn/testing/index_keys.py`` and
for those of the tiny MiniMax-M3. "scored" are the blocks whose keys are read besides the copy, and
"bytes" both, as shares of what is read without a copy. On a CPU they are computed from the bounds
of one request; on a GPU they are the kernels' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import msattn
from msattn.config import BLOCK_SIZE
from msattn.reference.quantize import compact_encode, rotate
from msattn.testing.index_keys import KINDS
from msattn.testing.timing import time_calls

M3 = msattn.MSAConfig()
COPY_SHARE = msattn.CompactKeys.page_bytes(128) / (BLOCK_SIZE * 128 * 2)
SECONDS = 0.3  # of replays for a row
MODEL_TOKENS = 12000  # of the tiny model: a minute on two cores


def main(
    requests: Annotated[int, typer.Option(help="of the step, on a GPU")] = 32,
    blocks: Annotated[str, typer.Option(help="of each request")] = "256,1024,4096",
    query_len: Annotated[int, typer.Option(help="tokens of a request")] = 1,
    model: Annotated[bool, typer.Option(help="keys of the tiny MiniMax-M3, too")] = True,
) -> None:
    """Print the table."""
    on_gpu = torch.cuda.is_available()
    table = Table("keys", "blocks", "scored", "bytes", *(["plain us", "compact us"] * on_gpu))
    cases = [(kind, int(count)) for count in blocks.split(",") for kind in KINDS]
    for kind, count in track(cases, "cases", transient=True):
        n, rows = count * BLOCK_SIZE, query_len * M3.num_index_heads
        keys, queries = KINDS[kind](n, rows, 128, torch.Generator().manual_seed(0))
        if on_gpu:
            row = measure(keys, queries, requests, query_len)
        else:
            row = in_bytes(scored_share(keys.bfloat16(), queries.bfloat16(), M3))
        table.add_row(kind, str(count), *row)
    if model:
        for layer, (keys, queries, config) in enumerate(model_keys()):
            share = scored_share(keys, queries, config)
            table.add_row(f"tiny M3, layer {layer}", str(-(-len(keys) // 128)), *in_bytes(share))
    Console().print(table)


def in_bytes(scored: float) -> tuple[str, str]:
    return f"{scored:.1%}", f"{COPY_SHARE + scored:.2f}"


def scored_share(keys: torch.Tensor, queries: torch.Tensor, config: msattn.MSAConfig) -> float:
    """Of the blocks of keys ``[n, Di]``, those that a row ``[rows, Di]`` may select by score."""
    codes, factors = compact_encode(keys)
    scale, bound = factors.double().unbind(-1)
    queries = rotate(queries.float()).double()
    value = (queries @ codes.double().T) * scale
    margin = torch.linalg.vector_norm(queries, dim=1, keepdim=True) * bound
    last = -(-len(keys) // BLOCK_SIZE) - config.local_blocks
    upper, lower = (
        torch.nn.functional.pad(x, (0, -len(keys) % BLOCK_SIZE), value=-math.inf)
        .unflatten(1, (-1, BLOCK_SIZE))
        .amax(-1)[:, config.init_blocks : last]
        for x in (value + margin, value - margin)
    )
    best = config.topk - config.init_blocks - config.local_blocks
    threshold = lower.topk(best, dim=1).values[:, -1:]
    return float((upper >= threshold).any(0).double().mean())


def measure(
    keys: torch.Tensor, queries: torch.Tensor, requests: int, query_len: int
) -> tuple[str, ...]:
    """The same on a GPU, by the kernels: every request has pages of its own with these keys."""
    from msattn.kernels.triton import indexer_compact

    indexer_compact.MIN_PAGES = 0  # also where it does not pay
    device, n = torch.device("cuda"), len(keys)
    blocks = n // BLOCK_SIZE
    pages = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(1))
    table = pages.view(requests, blocks).int().to(device)
    index = msattn.IndexCache.allocate(requests * blocks, M3, compact=True, device=device)
    stored = keys.to(device, torch.bfloat16)
    place = torch.arange(n, device=device)
    for request in range(requests):
        slots = table[request, place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
        msattn.store_index_k(stored, index, slots)
    batch = msattn.Batch.from_lists([query_len] * requests, [n] * requests, table, device=device)
    index_q = queries.view(query_len, -1, 128).repeat(requests, 1, 1).to(device, torch.bfloat16)
    plain = msattn.IndexCache(index.tensor, index.format)
    times, ids = [], []
    for cache in (plain, index):
        plan = msattn.make_plan(batch, M3, "bf16")
        ids.append(msattn.index_select(index_q, cache, plan))
        out = torch.empty_like(ids[0])

        def call(
            cache: msattn.IndexCache = cache, plan: msattn.Plan = plan, out: torch.Tensor = out
        ) -> None:
            msattn.index_select(index_q, cache, plan, out=out)

        times.append(f"{time_calls([call], device, SECONDS).median * 1e6:.1f}")
    if not torch.equal(*ids):
        raise SystemExit("the ids differ")
    scores = torch.empty(M3.num_index_heads, len(index_q), blocks, device=device)
    indexer_compact.score_rows(index_q, index, msattn.make_plan(batch, M3, "bf16"), scores, 0)
    made = (scores > -math.inf).unflatten(1, (requests, query_len)).any(2).any(0)
    return *in_bytes(float(made.double().mean())), *times


def model_keys() -> Iterator[tuple[torch.Tensor, torch.Tensor, msattn.MSAConfig]]:
    """Index keys, the last token's queries and the config of each sparse layer of a tiny model."""
    from msattn.integrations.transformers import MsattnCache, register
    from msattn.integrations.transformers.tiny import tiny_model, tiny_prompt

    steps: list[tuple[torch.Tensor, msattn.IndexCache, msattn.Plan]] = []
    attention: Any = import_module("msattn.integrations.transformers.attention")
    select = attention.index_select

    def watched(index_q: torch.Tensor, index: msattn.IndexCache, plan: msattn.Plan) -> torch.Tensor:
        steps.append((index_q[-1].clone(), index, plan))
        block_ids: torch.Tensor = select(index_q, index, plan)
        return block_ids

    attention.index_select = watched
    register()
    model = tiny_model("msattn")
    with torch.no_grad():
        model(tiny_prompt(MODEL_TOKENS), past_key_values=MsattnCache(model.config, "bf16"))
    for index_q, index, plan in steps:
        pages = plan.page_table[0, : -(-MODEL_TOKENS // BLOCK_SIZE)].long()
        keys = index.tensor[pages].flatten(0, 1)[:MODEL_TOKENS]
        yield keys, index_q.to(keys.dtype), plan.config


if __name__ == "__main__":
    typer.run(main)
