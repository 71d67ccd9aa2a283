"""Every environment variable that msattn reads, with its type and default; read once, at import."""

from __future__ import annotations

import os

IMPL: str = os.environ.get("MSATTN_IMPL", "auto")
"""``MSATTN_IMPL`` (default ``auto``): the implementation that ``impl="auto"`` stands for."""

LOG: bool = os.environ.get("MSATTN_LOG", "0") == "1"
"""``MSATTN_LOG=1`` (default 0): one line on stderr for each choice of an implementation, once."""
