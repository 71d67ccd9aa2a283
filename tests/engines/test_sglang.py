"""The plug-in in SGLang: found by its entry point, its hooks reached by SGLang's own backend.

SGLang's real plug-in loader, pool and backend, on a CPU; ``MSATTN_IMPL=reference`` stands for the
GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seams import parameters
from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxSparseAttnBackend
from sglang.srt.layers.attention.minimax_sparse_ops import minimax_sparse
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins, load_plugins_by_group
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_calls import FUNCTIONS, request_table

from msattn import env
from msattn.integrations.sglang import call, plugin, register, step
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import assert_attention, expected_block_ids
from msattn.testing.make import Inputs, as_bytes, make

CONFIG = make_config(group=4, kv_heads=2, topk=4, init_blocks=1)
LAYERS = (1, 2)  # layer 0 is dense

# Name -> mode, query lengths, KV lengths.
STEPS = {
    "prefill": (ForwardMode.EXTEND, (1, 127, 128, 129), (1, 127, 128, 129)),
    "chunks": (ForwardMode.EXTEND, (72, 128, 1, 2), (200, 640, 900, 131)),
    "mixed": (ForwardMode.MIXED, (130, 1, 1, 1), (700, 129, 1, 640)),
    "verify": (ForwardMode.EXTEND, (4, 4, 4), (131, 900, 4)),
    "padded_prefill": (ForwardMode.EXTEND, (60, 0, 0), (900, 0, 0)),
    "decode": (ForwardMode.DECODE, (1,) * 9, (1, 127, 128, 129, 256, 257, 512, 513, 900)),
    "padded_decode": (ForwardMode.DECODE, (1, 1, 1, 1), (700, 0, 1, 0)),
}
DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """As a process of SGLang begins."""
    load_plugins()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name, msattn serves a CPU, too."""
    monkeypatch.setattr(env, "IMPL", "reference")
    monkeypatch.setattr(plugin, "PLANS", step.Plans())
    plugin._log.cache_clear()


class Engine:
    """SGLang's backend and pool of two sparse layers, set up as its model runner would."""

    def __init__(self, x: Inputs, kv_dtype: torch.dtype, **changes: Any) -> None:
        config = x.config
        self.pool = MiniMaxSparseKVPool(
            size=(len(x.owned) - 1) * 128,  # it adds a page for padding
            page_size=128,
            dtype=kv_dtype,
            index_dtype=torch.bfloat16,
            head_num=config.num_kv_heads,
            head_dim=config.head_dim,
            idx_head_dim=config.index_head_dim,
            dense_layer_ids=[0],
            sparse_layer_ids=list(LAYERS),
            disable_value_sparse_layer_ids=list(LAYERS),
            device="cpu",
            start_layer=0,
            end_layer=3,
        )
        self.backend = MiniMaxSparseAttnBackend.__new__(MiniMaxSparseAttnBackend)
        self.table, self.requests = request_table(x, seed=1)
        settings = {
            "is_npu": False,
            "is_hip": False,
            "kv_pool": self.pool,
            "req_to_token": self.table,
            "disable_value_layer_ids": set(LAYERS),
            "sparse_layer_ids": list(LAYERS),
            "score_type": "max",
            "block_size_q": 1,
            "block_size_k": 128,
            "page_size": 128,
            "topk_blocks": config.topk,
            "init_blocks": config.init_blocks,
            "local_blocks": config.local_blocks,
            "use_msa": False,
            "fp8_attn_gemm": False,
            "use_dense_sparse_decode": False,
            "index_cache_enabled": False,
            "hisparse_coordinator": None,
            "indexer_cp": None,
            "speculative_num_draft_tokens": None,
            "_loc_mapping": None,
            "_use_msa_decode": False,
            "_msa_dec_meta": None,
            "_prefill_seqblock_meta": None,
            "_decode_topk_buf": {},
        }
        for name, value in (settings | changes).items():
            setattr(self.backend, name, value)

    def forward(self, mode: ForwardMode, x: Inputs, **scales: float) -> torch.Tensor:
        """Both layers on the same numbers; the second one's output. The pools are left in ``x``."""
        queries = x.batch.cu_seqlens_q.diff()
        batch = SimpleNamespace(
            forward_mode=mode,
            out_cache_loc=x.slot_mapping,
            req_pool_indices=self.requests,
            seq_lens=x.batch.seq_lens.long(),
            seq_lens_cpu=x.batch.seq_lens.long(),
            extend_seq_lens=queries,
            extend_seq_lens_cpu=queries.tolist(),
            extend_prefix_lens=x.batch.seq_lens - queries,
            minimax_m3_precached_sparse_layers=None,
        )
        self.backend._max_seqlen_q = max(1, int(queries.max()))
        self.backend._max_seqlen_k = int(x.batch.seq_lens.max())
        for layer_id in LAYERS:
            self.load(layer_id, x)
            layer = self.layer(layer_id, **scales)
            arguments = {"idx_q": x.index_q, "idx_k": x.index_k.unsqueeze(1), "idx_v": None}
            # It divides keys by their scale in place.
            index_out, out = self.backend.forward(
                x.q, x.k.clone(), x.v.clone(), layer, batch, **arguments
            )
            assert index_out is None
        self.unload(LAYERS[-1], x)
        assert out.is_contiguous()
        return out.view(x.q.shape)

    def layer(self, layer_id: int, **scales: float) -> SimpleNamespace:
        names = ("q_scale", "k_scale", "v_scale", "idx_q_scale", "idx_k_scale", "idx_v_scale")
        return SimpleNamespace(
            layer_id=layer_id, **{f"{name}_float": scales.get(name) for name in names}
        )

    def pools(self, layer_id: int, x: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """SGLang's memory and that of ``x``, of the same shapes."""
        k, v = self.pool.get_kv_buffer(layer_id)
        mine = k, v, self.pool.get_index_k_buffer(layer_id)
        theirs = x.cache.k, x.cache.v, x.index.tensor.unsqueeze(1)
        return [
            (as_bytes(a).unflatten(0, (-1, 128)).transpose(1, 2), as_bytes(b))
            for a, b in zip(mine, theirs, strict=True)
        ]

    def load(self, layer_id: int, x: Inputs) -> None:
        for mine, theirs in self.pools(layer_id, x):
            mine.copy_(theirs)

    def unload(self, layer_id: int, x: Inputs) -> None:
        for mine, theirs in self.pools(layer_id, x):
            theirs.copy_(mine)


def make_step(name: str, kv_format: str, *, scales: Any = "unit", seed: int = 0) -> Inputs:
    """A step whose own keys are not stored yet."""
    _, queries, lengths = STEPS[name]
    case = Case(name, queries, lengths, CONFIG)
    x = make(case, seed=seed, kv_format=kv_format, scales=scales, layout=LAYOUTS["pair"])
    x.forget_step()
    # SGLang's padding is stored in page 0, which serves no request.
    x.slot_mapping[x.slot_mapping < 0] = unowned_slot(x)
    return x


def unowned_slot(x: Inputs) -> int:
    return int((~x.owned.any(1)).nonzero()[0]) * 128


# How SGLang finds it.


def test_the_loader_finds_the_plugin() -> None:
    function, distribution = load_plugins_by_group(GENERAL_PLUGINS_GROUP)["msattn"]
    assert (function, distribution) == (register, "msattn")


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_functions_are_wrapped(kind: str) -> None:
    target = f"{plugin.TARGET}.minimax_sparse_{kind}"
    assert target in HookRegistry._patched
    (hook,) = HookRegistry._hooks[target]
    assert hook[1] is getattr(plugin, f"around_{kind}") and hook[2].plugin_name == "msattn"
    wrapped = getattr(minimax_sparse, f"minimax_sparse_{kind}")
    assert wrapped.__wrapped__.__module__ == plugin.TARGET
    # Whose parameters the tests without SGLang have.
    mine = parameters(f"sglang_calls:minimax_sparse_{kind}")
    assert parameters(f"{plugin.TARGET}:minimax_sparse_{kind}") == mine


def test_registering_again_changes_nothing() -> None:
    register()
    HookRegistry.apply_hooks()
    assert sum(len(hooks) for hooks in HookRegistry._hooks.values()) == 2


SWITCH = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.minimax_sparse_ops import minimax_sparse as m
print([hasattr(f, "__wrapped__") for f in (m.minimax_sparse_prefill, m.minimax_sparse_decode)])
"""


@pytest.mark.parametrize("variables", [{"MSATTN_SGLANG": "0"}, {"SGLANG_PLUGINS": "another"}])
def test_switched_off(variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWITCH],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | variables,
    )
    assert done.stdout.split("\n")[-2] == "[False, False]", done.stderr


# What its backend gets.


@pytest.mark.parametrize("kv_format", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, kv_format: str, seed: int) -> None:
    x = make_step(name, kv_format, seed=seed)
    out = Engine(x, DTYPES[kv_format]).forward(STEPS[name][0], x)
    assert_attention(x, expected_block_ids(x), out)
    assert len(plugin.PLANS) == 1


@pytest.mark.parametrize("name", ["chunks", "decode"])
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_scales(name: str, kv_format: str, seed: int) -> None:
    """SGLang divides by them when it stores; an index key in bf16 it leaves as it is."""
    x = make_step(name, kv_format, scales="float", seed=seed)
    scales = {"k_scale": x.cache.k_scale, "v_scale": x.cache.v_scale, "idx_k_scale": 0.5}
    out = Engine(x, DTYPES[kv_format]).forward(STEPS[name][0], x, **scales)
    assert_attention(x, expected_block_ids(x), out)


@pytest.mark.parametrize("name", ["chunks", "decode"])
def test_fp8_queries(name: str, seed: int) -> None:
    """SGLang casts queries to E4M3 in one of its modes."""
    x = make_step(name, "fp8_e4m3", seed=seed)
    # Numbers that the cast leaves as they are.
    x.q.copy_(x.q.to(torch.float8_e4m3fn))
    engine = Engine(x, torch.float8_e4m3fn, fp8_attn_gemm=True)
    out = engine.forward(STEPS[name][0], x)
    assert out.dtype == torch.bfloat16
    assert_attention(x, expected_block_ids(x), out)


def test_rows_that_dp_attention_adds(seed: int) -> None:
    """SGLang cuts them off before the call."""
    x = make_step("chunks", "bf16", seed=seed)
    engine = Engine(x, torch.bfloat16)
    q, index_q = x.q, x.index_q
    object.__setattr__(x, "q", torch.cat([q, q[:3]]))
    object.__setattr__(x, "index_q", torch.cat([index_q, index_q[:3]]))
    out = engine.forward(ForwardMode.EXTEND, x)
    object.__setattr__(x, "q", q)
    object.__setattr__(x, "index_q", index_q)
    assert bool((out[len(q) :] == 0).all())
    assert_attention(x, expected_block_ids(x), out[: len(q)])


def test_left_to_sglang(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where msattn has a reason, its own function is called: it would launch Triton kernels."""
    monkeypatch.setattr(env, "IMPL", "auto")
    x = make_step("decode", "bf16", seed=seed)
    engine = Engine(x, torch.bfloat16)
    calls = []

    def flash_decode_with_topk_idx(**arguments: Any) -> Any:
        calls.append(arguments)
        raise NotImplementedError("a kernel of SGLang's")

    monkeypatch.setattr(minimax_sparse, "flash_decode_with_topk_idx", flash_decode_with_topk_idx)
    with pytest.raises(NotImplementedError, match="a kernel of SGLang's"):
        engine.forward(ForwardMode.DECODE, x)
    assert calls[0]["req_to_token"] is engine.table


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_msa": True}, "use_msa: SGLang has MSA kernels of its own for this GPU"),
        ({"score_type": "lse"}, "score_type: a block's score is the maximum over its keys"),
        ({"page_size": 64}, "page_size: expected a multiple of 128, got 64"),
        ({"_loc_mapping": torch.zeros(1)}, "loc_mapping: HiSparse moves what req_to_token names"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_why_not(
    changes: dict[str, Any], reason: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SGLang's backend passes on in its other modes."""
    x = make_step("chunks", "bf16", seed=seed)
    reasons: list[str] = []

    def read(kind: call.Kind, arguments: call.Arguments) -> Any:
        reasons.extend(call.why_not(kind, arguments))
        raise InterruptedError

    monkeypatch.setattr(plugin, "read", read)
    with pytest.raises(InterruptedError):
        Engine(x, torch.bfloat16, **changes).forward(ForwardMode.EXTEND, x)
    assert reasons == [reason]


def test_one_of_four_ranks() -> None:
    """The heads that SGLang gives it: 16 for queries over one for keys."""
    x = make(CASES["m3_tp4_mixed"], layout=LAYOUTS["pair"])
    x.forget_step()
    out = Engine(x, torch.bfloat16).forward(ForwardMode.EXTEND, x)
    assert_attention(x, expected_block_ids(x), out)
