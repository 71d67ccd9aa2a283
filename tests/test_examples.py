"""The examples run, and the documents tell the truth: code blocks, command lines, files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))


def run(*arguments: str) -> str:
    """Standard output of a Python process in the repository's root."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


EXPECTED_OUTPUT = {
    "chunked_prefill": r"same blocks: True",
    "decode_step": r"reads 16 of 32 blocks",
    # fp32 gives the tokens of eager attention.
    "generate_transformers": r"msattn fp32 : (\[[\d, ]+\]),.*\n.*1920 bytes a token\neager +: \1\n",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    """Short, and a person who runs it sees a result."""
    if path.stem == "generate_transformers":
        pytest.importorskip("transformers")
    assert len(path.read_text().splitlines()) < 60
    assert re.search(EXPECTED_OUTPUT[path.stem], run(str(path.relative_to(ROOT))))


PYTHON_BLOCKS = [
    pytest.param(path, code, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, code in enumerate(code_blocks(path, "python"), 1)
]


@pytest.mark.parametrize(("path", "code"), PYTHON_BLOCKS)
def test_code_in_documents_runs(path: Path, code: str) -> None:
    """Each block in a process of its own, so that it can be copied alone."""
    if "transformers" in code:
        pytest.importorskip("transformers")
    run("-c", code)


COMMAND_LINES = [
    pytest.param(line, id=f"{path.name}-{' '.join(line.split()[:4])}")
    for path in DOCUMENTS
    for block in code_blocks(path, "sh")
    for line in block.splitlines()
    if line.startswith("msattn ")
]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_lines_in_documents_are_understood(line: str) -> None:
    """Command and options exist, and take such values."""
    typer = pytest.importorskip("typer")
    pytest.importorskip("rich")
    from msattn.cli.app import app

    _, name, *arguments = shlex.split(line, comments=True)
    typer.main.get_command(app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_in_documents_exist(path: Path) -> None:
    """Paths in backticks that begin with a folder of the repository, and targets of links."""
    text = path.read_text()
    named = re.findall(r"`((?:msattn|tests|examples|benchmarks|docs|\.ci)/[\w/.-]*)", text)
    linked = [
        path.parent.relative_to(ROOT) / target
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    ]
    assert [str(name) for name in [*named, *linked] if not (ROOT / name).exists()] == []


def test_tree_in_readme_is_the_tree() -> None:
    """Files that the tree names exist, and no module of the package's top level is left out."""
    (tree,) = code_blocks(ROOT / "README.md", "text")
    folders: list[str] = []
    listed = set()
    for line in tree.splitlines():
        depth, names = (len(line) - len(line.lstrip())) // 2, re.split(r"\s{2,}", line.strip())[0]
        folders[depth:] = [names] if names.endswith("/") else []
        for name in names.split(", "):
            listed.add("".join(folders[:depth]) + name)
    assert sorted(name for name in listed if not (ROOT / name).exists()) == []
    modules = {f"msattn/{path.name}" for path in (ROOT / "msattn").glob("*.py")}
    assert sorted(modules - listed) == []
