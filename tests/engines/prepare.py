"""Makes an environment in which a serving engine's Python sources can be imported on a CPU.

    python tests/engines/prepare.py vllm .venv/engines/vllm

An engine's wheel is for a GPU, and installing it brings several GB of CUDA libraries. Its Python
files need no GPU until a kernel is launched: they are unpacked into a cache, once for each version,
and a ``.pth`` file puts them on the path of a virtual environment that has what they import.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

# The versions that the plug-ins are written for; test_*_environment.py says what they rely on.
ENGINES = {"vllm": "0.33.0", "sglang": "0.5.23"}

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msattn" / "engines"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", type=Path, help="the virtual environment, made or completed")
    parser.add_argument("--cache", type=Path, default=CACHE, help="unpacked wheels [%(default)s]")
    arguments = parser.parse_args()
    prepare(arguments.engine, arguments.folder.absolute(), arguments.cache.absolute())


def prepare(engine: str, folder: Path, cache: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"{engine}: a virtual environment in {folder}")
        venv.create(folder, with_pip=True)
    sources = unpack(engine, cache, python)
    requirements = HERE / f"requirements-{engine}.txt"
    say(f"{engine}: installing {requirements.name}")
    # Below, pip sees the engine as installed, and its pins are not met: it need not say so.
    pip(python, "install", "--no-warn-conflicts", "--requirement", str(requirements))
    # Installed rather than on the path, so that the engine finds the plug-in by its entry point.
    pip(python, "install", "--no-deps", "--editable", str(ROOT))
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    paths = Path(site.strip(), "engine.pth")
    paths.write_text(f"{sources}\n{HERE / 'stand_ins'}\n")
    say(f"{engine}: ready, {python}")


def unpack(engine: str, cache: Path, python: Path) -> Path:
    """The folder with the Python files of the engine's wheel; downloads it the first time."""
    requirement = f"{engine}=={ENGINES[engine]}"
    sources = cache / requirement.replace("==", "-")
    if sources.exists():
        return sources
    cache.mkdir(parents=True, exist_ok=True)
    # Beside its final place, which it takes whole or not at all.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        say(f"{engine}: downloading the wheel of {requirement}")
        pip(python, "download", "--no-deps", "--only-binary=:all:", "--dest", scratch, requirement)
        (wheel,) = Path(scratch).glob("*.whl")
        say(f"{engine}: unpacking the Python files of {wheel.stat().st_size / 1e6:.0f} MB")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                # Folders too: SGLang refuses to be imported without those of its CUDA sources.
                if name.endswith((".py", ".json", "/")) or ".dist-info/" in name:
                    archive.extract(name, Path(scratch, "sources"))
        Path(scratch, "sources").rename(sources)
    return sources


def pip(python: Path, command: str, *arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", command, *quiet, *arguments], check=True)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
