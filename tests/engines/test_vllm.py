"""The plug-in in vLLM: found by its entry point, chosen where it serves, right in every format.

vLLM's real config, metadata and specs, on a CPU; ``MSATTN_IMPL=reference`` stands for the GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.models.minimax_m3.common import indexer as vllm_indexer
from vllm.models.minimax_m3.common import sparse_attention as vllm_attention
from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    get_kv_quant_mode,
)

import msattn
from msattn import env
from msattn.integrations.vllm import attention, indexer, select
from msattn.testing.cases import LAYOUTS, Case
from msattn.testing.compare import assert_attention, assert_same_ids, expected_block_ids
from msattn.testing.make import Inputs, make, make_block_ids

CONFIG = msattn.MSAConfig(4, 2, 2, topk=4, init_blocks=1)
LAYER = "model.layers.3.self_attn.attn"
CPU = torch.device("cpu")

# Name -> query lengths, KV lengths, drafts: decode requests first, as vLLM orders them.
STEPS = {
    "decode": ((1, 1, 1), (900, 1, 129), 0),
    "mixed": ((1, 1, 40, 3), (700, 128, 300, 640), 0),
    "verify": ((4, 4), (700, 131), 3),
    "mixed_verify": ((4, 4, 2, 150), (700, 131, 640, 150), 3),
    "prefill": ((70, 129), (900, 129), 0),
    "padded": ((2, 2, 0, 0), (700, 131, 0, 0), 1),
}
# vLLM's name of the cache's dtype -> ours.
DTYPES = {
    "bfloat16": "bf16",
    "auto": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "nvfp4": "nvfp4",
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name, msattn serves a CPU, too."""
    monkeypatch.setattr(env, "IMPL", "reference")
    monkeypatch.setattr(vllm_indexer, "get_tensor_model_parallel_world_size", lambda: 1)


class Engine:
    """What vLLM holds of one sparse layer: config, builders, impl, indexer, buffers."""

    def __init__(
        self,
        inputs: Inputs,
        monkeypatch: pytest.MonkeyPatch,
        cache_dtype: str = "bfloat16",
        *,
        drafts: int = 0,
        decode_backend: str = "triton",
        index_dtype: str = "bf16",
    ) -> None:
        self.inputs = inputs
        config = inputs.config
        text_config = MiniMaxM3TextConfig(
            num_attention_heads=config.num_q_heads,
            num_key_value_heads=config.num_kv_heads,
            sparse_attention_config={
                "sparse_num_index_heads": config.num_index_heads,
                "sparse_index_dim": config.index_head_dim,
                "sparse_block_size": 128,
                "sparse_topk_blocks": config.topk,
                "sparse_init_block": config.init_blocks,
                "sparse_local_block": config.local_blocks,
            },
        )
        self.config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=max(inputs.case.num_rows, 512)),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=drafts, parallel_drafting=False
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
            model_config=SimpleNamespace(
                hf_config=text_config,
                hf_text_config=text_config,
                dtype=torch.bfloat16,
                max_model_len=2048,
            ),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=128),
            attention_config=SimpleNamespace(
                resolve_indexer_kv_dtype=lambda default: index_dtype, minimax_m3_indexer_cp=False
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        for module in (vllm_indexer, select):
            monkeypatch.setattr(module, "get_current_vllm_config", lambda: self.config)
        self.backend, impl_cls = select.select_main_backend_and_impl_cls(
            topk_blocks=config.topk, kv_cache_dtype=cache_dtype, num_kv_heads=config.num_kv_heads
        )
        self.spec = self.backend.customize_spec(
            FullAttentionSpec(
                block_size=128,
                num_kv_heads=config.num_kv_heads,
                head_size=128,
                head_size_v=128,
                dtype=inputs.cache.format.storage_dtype,
                kv_quant_mode=get_kv_quant_mode(cache_dtype),
            )
        )
        self.builder = self.backend.get_builder_cls()(self.spec, [LAYER], self.config, CPU)
        self.impl = impl_cls(
            config.num_q_heads,
            128,
            128**-0.5,
            config.num_kv_heads,
            kv_cache_dtype=cache_dtype,
            topk_blocks=config.topk,
            sparse_block_size=128,
            msa_decode_backend=decode_backend,
        )
        indexer_cls = select.select_indexer_impl_cls(
            topk_blocks=config.topk, indexer_kv_dtype=index_dtype
        )
        rows = -(-max(inputs.case.num_rows, 512) // 4) * 4
        self.ids = torch.full((rows, config.num_kv_heads, config.topk), -7, dtype=torch.int32)
        self.indexer = indexer_cls(
            num_kv_heads=config.num_kv_heads,
            scale=128**-0.5,
            topk_blocks=config.topk,
            sparse_block_size=128,
            num_index_heads=config.num_index_heads,
            index_head_dim=128,
            prefix=LAYER,
            init_blocks=config.init_blocks,
            local_blocks=config.local_blocks,
            indexer_kv_dtype=index_dtype,
            topk_indices_buffer=self.ids,
        )
        # As the manager binds it: with an axis of one head.
        self.indexer.index_cache.bind_kv_cache(inputs.index.tensor.unsqueeze(1))
        backend = self.indexer.index_cache.get_attn_backend()
        spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
        self.index_builder = backend.get_builder_cls()(
            spec, [f"{LAYER}.index_cache"], self.config, CPU
        )
        self.layer = SimpleNamespace(
            layer_name=LAYER,
            topk_indices_buffer=self.ids,
            _k_scale=_tensor(inputs.cache.k_scale),
            _v_scale=_tensor(inputs.cache.v_scale),
            _q_scale_float=1.0 if inputs.q_scale is None else float(inputs.q_scale),
        )
        self.metadata: dict[str, Any] | None = None
        for module in (attention, indexer):
            monkeypatch.setattr(
                module, "get_forward_context", lambda: SimpleNamespace(attn_metadata=self.metadata)
            )

    def build(self, num_tokens: int | None = None, seq_lens: torch.Tensor | None = None) -> None:
        """The metadata of the step, by both builders."""
        batch, case = self.inputs.batch, self.inputs.case
        lengths = batch.seq_lens if seq_lens is None else seq_lens
        common = CommonAttentionMetadata(
            query_start_loc=batch.cu_seqlens_q,
            query_start_loc_cpu=batch.cu_seqlens_q.cpu(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.cpu(),
            num_reqs=batch.num_requests,
            num_actual_tokens=case.num_tokens if num_tokens is None else num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=5000,  # optimistic, beyond the longest that is admitted
            block_table_tensor=batch.page_table,
            slot_mapping=self.inputs.slot_mapping,
        )
        self.metadata = {
            LAYER: self.builder.build(0, common),
            f"{LAYER}.index_cache": self.index_builder.build(0, common),
        }

    def kv_cache(self) -> torch.Tensor:
        """fp8 comes as bytes."""
        pool = self.inputs.cache.tensor
        assert isinstance(pool, torch.Tensor)
        return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool

    def run(self, fp8_query: bool = False) -> torch.Tensor:
        """As the layer's ``_run_attention``: the indexer, then the attention."""
        self.indexer(self.inputs.index_q.flatten(1))
        query, out = self.inputs.q.flatten(1), self.inputs.new_out().flatten(1)
        bf16 = torch.full_like(out, torch.nan) if fp8_query else query
        returned = self.impl.forward(
            self.layer,
            bf16,
            self.kv_cache(),
            out,
            query_fp8=query if fp8_query else None,
        )
        assert returned is out
        return out.view(self.inputs.q.shape)


def _tensor(scale: object) -> torch.Tensor:
    return scale if isinstance(scale, torch.Tensor) else torch.tensor(scale)


def make_case(name: str) -> tuple[Case, int]:
    query_lens, seq_lens, drafts = STEPS[name]
    return Case(name, query_lens, seq_lens, CONFIG, spare_rows=4), drafts


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_what_the_oracle_says(
    name: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, drafts = make_case(name)
    kv_format = DTYPES[cache_dtype]
    scales = "unit" if kv_format == "bf16" else "0d"
    inputs = make(case, kv_format=kv_format, scales=scales)
    engine = Engine(inputs, monkeypatch, cache_dtype, drafts=drafts)
    engine.build()
    out = engine.run()
    rows = case.num_tokens
    assert_same_ids("ids", engine.ids[:rows], expected_block_ids(inputs)[:rows])
    assert engine.ids[rows:].eq(-7).all()
    assert_attention(inputs, engine.ids[: case.num_rows], out)


@pytest.mark.parametrize("cache_dtype", ["fp8", "nvfp4"])
def test_the_cutlass_alias_takes_an_fp8_query(
    cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, drafts = make_case("mixed_verify")
    inputs = make(
        case,
        kv_format=DTYPES[cache_dtype],
        query_dtype=torch.float8_e4m3fn,
        scales="0d",
        index_format="fp8_e4m3",
    )
    engine = Engine(
        inputs,
        monkeypatch,
        cache_dtype,
        drafts=drafts,
        decode_backend="cutlass",
        index_dtype="fp8",
    )
    assert engine.impl.use_cutlass_decode
    engine.build()
    assert engine.impl.should_use_msa_decode(LAYER)
    out = engine.run(fp8_query=True)
    assert_attention(inputs, engine.ids[: case.num_rows], out)


@pytest.mark.parametrize(
    ("cache_dtype", "decode_backend"), [("fp8", "triton"), ("bfloat16", "cutlass")]
)
def test_else_the_query_is_the_model_s(
    cache_dtype: str, decode_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make(make_case("decode")[0], kv_format=DTYPES[cache_dtype])
    engine = Engine(inputs, monkeypatch, cache_dtype, decode_backend=decode_backend)
    engine.build()
    assert not engine.impl.use_cutlass_decode and not engine.impl.should_use_msa_decode(LAYER)


@pytest.mark.parametrize("layout", ["dense", "nhd", "layers"])
def test_a_pool_is_read_as_vllm_lays_it_out(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(make_case("mixed")[0], layout=LAYOUTS[layout])
    engine = Engine(inputs, monkeypatch)
    engine.build()
    assert_attention(inputs, engine.ids[: inputs.case.num_rows], engine.run())


def test_a_padded_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of two tokens in a graph of four: the padding's rows are zeros."""
    case = Case("padded", (2, 2, 0, 0), (700, 131, 0, 0), CONFIG, spare_rows=4)
    inputs = make(case)
    engine = Engine(inputs, monkeypatch, drafts=1)
    engine.build(num_tokens=8)
    metadata = engine.metadata[LAYER]
    assert isinstance(metadata, vllm_attention.MiniMaxM3SparseMetadata)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (4, 8, 0)
    out = engine.run()
    assert_attention(inputs, engine.ids[:8], out)
    assert out[4:8].eq(0).all() and engine.ids[4:8].eq(-1).all()


def test_a_graph_finds_the_next_step_where_the_last_one_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = make(make_case("verify")[0])
    engine = Engine(inputs, monkeypatch, drafts=3)
    engine.build()
    first = engine.metadata[LAYER].step.decode.planned
    addresses = [x.data_ptr() for x in first.plan.tensors]
    engine.build(seq_lens=inputs.batch.seq_lens - 1)
    step = engine.metadata[LAYER].step
    assert step.decode.planned is first
    assert [x.data_ptr() for x in first.plan.tensors] == addresses
    assert first.plan.seq_lens.tolist() == [699, 130]
    assert first.plan.max_seq_len == min(2048, inputs.batch.page_table.shape[1] * 128)


def test_a_draft_s_next_token_updates_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's drafter moves lengths on the device and calls nothing but this."""
    inputs = make(make_case("decode")[0])
    engine = Engine(inputs, monkeypatch)
    lengths = inputs.batch.seq_lens - 1
    engine.build(seq_lens=lengths)
    lengths += 1
    for builder, name in (
        (engine.builder, LAYER),
        (engine.index_builder, f"{LAYER}.index_cache"),
    ):
        assert builder.supports_draft_decode_metadata_update
        builder.update_draft_decode_metadata(engine.metadata[name])
    assert_attention(inputs, engine.ids[: inputs.case.num_rows], engine.run())


def test_a_run_that_measures_memory_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(make_case("mixed")[0])
    engine = Engine(inputs, monkeypatch)
    assert engine.indexer(inputs.index_q.flatten(1)) == (None, None)
    out = inputs.new_out().flatten(1)
    before = out.clone()
    assert engine.impl.forward(engine.layer, inputs.q.flatten(1), engine.kv_cache(), out) is out
    assert torch.equal(out.view(torch.uint8), before.view(torch.uint8))
    assert not engine.impl.should_use_msa_decode(LAYER)


def test_the_indexer_returns_head_major_views(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(make_case("mixed")[0])
    engine = Engine(inputs, monkeypatch)
    engine.build()
    decode, prefill = engine.indexer(inputs.index_q.flatten(1))
    assert decode.shape == (2, 2, 4) and prefill.shape == (2, 43, 4)
    assert decode.data_ptr() == engine.ids.data_ptr()
    # A draft's layers get the target's ids after they were made.
    engine.indexer.topk_indices_buffer = other = torch.zeros_like(engine.ids)
    engine.indexer(inputs.index_q.flatten(1))
    assert torch.equal(other[:45], engine.ids[:45])
    engine.indexer.topk_indices_buffer = None
    decode, _ = engine.indexer(inputs.index_q.flatten(1))
    assert torch.equal(decode.transpose(0, 1), engine.ids[:2])


def test_the_lse_joins_shards_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode context parallelism: pages of other ranks are unmapped; vLLM's own combine."""
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine

    inputs = make(make_case("decode")[0])
    ids = make_block_ids(inputs, hostile=False)
    table = inputs.batch.page_table.clone()
    outs, lses = [], []
    for rank in range(2):
        engine = Engine(inputs, monkeypatch)
        engine.ids[: len(ids)] = ids
        engine.impl.need_to_return_lse_for_decode = True
        mine = torch.arange(table.shape[1]) % 2 == rank
        inputs.batch.page_table.copy_(torch.where(mine, table, -1))
        engine.build()
        out = inputs.new_out().flatten(1)
        returned, lse = engine.impl.forward(
            engine.layer, inputs.q.flatten(1), engine.kv_cache(), out
        )
        assert returned is out and engine.impl.lse_base_on_e
        outs.append(out[:3].view(3, 4, 128))
        lses.append(lse)
    inputs.batch.page_table.copy_(table)
    joined = _lse_weighted_combine(torch.stack(outs).float(), torch.stack(lses))
    whole = inputs.new_out()
    whole[:3] = joined
    assert_attention(inputs, ids, whole)


def test_specs_and_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {}
    for cache_dtype in ("bfloat16", "fp8", "nvfp4"):
        inputs = make(make_case("decode")[0], kv_format=DTYPES[cache_dtype])
        engine = Engine(inputs, monkeypatch, cache_dtype)
        pages[cache_dtype] = engine.spec.page_size_bytes
        assert engine.spec.page_size_bytes == inputs.cache.format.bytes_per_page(CONFIG)
        assert engine.backend.get_name() == "MINIMAX_M3_SPARSE"
        assert engine.backend.get_impl_cls() is type(engine.impl)
        assert engine.builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
        if cache_dtype == "nvfp4":
            assert engine.backend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
            assert (engine.spec.num_head_slots, engine.spec.state_content_bytes) == (4, 72)
    assert pages == {"bfloat16": 131072, "fp8": 65536, "nvfp4": 36864}


def test_aliases_differ_in_their_names() -> None:
    names = [
        backend.get_name()
        for backend in (
            attention.MiniMaxM3SparseMSABackend,
            attention.MiniMaxM3SparseMSANvfp4Backend,
            attention.MiniMaxM3SparseCutlassBackend,
            attention.MiniMaxM3SparseTritonBackend,
        )
    ]
    assert names == ["MINIMAX_M3_SPARSE", "MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA"]
    assert indexer.MiniMaxM3IndexerMSABackend.get_name() == "MINIMAX_M3_SPARSE_INDEXER"
    assert indexer.MiniMaxM3IndexerMSABackend.get_impl_cls() is indexer.MiniMaxM3IndexerMSAImpl


def test_the_documented_names_exist() -> None:
    document = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    for part, module in (("Sparse", attention), ("Indexer", indexer)):
        found = set(re.findall(rf"`(MiniMaxM3{part}\w+)", document))
        assert len(found) > 6
        for name in found - {f"MiniMaxM3{part}"}:
            assert isinstance(getattr(module, name), type)


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_hopper_gpu_is_ours(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, impl = choose(monkeypatch, "auto", (9, 0), cache_dtype)
    assert issubclass(impl, attention.MiniMaxM3SparseMSABaseImpl)
    nvfp4 = issubclass(backend, attention.MiniMaxM3SparseMSANvfp4Backend)
    assert nvfp4 == (cache_dtype == "nvfp4")


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e5m2"])
def test_vllm_keeps_blackwell(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, impl = choose(monkeypatch, "auto", (10, 0), cache_dtype)
    assert not issubclass(impl, attention.MiniMaxM3SparseMSABaseImpl)
    reasons = select.why_not(topk_blocks=16, num_kv_heads=4)
    assert reasons == ["vLLM has MSA kernels of its own for this GPU"]


def test_what_msattn_does_not_know_is_vllm_s_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="only the 'nvfp4' NVFP4 KV"):
        choose(monkeypatch, "auto", (9, 0), "nvfp4_fp8")
    Engine(make(make_case("decode")[0]), monkeypatch)
    with pytest.raises(NotImplementedError, match="mxfp4"):
        select.select_indexer_impl_cls(topk_blocks=16, indexer_kv_dtype="mxfp4")


def test_an_indexer_shared_by_ranks_is_vllm_s_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make(make_case("decode")[0]), monkeypatch)
    engine.config.attention_config.minimax_m3_indexer_cp = True
    with pytest.raises(ValueError, match="minimax_m3_indexer_cp requires ROCm"):
        select.select_indexer_impl_cls(topk_blocks=16)


def test_without_a_gpu_vllm_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "IMPL", "auto")
    (reason,) = select.why_not(topk_blocks=16, num_kv_heads=4)
    assert "msattn serves CUDA GPUs" in reason


def choose(
    monkeypatch: pytest.MonkeyPatch, impl: str, capability: tuple[int, int], cache_dtype: str
) -> tuple[type[Any], type[Any]]:
    """The classes on a GPU that is not here."""
    monkeypatch.setattr(env, "IMPL", impl)
    for name, answer in {
        "is_cuda": True,
        "is_device_capability_family": capability[0] * 10,
    }.items():
        monkeypatch.setattr(
            type(select.current_platform),
            name,
            (lambda self, family, answer=answer: family == answer)
            if name.endswith("family")
            else (lambda self, answer=answer: answer),
        )
    for kernels in ("triton", "hopper"):
        name = f"msattn.kernels.{kernels}.support.capability"
        monkeypatch.setattr(name, lambda device: capability)
    return select.select_main_backend_and_impl_cls(
        topk_blocks=16, kv_cache_dtype=cache_dtype, num_kv_heads=4
    )


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FOUND = """
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
from vllm import ModelRegistry
model = ModelRegistry.models["MiniMaxM3SparseForCausalLM"]
print(getattr(model, "module_name", model))
"""


def test_vllm_finds_the_plug_in() -> None:
    assert "msattn.integrations.vllm.model" in run(FOUND).splitlines()[-1]


def test_the_plug_in_is_switched_off() -> None:
    assert "msattn" not in run(FOUND, MSATTN_VLLM="0").splitlines()[-1]


def test_the_model_s_selectors_are_replaced_under_both_names() -> None:
    code = """
import msattn.integrations.vllm.model as ours
from msattn.integrations.vllm import select
from vllm.models.minimax_m3.common import indexer, sparse_attention
from vllm.models.minimax_m3.nvidia import model
print(sparse_attention.select_main_backend_and_impl_cls
      is model.select_main_backend_and_impl_cls
      is select.select_main_backend_and_impl_cls,
      indexer.select_indexer_impl_cls is select.select_indexer_impl_cls,
      ours.MiniMaxM3SparseForCausalLM is model.MiniMaxM3SparseForCausalLM)
"""
    assert run(code).splitlines()[-1] == "True True True"
