"""MSAConfig: MiniMax-M3's values, what is refused, and every spelling of a model's config."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict
from types import ModuleType, SimpleNamespace

import pytest

from msattn import BLOCK_SIZE, MSAConfig

M3 = {
    "num_q_heads": 64,
    "num_kv_heads": 4,
    "num_index_heads": 4,
    "head_dim": 128,
    "index_head_dim": 128,
    "block_size": 128,
    "topk": 16,
    "init_blocks": 0,
    "local_blocks": 1,
}

SPARSE = {
    "use_sparse_attention": True,
    "sparse_index_dim": 64,
    "sparse_num_index_heads": 2,
    "sparse_topk_blocks": 8,
    "sparse_block_size": 128,
    "sparse_init_block": 1,
    "sparse_local_block": 2,
    "sparse_score_type": "max",
    "sparse_attention_freq": [0, 0, 0, *[1] * 57],
}
CHECKPOINT = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "hidden_size": 6144,
    "sparse_attention_config": SPARSE,
}
# Every value differs from the defaults, so that one that is not read is seen.
READ_FROM_CHECKPOINT = MSAConfig(16, 2, 2, 96, 64, 128, topk=8, init_blocks=1, local_blocks=2)


def checkpoint(**changes: object) -> dict[str, object]:
    """CHECKPOINT with other values, at either level; None removes the key."""
    top, sparse = dict(CHECKPOINT), dict(SPARSE)
    for key, value in changes.items():
        level = sparse if key in SPARSE else top
        level[key] = value
        if value is None:
            del level[key]
    return {**top, "sparse_attention_config": sparse}


def test_defaults_are_minimax_m3() -> None:
    assert asdict(MSAConfig()) == M3
    assert BLOCK_SIZE == 128


def test_is_a_frozen_value() -> None:
    config = MSAConfig()
    with pytest.raises(FrozenInstanceError):
        config.topk = 4
    assert config == MSAConfig(topk=16) and hash(config) == hash(MSAConfig(topk=16))
    assert config != MSAConfig(topk=8)


@pytest.mark.parametrize(("q_heads", "kv_heads", "group"), [(64, 4, 16), (8, 1, 8), (4, 4, 1)])
def test_group_size(q_heads: int, kv_heads: int, group: int) -> None:
    assert MSAConfig(q_heads, kv_heads, kv_heads).group_size == group


@pytest.mark.parametrize("field", M3)
@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (True, TypeError), (16.0, TypeError), ("16", TypeError), (None, TypeError)],
    ids=["negative", "bool", "float", "str", "None"],
)
def test_every_field_is_a_count(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{field}: expected an int.*, got .*{value}"):
        MSAConfig(**{field: value})


@pytest.mark.parametrize(
    "field", [name for name in M3 if name not in ("init_blocks", "local_blocks")]
)
def test_zero_is_refused_where_it_means_nothing(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: expected an int >= 1, got 0$"):
        MSAConfig(**{field: 0})


def test_no_forced_blocks_and_only_forced_blocks() -> None:
    assert MSAConfig(init_blocks=0, local_blocks=0).local_blocks == 0
    assert MSAConfig(topk=3, init_blocks=1, local_blocks=2).topk == 3


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"block_size": 64}, NotImplementedError, "block_size: expected 128, got 64"),
        (
            {"num_q_heads": 62},
            ValueError,
            "num_q_heads: expected a multiple of num_kv_heads=4, got 62",
        ),
        (
            {"num_index_heads": 1},
            ValueError,
            "num_index_heads: expected num_kv_heads=4 (index head h selects for KV head h), got 1",
        ),
        ({"head_dim": 120}, NotImplementedError, "head_dim: expected a multiple of 16, got 120"),
        (
            {"index_head_dim": 8},
            NotImplementedError,
            "index_head_dim: expected a multiple of 16, got 8",
        ),
        (
            {"topk": 4, "init_blocks": 2, "local_blocks": 3},
            ValueError,
            "init_blocks + local_blocks: expected at most topk=4, got 2 + 3",
        ),
    ],
    ids=[
        "block_size",
        "num_q_heads",
        "num_index_heads",
        "head_dim",
        "index_head_dim",
        "more forced than topk",
    ],
)
def test_combinations_that_no_kernel_serves(
    fields: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        MSAConfig(**fields)
    assert str(raised.value) == message


@pytest.fixture
def transformers() -> ModuleType:
    """The installed transformers: its own configs, not imitations of them."""
    return pytest.importorskip("transformers", minversion="5.16.1")


def test_transformers_text_config(transformers: ModuleType) -> None:
    assert MSAConfig.from_hf(transformers.MiniMaxM3VLTextConfig()) == MSAConfig()


def test_transformers_full_config(transformers: ModuleType) -> None:
    text = transformers.MiniMaxM3VLTextConfig(index_topk_blocks=5)
    full = transformers.MiniMaxM3VLConfig(text_config=text)
    assert MSAConfig.from_hf(full) == MSAConfig(topk=5)


@pytest.mark.parametrize("name", ["MiniMaxM3VLTextConfig", "MiniMaxM3VLConfig"])
def test_json_that_transformers_writes(transformers: ModuleType, name: str) -> None:
    assert MSAConfig.from_hf(getattr(transformers, name)().to_dict()) == MSAConfig()


def test_checkpoint_spelling_read_by_transformers(transformers: ModuleType) -> None:
    """transformers renames the keys that it knows; it has no name for init blocks."""
    text = transformers.MiniMaxM3VLTextConfig.from_dict(checkpoint(sparse_init_block=None))
    assert MSAConfig.from_hf(text) == MSAConfig(16, 2, 2, 96, 64, 128, topk=8, local_blocks=2)


@pytest.mark.usefixtures("transformers")
def test_tiny_model() -> None:
    from msattn.integrations.transformers.tiny import tiny_config

    assert MSAConfig.from_hf(tiny_config()) == MSAConfig(8, 2, 2, topk=4)


def test_another_model_is_named(transformers: ModuleType) -> None:
    with pytest.raises(ValueError) as raised:
        MSAConfig.from_hf(transformers.LlamaConfig())
    assert str(raised.value) == (
        "config: expected a MiniMax-M3 config with 'index_n_heads' or "
        "sparse_attention_config['sparse_num_index_heads'], got LlamaConfig without either"
    )


@pytest.mark.parametrize(
    "config",
    [
        CHECKPOINT,
        {"text_config": CHECKPOINT},
        SimpleNamespace(**CHECKPOINT),
        SimpleNamespace(**{**CHECKPOINT, "sparse_attention_config": SimpleNamespace(**SPARSE)}),
        SimpleNamespace(text_config=CHECKPOINT),
    ],
    ids=["mapping", "full mapping", "namespace", "nested namespaces", "namespace of a mapping"],
)
def test_checkpoint_spelling(config: object) -> None:
    assert MSAConfig.from_hf(config) == READ_FROM_CHECKPOINT


def test_transformers_spelling_of_a_namespace() -> None:
    config = SimpleNamespace(
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=96,
        index_n_heads=2,
        index_head_dim=64,
        index_block_size=128,
        index_topk_blocks=8,
        index_local_blocks=2,
    )
    assert MSAConfig.from_hf(config) == MSAConfig(16, 2, 2, 96, 64, 128, topk=8, local_blocks=2)


def test_absent_forced_blocks_are_none() -> None:
    """The checkpoint's own code defaults both keys to 0, not to M3's values."""
    config = MSAConfig.from_hf(checkpoint(sparse_init_block=None, sparse_local_block=None))
    assert (config.init_blocks, config.local_blocks) == (0, 0)


def test_head_dim_defaults_to_hidden_size_per_head() -> None:
    assert MSAConfig.from_hf(checkpoint(head_dim=None, hidden_size=1024)).head_dim == 64


@pytest.mark.parametrize(
    ("tp_size", "q_heads", "kv_heads", "group"),
    [(1, 64, 4, 16), (2, 32, 2, 16), (4, 16, 1, 16), (8, 8, 1, 8), (16, 4, 1, 4)],
)
def test_tensor_parallel_shares(tp_size: int, q_heads: int, kv_heads: int, group: int) -> None:
    """Beyond 4 ranks the KV heads, and the index heads with them, are replicated."""
    config = MSAConfig.from_hf(checkpoint_of_m3(), tp_size=tp_size)
    assert config == MSAConfig(q_heads, kv_heads, kv_heads)
    assert config.group_size == group


def checkpoint_of_m3() -> dict[str, object]:
    sparse = {
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
    }
    heads = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
    return {**heads, "sparse_attention_config": sparse}


@pytest.mark.parametrize("tp_size", [3, 6, 128])
def test_query_heads_must_split(tp_size: int) -> None:
    message = rf"^tp_size: expected a divisor of the 64 query heads, got {tp_size}$"
    with pytest.raises(ValueError, match=message):
        MSAConfig.from_hf(checkpoint_of_m3(), tp_size)


@pytest.mark.parametrize("tp_size", [3, 6])
def test_kv_heads_must_split_or_be_replicated_evenly(tp_size: int) -> None:
    config = {**checkpoint_of_m3(), "num_attention_heads": 96}
    message = rf"^tp_size: expected a divisor or a multiple of the 4 KV heads, got {tp_size}$"
    with pytest.raises(ValueError, match=message):
        MSAConfig.from_hf(config, tp_size)


@pytest.mark.parametrize(
    ("tp_size", "error"),
    [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError)],
    ids=repr,
)
def test_tp_size_is_a_count(tp_size: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^tp_size: expected an int"):
        MSAConfig.from_hf(checkpoint_of_m3(), tp_size)


@pytest.mark.parametrize(
    "missing",
    [
        "num_attention_heads",
        "num_key_value_heads",
        "sparse_num_index_heads",
        "sparse_index_dim",
        "sparse_block_size",
        "sparse_topk_blocks",
    ],
)
def test_a_missing_key_is_named(missing: str) -> None:
    with pytest.raises(ValueError, match=rf"^config: expected .*'{missing}'.*, got dict without"):
        MSAConfig.from_hf(checkpoint(**{missing: None}))


@pytest.mark.parametrize("config", [None, "MiniMax-M3", {}, 3], ids=repr)
def test_no_config_at_all(config: object) -> None:
    kind = type(config).__name__
    with pytest.raises(ValueError, match=rf"^config: expected a MiniMax-M3 .*, got {kind} without"):
        MSAConfig.from_hf(config)


def test_scores_other_than_the_maximum_are_refused() -> None:
    message = r"^sparse_score_type: expected 'max', got 'mean'$"
    with pytest.raises(NotImplementedError, match=message):
        MSAConfig.from_hf(checkpoint(sparse_score_type="mean"))
    assert MSAConfig.from_hf(checkpoint(sparse_score_type=None)) == READ_FROM_CHECKPOINT


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^use_sparse_attention: expected True, got False$"):
        MSAConfig.from_hf(checkpoint(use_sparse_attention=False))
