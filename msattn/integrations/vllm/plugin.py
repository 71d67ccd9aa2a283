"""What vLLM calls in each of its processes: cheap, repeatable, without a device or a model."""

from __future__ import annotations

from ... import env

ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")


def register() -> None:
    """Let vLLM build MiniMax-M3 from :mod:`.model`, which is imported only then.

    Does nothing without vLLM, nor with ``MSATTN_VLLM=0``.
    """
    if not env.VLLM:
        return
    try:
        from vllm import ModelRegistry
    except ModuleNotFoundError:
        return

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"{__package__}.model:{name}")
