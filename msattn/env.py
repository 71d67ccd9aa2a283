"""Every ``MSATTN_*`` environment variable, with its type and default.

Read once, at import, but for numbers, which are read when they are needed: a wrong one fails there.
"""

from __future__ import annotations

import os


def read_int(name: str, default: int) -> int:
    """The number that variable ``name`` holds."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ValueError(f"{name}: expected an int >= 0, got {value!r}")
    return int(value)


IMPL: str = os.environ.get("MSATTN_IMPL", "auto")
"""``MSATTN_IMPL`` (default ``auto``): the implementation that ``impl="auto"`` stands for."""

LOG: bool = os.environ.get("MSATTN_LOG", "0") == "1"
"""``MSATTN_LOG=1`` (default 0): one line on stderr for each choice of an implementation, once."""

VLLM: bool = os.environ.get("MSATTN_VLLM", "1") == "1"
"""``MSATTN_VLLM=0`` (default 1): vLLM keeps its own kernels for MiniMax-M3."""

WARMUP: bool = os.environ.get("MSATTN_WARMUP", "1") == "1"
"""``MSATTN_WARMUP=0`` (default 1): the plug-ins of engines do not compile before they serve."""

SGLANG: bool = os.environ.get("MSATTN_SGLANG", "1") == "1"
"""``MSATTN_SGLANG=0`` (default 1): SGLang keeps its own kernels for MiniMax-M3."""


def decode_min_batch(engine_variable: str = "") -> int:
    """``MSATTN_DECODE_MIN_BATCH`` (default 1): decode requests from which serving plans the
    tensor-core decode; smaller batches take the Triton one.

    A variable of an engine's own that means the same goes first, where it is set.
    """
    own = engine_variable in os.environ
    return read_int(engine_variable if own else "MSATTN_DECODE_MIN_BATCH", 1)
