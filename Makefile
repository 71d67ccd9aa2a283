# The two commands of the README are `make demo` and `make test`; both install what they need.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test engines test-vllm test-sglang lint hub clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# One stamp for the environment: made again when the dependencies change.
# torch goes first and by version: a range would let pip take a larger build than is wanted.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli,transformers,bench,dev]'
	touch $@

demo: $(VENV)/installed  ## a small MiniMax-M3 generates through every KV format, beside eager attention
	$(BIN)/msattn demo --out out

test: $(VENV)/installed  ## all tests that this machine can run
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/triton

# The engines' pins exclude each other's: an environment for each, with the engine's Python sources.
$(VENV)/engines/%/installed: pyproject.toml tests/engines/prepare.py tests/engines/requirements.txt \
		tests/engines/requirements-%.txt
	$(PYTHON) tests/engines/prepare.py $* $(@D)
	touch $@

engines: $(VENV)/engines/vllm/installed $(VENV)/engines/sglang/installed  ## what the next two run in

test-vllm: $(VENV)/engines/vllm/installed  ## the plug-in in the pinned vLLM, on a CPU
	$(<D)/bin/python -m pytest tests/engines/test_vllm*.py

test-sglang: $(VENV)/engines/sglang/installed  ## the plug-in in the pinned SGLang, on a CPU
	$(<D)/bin/python -m pytest tests/engines/test_sglang*.py

lint: $(VENV)/installed  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

hub:  ## build/torch-cuda and build/torch-cpu: msattn as a kernel of the Hugging Face Hub
	$(PYTHON) tools/hub.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
