"""Each engine's tests run in its own environment; see prepare.py."""

from importlib.util import find_spec

from prepare import ENGINES

collect_ignore_glob = [f"test_{engine}*" for engine in ENGINES if find_spec(engine) is None]
