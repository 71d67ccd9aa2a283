"""Useful FLOP rate of the reference beside torch.matmul's on the same machine.

    python benchmarks/bench_reference.py

One prefill chunk of 2,048 tokens at the end of 8,192, with MiniMax-M3's 64 / 4 heads. Useful FLOPs
are
those of visible tokens alone: 2 * Hi * Di for each (token, visible key) pair of the scores, and
4 * D for each (query head, visible key of a selected block) of the attention. The reference
computes attention in fp32 whatever the cache holds, and scores in fp64, so torch.matmul's fp32 rate
is its roof.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import msattn
from msattn import BLOCK_SIZE, Batch, IndexCache, KVCache, MSAConfig

CONFIG = MSAConfig()
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp32")


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of ``repeats`` calls after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul_gflops(dtype: torch.dtype, repeats: int, size: int = 2048) -> float:
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2e-9 * size**3 / median_seconds(lambda: a @ b, repeats)


def layer_gflops(kv_format: str, tokens: int, context: int, repeats: int) -> tuple[float, ...]:
    """Useful GFLOP/s of (index_select, attend, both)."""
    fmt = msattn.KVFormat.parse(kv_format)
    dtype = torch.float32 if kv_format == "fp32" else torch.bfloat16
    pages = -(-context // BLOCK_SIZE)
    cache = KVCache.allocate(pages, CONFIG, fmt)
    index = IndexCache.allocate(pages, CONFIG, dtype)
    slots = torch.arange(context)
    k, v = (torch.randn(context, CONFIG.num_kv_heads, CONFIG.head_dim, dtype=dtype) for _ in "kv")
    msattn.store_kv(k, v, cache, slots)
    msattn.store_index_k(torch.randn(context, CONFIG.index_head_dim, dtype=dtype), index, slots)
    q = torch.randn(tokens, CONFIG.num_q_heads, CONFIG.head_dim, dtype=dtype)
    index_q = torch.randn(tokens, CONFIG.num_index_heads, CONFIG.index_head_dim, dtype=dtype)
    table = torch.randperm(pages).unsqueeze(0)
    plan = msattn.make_plan(Batch.from_lists([tokens], [context], table), CONFIG, fmt)

    ids = msattn.index_select(index_q, index, plan)
    select = median_seconds(lambda: msattn.index_select(index_q, index, plan), repeats)
    attend = median_seconds(lambda: msattn.attend(q, cache, ids, plan), repeats)

    visible = torch.arange(context - tokens, context) + 1
    keys_scored = int(visible.sum())
    in_block = (visible[:, None, None] - ids * BLOCK_SIZE).clamp(max=BLOCK_SIZE)
    keys_attended = int(in_block.where(ids >= 0, 0).sum())
    score_flops = 2 * CONFIG.num_index_heads * CONFIG.index_head_dim * keys_scored
    attend_flops = 4 * CONFIG.group_size * CONFIG.head_dim * keys_attended
    rates = (score_flops / select, attend_flops / attend)
    return *(1e-9 * r for r in rates), 1e-9 * (score_flops + attend_flops) / (select + attend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048, help="query tokens (default 2048)")
    parser.add_argument("--context", type=int, default=8192, help="KV length (default 8192)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls (default 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    console = Console()
    console.print(
        f"{platform.processor() or platform.machine()}, {args.threads} threads, "
        f"torch {torch.__version__}: {args.tokens} tokens at {args.context}, "
        f"{CONFIG.num_q_heads} / {CONFIG.num_kv_heads} heads; medians of {args.repeats}"
    )
    table = Table("KV format", "index_select", "attend", "both", "of fp32 matmul")
    for column in table.columns[1:]:
        column.justify = "right"
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=1 + len(FORMATS))
        roof = matmul_gflops(torch.float32, args.repeats)
        others = {d: matmul_gflops(d, args.repeats) for d in (torch.bfloat16, torch.float64)}
        progress.advance(task)
        for kv_format in FORMATS:
            rates = layer_gflops(kv_format, args.tokens, args.context, args.repeats)
            table.add_row(kv_format, *(f"{r:.0f}" for r in rates), f"{rates[2] / roof:.0%}")
            progress.advance(task)
    console.print(table)
    console.print(
        f"GFLOP/s. torch.matmul 2048^3: fp32 {roof:.0f}, "
        + ", ".join(f"{str(d).removeprefix('torch.')} {rate:.0f}" for d, rate in others.items())
    )


if __name__ == "__main__":
    main()
