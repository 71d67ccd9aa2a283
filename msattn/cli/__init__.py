"""The command line: ``msattn doctor``, ``msattn generate``, ``msattn demo``.

Nothing is imported here until a command runs, so that ``doctor`` works where the others cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns its exit code: 0, 1 a result is wrong, 2 a wrong use."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        return _without_typer(arguments, error.name)
    return run(arguments)


def _without_typer(arguments: list[str], missing: str) -> int:
    """``doctor`` needs neither typer nor rich; for the rest, say what does."""
    if arguments[:1] == ["doctor"]:
        from . import doctor

        return doctor.main(arguments[1:])
    print(
        f"error: the command line needs {missing}: pip install 'msattn[cli]' (doctor runs without)",
        file=sys.stderr,
    )
    return 2
