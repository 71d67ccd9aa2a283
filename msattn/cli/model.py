"""The model and the prompt of a command: the tiny MiniMax-M3, or a checkpoint folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..integrations.transformers import register
from ..integrations.transformers.cache import SPARSE_LAYER
from ..kv_format import KVFormat
from .doctor import available_devices, device_problem
from .errors import CliError

TINY = "tiny"
MODEL_TYPES = ("minimax_m3_vl", "minimax_m3_vl_text")  # with and without the vision tower
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SMALL_MODEL = 50_000_000  # parameters; tiny has 4.9 million
FIRST_ID = 2  # of ordinary tokens: padding and start tokens come first
PROMPT_SEED = 3  # added to --seed, so that the default is the prompt of tiny_prompt()


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, and what reads and writes its tokens."""

    name: str
    model: Any  # of transformers, in evaluation mode on its device
    tokenizer: Any | None  # None: the folder has none

    @property
    def title(self) -> str:
        """What a person calls it."""
        return "tiny MiniMax-M3 (random weights)" if self.name == TINY else Path(self.name).name

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def sparse_layers(self) -> list[int]:
        """Indices of the layers that select blocks."""
        kinds = self.text_config.layer_types
        return [layer for layer, kind in enumerate(kinds) if kind == SPARSE_LAYER]

    @property
    def native_format(self) -> str:
        """The KV format that stores the model's own dtype."""
        return KVFormat.parse(self.model.dtype).name

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a text."""
        found = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset(found if isinstance(found, list) else [] if found is None else [found])

    def encode(self, text: str) -> list[int]:
        """Token ids; the tiny model has no tokenizer, and takes the bytes of the text."""
        if self.name == TINY:
            return [FIRST_ID + byte for byte in text.encode()]
        if self.tokenizer is None:
            raise CliError(
                f"--prompt: {self.name} has no tokenizer; give --prompt-ids or --prompt-length"
            )
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode(tokens))


def choose_device(device: str | None) -> str:
    """``device`` if this machine has it; by default the first CUDA device, else the CPU."""
    devices = available_devices()
    if device is None:
        return "cuda:0" if "cuda" in devices else "cpu"
    if device not in devices:
        raise CliError(device_problem(device, devices))
    return device


def load(name: str, *, attn: str, dtype: str, device: str, seed: int) -> Loaded:
    """Build the tiny model or read a checkpoint folder.

    Args:
        name: ``"tiny"`` or the path of a folder that ``save_pretrained`` wrote.
        attn: transformers' name of the attention implementation.
        dtype: ``"auto"`` or the name of a torch dtype; auto is the checkpoint's, fp32 for tiny.
        seed: of the tiny model's weights.
    """
    register()
    if name == TINY:
        from ..integrations.transformers.tiny import tiny_model

        model, tokenizer = tiny_model(attn, seed=seed), None
        if dtype != "auto":
            model = model.to(getattr(torch, dtype))
    else:
        folder = Path(name)
        model = _read_weights(folder, _checkpoint_type(folder), attn, dtype)
        tokenizer = _tokenizer(folder)
    if device == "cpu":
        _prepare_for_cpu(model)
    return Loaded(name, model.to(device), tokenizer)


def _prepare_for_cpu(model: Any) -> None:
    # The grouped matmuls of the experts are several times slower than a loop on a CPU.
    model.set_experts_implementation("eager")
    if model.num_parameters() < SMALL_MODEL:
        # On busy cores, threads that wait for one another in its small matmuls take 20 times as
        # long as one thread; on idle ones, two threads save a third.
        torch.set_num_threads(1)


def read_prompt(
    loaded: Loaded, *, text: str | None, ids: str | None, length: int | None, seed: int
) -> torch.Tensor:
    """Token ids ``[1, n]`` from the one of ``text``, ``ids`` and ``length`` that is given."""
    vocab_size = loaded.text_config.vocab_size
    if text is not None:
        tokens = loaded.encode(text)
    elif ids is not None:
        tokens = _parse_ids(ids, vocab_size)
    else:
        assert length is not None
        generator = torch.Generator().manual_seed(PROMPT_SEED + seed)
        return torch.randint(FIRST_ID, vocab_size, (1, length), generator=generator)
    if not tokens:
        raise CliError("the prompt is empty; give at least one token")
    return torch.tensor([tokens])


def _parse_ids(ids: str, vocab_size: int) -> list[int]:
    try:
        tokens = [int(word) for word in ids.replace(",", " ").split()]
    except ValueError:
        raise CliError(f'--prompt-ids: expected numbers as in "5,17,300", got {ids!r}') from None
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise CliError(f"--prompt-ids: expected ids from 0 to {vocab_size - 1}, got {wrong[0]}")
    return tokens


def _checkpoint_type(folder: Path) -> str:
    """The model type of a MiniMax-M3 folder; others are refused before weights are read."""
    if not folder.is_dir():
        raise CliError(
            f'--model: expected "{TINY}" or the folder of a MiniMax-M3 checkpoint, got {folder}, '
            "which is no folder here"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = config.get("model_type") if isinstance(config, dict) else None
    except OSError:
        raise CliError(f"--model: {folder} has no config.json that can be read") from None
    except ValueError:
        raise CliError(f"--model: {folder / 'config.json'} is not valid JSON") from None
    if found not in MODEL_TYPES:
        raise CliError(
            f"--model: expected a MiniMax-M3 (model_type {' or '.join(MODEL_TYPES)}), "
            f"got model_type {found} in {folder}"
        )
    return str(found)


def _read_weights(folder: Path, model_type: str, attn: str, dtype: str) -> Any:
    import transformers

    class_name = {
        "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
        "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    }[model_type]
    transformers.utils.logging.set_verbosity_error()  # what matters of its report is an error here
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        model, report = getattr(transformers, class_name).from_pretrained(
            folder,
            attn_implementation=attn,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # no weights, torn files, a wrong config: each has its own type
        raise CliError(f"--model: cannot load {folder}: {_one_line(error)}") from error
    # transformers would leave them random.
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        raise CliError(
            f"--model: {folder} has no weights of the right shape for {len(wrong)} parameters, "
            f"such as {wrong[0]}"
        )
    return model.eval()


def _tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CliError(
            f"--model: cannot load the tokenizer of {folder}: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
