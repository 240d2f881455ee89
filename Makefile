# Everything from nothing but Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# URL of PyTorch's CPU wheel index, for machines that don't find torch 2.13.0+cpu otherwise.
TORCH_INDEX ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/isochunk demo

# The engine in a process of its own: it leaves signal handlers and settings behind.
test: lint
	$(BIN)/python -m pytest tests/unit tests/property
	$(BIN)/python -m pytest tests/engine

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "Installing vLLM for CPUs and what it needs (a few minutes) ..."
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement requirements/cpu.txt
	$(PIP) --editable .
	touch $@

clean:
	rm -rf $(VENV) demo-out
