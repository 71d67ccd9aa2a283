"""The command line: every command and option, every refusal, and the doctor where little works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import msattn
from msattn.cli import main
from msattn.dispatch import IMPLEMENTATION_NAMES, STAGES
from msattn.integrations.engines import Answer

pytest.importorskip("transformers")
pytest.importorskip("typer")

DOCTOR = Path(msattn.__file__).parent / "cli" / "doctor.py"
SHORT = ("--prompt-length", "700", "--max-new-tokens", "3")  # six blocks: top-4 has to choose

Cli = Callable[..., "Result"]


class Result:
    """What a command line printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def tokens(self) -> str:
        """The line of new tokens."""
        return self.out.splitlines()[0]

    def fact(self, name: str) -> list[str]:
        """The cells of a line of the closing table."""
        line = next(line for line in self.out.splitlines() if line.startswith(name))
        return line.removeprefix(name).split()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Run a command line in this process, as wide as the README shows it."""
    monkeypatch.setenv("COLUMNS", "100")
    threads = torch.get_num_threads()

    def run(*arguments: object) -> Result:
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint folder, with a tokenizer whose ids are bytes + 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from msattn.integrations.transformers.tiny import tiny_model

    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    # BPE without merges: one token for each byte; the letters stand in the order of the bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocabulary = {letter: 2 + byte for byte, letter in letters.items()}
    tokenizer = Tokenizer(models.BPE({"<pad>": 0, "<s>": 1, **vocabulary}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def edited(checkpoint: Path, folder: Path, **config: Any) -> Path:
    """A copy of the checkpoint with other values in its config."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def assert_refused(result: Result, *parts: str) -> None:
    """Exit code 2 and one sentence on stderr, which names ``parts``."""
    assert result.code == 2
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err
    assert not result.out


# generate


@pytest.mark.parametrize("kv_format", [*msattn.KV_FORMATS, "half", "e4m3"])
def test_generate_runs_every_kv_format(cli: Cli, kv_format: str) -> None:
    result = cli("generate", *SHORT, "--kv-format", kv_format)
    assert result.code == 0
    assert re.fullmatch(r"\d+,\d+,\d+", result.tokens)
    assert result.fact("KV format") == [msattn.KVFormat.parse(kv_format).name]
    assert result.fact("prompt tokens") == ["700"] and result.fact("new tokens") == ["3"]


def test_generate_reports_the_bytes_of_a_token(cli: Cli) -> None:
    """4 layers of 2 * 2 heads * 128 numbers, and 3 of 128 index keys, in 2 bytes each."""
    result = cli("generate", *SHORT)
    expected = 2 * (4 * 2 * 2 * 128 + 3 * 128)
    assert result.fact("cache bytes per token") == [f"{expected:,}"]
    assert result.fact("KV format") == ["bf16"]


def test_compare_says_that_an_exact_cache_agrees(cli: Cli) -> None:
    result = cli("generate", *SHORT, "--kv-format", "fp32", "--compare")
    assert result.code == 0
    assert "The tokens agree with eager attention: all 3 are equal." in result.out
    gap = re.search(r"Largest logit difference: (\S+)\.$", result.out, re.MULTILINE)
    assert gap is not None and float(gap[1]) < 1e-4
    assert result.fact("attention") == ["msattn", "eager"]
    # The eager cache holds the same numbers: its bytes are counted from its tensors.
    assert len(set(result.fact("cache bytes per token"))) == 1


def test_compare_names_the_first_difference() -> None:
    from msattn.cli.run import Comparison, compare
    from msattn.cli.tables import agreement

    logits = torch.zeros(3, 8)
    other = logits + torch.tensor([1.0, 2.0, 4.0])[:, None]
    ours, theirs = generation([1, 2, 3], logits), generation([1, 5, 3], other)
    # The third row's pasts differ, so its logits are not compared.
    assert compare(ours, theirs) == Comparison(1, 2.0)
    assert compare(ours, ours) == Comparison(None, 0.0)
    sentence = agreement(compare(ours, theirs), ours, theirs)
    assert "differ from eager attention's at no. 2 of 3: 2 instead of 5." in sentence


def generation(tokens: list[int], logits: torch.Tensor) -> Any:
    from msattn.cli.run import Generation

    return Generation(tokens, logits, 1, 1.0, 1.0, 1, torch.device("cpu"), None)


def test_prompt_options_mean_the_same(cli: Cli, checkpoint: Path) -> None:
    """A text, its byte ids and the tokenizer's ids give one continuation."""
    text = "sparse " * 100
    ids = ",".join(str(2 + byte) for byte in text.encode())
    more = ("--max-new-tokens", "3")
    by_text = cli("generate", "--prompt", text, *more)
    by_ids = cli("generate", "--prompt-ids", ids, *more)
    by_tokenizer = cli("generate", "--model", checkpoint, "--prompt", text, *more)
    assert by_text.code == by_ids.code == by_tokenizer.code == 0
    assert by_text.tokens == by_ids.tokens
    assert by_tokenizer.fact("prompt tokens") == by_text.fact("prompt tokens") == ["700"]
    assert not re.fullmatch(r"[\d,]+", by_tokenizer.tokens)  # it prints text


def test_a_saved_checkpoint_gives_the_tokens_of_tiny(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    bare = edited(checkpoint, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert cli("generate", "--model", bare, *SHORT).tokens == cli("generate", *SHORT).tokens
    refused = cli("generate", "--model", bare, "--prompt", "a text")
    assert_refused(refused, "has no tokenizer", "--prompt-ids")


def test_defaults_are_1100_random_tokens_and_32_new_ones(cli: Cli) -> None:
    result = cli("generate")
    assert result.fact("prompt tokens") == ["1,100"] and result.fact("new tokens") == ["32"]


def test_chunk_does_not_change_the_tokens_and_seed_does(cli: Cli) -> None:
    exact = ("generate", *SHORT, "--kv-format", "fp32")
    first = cli(*exact)
    assert cli(*exact, "--chunk", "129").tokens == first.tokens
    assert cli(*exact, "--seed", "1").tokens != first.tokens


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_transformers_own_attention_runs_too(cli: Cli, attn: str) -> None:
    result = cli("generate", *SHORT, "--attn", attn)
    assert result.code == 0
    assert result.fact("attention") == [attn] and result.fact("KV format") == ["fp32"]
    assert result.tokens == cli("generate", *SHORT, "--kv-format", "fp32").tokens


@pytest.mark.parametrize(("dtype", "native"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_dtype_is_the_model_s(cli: Cli, dtype: str, native: str) -> None:
    result = cli("generate", *SHORT, "--dtype", dtype, "--compare")
    assert result.code == 0
    assert result.fact("KV format") == ["bf16", native]


def test_no_new_token_only_reads_the_prompt(cli: Cli) -> None:
    result = cli("generate", "--prompt-length", "5", "--max-new-tokens", "0", "--device", "cpu")
    assert result.code == 0 and result.tokens == ""
    assert result.fact("decode tokens/s") == ["-"]


def test_generation_stops_behind_a_stop_token() -> None:
    from msattn.cli.model import load
    from msattn.cli.run import generate, new_cache

    loaded = load("tiny", attn="msattn", dtype="auto", device="cpu", seed=0)
    prompt = torch.arange(2, 9)[None]

    def tokens(stop: frozenset[int]) -> list[int]:
        cache = new_cache(loaded.model, "msattn", "fp32")
        return generate(loaded.model, prompt, cache, max_new_tokens=4, stop_tokens=stop).tokens

    free = tokens(frozenset())
    assert tokens(frozenset(free[1:2])) == free[: free.index(free[1]) + 1]


# The picture


def test_plot_draws_one_panel_for_each_head(cli: Cli, tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from msattn.cli.picture import COLOURS

    path = tmp_path / "selection.png"
    result = cli("generate", *SHORT, "--plot", path)
    assert result.code == 0 and "layer 3" in result.out
    pixels = torch.tensor(imread(path))[..., :3]
    assert tuple(pixels.shape) == (900, 1500, 3)
    for colour in COLOURS.values():
        found = (pixels - torch.tensor(to_rgb(colour))).abs().amax(-1) < 0.01
        left, right = found[:650, :750], found[:650, 750:]  # above the legend
        assert left.sum() > 500 and right.sum() > 500


def test_plot_layer_chooses_another_layer(cli: Cli, tmp_path: Path) -> None:
    drawn = {}
    for layer in (1, 2):
        path = tmp_path / f"layer{layer}.png"
        assert cli("generate", *SHORT, "--plot", path, "--plot-layer", layer).code == 0
        drawn[layer] = path.read_bytes()
    assert drawn[1] != drawn[2]


def test_kinds_are_what_the_legend_says() -> None:
    from msattn.cli.picture import kind_shares

    own = torch.arange(512) // 128  # four blocks
    ids = torch.stack([torch.zeros_like(own), own - 1, own], dim=1).int()
    # Block 0 is far enough to be a sink for the last two blocks' tokens; -1 is no block.
    sink, total = 256, 3 * 512 - 128
    assert kind_shares(ids) == pytest.approx(
        {"sink": sink / total, "local": 1 - sink / total, "long-range": 0.0}
    )


@pytest.mark.parametrize("tokens", [1, 128, 5000])
def test_picture_loses_no_block(tokens: int) -> None:
    from msattn.cli.picture import _counts, _pixel

    visible = torch.arange(tokens)[:, None] // 128 + 1
    ids = (torch.rand(tokens, 3) * (visible + 1)).int() - 1
    counts = _counts(ids, _pixel(tokens), 4)
    assert int(counts.sum()) == int((ids >= 0).sum())


# Refusals


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prompt", "a", "--prompt-ids", "5"], ["--prompt and --prompt-ids", "--prompt-length"]),
        (["--prompt-ids", "5,x"], ["--prompt-ids", "'5,x'"]),
        (["--prompt-ids", "5,512"], ["--prompt-ids", "0 to 511", "512"]),
        (["--prompt-ids", ","], ["empty"]),
        (["--prompt", ""], ["empty"]),
        (["--prompt-length", "0"], ["--prompt-length"]),
        (["--max-new-tokens", "-1"], ["--max-new-tokens"]),
        (["--max-new-tokens", "0", "--compare"], ["--compare", "--max-new-tokens 0"]),
        (["--chunk", "0"], ["--chunk"]),
        (["--chunk", "many"], ["--chunk"]),
        (["--kv-format", "int4"], ["--kv-format", "nvfp4", "'int4'"]),
        (["--kv-format", "bf16", "--attn", "eager"], ["--kv-format", "--attn msattn"]),
        (["--compare", "--attn", "sdpa"], ["--compare", "--attn msattn"]),
        (["--plot", "p.png", "--attn", "sdpa"], ["--plot", "--attn msattn"]),
        (["--attn", "flash"], ["--attn", "'flash'", "eager"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "bfloat16"]),
        (["--device", "quantum"], ["--device", "'quantum'", "cpu"]),
        (["--device", "cuda:99"], ["--device", "'cuda:99'"]),
        (["--plot", "no/such/folder/p.png"], ["--plot", "no/such/folder"]),
        (["--plot", "p.txt"], ["--plot", ".png", "p.txt"]),
        (["--plot", "p.png", "--plot-layer", "0"], ["--plot-layer", "1, 2, 3", "got 0"]),
        (["--plot-layer", "1"], ["--plot-layer needs --plot"]),
        (["--model", "no/such/folder"], ["--model", "no/such/folder", "tiny"]),
        (["--colour"], ["--colour"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_generate_refuses(cli: Cli, arguments: list[str], parts: list[str]) -> None:
    assert_refused(cli("generate", *arguments), *parts)


def test_a_folder_cannot_be_plotted_over(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    assert_refused(cli("generate", *SHORT, "--plot", tmp_path / "taken.png"), "is a folder")


@pytest.mark.parametrize("model_type", ["llama", None, "minimax_m2"])
def test_other_models_are_refused_before_their_weights(
    cli: Cli, checkpoint: Path, tmp_path: Path, model_type: str | None
) -> None:
    folder = edited(checkpoint, tmp_path / "other", model_type=model_type)
    (folder / "model.safetensors").write_bytes(b"never read")
    assert_refused(cli("generate", "--model", folder), "MiniMax-M3", f"model_type {model_type}")


def test_broken_checkpoints_are_refused(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = edited(checkpoint, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:5].contiguous()
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    lacking = cli("generate", "--model", folder)
    assert_refused(lacking, "no weights of the right shape for 2 parameters", "lm_head.weight")
    (folder / "model.safetensors").write_bytes(b"torn")
    assert_refused(cli("generate", "--model", folder), "cannot load")
    (folder / "model.safetensors").unlink()
    assert_refused(cli("generate", "--model", folder), "cannot load")
    (folder / "config.json").write_text("{")
    assert_refused(cli("generate", "--model", folder), "config.json", "JSON")
    (folder / "config.json").unlink()
    assert_refused(cli("generate", "--model", folder), "no config.json")


def test_what_the_library_cannot_serve_is_a_sentence(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msattn.env.IMPL", "hopper")
    refused = cli("generate", *SHORT, "--device", "cpu")
    assert_refused(refused, "impl='hopper' cannot serve store_kv")


@pytest.mark.parametrize("arguments", [["dance"], ["doctor", "--jsno"], ["demo", "extra"]])
def test_wrong_commands_are_refused(cli: Cli, arguments: list[str]) -> None:
    assert_refused(cli(*arguments), arguments[-1])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["generate", "-h"], ["doctor", "--help"]])
def test_help_is_no_error(cli: Cli, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code == 0 and "Usage: msattn" in result.out


def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.code, result.out) == (0, f"msattn {msattn.__version__}\n")


# demo


def test_demo_compares_every_format_and_draws(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msattn.cli import demo

    monkeypatch.setattr(demo, "PICTURE_TOKENS", 700)
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    out = tmp_path / "made" / "here"
    result = cli("demo", "--out", out)
    assert result.code == 0
    rows = [line.split() for line in result.out.splitlines()]
    names = {tuple(row[:2]) for row in rows if len(row) > 2}
    assert {("eager", "fp32"), *(("msattn", name) for name in msattn.KV_FORMATS)} <= names
    exact = next(line for line in result.out.splitlines() if line.split()[:2] == ["msattn", "fp32"])
    assert "all equal" in exact
    assert (out / "selection.png").stat().st_size > 10_000


def test_demo_fails_if_the_exact_row_does_not_match(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msattn.cli import demo
    from msattn.cli.run import Comparison

    monkeypatch.setattr(demo, "FORMATS", ("fp32",))
    monkeypatch.setattr(demo, "PROMPT_TOKENS", 5)
    monkeypatch.setattr(demo, "PICTURE_TOKENS", 5)
    monkeypatch.setattr(demo, "NEW_TOKENS", 1)
    monkeypatch.setattr(demo, "compare", lambda run, other: Comparison(0, 1.0))
    result = cli("demo", "--out", tmp_path)
    assert result.code == 1 and "fp32 gave other tokens" in result.err


def test_demo_needs_a_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(cli("demo", "--out", tmp_path / "file"), "--out")


# doctor


def test_doctor_has_every_stage_and_format(cli: Cli) -> None:
    report = json.loads(cli("doctor", "--json", "--device", "cpu").out)
    matrix = report["serving"]["matrix"]
    assert list(matrix) == list(STAGES)
    for stage, cells in matrix.items():
        assert list(cells) == list(msattn.KV_FORMATS)
        for name, cell in cells.items():
            stores_no_index = "index" in stage and not msattn.KV_FORMATS[name].in_index
            assert cell == "-" if stores_no_index else cell in IMPLEMENTATION_NAMES
    assert report["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert report["versions"]["msattn"] == msattn.__version__
    for refusal in report["serving"]["why_not"]:
        assert refusal["reason"] in msattn.why_not(
            refusal["stage"], impl=refusal["impl"], kv_format=refusal["kv_format"]
        )


def test_doctor_reads_as_text(cli: Cli) -> None:
    result = cli("doctor", "--device", "cpu")
    assert result.code == 0
    for title in ("Versions", "Machine", "Environment variables", "What serves each stage on cpu"):
        assert title in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    # One line for a reason, not one for each stage and format.
    assert result.out.count("implementation of the stage") <= len(IMPLEMENTATION_NAMES)


def test_doctor_refuses_a_device_that_is_not_here(cli: Cli) -> None:
    assert_refused(cli("doctor", "--device", "cuda:99"), "--device", "'cuda:99'")


def test_doctor_shows_the_variables(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSATTN_IMPLL", "triton")
    report = json.loads(cli("doctor", "--json").out)
    assert report["environment"]["MSATTN_IMPLL"] == "triton (msattn reads no such variable)"
    assert set(report["environment"]) > {"MSATTN_IMPL", "MSATTN_LOG", "MSATTN_DECODE_MIN_BATCH"}


def test_doctor_knows_every_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """However ``env.py`` reads it."""
    monkeypatch.setenv("MSATTN_DECODE_MIN_BATCH", "3")
    environment = json.loads(cli("doctor", "--json").out)["environment"]
    assert environment["MSATTN_DECODE_MIN_BATCH"] == "3"
    documented = {"IMPL", "LOG", "DECODE_MIN_BATCH", "VLLM", "WARMUP", "SGLANG"}
    assert {f"MSATTN_{name}" for name in documented} <= set(environment)


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_doctor_cuts_no_name_off(cli: Cli, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = cli("doctor", "--device", "cpu").out
    assert "…" not in out
    lines = [line.split() for line in out.splitlines()]
    assert ["stage", *msattn.KV_FORMATS] in lines
    assert {*STAGES} <= {words[0] for words in lines if len(words) == 1 + len(msattn.KV_FORMATS)}
    assert ["merge_states", *["reference"] * len(msattn.KV_FORMATS)] in lines


def test_doctor_survives_an_unknown_implementation(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msattn.env.IMPL", "cuda")
    result = cli("doctor")
    assert result.code == 0 and "MSATTN_IMPL=cuda" in result.out and "'cuda'" in result.out


def test_grouping_keeps_what_differs() -> None:
    from msattn.cli.doctor import _grouped

    def refusal(stage: str, kv_format: str, reason: str) -> dict[str, str]:
        return {"impl": "hopper", "stage": stage, "kv_format": kv_format, "reason": reason}

    matrix = {"attend": {"bf16": "x", "fp32": "x"}, "index_scores": {"bf16": "x", "fp32": "-"}}
    refusals = [
        refusal("attend", "bf16", "no attend on cpu"),
        refusal("attend", "fp32", "no attend on cpu"),
        refusal("attend", "fp32", "reads no fp32"),
        refusal("index_scores", "bf16", "no index_scores on cpu"),
    ]
    assert _grouped({"matrix": matrix, "why_not": refusals}) == [
        ("hopper", "no the stage on cpu", "every stage"),
        ("hopper", "reads no fp32", "attend in fp32"),
    ]


# Broken installations: each in a process of its own


def process(*arguments: object, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a file or a module as a program, in which the modules ``blocked`` are missing."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "del sys.argv[0]\n"
        "run = runpy.run_path if sys.argv[0].endswith('.py') else runpy.run_module\n"
        "run(sys.argv[0], run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_doctor_runs_without_torch_by_its_path() -> None:
    done = process(DOCTOR, "--json", blocked=("torch",))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "cannot be imported" in report["versions"]["torch"]
    assert "torch" in report["serving"]["error"] and "torch" in report["devices"]["error"]
    plain = process(DOCTOR, blocked=("torch",))
    assert plain.returncode == 0 and "not available" in plain.stdout


def test_doctor_runs_where_nothing_is_installed() -> None:
    """-S and -I: no site-packages at all, only the standard library."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(DOCTOR)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"torch +missing", done.stdout)


def test_doctor_by_path_sees_the_package_beside_it(tmp_path: Path) -> None:
    """From any folder, and without an installed msattn."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(DOCTOR), "--json", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["serving"]["matrix"]["attend"]["nvfp4"] in IMPLEMENTATION_NAMES


@pytest.mark.parametrize("blocked", [("typer",), ("rich",), ("transformers", "matplotlib")])
def test_doctor_runs_without_what_the_other_commands_need(blocked: tuple[str, ...]) -> None:
    done = process("msattn.cli", "doctor", "--device", "cpu", blocked=blocked)
    assert done.returncode == 0, done.stderr
    assert "What serves each stage on cpu" in done.stdout


@pytest.mark.parametrize(
    ("blocked", "parts"),
    [(("typer",), ["msattn[cli]", "typer"]), (("transformers",), ["transformers 5.16.1"])],
)
def test_the_other_commands_say_what_they_need(blocked: tuple[str, ...], parts: list[str]) -> None:
    done = process("msattn.cli", "generate", blocked=blocked)
    assert_refused(Result(done.returncode, done.stdout, done.stderr), *parts)


def test_plot_says_that_it_needs_matplotlib() -> None:
    done = process("msattn.cli", "generate", "--plot", "p.png", blocked=("matplotlib",))
    assert_refused(Result(done.returncode, done.stdout, done.stderr), "matplotlib")


# serve-check

M3_CONFIG = {
    "model_type": "minimax_m3_vl",
    "text_config": {
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sparse_attention_config": {
            "sparse_num_index_heads": 4,
            "sparse_index_dim": 128,
            "sparse_block_size": 128,
            "sparse_topk_blocks": 16,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0] * 3 + [1] * 57,
        },
    },
}


@pytest.fixture
def m3_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(M3_CONFIG))
    return tmp_path


def test_serve_check_says_what_each_engine_uses(cli: Cli, m3_folder: Path) -> None:
    result = cli("serve-check", m3_folder, "--gpu", "H200", "--tp", "4", "--json")
    assert result.code == 0
    report = json.loads(result.out)
    assert report["target"]["capability"] == "9.0"
    assert report["model"]["layers"] == "57 sparse, 3 dense"
    assert report["model"]["heads"] == "16 query, 1 KV on a rank"
    nvfp4 = report["kv_formats"]["nvfp4"]
    assert nvfp4["engines"]["vLLM"] == {"served_by": "msattn, hopper", "reasons": []}
    assert nvfp4["engines"]["SGLang"]["served_by"] is None
    # 60 layers of 2 * 72 bytes, and 57 of 128 index keys in bf16.
    assert nvfp4["bytes_per_token"] == 60 * 144 + 57 * 256
    assert nvfp4["tokens"] == 80 * 2**30 // (60 * 144 + 57 * 256) // 128 * 128


def test_serve_check_prints_tables(cli: Cli, m3_folder: Path) -> None:
    result = cli(
        "serve-check", m3_folder, "--gpu", "sm_100", "--memory", "10GB", "--index-dtype", "fp8"
    )
    assert result.code == 0
    assert "Sparse layers on sm_100 (compute capability 10.0)" in result.out
    bf16 = next(line for line in result.out.splitlines() if line.startswith("  bf16"))
    size = 60 * 2048 + 57 * 128
    assert bf16.split()[1:3] == [f"{size:,}", f"{10**10 // size // 128 * 128:,}"]
    assert "vLLM has MSA kernels of its own for this GPU" in result.out


def test_serve_check_asks_about_the_index_keys(cli: Cli, m3_folder: Path) -> None:
    arguments = ("--gpu", "h200", "--kv-format", "bf16", "--index-dtype", "fp32", "--json")
    result = cli("serve-check", m3_folder, *arguments)
    found = json.loads(result.out)["kv_formats"]["bf16"]["engines"]
    assert found["transformers"]["served_by"] == "msattn, hopper and reference"
    assert found["vLLM"]["served_by"] is None and found["SGLang"]["served_by"] is None


@pytest.mark.parametrize("gpu", ["h200", "b200", "t4"])
def test_serve_check_fits_a_terminal(cli: Cli, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("serve-check", "--gpu", gpu).out
    assert "\u2026" not in out and max(map(len, out.splitlines())) <= 80
    assert "KV format" in out and " transformers " in out


def test_serve_check_of_the_tiny_model_on_this_machine(cli: Cli) -> None:
    result = cli("serve-check", "--kv-format", "bf16,nvfp4", "--json")
    report = json.loads(result.out)
    assert result.code == 0 and list(report["kv_formats"]) == ["bf16", "nvfp4"]
    assert report["model"]["layers"] == "3 sparse, 1 dense"
    served = report["kv_formats"]["bf16"]["engines"]["transformers"]["served_by"]
    assert served.startswith("msattn")


def test_serve_check_fails_where_nobody_serves(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Answer(None, ["no reason"])
    monkeypatch.setattr("msattn.cli.serve_check.ask", lambda *_, **__: nobody)
    assert cli("serve-check", "--kv-format", "bf16").code == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--gpu", "voodoo2"), ("--gpu: expected cpu, t4,", "sm_90 or 9.0, got 'voodoo2'")),
        (("--memory", "much"), ("--memory: expected a size above 0, as 80GiB", "got 'much'")),
        (("--memory", "0GB"), ("--memory: expected a size above 0", "got '0GB'")),
        (("--memory", "0.1e0"), ("--memory: expected a size above 0", "got '0.1e0'")),
        (("--kv-format", "int8"), ("--kv-format: expected", "got 'int8'")),
        (("--index-dtype", "nvfp4"), ("--index-dtype: expected", "got nvfp4")),
        (("/nowhere",), ('MODEL: expected "tiny" or a folder with config.json', "/nowhere")),
        (("--tp", "3"), ("MODEL tiny: tp_size: expected a divisor of the 8 query heads",)),
    ],
)
def test_serve_check_refuses(cli: Cli, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_refused(cli("serve-check", *arguments), *parts)


def test_serve_check_refuses_another_model(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for text, part in (
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "MiniMax-M3"),
    ):
        config.write_text(text)
        assert_refused(cli("serve-check", tmp_path), "MODEL", part)
