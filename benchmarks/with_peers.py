"""Run ``msattn bench`` where the peers come from a folder of prebuilt files.

    python benchmarks/with_peers.py FOLDER [--warm] -- --op attend --quick --out out

FOLDER holds ``vllm_m3`` (vLLM's two kernel files), ``peers.py`` with ``setup_flashinfer``, and
FlashInfer with its prebuilt kernels as ``flashinfer.tar.xz`` and ``wheels/*.whl``. They are
unpacked into ``$TMPDIR/peerbench``, or ``work`` in the folder. Where the peers are installed as
packages, ``msattn bench`` finds them by itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_SECTIONS = "decode,prefill,indexer,decode_weighted,prefill_weighted,pipeline"
MAX_WARM_PROCESSES = 14


def unpack(folder: Path) -> Path:
    """The work folder, filled once for each build of the peers."""
    temporary = os.environ.get("TMPDIR")
    work = Path(temporary) / "peerbench" if temporary else folder / "work"
    stamp, made = (folder / "stamp").read_text(), work / "stamp"
    if made.exists() and made.read_text() == stamp:
        return work
    with tarfile.open(folder / "flashinfer.tar.xz") as archive:
        archive.extractall(work / "flashinfer", filter="fully_trusted")
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "site")
    made.write_text(stamp)
    return work


def set_environment(folder: Path, work: Path) -> None:
    """For this process and the ones that it starts; before torch, triton or the peers are there."""
    os.environ["TRITON_CACHE_DIR"] = str(work / "triton")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(work)
    paths = [str(ROOT), str(work / "site")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    # The folder comes last: its modules have common names.
    sys.path[:0] = paths
    sys.path.append(str(folder))


def warm(folder: Path) -> None:
    """Compile the variants of vLLM's Triton kernels in parallel, which takes minutes one by one."""
    count = min(MAX_WARM_PROCESSES, os.cpu_count() or 1)
    script = str(folder / "warm.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, f"{i}/{count}", WARM_SECTIONS],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in range(count)
    ]
    failed = sum(process.wait() != 0 for process in processes)
    if failed:
        print(f"{failed} of {count} processes that compile vLLM's kernels failed", file=sys.stderr)


def set_up_flashinfer(work: Path) -> None:
    """FlashInfer with its prebuilt kernels in place of its compiler; the run can do without it."""
    try:
        from peers import setup_flashinfer  # type: ignore[import-not-found]

        setup_flashinfer(str(work / "flashinfer"))
    except Exception as error:
        print(f"FlashInfer is not set up: {type(error).__name__}: {error}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="What follows -- are arguments of msattn bench.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--warm", action="store_true", help="compile vLLM's kernels in parallel")
    mine, arguments = _split(sys.argv[1:])
    args = parser.parse_args(mine)
    folder = args.folder.resolve()
    work = unpack(folder)
    set_environment(folder, work)
    if args.warm:
        warm(folder)
    set_up_flashinfer(work)
    from msattn.cli import main as msattn

    return msattn(["bench", *arguments])


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before ``--`` is ours, what stands behind it is the command's."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
