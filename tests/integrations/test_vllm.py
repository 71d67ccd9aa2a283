"""The vLLM plug-in where there is no vLLM; ``tests/engines/test_vllm.py`` has the rest."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

from msattn import env
from msattn.integrations import vllm as plugin


def test_the_entry_point_is_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "msattn"]
    register = found.load()
    assert register is plugin.register
    assert "vllm" not in sys.modules
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    assert register() is None


def test_registration_names_classes_and_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, str] = {}
    fake = ModuleType("vllm")
    fake.ModelRegistry = SimpleNamespace(register_model=registered.__setitem__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    plugin.register()
    plugin.register()
    module = "msattn.integrations.vllm.model"
    assert registered == {
        name: f"{module}:{name}"
        for name in ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
    }
    assert module not in sys.modules


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "VLLM", False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))  # without a registry
    plugin.register()
