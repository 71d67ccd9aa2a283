"""Who serves a MiniMax-M3 in which engine, on GPUs that need not be here."""

from __future__ import annotations

import pytest
import torch

import msattn
from msattn.integrations.engines import ENGINES, SGLANG, TRANSFORMERS, VLLM, Answer, Engine, ask

M3 = msattn.MSAConfig()
GPUS = {"A100": (8, 0), "L40S": (8, 9), "H200": (9, 0), "RTX 5090": (12, 0)}


def answer(
    engine: Engine,
    kv_format: str,
    capability: tuple[int, int] | None,
    index_format: str = "bf16",
) -> Answer:
    device = torch.device("cpu" if capability is None else "cuda")
    fmt, index = msattn.KV_FORMATS[kv_format], msattn.KV_FORMATS[index_format]
    return ask(engine, M3, fmt, device=device, index_format=index, capability=capability)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_msattn_serves_every_cache_that_the_engine_has(engine: Engine, gpu: str) -> None:
    for kv_format in engine.kv_dtypes:
        if kv_format != "fp32":
            found = answer(engine, kv_format, GPUS[gpu])
            assert found.served_by in ("msattn, hopper", "msattn, triton") and not found.reasons


@pytest.mark.parametrize(
    ("kv_format", "served_by"),
    [
        ("bf16", "vLLM's own MSA kernels"),
        ("nvfp4", "vLLM's own MSA kernels"),
        ("fp8_e5m2", "vLLM's own Triton kernels"),
        ("fp16", None),
    ],
)
def test_engines_keep_blackwell(kv_format: str, served_by: str | None) -> None:
    found = answer(VLLM, kv_format, (10, 0))
    assert found == (served_by, ["vLLM has MSA kernels of its own for this GPU"])
    served = answer(TRANSFORMERS, kv_format, (10, 0)).served_by
    assert served is not None and served.startswith("msattn")


def test_an_old_gpu() -> None:
    """Engines capture graphs, which cannot hold the reference; transformers does not."""
    found = answer(VLLM, "bf16", (7, 5))
    assert found.served_by == "vLLM's own Triton kernels"
    for stage in ("attend", "index_select"):
        assert (
            f"{stage} by triton: needs compute capability 8.0, the device has 7.5" in found.reasons
        )
    assert answer(VLLM, "nvfp4", (7, 5)).served_by is None
    assert answer(TRANSFORMERS, "nvfp4", (7, 5)).served_by == "msattn, reference"


def test_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert answer(SGLANG, "bf16", None) == (None, ["SGLang runs MiniMax-M3 on GPUs alone"])
    assert answer(TRANSFORMERS, "fp32", None) == ("msattn, reference", [])


def test_a_cache_that_the_engine_does_not_have() -> None:
    (reason,) = answer(SGLANG, "nvfp4", (9, 0)).reasons
    assert reason.startswith("SGLang has no nvfp4 cache for MiniMax-M3 on it (has bf16, fp8_e4m3")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_index_keys_are_asked_about(engine: Engine, gpu: str) -> None:
    for index_format in ("bf16", "fp16", "fp8_e4m3", "fp32"):
        found = answer(engine, "bf16", GPUS[gpu], index_format)
        if index_format in engine.index_formats:
            assert found.served_by is not None and found.served_by.startswith("msattn")
            # No kernel reads fp32: transformers has the reference, engines with graphs have not.
            assert ("reference" in found.served_by) == (index_format == "fp32")
        else:
            (reason,) = found.reasons
            assert found.served_by is None
            assert reason.startswith(f"{engine.name} has no {index_format} index keys (has bf16,")


def test_an_fp16_model_in_vllm() -> None:
    assert VLLM.kv_dtypes["fp16"] == "auto"
    assert answer(VLLM, "fp16", (9, 0)) == ("msattn, hopper", [])
    assert answer(SGLANG, "fp16", (9, 0)).served_by is None
