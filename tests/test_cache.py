"""KVCache and IndexCache: an engine's pool in any layout, seen and written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from msattn import IndexCache, KVCache, MSAConfig, store_index_k, store_kv

CONFIG = MSAConfig(num_q_heads=4, num_kv_heads=2, num_index_heads=2)
PAGES, HEADS, DIM = 3, 2, 128
PLAIN = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp32"]


class Engine(NamedTuple):
    """A pool as an engine owns it, what it hands to msattn, and where its elements are.

    ``element(page, head, token, side)`` indexes the owner's memory, not the handed-over view.
    """

    memory: torch.Tensor  # all that the engine allocated
    pool: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    element: Callable[[int, int, int, int], torch.Tensor]  # -> [D] view of memory


def halves(side: int) -> slice:
    return slice(side * DIM, (side + 1) * DIM)


def hnd(dtype: torch.dtype) -> Engine:
    memory = torch.zeros(PAGES, HEADS, 128, 2 * DIM, dtype=dtype)
    return Engine(memory, memory, lambda p, h, t, side: memory[p, h, t, halves(side)])


def nhd(dtype: torch.dtype) -> Engine:
    memory = torch.zeros(PAGES, 128, HEADS, 2 * DIM, dtype=dtype)
    pool = memory.transpose(1, 2)
    return Engine(memory, pool, lambda p, h, t, side: memory[p, t, h, halves(side)])


def interleaved_layers(dtype: torch.dtype) -> Engine:
    """Layer 1 of 3, all of whose pages lie between those of the other layers."""
    memory = torch.zeros(PAGES, 3, HEADS, 128, 2 * DIM, dtype=dtype)
    return Engine(memory, memory[:, 1], lambda p, h, t, side: memory[p, 1, h, t, halves(side)])


def slice_of_a_pool(dtype: torch.dtype) -> Engine:
    """Pages 2 to 4 of a larger pool, with some bytes behind each page."""
    memory = torch.zeros(5, HEADS * 128 * 2 * DIM + 64, dtype=dtype)
    pool = memory[2:, :-64].unflatten(1, (HEADS, 128, 2 * DIM))
    page = HEADS, 128, 2 * DIM
    return Engine(
        memory, pool, lambda p, h, t, side: memory[2 + p, :-64].view(page)[h, t, halves(side)]
    )


def keys_then_values(dtype: torch.dtype) -> Engine:
    """One tensor for each side, in one allocation as FlashAttention's backends have it."""
    memory = torch.zeros(2, PAGES, 128, HEADS, DIM, dtype=dtype)
    k, v = memory.transpose(2, 3)
    return Engine(memory, (k, v), lambda p, h, t, side: memory[side, p, t, h])


LAYOUTS = [hnd, nhd, interleaved_layers, slice_of_a_pool, keys_then_values]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


def tensors_of(pool: object) -> tuple[torch.Tensor, ...]:
    return pool if isinstance(pool, tuple) else (pool,)


def same_memory(a: object, b: object) -> bool:
    return all(
        (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())
        for x, y in zip(tensors_of(a), tensors_of(b), strict=True)
    )


@layouts
@pytest.mark.parametrize("name", PLAIN)
def test_engine_and_cache_share_every_element(layout: Callable[..., Engine], name: str) -> None:
    dtype = KVCache.allocate(0, CONFIG, name).format.storage_dtype
    engine = layout(dtype)
    cache = KVCache.from_tensor(engine.pool, CONFIG, name)
    assert same_memory(cache.tensor, engine.pool)
    assert (cache.num_pages, cache.num_kv_heads, cache.head_dim) == (PAGES, HEADS, DIM)

    # The engine writes, msattn reads.
    for number, (page, head, token, side) in enumerate(
        [(0, 0, 0, 0), (2, 1, 127, 1), (1, 0, 64, 1)]
    ):
        engine.element(page, head, token, side).copy_(torch.full((DIM,), number + 1.0))
        assert cache.dequantize()[side][page, head, token].eq(number + 1.0).all()
    assert sum(float(x.sum()) for x in cache.dequantize()) == DIM * (1 + 2 + 3)

    # msattn writes, the engine sees it, and nothing else changed.
    expected = engine.memory.float()
    k, v = torch.randint(-4, 5, (2, 2, HEADS, DIM)).float()
    store_kv(k, v, cache, torch.tensor([130, 2 * 128 + 127]))
    for token, (page, offset) in enumerate([(1, 2), (2, 127)]):
        for head in range(HEADS):
            assert engine.element(page, head, offset, 0).float().equal(k[token, head])
            assert engine.element(page, head, offset, 1).float().equal(v[token, head])
            for side in (0, 1):
                engine.element(page, head, offset, side).zero_()
    engine.element(2, 1, 127, 1).copy_(torch.full((DIM,), 2.0))
    assert engine.memory.float().equal(expected)


@layouts
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_held_as_bytes(layout: Callable[..., Engine], name: str) -> None:
    """Engines allocate uint8 and keep the flavour of fp8 in a string."""
    engine = layout(torch.uint8)
    cache = KVCache.from_tensor(engine.pool, CONFIG, name)
    assert {t.dtype for t in tensors_of(cache.tensor)} == {cache.format.storage_dtype}
    store_kv(*torch.full((2, 1, HEADS, DIM), -1.5), cache, torch.tensor([128 + 5]))
    byte = torch.tensor([-1.5]).to(cache.format.storage_dtype).view(torch.uint8)
    assert engine.element(1, 1, 5, 1).eq(byte).all()
    assert int(engine.memory.count_nonzero()) == 2 * HEADS * DIM


@pytest.mark.parametrize("name", [*PLAIN, "nvfp4"])
def test_allocate(name: str) -> None:
    cache = KVCache.allocate(PAGES, CONFIG, name)
    assert isinstance(cache.tensor, torch.Tensor)
    assert cache.tensor.shape == (PAGES, *cache.format.page_shape(CONFIG))
    assert cache.tensor.dtype == cache.format.storage_dtype
    assert cache.tensor.is_contiguous()
    assert (cache.device.type, cache.k_scale, cache.v_scale) == ("cpu", 1.0, 1.0)
    k, v = cache.dequantize()
    assert k.shape == v.shape == (PAGES, HEADS, 128, DIM)
    assert not k.any() and not v.any()


def test_allocate_defaults_to_bf16() -> None:
    assert KVCache.allocate(1, CONFIG).format.name == "bf16"


@pytest.mark.parametrize("name", [*PLAIN, "nvfp4"])
def test_no_pages(name: str) -> None:
    cache = KVCache.allocate(0, CONFIG, name)
    assert cache.num_pages == 0
    assert cache.dequantize()[0].shape == (0, HEADS, 128, DIM)


def test_dequantize_gives_the_dtype_asked_for() -> None:
    cache = KVCache.allocate(1, CONFIG, "fp8")
    assert [x.dtype for x in cache.dequantize()] == [torch.float32] * 2
    assert [x.dtype for x in cache.dequantize(torch.float64)] == [torch.float64] * 2


def test_sides_of_a_plain_pool() -> None:
    cache = KVCache.allocate(PAGES, CONFIG, "bf16")
    assert cache.k.shape == cache.v.shape == (PAGES, HEADS, 128, DIM)
    assert cache.k.stride() == cache.v.stride() == (HEADS * 32768, 32768, 256, 1)
    assert (cache.k.storage_offset(), cache.v.storage_offset()) == (0, DIM)


class TestNvfp4:
    """Byte addresses of the layout, each written out from its description."""

    SLOT = 9216

    def byte_of_element(self, head: int, side: int, token: int, d: int) -> int:
        return (2 * head + side) * self.SLOT + token * 64 + d // 2

    def byte_of_scale(self, head: int, side: int, token: int, group: int) -> int:
        in_quads = (token // 4) * 32 + group * 4 + token % 4
        return (2 * head + side) * self.SLOT + 8192 + (in_quads if side else token * 8 + group)

    @pytest.fixture(params=["own", "interleaved layers"])
    def engine(self, request: pytest.FixtureRequest) -> tuple[torch.Tensor, KVCache]:
        """A pool as bytes of each page, and the cache over it."""
        layers = 1 if request.param == "own" else 3
        memory = torch.zeros(PAGES, layers, 2 * HEADS, 128, 72, dtype=torch.uint8)
        cache = KVCache.from_tensor(memory[:, -1], CONFIG, "nvfp4")
        return memory[:, -1].flatten(1) if layers == 1 else memory.flatten(2)[:, -1], cache

    def test_sizes(self, engine: tuple[torch.Tensor, KVCache]) -> None:
        pages, cache = engine
        assert pages.shape == (PAGES, 2 * HEADS * self.SLOT)
        assert pages.data_ptr() == cache.tensor.data_ptr()
        views = cache.nvfp4_views()
        assert views.k_codes.shape == views.v_codes.shape == (PAGES, HEADS, 128, 64)
        assert views.k_scales.shape == (PAGES, HEADS, 128, 8)
        assert views.v_scales.shape == (PAGES, HEADS, 32, 8, 4)

    @pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
    def test_views_are_the_bytes(self, engine: tuple[torch.Tensor, KVCache], side: int) -> None:
        pages, cache = engine
        pages.copy_(torch.randint(0, 126, pages.shape, dtype=torch.uint8))  # no NaN scales
        views = cache.nvfp4_views()
        codes = (views.k_codes, views.v_codes)[side]
        scales = (views.k_scales, views.v_scales)[side].view(torch.uint8)
        for page, head, token, group in [(0, 0, 0, 0), (2, 1, 127, 7), (1, 1, 66, 3), (1, 0, 5, 6)]:
            code = pages[page, self.byte_of_element(head, side, token, 16 * group + 6)]
            assert codes[page, head, token, 8 * group + 3] == code
            scale = pages[page, self.byte_of_scale(head, side, token, group)]
            at = (token, group) if side == 0 else (token // 4, group, token % 4)
            assert scales[page, head][at] == scale

    @pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
    def test_reading(self, engine: tuple[torch.Tensor, KVCache], side: int) -> None:
        """E2M1 code 7 is 6, code 10 is -1; E4M3 byte 0x40 is 2."""
        pages, cache = engine
        page, head, token, d = 2, 1, 77, 53
        pages[page, self.byte_of_element(head, side, token, d)] = 0x7A  # odd d: the high nibble
        pages[page, self.byte_of_scale(head, side, token, d // 16)] = 0x40
        expected = torch.zeros(2, PAGES, HEADS, 128, DIM)
        expected[side, page, head, token, d] = 12.0
        expected[side, page, head, token, d - 1] = -2.0
        assert torch.stack(cache.dequantize()).equal(expected)

    @pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
    def test_writing(self, engine: tuple[torch.Tensor, KVCache], side: int) -> None:
        pages, cache = engine
        x = torch.zeros(2, 1, HEADS, DIM)
        x[side, 0, 1, 53] = 12.0  # scale 2, code 7
        store_kv(x[0], x[1], cache, torch.tensor([2 * 128 + 77]))
        assert pages[2, self.byte_of_element(1, side, 77, 53)] == 0x70
        assert pages[2, self.byte_of_scale(1, side, 77, 3)] == 0x40
        # Groups of zeros get the smallest scale, 2^-9.
        assert pages[2, self.byte_of_scale(1, side, 77, 2)] == 0x01
        assert pages[2, self.byte_of_scale(0, 1 - side, 77, 7)] == 0x01
        assert int(pages.count_nonzero()) == 1 + 2 * HEADS * 8


class TestPoolsBeyond32Bits:
    PAGE = 2 * HEADS * 128 * 2 * DIM

    @pytest.mark.parametrize("name", [*PLAIN, "nvfp4"])
    def test_views(self, name: str) -> None:
        """A page stride of 2^40 elements, on a device without memory."""
        shape = KVCache.allocate(0, CONFIG, name).format.page_shape(CONFIG)
        dtype = KVCache.allocate(0, CONFIG, name).format.storage_dtype
        stride, offset = 2**40, 2**33
        memory = torch.empty(PAGES * stride, dtype=dtype, device="meta")
        pool = memory.as_strided(
            (PAGES, *shape), (stride, shape[1] * shape[2], shape[2], 1), offset
        )
        cache = KVCache.from_tensor(pool, CONFIG, name)
        assert cache.tensor.stride() == pool.stride()
        sides = cache.nvfp4_views() if name == "nvfp4" else (cache.k, cache.v)
        assert {side.stride(0) for side in sides} == {stride}
        assert all(side.storage_offset() >= offset for side in sides)

    def test_elements(self) -> None:
        """Two pages 2^31 bytes apart; the memory between them is reserved but never touched."""
        stride = 2**31 + self.PAGE
        memory = torch.empty(stride + self.PAGE, dtype=torch.uint8)
        pool = memory.as_strided((2, HEADS, 128, 2 * DIM), (stride, 32768, 256, 1))
        memory[: self.PAGE].zero_()
        memory[stride:].zero_()
        cache = KVCache.from_tensor(pool, CONFIG, "fp8_e4m3")
        store_kv(*torch.full((2, 1, HEADS, DIM), 1.0), cache, torch.tensor([128 + 127]))
        last = memory[stride + 127 * 256 : stride + 128 * 256]
        assert last.eq(0x38).all(), "1.0 in E4M3"
        assert int(memory[stride:].count_nonzero()) == 2 * HEADS * DIM
        assert int(memory[: self.PAGE].count_nonzero()) == 0
        assert cache.dequantize()[1][1, :, 127].eq(1.0).all()


SCALE_FORMS: dict[str, Callable[[float], float | torch.Tensor]] = {
    "float": float,
    "0-d": torch.tensor,
    "one element": lambda x: torch.tensor([x]),
    "1 x 1 x 1": lambda x: torch.tensor([[[x]]]),
    "one element at an offset": lambda x: torch.tensor([99.0, 99.0, x, 99.0])[2:3],
    "0-d at an offset": lambda x: torch.tensor([99.0, 99.0, x, 99.0])[2],
    "one element of a strided tensor": lambda x: torch.tensor([[99.0, x], [99.0, 99.0]])[:1, 1:],
}


@pytest.mark.parametrize("form", SCALE_FORMS)
@pytest.mark.parametrize("name", [*PLAIN, "nvfp4"])
def test_scales_of_one_number(form: str, name: str) -> None:
    """``stored = x / scale`` and ``x = stored * scale``, each side with its own."""
    k_scale, v_scale = SCALE_FORMS[form](0.5), SCALE_FORMS[form](4.0)
    cache = KVCache.allocate(1, CONFIG, name, k_scale=k_scale, v_scale=v_scale)
    # Powers of two and their 1.5 are exact in every format, in groups with a spread of 6.
    x = torch.tensor([1.0, -2.0, 3.0, 6.0]).repeat(1, HEADS, DIM // 4)
    store_kv(x, x, cache, torch.tensor([9]))
    k, v = cache.dequantize()
    assert k[0, :, 9].equal(x[0]) and v[0, :, 9].equal(x[0])
    unscaled = KVCache.from_tensor(cache.tensor, CONFIG, name)
    k, v = unscaled.dequantize()
    assert k[0, :, 9].equal(x[0] * 2) and v[0, :, 9].equal(x[0] / 4)


def test_an_int_is_a_float() -> None:
    cache = KVCache.allocate(1, CONFIG, k_scale=2)
    assert cache.k_scale == 2.0 and isinstance(cache.k_scale, float)


@pytest.mark.parametrize("form", [form for form in SCALE_FORMS if form != "float"])
def test_a_scale_on_the_device_is_read_when_it_is_used(form: str) -> None:
    """As engines load checkpoints: the cache is made first, the scale is filled in later."""
    scale = SCALE_FORMS[form](1.0)
    assert isinstance(scale, torch.Tensor)
    cache = KVCache.allocate(1, CONFIG, "bf16", k_scale=scale)
    assert isinstance(cache.k_scale, torch.Tensor) and cache.k_scale.dim() == 0
    ones = torch.ones(1, HEADS, DIM)
    scale.fill_(0.25)
    store_kv(ones, ones, cache, torch.tensor([0]))
    k, v = cache.dequantize()
    assert k[0, :, 0].eq(1).all() and v[0, :, 0].eq(1).all()
    scale.fill_(0.5)
    k, v = cache.dequantize()
    assert k[0, :, 0].eq(2).all() and v[0, :, 0].eq(1).all()


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_scales_of_a_head_and_slot(name: str, transposed: bool) -> None:
    scales = 2.0 ** torch.randint(-3, 4, (2, HEADS, PAGES * 128)).float()
    if transposed:
        scales = scales.mT.contiguous().mT
    k_scale, v_scale = scales
    cache = KVCache.allocate(PAGES, CONFIG, name, k_scale=k_scale, v_scale=v_scale)
    assert cache.k_scale is k_scale and cache.v_scale is v_scale
    slots = torch.randperm(PAGES * 128)
    k, v = torch.randint(1, 4, (2, len(slots), HEADS, DIM)).float()
    store_kv(k, v, cache, slots)
    for got, x in zip(cache.dequantize(), (k, v), strict=True):
        assert got.transpose(1, 2).flatten(0, 1)[slots].equal(x)
    # What is stored, slot by slot, is x / scale.
    stored = KVCache.from_tensor(cache.tensor, CONFIG, name).dequantize()
    for got, x, scale in zip(stored, (k, v), scales, strict=True):
        by_slot = got.transpose(1, 2).flatten(0, 1)
        assert by_slot[slots].equal(x / scale[:, slots].T.unsqueeze(-1))


def test_one_side_may_be_scaled_by_slot_and_the_other_by_one_number() -> None:
    per_slot = torch.full((HEADS, 128), 2.0)
    cache = KVCache.allocate(1, CONFIG, "fp8", k_scale=per_slot, v_scale=8.0)
    ones = torch.ones(1, HEADS, DIM)
    store_kv(ones, ones, cache, torch.tensor([3]))
    stored = KVCache.from_tensor(cache.tensor, CONFIG, "fp8").dequantize()
    assert [float(x[0, 0, 3, 0]) for x in stored] == [1 / 2, 1 / 8]


INDEX_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float32: "fp32",
}


class TestIndexCache:
    @pytest.mark.parametrize(("dtype", "name"), INDEX_DTYPES.items(), ids=INDEX_DTYPES.values())
    def test_allocate(self, dtype: torch.dtype, name: str) -> None:
        for given in (dtype, name):
            index = IndexCache.allocate(PAGES, CONFIG, given)
            assert index.tensor.shape == (PAGES, 128, 128)
            assert (index.tensor.dtype, index.format.name) == (dtype, name)
            assert (index.num_pages, index.head_dim, index.device.type) == (PAGES, 128, "cpu")
            assert not index.tensor.float().any()

    def test_allocate_defaults_to_bf16(self) -> None:
        assert IndexCache.allocate(1, CONFIG).tensor.dtype == torch.bfloat16

    def test_width_is_the_index_heads_own(self) -> None:
        config = MSAConfig(4, 2, 2, head_dim=128, index_head_dim=64)
        assert IndexCache.allocate(2, config).tensor.shape == (2, 128, 64)

    @pytest.mark.parametrize("axis", [False, True], ids=["[pages, 128, Di]", "[pages, 1, 128, Di]"])
    @pytest.mark.parametrize("interleaved", [False, True], ids=["own", "interleaved layers"])
    @pytest.mark.parametrize(
        ("dtype", "name", "held_as"),
        [
            *((dtype, name, dtype) for dtype, name in INDEX_DTYPES.items()),
            (torch.float8_e4m3fn, "fp8_e4m3", torch.uint8),
        ],
        ids=[*INDEX_DTYPES.values(), "fp8_e4m3 as bytes"],
    )
    def test_from_tensor(
        self, axis: bool, interleaved: bool, dtype: torch.dtype, name: str, held_as: torch.dtype
    ) -> None:
        memory = torch.zeros(PAGES, 3, 128, 128, dtype=held_as)
        pool = memory[:, 1] if interleaved else memory[:, 1].clone()
        pool = pool.unsqueeze(1) if axis else pool
        index = IndexCache.from_tensor(pool, CONFIG, *([name] if held_as != dtype else []))
        assert index.tensor.shape == (PAGES, 128, 128)
        assert (index.tensor.dtype, index.format.name) == (dtype, name)
        assert index.tensor.data_ptr() == pool.data_ptr()
        assert index.tensor.stride(0) == pool.stride(0)

        key = torch.randint(-4, 5, (1, 128)).float()
        store_index_k(key, index, torch.tensor([2 * 128 + 31]))
        written = pool.view(dtype).reshape(PAGES, 128, 128)
        assert written[2, 31].float().equal(key[0])
        assert int(written.float().count_nonzero()) == int(key.count_nonzero())

    def test_one_page_with_a_head_axis(self) -> None:
        """The head axis is the second one, whatever the number of pages."""
        pool = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16)
        assert IndexCache.from_tensor(pool, CONFIG).tensor.shape == (1, 128, 128)

    def test_large_strides(self) -> None:
        memory = torch.empty(2**42, dtype=torch.bfloat16, device="meta")
        pool = memory.as_strided((2, 128, 128), (2**40, 128, 1), 2**33)
        index = IndexCache.from_tensor(pool, CONFIG)
        assert index.tensor.stride() == (2**40, 128, 1)
        assert index.tensor.storage_offset() == 2**33
