"""A real MiniMax-M3 (tiny, random weights) in msattn, beside transformers' own eager attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

import msattn
from msattn.integrations.transformers import MsattnCache, register, unregister
from msattn.integrations.transformers.tiny import tiny_model, tiny_prompt

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "tiny_m3_golden.json").read_text())
LENGTHS = [int(length) for length in GOLDEN["cases"]]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def eager() -> Any:
    return tiny_model("eager")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    register()
    yield tiny_model("msattn")
    unregister()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def generate(model: Any, prompt: torch.Tensor, new_tokens: int = NEW_TOKENS, **kwargs: Any) -> list:
    out = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **kwargs)
    rows = out[:, prompt.shape[1] :].tolist()
    return rows[0] if len(rows) == 1 else rows


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_the_tiny_model_is_the_golden_one(eager: Any) -> None:
    prompt = tiny_prompt(300)
    logits = eager(prompt).logits[0, -1, :4]
    want = torch.tensor(GOLDEN["cases"]["300"]["logits_first4_step0"])
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cache", ["none", "dynamic", "msattn"])
def test_logits_are_those_of_eager_attention(
    length: int, cache: str, eager: Any, model: Any
) -> None:
    prompt = tiny_prompt(length)
    past = {
        "none": lambda: None,
        "dynamic": lambda: DynamicCache(config=model.config),
        "msattn": lambda: MsattnCache(model.config, "fp32"),
    }[cache]()
    got = model(prompt, past_key_values=past, use_cache=past is not None).logits
    assert relative_error(got, eager(prompt).logits) < 1e-5


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cache", ["msattn", "dynamic", "static"])
def test_greedy_tokens_are_the_golden_ones(length: int, cache: str, model: Any) -> None:
    kwargs: dict[str, Any] = {}
    if cache == "msattn":
        kwargs["past_key_values"] = MsattnCache(model.config, "fp32")
    elif cache == "static":
        kwargs["cache_implementation"] = "static"
    tokens = generate(model, tiny_prompt(length), **kwargs)
    assert tokens == GOLDEN["cases"][str(length)]["tokens"]


def test_the_selection_matters(eager: Any, model: Any) -> None:
    """With 9 blocks and 4 selected, dense attention gives other logits: these tests have power."""
    prompt = tiny_prompt(1100)
    dense = tiny_model("msattn")
    for module in dense.modules():
        if isinstance(module, m3.MiniMaxM3VLAttention):
            module.indexer = None
    assert relative_error(dense(prompt).logits, eager(prompt).logits) > 1e-2


@pytest.mark.parametrize("chunks", [[1100], [512, 512, 76], [190, 910], [1, 127, 128, 129, 715]])
def test_chunked_prefill_agrees_with_one_pass(chunks: list[int], eager: Any, model: Any) -> None:
    prompt = tiny_prompt(1100)
    cache = MsattnCache(model.config, "fp32")
    logits = [
        model(part, past_key_values=cache, use_cache=True).logits
        for part in prompt.split(chunks, 1)
    ]
    assert relative_error(torch.cat(logits, 1), eager(prompt).logits) < 1e-5


def test_decoding_step_by_step_agrees_with_one_pass(eager: Any, model: Any) -> None:
    prompt = tiny_prompt(660)
    cache = MsattnCache(model.config, "fp32")
    model(prompt[:, :620], past_key_values=cache, use_cache=True)
    steps = [
        model(prompt[:, i : i + 1], past_key_values=cache, use_cache=True).logits
        for i in range(620, 660)
    ]
    assert relative_error(torch.cat(steps, 1), eager(prompt).logits[:, 620:]) < 1e-5


PADDED_PROMPTS = [tiny_prompt(n, seed=s)[0] for n, s in ((700, 1), (129, 2), (333, 3))]
COLUMNS = 740


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of several lengths in one batch: ids and mask ``[3, COLUMNS]``."""
    ids = torch.zeros((len(PADDED_PROMPTS), COLUMNS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(PADDED_PROMPTS):
        room = COLUMNS - len(prompt)
        start = {"right": 0, "left": room, "both": room // 3}[side]
        ids[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = 1
    return ids, mask


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("cache", ["msattn", "msattn-chunked", "dynamic", "static"])
def test_padded_prompts_generate_as_if_alone(side: str, cache: str, eager: Any, model: Any) -> None:
    """Every row gets the tokens that eager attention gives its prompt alone, unpadded."""
    kwargs: dict[str, Any] = {}
    if cache.startswith("msattn"):
        kwargs["past_key_values"] = MsattnCache(model.config, "fp32")
    if cache == "msattn-chunked":
        kwargs["prefill_chunk_size"] = 200
    if cache == "static":
        kwargs["cache_implementation"] = "static"
    ids, mask = padded(side)
    got = generate(model, ids, 10, attention_mask=mask, **kwargs)
    assert got == [generate(eager, prompt.unsqueeze(0), 10) for prompt in PADDED_PROMPTS]


def test_right_padded_logits_are_those_of_eager_attention(eager: Any, model: Any) -> None:
    ids, mask = padded("right")
    got = model(ids, attention_mask=mask).logits[mask.bool()]
    assert relative_error(got, eager(ids, attention_mask=mask).logits[mask.bool()]) < 1e-5


def test_padding_is_not_stored(model: Any) -> None:
    ids, mask = padded("left")
    cache = MsattnCache(model.config, "bf16", max_cache_len=700)
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert cache.num_pages == 3 * 6
    assert cache.get_seq_length() == COLUMNS


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_every_kv_format_is_close(kv_format: str, eager: Any, model: Any) -> None:
    """The logits of most tokens move by the format's rounding; a few change experts besides."""
    prompt = tiny_prompt(300)
    cache = MsattnCache(model.config, kv_format)
    got, want = model(prompt, past_key_values=cache).logits, eager(prompt).logits
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    bound = {"bf16": 4e-3, "fp16": 5e-4, "fp8_e4m3": 5e-2, "fp8_e5m2": 1e-1, "nvfp4": 2e-1}
    assert float(error.median()) < bound[kv_format]
    layer_bytes = msattn.KV_FORMATS[kv_format].bytes_per_token(cache.config)
    index_bytes = 2 * 128  # index keys are 16 bit here
    assert cache.bytes_per_token == 4 * layer_bytes + 3 * index_bytes


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "nvfp4"])
def test_prefill_and_decode_read_the_same_numbers(kv_format: str, model: Any) -> None:
    prompt = tiny_prompt(400)
    once = MsattnCache(model.config, kv_format)
    whole = model(prompt, past_key_values=once, use_cache=True).logits[:, -1]
    steps = MsattnCache(model.config, kv_format)
    model(prompt[:, :-1], past_key_values=steps, use_cache=True)
    last = model(prompt[:, -1:], past_key_values=steps, use_cache=True).logits[:, -1]
    assert relative_error(last, whole) < 1e-4


def test_scales_of_the_cache_cancel(model: Any) -> None:
    """stored = x / scale, read = stored * scale: a power of two changes no bit of a bf16 cache."""
    prompt = tiny_prompt(200)
    plain = model(prompt, past_key_values=MsattnCache(model.config, "bf16")).logits
    scaled = MsattnCache(model.config, "bf16", k_scale=0.25, v_scale=0.5)
    torch.testing.assert_close(
        model(prompt, past_key_values=scaled).logits, plain, rtol=1e-6, atol=1e-6
    )


def test_beam_search_reorders_pages(eager: Any, model: Any) -> None:
    prompt = tiny_prompt(400)
    cache = MsattnCache(model.config, "fp32")
    got = generate(model, prompt, 10, num_beams=3, past_key_values=cache)
    assert got == generate(eager, prompt, 10, num_beams=3)


def test_assisted_decoding_crops(eager: Any, model: Any) -> None:
    prompt = tiny_prompt(400)
    cache = MsattnCache(model.config, "fp32")
    got = generate(model, prompt, 30, prompt_lookup_num_tokens=3, past_key_values=cache)
    assert got == generate(eager, prompt, 30)


def test_a_second_turn_continues_the_cache(eager: Any, model: Any) -> None:
    prompt = tiny_prompt(400)
    cache = MsattnCache(model.config, "fp32")
    first = model.generate(prompt, max_new_tokens=10, do_sample=False, past_key_values=cache)
    second = torch.cat([first, tiny_prompt(200, seed=9)], 1)
    assert generate(model, second, 10, past_key_values=cache) == generate(eager, second, 10)


def test_reset_forgets(model: Any) -> None:
    cache = MsattnCache(model.config, "fp32")
    want = generate(model, tiny_prompt(300), past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert generate(model, tiny_prompt(300), past_key_values=cache) == want


def test_batch_rows_can_be_selected_and_repeated(model: Any) -> None:
    ids, mask = padded("left")
    cache = MsattnCache(model.config, "fp32")
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    token, rows = torch.full((4, 1), 7), torch.tensor([2, 2, 0, 0])
    mask = torch.cat([mask[rows], torch.ones((4, 1), dtype=torch.long)], 1)
    got = model(token, attention_mask=mask, past_key_values=cache, use_cache=True).logits
    for row, prompt in enumerate(PADDED_PROMPTS[i] for i in rows.tolist()):
        alone = model(torch.cat([prompt, token[0]]).unsqueeze(0)).logits[0, -1]
        assert relative_error(got[row, -1], alone) < 1e-5


def test_selection_is_recorded(model: Any) -> None:
    cache = MsattnCache(model.config, "fp32", record_selection=True)
    prompt = tiny_prompt(1100)
    for part in prompt.split(512, 1):
        model(part, past_key_values=cache, use_cache=True)
    assert cache.sparse_layers == [1, 2, 3]
    ids = cache.selection(2)
    assert ids.shape == (1100, 2, 4) and ids.dtype == torch.int32
    local = torch.arange(1100) // 128
    assert (ids == local[:, None, None]).any(-1).all(), "every token selects its own block"
    with pytest.raises(ValueError, match=r"layer_idx: expected one of \[1, 2, 3\]"):
        cache.selection(0)


def test_models_switch_between_implementations(eager: Any, model: Any) -> None:
    prompt = tiny_prompt(300)
    want = eager(prompt).logits
    switched = tiny_model("eager")
    switched.set_attn_implementation("msattn")
    assert relative_error(switched(prompt).logits, want) < 1e-5
    switched.set_attn_implementation("eager")
    assert torch.equal(switched(prompt).logits, want)


def test_register_twice_and_unregister(model: Any) -> None:
    forward = m3.MiniMaxM3VLAttention.forward
    register()
    assert m3.MiniMaxM3VLAttention.forward is forward
    unregister()
    assert m3.MiniMaxM3VLAttention.forward is forward._msattn_original
    with pytest.raises(ValueError, match="msattn"):
        tiny_model("eager").set_attn_implementation("msattn")
    register()


def test_from_pretrained(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="msattn", dtype=torch.float32
    )
    prompt = tiny_prompt(300)
    assert relative_error(loaded(prompt).logits, model(prompt).logits) < 1e-5


def test_no_score_tensor_over_all_keys(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither transformers' indexer, nor its block mask, nor a 4-D mask is ever asked for."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("dense selection was computed")

    monkeypatch.setattr(m3.MiniMaxM3VLIndexer, "forward", refuse)
    monkeypatch.setattr(m3.MiniMaxM3VLIndexer, "build_block_mask", refuse)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    ids, mask = padded("right")
    generate(model, ids, 2, attention_mask=mask, past_key_values=MsattnCache(model.config, "bf16"))


def test_backward_is_refused(model: Any) -> None:
    with torch.enable_grad():
        loss = model(tiny_prompt(130)).logits.sum()
        with pytest.raises(NotImplementedError, match="no backward pass; train with"):
            loss.backward()


def test_the_cache_is_refused_by_other_implementations(eager: Any) -> None:
    with pytest.raises(NotImplementedError, match="MsattnCache serves attn_implementation"):
        eager(tiny_prompt(130), past_key_values=MsattnCache(eager.config))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"kv_format": "int8"}, ValueError, "kv_format: expected bf16"),
        ({"index_dtype": "fp8_e5m2"}, NotImplementedError, "index_dtype: expected .* got fp8_e5m2"),
        ({"max_cache_len": 0}, ValueError, "max_cache_len: expected an int >= 1, got 0"),
        ({"k_scale": -1.0}, ValueError, "k_scale: expected a finite number > 0, got -1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_cache_arguments(kwargs: dict, error: type[Exception], message: str, model: Any) -> None:
    with pytest.raises(error, match=message):
        MsattnCache(model.config, **kwargs)


def test_a_full_cache_is_refused(model: Any) -> None:
    cache = MsattnCache(model.config, max_cache_len=256)
    with pytest.raises(ValueError, match="max_cache_len: expected at least 257, got 256"):
        model(tiny_prompt(257), past_key_values=cache)


def test_masks_that_do_not_fit_are_refused(model: Any) -> None:
    ids, mask = padded("left")
    cache = MsattnCache(model.config)
    model(ids, attention_mask=mask, past_key_values=cache)
    token = ids[:, -1:]
    grown = torch.cat([mask, torch.ones((3, 1), dtype=torch.long)], 1)
    changed = grown.clone()
    changed[1, 0] = 1
    with pytest.raises(ValueError, match="attention_mask: expected earlier columns as in earlier"):
        model(token, attention_mask=changed, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values: expected a cache of 2 rows"):
        model(token[:2], attention_mask=grown[:2], past_key_values=cache)
    four_dimensional = torch.ones((3, 1, 1, COLUMNS + 1), dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"attention_mask: expected a padding mask"):
        model(token, attention_mask=four_dimensional, past_key_values=cache)


def test_packed_sequences_are_refused(model: Any) -> None:
    positions = torch.cat([torch.arange(60), torch.arange(70)]).unsqueeze(0)
    with pytest.raises(ValueError, match="a causal mask"):
        model(tiny_prompt(130), position_ids=positions, use_cache=False)
