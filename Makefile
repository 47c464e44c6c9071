# Every target does its own set-up, in .venv: idempotent, and quick when nothing has changed.
# ARGS goes to the command: make serve ARGS="--model PATH", make test ARGS="tests/filters -x".

PYTHON ?= $(or $(HEADRACE_PYTHON),python3)
VENV := .venv/bin
ARGS ?=
# Three test processes, which wait for others half of their time; empty for one, as a debugger wants it:
# make test PARALLEL= ARGS="tests/filters --pdb".
PARALLEL ?= -n 3 --dist loadgroup
# Tests and benchmarks start a thousand processes: compiled modules are kept, whatever the shell's habit.
unexport PYTHONDONTWRITEBYTECODE
# Without those that install other programs.
BENCHES ?= $(filter-out bench_peers bench_agreement,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/bench_*.py)))

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-long lint bench bench-peers clean

help:  ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup:  ## build .venv with everything: gateway, engine, tools for tests
	@$(PYTHON) .ci/setup.py test
	@$(PYTHON) .ci/tokenizers.py

serve:  ## a gateway and an engine with the embedded model, on http://127.0.0.1:8000
	@$(PYTHON) .ci/setup.py serve
	@exec $(VENV)/python -m gateway serve $(ARGS)

test: setup  ## all tests but the long ones, under 8 minutes
	@$(VENV)/python -m pytest $(PARALLEL) $(ARGS)

test-long: setup  ## the soaks and the full counts
	@$(VENV)/python -m pytest -m long $(PARALLEL) $(ARGS)

lint: setup  ## ruff and mypy
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy

bench: setup  ## every benchmark that installs nothing, or BENCHES="bench_gateway"
	@set -e; for bench in $(BENCHES); do $(VENV)/python -m benchmarks.$$bench $(ARGS); done

bench-peers: setup  ## Headrace beside LiteLLM, vllm-router and vLLM's server; ARGS="--quick" for a first look
	@$(VENV)/python -m benchmarks.bench_peers $(ARGS)

clean:  ## remove caches and build outputs; .venv stays
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
