"""The kernel of the Hugging Face Hub: what it exports to transformers, and the tree it comes as."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import msattn
from msattn.integrations.hub import flash_attn_forward
from msattn.testing import oracle
from msattn.testing.compare import assert_close

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = json.loads((ROOT / "tests/data/tiny_m3_golden.json").read_text())["cases"]
HEADS, KV_HEADS, DIM = 8, 2, 128


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make hub`` writes."""
    return write(tmp_path_factory.mktemp("hub") / "build")


def write(out: Path) -> Path:
    subprocess.run([sys.executable, "tools/hub.py", "--out", str(out)], cwd=ROOT, check=True)
    return out


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def run(code: str, *arguments: object, **environment: str) -> str:
    """Standard output of a fresh process in which ``import msattn`` fails."""
    code = f"import sys; sys.modules['msattn'] = None\n{code}"
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the tree


def test_variants_hold_the_same_files(build: Path) -> None:
    cuda, cpu = (files(build / f"torch-{backend}") for backend in ("cuda", "cpu"))
    assert cuda.keys() == cpu.keys()
    assert [name for name in cuda if cuda[name] != cpu[name]] == ["metadata.json"]
    assert cuda["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert cuda["NOTICE"] == (ROOT / "NOTICE").read_bytes()


def test_the_same_sources_give_the_same_bytes(build: Path, tmp_path: Path) -> None:
    """Over a tree of other files, too: nothing of an earlier build is left."""
    (tmp_path / "torch-cpu").mkdir()
    (tmp_path / "torch-cpu" / "gone.py").touch()
    assert files(write(tmp_path)) == files(build)


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_metadata(backend: str, build: Path) -> None:
    kernels_data = pytest.importorskip("kernels_data")
    metadata = kernels_data.Metadata.read_from_file(build / f"torch-{backend}" / "metadata.json")
    assert metadata.name.python_name == "msattn"
    assert metadata.license == "Apache-2.0"
    assert metadata.python_depends == []
    assert str(metadata.backend.backend_type) == backend
    assert metadata.id.isidentifier() and metadata.id.startswith(f"_msattn_{backend}_")


def test_transformers_asks_for_this_version(build: Path) -> None:
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    metadata = json.loads((build / "torch-cuda" / "metadata.json").read_text())
    assert metadata["version"] == hub.get_attn_kernel_version("some-org/msattn")


def test_every_import_stays_inside(build: Path) -> None:
    """A file of the tree, the standard library, torch; triton in kernels, transformers when called.

    Whether a module without a file is imported at once or in a function, it would not be there.
    """
    root = build / "torch-cuda"
    foreign = []
    for path in sorted(root.rglob("*.py")):
        module = ast.parse(path.read_text())
        name, folder = path.relative_to(root).as_posix(), path.parent
        allowed = {"torch", *sys.stdlib_module_names}
        allowed |= {"triton"} if name.startswith("kernels/") else set()
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [folder, *folder.parents][node.level - 1]
                names = [node.module] if node.module else [alias.name for alias in node.names]
                targets = [base.joinpath(*target.split(".")) for target in names]
                foreign += [
                    (name, target.name)
                    for target in targets
                    if not target.with_suffix(".py").is_file()
                    and not (target / "__init__.py").is_file()
                ]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                named = named or [alias.name for alias in node.names]
                foreign += [(name, n) for n in named if n.split(".")[0] not in allowed]
    assert foreign == [("integrations/hub.py", "transformers.integrations.sdpa_attention")]


# -- the kernel, loaded where msattn is not installed

ATTEND = """
from pathlib import Path
import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]))
x = torch.load(sys.argv[2])
config = kernel.MSAConfig(*x["heads"])
cache = kernel.KVCache.allocate(len(x["table"]), config, "fp32")
batch = kernel.Batch.from_lists([len(x["q"])], [len(x["k"])], [x["table"]])
plan = kernel.make_plan(batch, config, cache.format)
slots = torch.tensor(x["table"])[:, None] * 128 + torch.arange(128)
kernel.store_kv(x["k"], x["v"], cache, slots.flatten()[: len(x["k"])])
torch.save(kernel.attend(x["q"], cache, x["ids"], plan), sys.argv[3])
assert set(kernel.__all__) <= set(vars(kernel)) and kernel.supports_flash_attn
assert not hasattr(kernel, "sparse_atten_func") and not hasattr(kernel, "flash_attn_varlen_func")
assert "transformers" not in sys.modules
print(kernel.__version__, kernel.__name__)
"""


@pytest.mark.parametrize("folder", [".", "torch-cuda"])
def test_attend_of_the_kernel(folder: str, build: Path, tmp_path: Path) -> None:
    """On a CPU ``kernels`` finds ``torch-cpu``; the other variant, named, runs as well."""
    pytest.importorskip("kernels")
    table = [2, 0, 1]
    q, k, v = torch.randn(40, 4, DIM), torch.randn(300, 2, DIM), torch.randn(300, 2, DIM)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(80)]).view(40, 2, 2).int()
    ids[7] = -1
    x = {"heads": (4, 2, 2), "q": q, "k": k, "v": v, "ids": ids, "table": table}
    torch.save(x, tmp_path / "x")
    shown = run(ATTEND, build / folder, tmp_path / "x", tmp_path / "out").split()
    assert shown[0] == msattn.__version__
    assert shown[1].startswith("_msattn_cuda_" if folder == "torch-cuda" else "_msattn_")
    whole = torch.nn.functional.pad(torch.stack([k, v]), (0, 0, 0, 0, 0, 84))
    pages = whole.view(2, 3, 128, 2, DIM).transpose(2, 3)  # in the order of the request's blocks
    batch = msattn.Batch.from_lists([40], [300], [[0, 1, 2]])
    truth, _ = oracle.attend(q, pages[0], pages[1], ids, batch, DIM**-0.5)
    assert_close("out", torch.load(tmp_path / "out"), truth)


OPERATORS = """
from importlib import import_module
from pathlib import Path
import torch
from kernels import get_local_kernel

del sys.modules["msattn"]
import msattn.ops

for variant in ("cpu", "cuda"):
    name = get_local_kernel(Path(sys.argv[1]) / f"torch-{variant}").__name__
    import_module(f"{name}.ops")
    print(getattr(torch.ops, name).attend.default.name() == f"{name}::attend")
print(torch.ops.msattn.attend.default.name())
"""


def test_operators_do_not_clash(build: Path) -> None:
    """The package and both variants register theirs in one process, each in its own namespace."""
    pytest.importorskip("kernels")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shown = run(OPERATORS, build, PYTHONPATH=path).split()
    assert shown == ["True", "True", "msattn::attend"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder."""
    tiny = pytest.importorskip("msattn.integrations.transformers.tiny")
    folder = tmp_path_factory.mktemp("model")
    tiny.tiny_model("eager").save_pretrained(folder)
    return folder


GENERATE = """
import json, torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    attn_implementation="some-org/msattn",
    experts_implementation="eager",
    dtype=torch.float32,
    allow_all_kernels=True,
)
for prompt in torch.load(sys.argv[2]):
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": cache}
        print(json.dumps(model.generate(prompt, **options)[0, prompt.shape[1]:].tolist()))
print(ALL_ATTENTION_FUNCTIONS["some-org/msattn"].__module__)
"""


def test_transformers_loads_the_kernel_by_its_name(
    build: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """A checkpoint and a string, nothing imported: greedy tokens are the golden ones."""
    pytest.importorskip("kernels")
    from msattn.integrations.transformers.tiny import tiny_prompt

    lengths = [129, 1100]  # within topk blocks, and beyond
    torch.save([tiny_prompt(length) for length in lengths], tmp_path / "prompts")
    override = f"some-org/msattn={build}"
    shown = run(GENERATE, checkpoint, tmp_path / "prompts", LOCAL_KERNELS=override)
    *tokens, bound = shown.splitlines()[-5:]
    want = [GOLDEN[str(length)]["tokens"] for length in lengths for _ in range(2)]
    assert [json.loads(line) for line in tokens] == want
    assert bound.startswith("_msattn_") and bound.endswith(".integrations.hub")


BLOCKS = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/hub.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=["kernels", "transformers"])
def test_code_in_the_document_runs(
    code: str, build: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """In a folder with the tree and the checkpoint that it names."""
    pytest.importorskip("kernels")
    (tmp_path / "build").symlink_to(build)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/checkpoint").symlink_to(checkpoint)
    run(f"import os; os.chdir({str(tmp_path)!r})\n{code}")


# -- flash_attn_forward, against attention in fp64 over a dense mask


def causal(num_keys: int, tokens: torch.Tensor, query_len: int, length: int) -> torch.Tensor:
    """transformers' sdpa mask of ``tokens`` [B, length]; the last query is at ``length - 1``."""
    column = torch.arange(num_keys)
    visible = column <= torch.arange(length - query_len, length).unsqueeze(1)
    tokens = torch.nn.functional.pad(tokens, (0, num_keys - length))
    return tokens[:, None, None] & visible


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """``[B, Sq, Hq, D]`` in fp64; a row that sees nothing is 0."""
    block = torch.arange(k.shape[2]) // 128
    chosen = (ids.unsqueeze(-2) == block.unsqueeze(-1)).any(-1)  # [B, Hkv, Sq, Sk]
    seen = (chosen & mask).repeat_interleave(HEADS // KV_HEADS, 1)
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = (q.double() @ k.mT * DIM**-0.5).masked_fill(~seen, -math.inf)
    return (logits.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.fixture(scope="module")
def layer() -> Any:
    tiny = pytest.importorskip("msattn.integrations.transformers.tiny")
    return SimpleNamespace(config=tiny.tiny_config(), training=False)


def step(batch: int, query_len: int, num_keys: int, blocks: int) -> tuple[torch.Tensor, ...]:
    """Random q, k, v and, for each query and KV head, three of the blocks or -1."""
    q = torch.randn(batch, HEADS, query_len, DIM)
    k, v = torch.randn(2, batch, KV_HEADS, num_keys, DIM)
    ids = torch.rand(batch, KV_HEADS, query_len, blocks + 1).argsort(-1)[..., :3] - 1
    return q, k, v, ids


# First and last token of each row in 500 columns, or a list of such runs: padding on any side, at
# edges of blocks and inside, a hole as decoding leaves it behind right padding, whole rows.
PADDINGS = {
    "none": [(0, 500), (0, 500)],
    "left": [(0, 500), (77, 500), (128, 500), (499, 500)],
    "right": [(0, 500), (0, 300), (0, 256), (0, 1)],
    "every row ends early": [(0, 460), (0, 200)],
    "holes": [[(0, 130), (497, 500)], [(5, 90), (100, 500)], (0, 500)],
    "a row of padding": [(0, 0), (0, 500)],
    "nothing but padding": [(0, 0), (0, 0)],
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("query_len", [1, 3, 500])
@pytest.mark.parametrize("tail", [0, 1, 140], ids=lambda n: f"{n}-unused")
def test_masks(padding: str, query_len: int, tail: int, layer: Any) -> None:
    runs = [row if isinstance(row, list) else [row] for row in PADDINGS[padding]]
    tokens = torch.zeros(len(runs), 500, dtype=torch.bool)
    for row, parts in enumerate(runs):
        for first, end in parts:
            tokens[row, first:end] = True
    q, k, v, ids = step(len(runs), query_len, 500 + tail, 4)
    mask = causal(500 + tail, tokens, query_len, 500)
    want = truth(q, k, v, mask, ids)
    hidden = ~torch.nn.functional.pad(tokens, (0, tail))[:, None, :, None]
    k, v = (x.masked_fill(hidden, 1e4) for x in (k, v))  # of no effect on any sum
    got, weights = flash_attn_forward(layer, q, k, v, mask, scaling=None, block_indices=ids)
    assert weights is None
    assert_close("out", got, want)


@pytest.mark.parametrize(("query_len", "num_keys"), [(1, 1), (1, 257), (300, 300), (300, 512)])
def test_no_mask(query_len: int, num_keys: int, layer: Any) -> None:
    """As SDPA reads it: one query is the last column, more are the first of a static cache."""
    q, k, v, ids = step(2, query_len, num_keys, 3)
    length = num_keys if query_len == 1 else query_len
    mask = causal(num_keys, torch.ones(2, length, dtype=torch.bool), query_len, length)
    got, _ = flash_attn_forward(layer, q, k, v, scaling=DIM**-0.5, block_indices=ids)
    assert_close("out", got, truth(q, k, v, mask, ids))


def test_16_bit(layer: Any) -> None:
    """The blocks beside the pages are rounded once, as those in pages are."""
    q, k, v, ids = step(2, 200, 200, 2)
    tokens = torch.arange(200) >= torch.tensor([[0], [50]])
    mask = causal(200, tokens, 200, 200)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    got, _ = flash_attn_forward(layer, q, k, v, mask, block_indices=ids)
    assert got.dtype == torch.bfloat16
    want = truth(q, k, v, mask, ids)
    # Both parts and their sum are rounded to bf16.
    assert float((got - want).norm() / want.norm()) < 3 * 2**-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask.float(), r"attention_mask: expected torch.bool .* got torch.float32"),
        (lambda mask: mask[..., 1:], r"attention_mask: .* got torch.bool \[1, 1, 9, 8\]"),
        (lambda mask: mask.tril(-1), "attention_mask: expected a causal mask with padding"),
        (lambda mask: mask.triu(-4), "attention_mask: .* got packed sequences or a mask of your"),
    ],
)
def test_other_masks_are_refused(change: Any, message: str, layer: Any) -> None:
    q, k, v, ids = step(1, 9, 9, 1)
    mask = change(causal(9, torch.ones(1, 9, dtype=torch.bool), 9, 9))
    with pytest.raises(NotImplementedError, match=message):
        flash_attn_forward(layer, q, k, v, mask, block_indices=ids)


def test_training_is_refused(layer: Any) -> None:
    q, k, v, ids = step(1, 9, 9, 1)
    with pytest.raises(NotImplementedError, match=r"dropout: expected 0, got 0\.1"):
        flash_attn_forward(layer, q, k, v, dropout=0.1, block_indices=ids)
    out, _ = flash_attn_forward(layer, q.requires_grad_(), k, v, block_indices=ids)
    with pytest.raises(NotImplementedError, match="no backward pass; train with"):
        out.sum().backward()


# -- flash_attn_forward in transformers, beside its eager attention


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    """Eager attention, and the same weights with the function bound as transformers binds it."""
    transformers = pytest.importorskip("transformers")
    masking = pytest.importorskip("transformers.masking_utils")
    tiny = pytest.importorskip("msattn.integrations.transformers.tiny")
    transformers.AttentionInterface.register("hub", flash_attn_forward)
    masking.AttentionMaskInterface.register("hub", masking.sdpa_mask)
    yield tiny.tiny_model("eager"), tiny.tiny_model("hub")
    transformers.AttentionInterface._global_mapping.pop("hub")
    masking.AttentionMaskInterface._global_mapping.pop("hub")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_padded_batches_are_those_of_eager_attention(side: str, cache: str, models: Any) -> None:
    """As far as eager attention is a yardstick: a query whose blocks hold nothing that it may see
    gets 0 from us and the mean of all columns there, and transformers' indexer scores padding, too.
    On the left, where padding comes first, there are no more blocks than are selected.
    """
    eager, hub = models
    columns, paddings = {"left": (500, (0, 77, 127)), "right": (660, (0, 100, 250))}[side]
    ids = torch.randint(2, 512, (3, columns))
    position = torch.arange(columns) if side == "left" else torch.arange(columns).flip(0)
    mask = (position >= torch.tensor(paddings).unsqueeze(1)).long()
    got, want = (
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=8,
            do_sample=False,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for model in (hub, eager)
    )
    assert torch.equal(got.sequences, want.sequences)
    got, want = torch.stack(got.logits), torch.stack(want.logits)
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_chunked_prefill(cache: str, models: Any) -> None:
    eager, hub = models
    ids = torch.randint(2, 512, (1, 700))
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    got = hub.generate(ids, prefill_chunk_size=200, **options)
    assert torch.equal(got, eager.generate(ids, **options))


@torch.no_grad()
def test_vision_attention(models: Any) -> None:
    """The tower has no blocks and no causality."""
    m3 = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    config = m3.MiniMaxM3VLVisionConfig(hidden_size=128, num_attention_heads=2)
    module, states = m3.MiniMaxM3VLVisionAttention(config).eval(), torch.randn(1, 40, 128)
    embeddings = (torch.randn(40, 64), torch.randn(40, 64))
    outs = []
    for config._attn_implementation in ("eager", "hub"):
        outs.append(module(states, embeddings)[0])
    torch.testing.assert_close(outs[1], outs[0], atol=1e-6, rtol=1e-5)
