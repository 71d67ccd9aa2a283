"""Looks up what the plug-ins rely on in an engine, as ``package.module:Class.method``."""

from __future__ import annotations

import inspect
from functools import reduce
from importlib import import_module
from typing import Any


def find(seam: str) -> Any:
    module, _, path = seam.partition(":")
    return reduce(getattr, path.split("."), import_module(module))


def parameters(seam: str) -> str:
    """The signature without annotations: names, order and defaults are what a caller depends on."""
    signature = inspect.signature(find(seam))
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
