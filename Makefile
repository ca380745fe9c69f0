# Two commands for users (demo, test), two for developers (check, test-all). Everything lives in $(VENV).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.installed-dev
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint requirements/constraints.txt
TEST := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

TELLING := $(addprefix tests/test_,engine_overrides.py engine_training.py stage_model.py attention.py lora.py \
	trainer.py trainer_arguments.py trl_parts.py checkpoint.py dataset.py config.py planner.py check_command.py)

export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export TOKENIZERS_PARALLELISM ?= false
# Bytecode of what is imported is kept, as pip does not compile that of everything.
export PYTHONDONTWRITEBYTECODE :=
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-nightly test-lowest test-newest check types lint docs reproduce format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

install: $(DEVELOPED)  ## create the virtual environment

# Compiles the planner once, so that no run waits for a compiler: on one core, while another one installs the rest.
$(INSTALLED): setup.cfg pyproject.toml requirements/constraints.txt
	@echo "installing torch, DeepSpeed and transformers into $(VENV), compiling the planner"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) numba pydantic setuptools
	@$(BIN)/python -c "from ds_hydra.sampler.warm_up import warm_up; warm_up()" & planner=$$!; \
	$(PIP) torch && $(PIP) --editable . && $(BIN)/python -W ignore -c "import ds_hydra.engine, transformers.models.llama.modeling_llama" \
	&& wait $$planner
	@touch $(INSTALLED)

$(DEVELOPED): $(INSTALLED)
	@echo "installing what tests, checks and documentation need"
	@$(PIP) --editable '.[dev]'
	@touch $(DEVELOPED)

demo: export TOKENIZERS_PARALLELISM := true
demo: $(INSTALLED)  ## train a small LLaMA on the standard library's source with 4 CPU ranks
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/deepspeed --log_level error --num_gpus 4 --no_local_rank examples/stdlib/train.py

test: $(DEVELOPED)  ## run the tests of some minutes
	$(TEST) -m "not slow and not nightly"

test-all: $(DEVELOPED)  ## run those too that are slow, as CI does
	$(TEST) -m "not nightly"

test-nightly: $(DEVELOPED)  ## run what is slow and rarely fails: launchers, hosts, the stand-in device, long counts
	$(TEST) -m nightly

test-lowest:  ## test with the lowest versions that setup.cfg admits, in an environment of their own
test-newest:  ## the same with the newest versions

# Of torch the version that constraints pin: its other builds for Linux are those for CUDA.
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest:
	@echo "installing what setup.cfg admits into $(VENV)-$@"
	@$(PYTHON) -m venv $(VENV)-$@
	@grep '^torch==' requirements/constraints.txt > $(VENV)-$@/torch.txt
	@$(VENV)-$@/bin/pip install --quiet --disable-pip-version-check uv
	@$(VENV)-$@/bin/uv pip compile --quiet --resolution $(RESOLUTION) --constraint $(VENV)-$@/torch.txt \
		--extra highs --extra peft --extra trl setup.cfg --output-file $(VENV)-$@/versions.txt
	@$(VENV)-$@/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint $(VENV)-$@/versions.txt \
		--editable '.[highs,peft,trl]' pytest pytest-timeout pytest-xdist hypothesis
	PATH="$(abspath $(VENV))-$@/bin:$$PATH" $(VENV)-$@/bin/python -m pytest -n 2 --dist loadfile \
		-m "not slow and not nightly" $(TELLING)

check: types docs lint  ## lint, types, import contract, documentation

types: $(DEVELOPED)
	$(BIN)/mypy

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

reproduce: $(INSTALLED)  ## simulate every case -> docs/reproduction.md; continues where it stopped
	$(BIN)/python -m benchmarks.simulate --iterations 100 --all --out docs/benchmarks/simulate.json \
		--document docs/reproduction.md --page docs/benchmarks/simulate.md

docs: $(DEVELOPED)  ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(DEVELOPED)  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove environment and caches
	rm -rf $(VENV) .cache runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
