"""KVFormat: one object per format under all its names, and what a page of it weighs."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from msattn import KV_FORMATS, Batch, IndexCache, KVCache, KVFormat, MSAConfig, Plan, make_plan
from msattn.attend import _check_cache

NAMES = {
    "bf16": ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16],
    "fp16": ["fp16", "float16", "half", "torch.float16", torch.float16, torch.half],
    "fp8_e4m3": [
        "fp8_e4m3",
        "fp8",
        "e4m3",
        "float8_e4m3fn",
        "float8_e4m3",
        "torch.float8_e4m3fn",
        torch.float8_e4m3fn,
    ],
    "fp8_e5m2": ["fp8_e5m2", "e5m2", "float8_e5m2", "torch.float8_e5m2", torch.float8_e5m2],
    "nvfp4": ["nvfp4", "fp4"],
    "fp32": ["fp32", "float32", "float", "torch.float32", torch.float32],
}
SPELLINGS = [(name, spelling) for name, spellings in NAMES.items() for spelling in spellings]

UNSUPPORTED_DTYPES = [
    torch.int8,
    torch.uint8,  # a container of fp8 and NVFP4 bytes, which does not say of which
    torch.int32,
    torch.bool,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
LISTED = "bf16, fp16, fp8_e4m3, fp8_e5m2, nvfp4 or fp32"
LISTED_FOR_INDEX = "bf16, fp16, fp8_e4m3 or fp32"


def test_the_formats() -> None:
    assert set(KV_FORMATS) == set(NAMES)
    assert all(fmt.name == name == str(fmt) for name, fmt in KV_FORMATS.items())


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS, ids=str)
def test_every_spelling_is_the_same_object(name: str, spelling: object) -> None:
    assert KVFormat.parse(spelling) is KV_FORMATS[name]
    if isinstance(spelling, str):
        assert KVFormat.parse(spelling.upper()) is KV_FORMATS[name]
        assert KVFormat.parse(spelling.title()) is KV_FORMATS[name]


def test_no_name_means_two_formats() -> None:
    names = [name for fmt in KV_FORMATS.values() for name in (fmt.name, *fmt.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    assert set(names) == {s for _, s in SPELLINGS if isinstance(s, str) and "torch." not in s}


@pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=str)
def test_a_format_names_itself(fmt: KVFormat) -> None:
    assert KVFormat.parse(fmt) is fmt
    with pytest.raises(FrozenInstanceError):
        fmt.max_value = 1.0


@pytest.mark.parametrize("dtype", UNSUPPORTED_DTYPES, ids=str)
def test_unsupported_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(NotImplementedError) as raised:
        KVFormat.parse(dtype)
    assert str(raised.value) == f"kv_format: expected {LISTED}, got {dtype}"
    with pytest.raises(NotImplementedError) as raised:
        KVFormat.parse(dtype, name="dtype", for_index=True)
    assert str(raised.value) == f"dtype: expected {LISTED_FOR_INDEX}, got {dtype}"


@pytest.mark.parametrize(
    "name",
    ["int8", "auto", "fp8_e4m3fnuz", "float8_e4m3fnuz", "nvfp4_ds_mla", "mxfp4", "", " bf16"],
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError) as raised:
        KVFormat.parse(name)
    assert str(raised.value) == f"kv_format: expected {LISTED}, got {name!r}"


@pytest.mark.parametrize(
    "value", [None, 8, b"bf16", torch.zeros(1)], ids=lambda v: type(v).__name__
)
def test_other_types(value: object) -> None:
    message = f"kv_format: expected a str, torch.dtype or KVFormat, got {type(value).__name__}"
    with pytest.raises(TypeError) as raised:
        KVFormat.parse(value)
    assert str(raised.value) == message


@pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=str)
def test_formats_of_an_index_cache(fmt: KVFormat) -> None:
    if fmt.name in ("fp8_e5m2", "nvfp4"):
        with pytest.raises(NotImplementedError) as raised:
            IndexCache.allocate(1, MSAConfig(), fmt)
        assert str(raised.value) == f"dtype: expected {LISTED_FOR_INDEX}, got {fmt}"
    else:
        assert IndexCache.allocate(1, MSAConfig(), fmt).format is fmt


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "per_head"),
    [
        ("bf16", 65536),
        ("fp16", 65536),
        ("fp8_e4m3", 32768),
        ("fp8_e5m2", 32768),
        ("nvfp4", 18432),
        ("fp32", 131072),
    ],
)
def test_bytes(name: str, per_head: int, kv_heads: int) -> None:
    """The sizes that an engine's memory planner computes for the same pages."""
    config = MSAConfig(16 * kv_heads, kv_heads, kv_heads)
    fmt = KVFormat.parse(name)
    assert fmt.bytes_per_page(config) == per_head * kv_heads
    assert fmt.bytes_per_token(config) == per_head * kv_heads // 128
    pool = KVCache.allocate(3, config, name).tensor
    assert isinstance(pool, torch.Tensor)
    assert pool.untyped_storage().nbytes() == 3 * fmt.bytes_per_page(config)


@pytest.mark.parametrize(
    ("name", "shape"), [("bf16", (4, 128, 256)), ("fp8", (4, 128, 256)), ("nvfp4", (8, 128, 72))]
)
def test_page_shape(name: str, shape: tuple[int, int, int]) -> None:
    assert KVFormat.parse(name).page_shape(MSAConfig()) == shape


@pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=str)
def test_max_value_is_the_largest_number_that_is_read_back(fmt: KVFormat) -> None:
    """E2M1's largest code is 6, and block scales are E4M3."""
    if fmt.scale_group:
        assert fmt.max_value == 6 * torch.finfo(torch.float8_e4m3fn).max
    else:
        assert fmt.max_value == torch.finfo(fmt.storage_dtype).max


@pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=str)
def test_kinds(fmt: KVFormat) -> None:
    assert fmt.is_fp8 == fmt.name.startswith("fp8")
    assert (fmt.scale_group, fmt.slot_scales) == ((16, False) if fmt.name == "nvfp4" else (0, True))


def test_a_compiled_function_meets_a_second_format() -> None:
    """The check alone: to trace a whole stage takes half a minute."""
    torch.compiler.reset()

    def doubled(x: torch.Tensor, cache: KVCache, plan: Plan) -> torch.Tensor:
        _check_cache(cache, plan)
        return 2 * x

    compiled, config = torch.compile(doubled, backend="eager"), MSAConfig(4, 2, 2, topk=4)
    for name in ("bf16", "fp16", "nvfp4"):
        plan = make_plan(Batch.from_lists([1], [1], [[0]]), config, name)
        x = torch.ones(2)
        assert torch.equal(compiled(x, KVCache.allocate(1, config, name), plan), 2 * x)
