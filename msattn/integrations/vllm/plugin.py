"""What vLLM calls in each of its processes: cheap, repeatable, without a device or a model."""

from __future__ import annotations

from ... import env

ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")


def register() -> None:
    """Let vLLM build MiniMax-M3 from :mod:`.model`, which is imported only then.

    With ``MSATTN_VLLM=0`` vLLM stays as it is.
    """
    if not env.VLLM:
        return
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"{__package__}.model:{name}")
