# The same few commands for people and for CI. `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# The stamp's name holds a checksum of what the environment was built from, so that a change of
# either file installs anew and anything else does not.
STAMP := .venv/setup-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
# Airflow caps web libraries that Headrace does not: it lives apart and calls the command line.
AIRFLOW := .venv-airflow/bin
D3RLPY := .venv-d3rlpy/bin
RLLIB := .venv-rllib/bin
RLLIB_STAMP := .venv-rllib/setup-$(shell cksum < tests/rllib/constraints.txt | tr ' ' '-')
AIRFLOW_STAMP := .venv-airflow/setup-$(shell cksum < airflow_dags/constraints.txt | tr ' ' '-')

# The tests start hundreds of processes: what one has compiled is there for the next.
unexport PYTHONDONTWRITEBYTECODE

# Of the fault suite and the judge's: the same seed draws the same faults and logs.
SEED ?= 7

.DEFAULT_GOAL := help
.PHONY: help setup test lint dags airflow-e2e d3rlpy exports rllib unit long attack faults faults-long judge format demo demo-seeds bench docs release clean

help:  ## list the commands
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP)  ## build .venv with every extra, at the tested versions

$(STAMP):
	@echo 'Setting up .venv; the first time takes minutes.'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -qq -c constraints.txt hatchling
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	@rm -f .venv/setup-*
	@touch $@

$(AIRFLOW_STAMP):
	@echo 'Setting up .venv-airflow; the first time takes minutes.'
	@$(AIRFLOW)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv-airflow
	$(AIRFLOW)/python -m pip install -qq -c airflow_dags/constraints.txt apache-airflow pytest
	@rm -f .venv-airflow/setup-*
	@touch $@

test: lint  ## everything that CI runs
	@$(MAKE) --no-print-directory -j2 dags unit

lint: setup  ## rules, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

dags: setup $(AIRFLOW_STAMP)  ## the Airflow DAGs, in their own environment
	$(AIRFLOW)/python -m pytest -c tests/airflow/pytest.ini --rootdir=. --confcutdir=tests/airflow \
		tests/airflow

airflow-e2e: setup $(AIRFLOW_STAMP)  ## Airflow's four components, a collector and a client on loopback
	$(AIRFLOW)/python -m tests.airflow.e2e

# d3rlpy holds gymnasium 1.0.0, which `[train]` does not accept.
d3rlpy:  ## the d3rlpy program of docs/own_loop.md, in an environment of its own
	@$(D3RLPY)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv-d3rlpy
	$(D3RLPY)/python -m pip install -qq 'torch==2.13.0' 'd3rlpy==2.8.1' pyarrow blake3 watchdog scipy \
		msgspec safetensors requests urllib3
	$(D3RLPY)/python -m tests.docs.own_loop d3rlpy

# What each library reads of an export. LeRobot's torch is older; one of its packages ships `tests`.
exports: setup $(RLLIB_STAMP)  ## exports, loaded by their own libraries, each in an environment of its own
	$(BIN)/python -m tests.policy.exporting.libraries torchrl
	$(RLLIB)/python -m tests.policy.exporting.libraries minari huggingface
	@$(D3RLPY)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv-d3rlpy
	$(D3RLPY)/python -m pip install -qq 'torch==2.13.0' 'd3rlpy==2.8.1' pyarrow watchdog scipy \
		msgspec safetensors requests urllib3
	$(D3RLPY)/python -m tests.policy.exporting.libraries d3rlpy
	@.venv-lerobot/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv-lerobot
	.venv-lerobot/bin/python -m pip install -qq 'lerobot==0.4.4' msgspec watchdog
	rm -rf .venv-lerobot/lib/python3*/site-packages/tests
	.venv-lerobot/bin/python -m tests.policy.exporting.libraries lerobot

rllib: $(RLLIB_STAMP)  ## Ray's algorithms on a log and on clients, in their own environment; HEADRACE_RLLIB_GOAL=25 is short
	RAY_DATA_DISABLE_PROGRESS_BARS=1 PYTHONPATH=. $(RLLIB)/python -m pytest -s \
		-c tests/rllib/pytest.ini --rootdir=. --confcutdir=tests/rllib tests/rllib

$(RLLIB_STAMP):
	@echo 'Setting up .venv-rllib; the first time takes minutes.'
	@$(RLLIB)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv-rllib
	$(RLLIB)/python -m pip install -qq -r tests/rllib/constraints.txt
	@rm -f .venv-rllib/setup-*
	@touch $@

# More workers than cores: many tests wait, for a process to start or a file to be on disk.
unit: setup  ## the tests but for the long ones
	$(BIN)/python -m pytest -n 5

long: setup  ## the long tests: the wheel in fresh environments, each Python, each floor, kills, learning
	$(BIN)/python -m pytest -n 2 -m long

faults: setup  ## what can go wrong, and broken builds that must be caught; SEED=n
	HEADRACE_EXAMPLES=2000 $(BIN)/python -m pytest -q tests/ingest/episodes/test_judge_odd_*.py
	$(BIN)/python -m tests.faults --seed $(SEED)

attack: setup  ## hostile input on this build, and broken builds that must fall; SEED=n
	$(BIN)/python -m tests.attack --seed $(SEED)

faults-long: setup  ## the same scenarios at full size, without the broken builds
	$(BIN)/python -m tests.faults --seed $(SEED) --long

judge: setup  ## how often the judge is wrong, and can tell: 2,000 repetitions a case
	$(BIN)/python -m tests.judge --seed $(SEED)

format: setup  ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: setup  ## the main job: a real log becomes a published policy
	$(BIN)/headrace demo

demo-seeds: setup  ## the demo for three seeds, CartPole included
	for seed in 1 2 3; do $(BIN)/headrace demo --root data/run/demo-$$seed --seed $$seed || exit 1; done

bench: setup  ## one table of ratios, each against a named baseline
	$(BIN)/python -m benchmarks

docs: setup  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

release: test  ## all tests, then wheel, sdist and SBOM of this commit, each tried, and its tag
	$(BIN)/python -m pytest -q tests/project/test_wheel.py tests/project/test_versions.py
	$(BIN)/python release.py --tag

clean:  ## remove what was built; data/run stays
	rm -rf .venv .venv-airflow .make build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis .import_linter_cache
