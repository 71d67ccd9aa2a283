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
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        return _without_them(arguments, error)
    from .app import run

    return run(arguments)


def _without_them(arguments: list[str], error: ImportError) -> int:
    """``doctor`` needs neither typer nor rich; for the rest, say what does."""
    if arguments[:1] == ["doctor"]:
        from . import doctor

        return doctor.main(arguments[1:])
    print(
        "error: the command line needs typer and rich: pip install 'msattn[cli]' "
        f"({error}); msattn doctor runs without them",
        file=sys.stderr,
    )
    return 2
