"""What importing msattn costs and touches, which way its imports point, and its public names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import msattn

PACKAGE = Path(msattn.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def run(code: str) -> str:
    """Standard output of a fresh process, in which nothing has been imported yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_torch_and_nothing_else() -> None:
    """Not triton, not transformers, no plotting, not even more of torch or of Python."""
    code = """
import sys, torch
before = set(sys.modules)
import msattn
print(*sorted(name for name in set(sys.modules) - before))
"""
    loaded = run(code).split()
    assert "msattn" in loaded
    assert [name for name in loaded if name.split(".")[0] != "msattn"] == []
    optional = {"bench", "ops", "cli", "integrations", "serving", "testing", "train"}
    optional |= {"distributed", "tuning"}
    assert [name for name in loaded if optional & set(name.split("."))] == []
    # Of the kernels, only what says whether they can serve.
    kernels = {name.split(".")[-1] for name in loaded if name.startswith("msattn.kernels")}
    assert kernels <= {"kernels", "triton", "hopper", "support"}


def test_import_takes_no_time_worth_noticing() -> None:
    """Processor time, so that a busy machine does not fail the test; the best of three."""
    code = """
import time, torch
start = time.process_time()
import msattn
print(time.process_time() - start)
"""
    assert min(float(run(code)) for _ in range(3)) < 0.1


def test_no_device_is_touched() -> None:
    """Neither by the import nor by a layer on the CPU: every way to a device is made to raise."""
    code = """
import torch

def touched(*args, **kwargs):
    raise AssertionError("a device was touched")

for name in (
    "_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_capability",
    "get_device_name", "get_device_properties", "synchronize", "current_stream",
):
    setattr(torch.cuda, name, touched)
torch._C._cuda_init = torch._C._cuda_getDeviceCount = touched

import msattn

config = msattn.MSAConfig(4, 2, 2, topk=4)
cache, index = msattn.KVCache.allocate(1, config, "nvfp4"), msattn.IndexCache.allocate(1, config)
plan = msattn.make_plan(msattn.Batch.from_lists([2], [2], [[0]]), config, "nvfp4")
q, kv = torch.ones(2, 4, 128), torch.full((2, 2, 128), 6.0)  # exact in NVFP4
out = msattn.sparse_attention(q, kv, kv, kv, kv[:, 0], cache, index, plan, torch.arange(2))
assert msattn.why_not("attend", impl="hopper", plan=plan)
print(float(out.sum()), torch.cuda.is_initialized())
"""
    assert run(code).split() == ["6144.0", "False"]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a source imports: dotted names, and whether it says so relatively.

    Names of the package come without its own: ``from ..cache import KVCache`` is ``cache``.
    """
    folder = path.parent.relative_to(PACKAGE).parts
    tree = ast.parse(path.read_text())
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in for_types:  # never executed
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", False
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - (node.level - 1)]
            if node.module:
                yield ".".join((*base, node.module)), True
            else:  # from . import env
                yield from ((".".join((*base, alias.name)), True) for alias in node.names)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_the_package_imports_itself_relatively() -> None:
    """So that it works under another name, as vendored copies and kernel hubs have it."""
    absolute = [
        f"{name_of(path)} imports {module}"
        for path in SOURCES
        for module, relative in imports(path)
        if not relative and module.split(".")[0] == "msattn"
    ]
    assert absolute == []


# Lower layers first; a module may import its own layer and those below.
LAYERS = [
    ["checks", "config", "kv_format", "cache", "batch", "plan", "arch", "env", "recording"],
    ["reference", "kernels", "tuning"],  # how it is computed
    ["dispatch", "calls"],
    ["store", "indexer", "selection", "attend", "combine"],
    ["api", "ops", "warmup"],
    ["__init__"],
    ["testing", "train", "distributed", "serving"],
    ["integrations", "bench"],
    ["cli"],
]
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}

# KVCache.dequantize is a method for the user's convenience, imported when it is called.
UPWARD = {("cache", "reference")}


def test_every_module_has_its_layer() -> None:
    found = {name_of(path).split(".")[0] for path in SOURCES}
    assert found <= set(LAYER), f"give {found - set(LAYER)} a place in LAYERS"


def test_imports_point_down() -> None:
    upward = set()
    for path in SOURCES:
        importer = name_of(path).split(".")[0]
        for module, relative in imports(path):
            imported = module.split(".")[0] or "__init__"
            if relative and LAYER.get(imported, LAYER["__init__"]) > LAYER[importer]:
                upward.add((importer, imported))
    assert upward == UPWARD


@pytest.mark.parametrize(
    ("importer", "imported"), [("reference", "kernels"), ("kernels", "reference")]
)
def test_a_kernel_and_its_reference_are_strangers(importer: str, imported: str) -> None:
    """One is the yardstick of the other."""
    assert [
        name_of(path)
        for path in SOURCES
        if name_of(path).split(".")[0] == importer
        for module, relative in imports(path)
        if relative and module.split(".")[0] == imported
    ] == []


ONLY_TORCH = {"torch", *sys.stdlib_module_names}


def test_the_core_needs_only_torch() -> None:
    """Kernels may use triton, which comes with torch; integrations and cli what they integrate."""
    optional = {"kernels": {"triton"}, "cli": None, "integrations": None}
    optional["bench"] = {"rich", "matplotlib"}  # peers are imported by name, where they are found
    foreign = []
    for path in SOURCES:
        extra = optional.get(name_of(path).split(".")[0], set())
        if extra is not None:
            foreign += [
                f"{name_of(path)} imports {module}"
                for module, relative in imports(path)
                if not relative and module.split(".")[0] not in ONLY_TORCH | extra
            ]
    assert foreign == []


def test_public_names() -> None:
    assert msattn.__all__ == [
        "BLOCK_SIZE",
        "KV_FORMATS",
        "Batch",
        "CompactKeys",
        "IndexCache",
        "KVCache",
        "KVFormat",
        "MSAConfig",
        "Plan",
        "attend",
        "index_scores",
        "index_select",
        "make_plan",
        "merge_states",
        "refresh_compact_keys",
        "select_blocks",
        "sparse_attention",
        "store_index_k",
        "store_kv",
        "warmup",
        "why_not",
    ]
    assert all(hasattr(msattn, name) for name in msattn.__all__)
    assert msattn.__version__.count(".") == 2


def public_objects() -> Iterator[tuple[str, object]]:
    """Functions, classes, and what the classes define themselves."""
    for name in msattn.__all__:
        value = getattr(msattn, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            yield name, value
        if inspect.isclass(value):
            for member, attribute in vars(value).items():
                is_method = isinstance(attribute, classmethod | staticmethod)
                if not member.startswith("_") and (is_method or inspect.isfunction(attribute)):
                    yield f"{name}.{member}", getattr(value, member)


@pytest.mark.parametrize("name", [name for name, _ in public_objects()])
def test_docstrings(name: str) -> None:
    """A sentence first, written by a person: a dataclass without one shows its fields."""
    value = resolve(name)
    text = inspect.getdoc(value) or ""
    assert text.partition("\n\n")[0].endswith(".")
    assert not (dataclasses.is_dataclass(value) and text.startswith(f"{name}("))


def resolve(name: str) -> Callable[..., object]:
    value = msattn
    for part in name.split("."):
        value = getattr(value, part)
    return value


# The arguments that may be given by position: the main tensors, and what they are of.
POSITIONAL = {
    "store_kv": ["k", "v", "cache", "slot_mapping"],
    "store_index_k": ["index_k", "index", "slot_mapping"],
    "refresh_compact_keys": ["index", "pages"],
    "index_scores": ["index_q", "index", "plan"],
    "select_blocks": ["scores", "plan"],
    "index_select": ["index_q", "index", "plan"],
    "attend": ["q", "cache", "block_ids", "plan"],
    "merge_states": ["outs", "lses"],
    "sparse_attention": [
        "q",
        "k",
        "v",
        "index_q",
        "index_k",
        "cache",
        "index",
        "plan",
        "slot_mapping",
    ],
    "make_plan": ["batch", "config", "kv_format"],
    "warmup": ["config", "kv_format"],
    "why_not": ["stage"],
    "KVCache.allocate": ["num_pages", "config", "kv_format"],
    "KVCache.from_tensor": ["tensor", "config", "kv_format"],
    "KVCache.dequantize": ["self", "dtype"],
    "IndexCache.allocate": ["num_pages", "config", "dtype"],
    "IndexCache.from_tensor": ["tensor", "config", "dtype"],
    "CompactKeys.page_bytes": ["head_dim"],
    "Batch": ["cu_seqlens_q", "seq_lens", "page_table"],
    "Batch.from_lists": ["query_lens", "seq_lens", "page_table"],
    "MSAConfig.from_hf": ["config", "tp_size"],
    "Plan.update": ["self", "batch"],
}
# Options with their defaults, as callers rely on them.
KEYWORDS = {
    "store_kv": {"impl": "auto"},
    "store_index_k": {"impl": "auto"},
    "refresh_compact_keys": {"impl": "auto"},
    "index_scores": {"out": None, "impl": "auto"},
    "select_blocks": {"out": None, "impl": "auto"},
    "index_select": {"out": None, "impl": "auto"},
    "attend": {
        "softmax_scale": None,
        "q_scale": None,
        "out": None,
        "return_lse": False,
        "impl": "auto",
    },
    "merge_states": {"out": None, "impl": "auto"},
    "sparse_attention": {"impl": "auto", "softmax_scale": None, "return_lse": False, "out": None},
    "warmup": {"device": None, "max_query_lens": (1, 4, 8192), "index_dtype": torch.bfloat16},
    "why_not": {"impl": inspect.Parameter.empty, "plan": None, "device": None},
    "KVCache.allocate": {"device": None, "k_scale": None, "v_scale": None},
    "KVCache.from_tensor": {"k_scale": None, "v_scale": None},
    "IndexCache.allocate": {"compact": False, "device": None},
    "IndexCache.from_tensor": {"compact": None},
    "Batch": {
        "max_query_len": inspect.Parameter.empty,
        "max_seq_len": inspect.Parameter.empty,
        "num_tokens": None,
    },
    "Batch.from_lists": {"max_query_len": None, "max_seq_len": None, "device": None},
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_everything_behind_the_main_tensors_is_given_by_name(name: str) -> None:
    parameters = inspect.signature(resolve(name)).parameters.values()
    by_position = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY]
    assert by_position == POSITIONAL[name]
    options = {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}
    assert KEYWORDS.get(name, {}).items() <= options.items()


def test_no_public_function_is_without_a_pinned_signature() -> None:
    functions = {name for name, value in public_objects() if not inspect.isclass(value)}
    formats = {"KVFormat.page_shape", "KVFormat.bytes_per_page", "KVFormat.bytes_per_token"}
    for_kernels = {"KVFormat.parse", "KVCache.nvfp4_views"}
    for_kernels |= {"Plan.tiles", "Plan.workspace", "Plan.launches", "CompactKeys.rounding"}
    assert functions - formats - for_kernels == set(POSITIONAL) - {"Batch"}


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_public_functions_are_annotated() -> None:
    missing = {
        name: [
            p.name for p in parameters if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        for name in POSITIONAL
        for parameters in [inspect.signature(resolve(name)).parameters.values()]
    }
    assert {name: names for name, names in missing.items() if names} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name_of(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
