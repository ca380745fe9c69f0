# Two commands for users (demo, test), one for developers (check). Everything lives in $(VENV).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help install demo test check docs reproduce format clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED)  ## create the virtual environment

# The last two steps compile DeepSpeed's CPU collectives and the planner once, so that no run waits for a compiler.
$(INSTALLED): setup.cfg pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt torch numpy setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt --editable '.[dev]'
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	$(BIN)/python -c "from ds_hydra.sampler.planner import warm_up; warm_up()"
	@touch $(INSTALLED)

demo: $(INSTALLED)  ## train a small LLaMA on the standard library's source with 4 CPU ranks
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/deepspeed --num_gpus 4 --no_local_rank examples/stdlib/train.py

test: $(INSTALLED)  ## run the tests
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest

check: $(INSTALLED) docs  ## lint, types, import contract, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reproduce: $(INSTALLED)  ## simulate every case of the paper -> docs/reproduction.md (some 15 minutes)
	$(BIN)/python -m benchmarks.simulate --iterations 100 --all --out docs/benchmarks/simulate.json \
		--document docs/reproduction.md

docs: $(INSTALLED)  ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(INSTALLED)  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove environment and caches
	rm -rf $(VENV) .cache runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
