"""The compact copy of index keys: what it promises, when it is written, and that it moves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import msattn
from msattn.reference.quantize import compact_encode, rotate
from msattn.testing.cases import Case, make_config
from msattn.testing.compare import assert_same_ids, expected_block_ids
from msattn.testing.index_keys import KINDS
from msattn.testing.make import make, make_index_cache

CONFIG = make_config(1, 2, topk=4)
PAGES = 3
DTYPES = (torch.bfloat16, torch.float16)


def error_and_bound(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 norm of each rotated key's error, and the bound on it."""
    codes, factors = compact_encode(keys)
    scale, bound = factors.double().unbind(-1)
    read = scale[..., None] * codes.double()
    return torch.linalg.vector_norm(rotate(keys.double()) - read, dim=-1), bound


@pytest.mark.parametrize("dim", msattn.cache.COMPACT_DIMS)
def test_the_rotation_is_one(dim: int) -> None:
    matrix = rotate(torch.eye(dim))
    assert (matrix.abs() == 1).all()
    assert torch.equal(matrix @ matrix.T, dim * torch.eye(dim))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e-3, 1.0, 1e3, 1e5])
@pytest.mark.parametrize("dim", msattn.cache.COMPACT_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_within_the_bound(kind: str, dim: int, magnitude: float) -> None:
    """Of any query: the worst is the one along the error, and reaches its norm."""
    keys, _ = KINDS[kind](1000, 4, dim, torch.Generator().manual_seed(0))
    keys = (keys / keys.abs().max() * magnitude).bfloat16()
    error, bound = error_and_bound(keys)
    norm = dim**0.5 * torch.linalg.vector_norm(keys.double(), dim=-1)
    slack = msattn.CompactKeys.rounding(dim) * norm
    assert (error + slack <= bound).all()
    if 1e-3 <= magnitude <= 1e3 and kind == "random":
        assert (bound < 0.02 * norm).all(), "8 bits are better than that"


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=16, max_size=16))
def test_the_error_of_any_key_is_within_the_bound(bits: list[int]) -> None:
    numbers = torch.tensor([bits], dtype=torch.int16).view(torch.float16)
    numbers = torch.cat([numbers, numbers.flip(-1)], -1)
    error, bound = error_and_bound(numbers.where(numbers.isfinite(), 0.0))
    assert (error <= bound).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e7, 3e38])
def test_what_8_bits_cannot_hold_has_no_bound(value: float) -> None:
    keys = torch.ones(2, 128, dtype=torch.bfloat16)
    keys[1, 77] = value
    codes, factors = compact_encode(keys)
    assert factors[0].isfinite().all() and codes[0].tolist() == [127] + [0] * 127
    assert factors[1].tolist() == [0.0, math.inf] and (codes[1] == 0).all()


def test_a_key_of_zeros() -> None:
    codes, factors = compact_encode(torch.zeros(1, 128, dtype=torch.bfloat16))
    assert (codes == 0).all() and factors[0, 0] == 0
    assert 0 < factors[0, 1] < 1e-6  # never 0: an infinite query's bound would be NaN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_writes_the_copy_of_its_slots_alone(dtype: torch.dtype) -> None:
    index = make_index_cache(CONFIG, PAGES, dtype, compact=True)
    assert index.compact is not None
    before = index.compact.tensor.clone()
    slots = torch.tensor([5, -1, 383, 0, 200])
    keys = torch.randn(5, 128)
    msattn.store_index_k(keys.to(dtype), index, slots)
    stored = slots >= 0
    codes, factors = compact_encode(keys.to(dtype)[stored])
    page, offset = slots[stored] // 128, slots[stored] % 128
    assert torch.equal(index.compact.codes[page, offset], codes)
    assert torch.equal(index.compact.factors[page, offset], factors)
    others = torch.ones(PAGES, 128, dtype=torch.bool)
    others[page, offset] = False
    assert (index.compact.codes[others] == -1).all() and (index.compact.words[others] == -1).all()
    assert torch.equal(before[:, -1:], torch.full((PAGES, 1), 255, dtype=torch.uint8))


def test_the_copy_is_of_the_key_as_it_is_stored() -> None:
    """fp32 keys are rounded first: 1 + 2^-9 becomes 1 in bf16."""
    index = msattn.IndexCache.allocate(1, CONFIG, compact=True)
    msattn.store_index_k(torch.full((1, 128), 1 + 2**-9), index, torch.tensor([7]))
    assert index.compact is not None
    assert torch.equal(
        index.compact.factors[0, 7], compact_encode(torch.ones(1, 128, dtype=torch.bfloat16))[1][0]
    )


@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
def test_refresh_is_what_store_writes(int_dtype: torch.dtype) -> None:
    stored = make_index_cache(CONFIG, PAGES, "bf16", compact=True)
    msattn.store_index_k(torch.randn(PAGES * 128, 128), stored, torch.arange(PAGES * 128))
    assert stored.compact is not None
    pool = torch.full_like(stored.compact.tensor, 9)
    wrapped = msattn.IndexCache.from_tensor(stored.tensor, CONFIG, compact=pool)
    msattn.refresh_compact_keys(wrapped, torch.tensor([2, -1, PAGES, 0], dtype=int_dtype))
    assert torch.equal(pool[0], stored.compact.tensor[0])
    assert torch.equal(pool[2], stored.compact.tensor[2])
    assert (pool[1] == 9).all()
    msattn.refresh_compact_keys(wrapped)
    assert torch.equal(pool, stored.compact.tensor)
    msattn.refresh_compact_keys(wrapped, torch.empty(0, dtype=int_dtype))


def test_a_page_moves_with_its_copy() -> None:
    """A shared prefix, or a page that an engine copies: no key has to be read again."""
    index = msattn.IndexCache.allocate(PAGES, CONFIG, compact=True)
    msattn.store_index_k(torch.randn(128, 128), index, torch.arange(128))
    assert index.compact is not None
    index.tensor[2], index.compact.tensor[2] = index.tensor[0], index.compact.tensor[0]
    moved = index.compact.tensor.clone()
    msattn.refresh_compact_keys(index, torch.tensor([0, 2]))
    assert torch.equal(index.compact.tensor, moved)


def test_pools_of_an_engine_share_memory() -> None:
    """Pages may have gaps between them."""
    page = msattn.CompactKeys.page_bytes(128)
    assert page == 128 * 128 + 512
    room = torch.zeros(PAGES, page + 64, dtype=torch.uint8)
    keys = torch.zeros(PAGES, 128, 128, dtype=torch.bfloat16)
    index = msattn.IndexCache.from_tensor(keys, CONFIG, compact=room[:, :page])
    msattn.store_index_k(torch.ones(1, 128), index, torch.tensor([129]))
    assert room[1, 128:256].tolist() == [127] + [0] * 127 and (room[:, page:] == 0).all()


def test_selection_on_a_cpu_has_no_use_for_it() -> None:
    inputs = make(Case("small", (1, 3), (900, 700), CONFIG), compact=True)
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    assert_same_ids("block_ids", ids, expected_block_ids(inputs))
