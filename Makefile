# Self-documenting: `make` or `make help` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PYTHONDONTWRITEBYTECODE ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo demo-weights test lint format bench bench-lora kernels-report gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv and install everything into it

# torch is most of the download. pip takes a CPU build where its indexes offer one; the README says
# how to ask for it.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing torch and the other dependencies; this takes some minutes ..."
	$(BIN)/python -m pip install --progress-bar on -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## the main job: serve a base and three adapters, push, ask, check the answers
	$(BIN)/loraplex demo $(if $(ONCE),--once) $(if $(JSON),--json $(JSON))

demo-weights: $(INSTALLED) ## train the demo's base model and adapters again (about 15 minutes)
	$(BIN)/python -m loraplex.api.demo.recipe api/demo/weights

test: $(INSTALLED) ## run the tests
	$(BIN)/python -m pytest

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## throughput and latency, mixed adapters against the base alone
	$(BIN)/loraplex bench serving

bench-lora: $(INSTALLED) ## the LoRA kernels alone
	$(BIN)/python -m benchmarks.bench_lora

kernels-report: $(INSTALLED) ## compile the Triton kernels for sm_80 and sm_90 and print what they use
	@$(BIN)/python -m loraplex.kernels.report

gpu-check: ## serve a mixed batch on CUDA, compare with the CPU, time the kernels (no install needed)
	PYTHONPATH=.src:tests $(or $(GPU_PYTHON),python3) -m benchmarks.gpu_check

clean: ## remove what these targets made
	rm -rf $(VENV) .loraplex dist .mypy_cache .ruff_cache .pytest_cache
