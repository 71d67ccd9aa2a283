"""MiniMax-M3's sparse layers in SGLang through msattn, where msattn can serve them."""

from .plugin import register

__all__ = ["register"]
