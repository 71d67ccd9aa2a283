"""Write the package as a kernel of the Hugging Face Hub: ``python tools/hub.py --out build``.

The Hub's ``kernels`` library loads ``build/<variant>/`` as a module whose name is the ``id`` in
``metadata.json``. Python and Triton run on any version of torch, so a variant stands for a backend
alone, and all of them hold the same files. The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SOURCES = (
    "*.py",
    "py.typed",
    "reference/*.py",
    "kernels/**/*.py",
    "integrations/__init__.py",
    "integrations/hub.py",
    "integrations/inference.py",
)
"""What travels, as patterns inside of ``msattn/``: the stages, and transformers' way to them."""

BACKENDS = ("cuda", "cpu")
"""``rocm`` would hold the same files, and nobody has run them there."""

VERSION = 1
"""Of what transformers calls, not of the package: it asks for version 1 if told nothing else."""

FRONT = """
# What transformers looks for in a kernel that is named as an attn_implementation.
from .integrations.hub import flash_attn_forward  # noqa: E402

supports_flash_attn = True

__all__ += ["flash_attn_forward", "supports_flash_attn"]
"""
"""Behind the package's own ``__init__.py``: the package does not import its integrations."""


def tree() -> dict[str, bytes]:
    """The files of every variant, by name: sources, license and notice."""
    package = ROOT / "msattn"
    paths = [path for pattern in SOURCES for path in package.glob(pattern)]
    files = {path.relative_to(package).as_posix(): path.read_bytes() for path in paths}
    files["__init__.py"] += FRONT.encode()
    for name in ("LICENSE", "NOTICE"):
        files[name] = (ROOT / name).read_bytes()
    return dict(sorted(files.items()))


def metadata(files: dict[str, bytes], backend: str) -> dict[str, object]:
    """What ``kernels`` reads before it imports anything.

    ``archs`` is left out: what a GPU cannot run in Triton, the dispatch gives to the reference.
    """
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return {
        "name": "msattn",
        # Two versions, or two backends, may be loaded into one process.
        "id": f"_msattn_{backend}_{digest.hexdigest()[:12]}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def write(out: Path) -> None:
    """Make ``out/torch-<backend>/`` anew for every backend."""
    files = tree()
    for backend in BACKENDS:
        folder = out / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        described = json.dumps(metadata(files, backend), indent=2) + "\n"
        for name, content in {**files, "metadata.json": described.encode()}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        print(f"{folder}: {len(files) + 1} files")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="default: build/")
    write(parser.parse_args().out)
