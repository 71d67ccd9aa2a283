"""Which backend serves a model, a cache and a GPU, and the reasons where none does."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import msattn
from msattn import env
from msattn.serving import (
    BACKENDS,
    SPARSE_MSA,
    SPARSE_MSA_NVFP4,
    TENSOR_CORE_MSA,
    TRITON_MSA,
    Request,
    is_nvfp4,
    parse_index_dtype,
    parse_kv_dtype,
    select_backend,
    why_not,
)

M3 = msattn.MSAConfig()
CUDA = torch.device("cuda")
GPUS = {"A100": (8, 0), "L40S": (8, 9), "H200": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
SHARES = ((64, 4), (32, 2), (16, 1), (8, 1), (4, 1))
KV_DTYPES = ("auto", "bfloat16", "float16", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_serves_every_cache(gpu: str, kv_dtype: str) -> None:
    """For every share of M3's heads, and every number of blocks that the original selects."""
    for (heads, kv_heads), topk in product(SHARES, (4, 8, 16, 32)):
        config = msattn.MSAConfig(heads, kv_heads, kv_heads, topk=topk)
        request = Request(config, kv_dtype, CUDA, capability=GPUS[gpu])
        chosen = select_backend(request)
        assert chosen.backend is (SPARSE_MSA_NVFP4 if kv_dtype == "nvfp4" else SPARSE_MSA)
        assert chosen.implementations["attend"] in ("hopper", "triton")
        assert select_backend(request, decode="triton").backend is TRITON_MSA


def test_a_cpu_has_the_reference_for_both_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = Request(M3, "nvfp4", torch.device("cpu"))
    assert set(select_backend(request).implementations.values()) == {"reference"}
    assert why_not(TRITON_MSA, request) == []
    chosen = select_backend(request, decode="triton")
    assert chosen.backend is TRITON_MSA
    assert set(chosen.implementations.values()) == {"reference"}


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        (SPARSE_MSA, {"kv_dtype": "nvfp4"}, "kv_dtype=nvfp4; MINIMAX_M3_SPARSE has auto,"),
        (SPARSE_MSA_NVFP4, {}, "kv_dtype=auto; MINIMAX_M3_SPARSE_NVFP4 has nvfp4"),
        (SPARSE_MSA_NVFP4, {"kv_dtype": "nvfp4", "layout": "NHD"}, "layout=NHD; .* has HND"),
        (TENSOR_CORE_MSA, {"kv_dtype": "nvfp4", "layout": "NHD"}, "layout=NHD; .* has HND"),
        (SPARSE_MSA, {"model_dtype": torch.float32}, "model_dtype=torch.float32; .* has torch.bf"),
        (SPARSE_MSA, {"config": replace(M3, head_dim=64)}, "head_dim=64; .* has 128"),
        (SPARSE_MSA, {"config": replace(M3, index_head_dim=64)}, "index_head_dim=64; .* has 128"),
    ],
)
def test_reasons(backend: msattn.serving.Backend, changes: dict[str, object], reason: str) -> None:
    request = replace(Request(M3, "auto", torch.device("cpu")), **changes)  # type: ignore[arg-type]
    (got,) = why_not(backend, request)
    assert re.match(reason, got)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs cannot hold the reference: it serves a GPU only where it is asked for by name."""
    request = Request(M3, "auto", CUDA, capability=(7, 5))
    for decode in ("tensor_core", "triton"):
        with pytest.raises(NotImplementedError, match="needs compute capability"):
            select_backend(request, decode=decode)
    monkeypatch.setattr(env, "IMPL", "reference")
    assert set(select_backend(request).implementations.values()) == {"reference"}


def test_page_sizes() -> None:
    """vLLM's customize_spec: two slots of 72 bytes for each KV head."""
    nvfp4, bf16 = msattn.KV_FORMATS["nvfp4"], msattn.KV_FORMATS["bf16"]
    assert SPARSE_MSA_NVFP4.page_slots(M3, nvfp4) == (8, 72)
    assert SPARSE_MSA.page_slots(M3, bf16) == (4, 512)
    assert SPARSE_MSA.page_slots(M3, msattn.KV_FORMATS["fp8_e5m2"]) == (4, 256)


@pytest.mark.parametrize(
    ("name", "model_dtype", "expected"),
    [
        ("auto", torch.bfloat16, "bf16"),
        ("auto", torch.float16, "fp16"),
        ("bfloat16", torch.float16, "bf16"),
        ("bf16", torch.float16, "bf16"),
        ("fp16", torch.bfloat16, "fp16"),
        ("fp8", torch.bfloat16, "fp8_e4m3"),
        ("fp8_e5m2", torch.bfloat16, "fp8_e5m2"),
        ("nvfp4", torch.bfloat16, "nvfp4"),
    ],
)
def test_cache_dtypes(name: str, model_dtype: torch.dtype, expected: str) -> None:
    assert parse_kv_dtype(name, model_dtype).name == expected
    assert is_nvfp4(name) == (expected == "nvfp4")


@pytest.mark.parametrize("name", ["nvfp4_per_token", "nvfp4_ds_mla", "int8", ""])
def test_other_cache_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"kv_dtype: expected auto, .* or nvfp4, got '{name}'"):
        parse_kv_dtype(name)
    assert is_nvfp4(name) == (name == "nvfp4_per_token")


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_e5m2"])
def test_other_index_dtypes_are_refused(name: str) -> None:
    assert parse_index_dtype("fp8").name == "fp8_e4m3"
    with pytest.raises(NotImplementedError, match=f"index_dtype: expected bf16, .* got '{name}'"):
        parse_index_dtype(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "device: expected torch.device, got str"),
        ({"capability": 9}, r"capability: expected a pair of ints, as \(9, 0\), got 9"),
        ({"capability": (9, "0")}, "capability: expected an int, got str '0'"),
        ({"model_dtype": "bf16"}, "model_dtype: expected torch.dtype, got str"),
        ({"kv_dtype": torch.bfloat16}, "kv_dtype: expected a str, got dtype"),
        ({"index_dtype": None}, "index_dtype: expected a str, got NoneType"),
        ({"config": None}, "config: expected msattn.MSAConfig, got NoneType"),
    ],
)
def test_wrong_types(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        replace(Request(M3, "auto", CUDA), **changes)


def test_wrong_words() -> None:
    with pytest.raises(ValueError, match="decode: expected tensor_core or triton, got 'cutlass'"):
        select_backend(Request(M3, "auto", CUDA), decode="cutlass")
    with pytest.raises(ValueError, match="layout: expected HND or NHD, got 'LBHNC'"):
        Request(M3, "auto", CUDA, layout="LBHNC")
    assert len({backend.name for backend in BACKENDS}) == 4
