"""MiniMax-M3 of vLLM through msattn, as a plug-in that vLLM finds by its entry point.

``vllm.general_plugins`` calls :func:`register` in every process. It changes nothing but which
classes two of the model's selectors return, and that only once vLLM builds a MiniMax-M3.
"""

from .plugin import register

__all__ = ["register"]
