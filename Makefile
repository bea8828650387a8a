.DEFAULT_GOAL := help
SHELL := /bin/bash -eo pipefail
PYTHON := .venv/bin/python
BENCH := .venv/bin/entrain-bench
STAMP := .venv/.installed
# A Python that can create the environment without uv.
BASE_PYTHON = $(shell for p in python3.12 python3 python; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
# A folder of yours, for figures: make figures CONFIG_DIR=my_folder.
FOLDER = $(if $(CONFIG_DIR), --config-dir "$(CONFIG_DIR)")
# The quick figure on a tiny job: shows that the installation works, and compiles all that the first run needs.
TRIAL = mkdir -p build && rm -rf build/trial && $(BENCH) figures quick model=tiny cluster=tiny workload=chartqa \
	layout.tp=1 layout.dp=2 global_batch=16 microbatch_size=2 iterations=1 mlflow=false results_dir=build/trial \
	>build/trial.log 2>&1
export OMP_NUM_THREADS ?= 1
export MLFLOW_DISABLE_TELEMETRY := true
# Containers set it; then every process compiles the suite, torch and megatron-core anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quick figures appendix report measured fidelity gpu-check claims calibration verify reference test test-slow test-site mutants fuzz tamper bench ui docs docs-serve lint clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## Create .venv with all packages (with uv if installed, else venv and pip)

$(STAMP): pyproject.toml setup.py constraints.txt
	@echo 'installing into .venv (about 5 GB; a minute or two with uv, several with pip)'
	@if uv --version >/dev/null 2>&1; then \
	  uv venv --quiet --allow-existing --python 3.12 .venv; \
	  uv pip install --quiet --python $(PYTHON) -c constraints.txt -e '.[data,dev,docs,joblib]'; \
	elif [ -n "$(BASE_PYTHON)" ]; then \
	  $(BASE_PYTHON) -m venv .venv; \
	  $(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[data,dev,docs,joblib]'; \
	else \
	  echo "setup: needs uv or a Python >= 3.12 on PATH" >&2; exit 1; \
	fi
	@# Compiled loops remember the names that their modules had.
	@find entrain_bench strategies workloads -name '*.nb[ic]' -delete
	@$(PYTHON) -m compileall -qq -j 0 .venv/lib || true
	@echo 'trying a tiny job, which compiles the loops (half a minute)'
	@$(TRIAL) || { cat build/trial.log >&2; exit 1; }
	@touch $@

quick: setup ## Compare Megatron and the three fastest strategies on two jobs, one seed: table, answer, picture, next steps
	$(BENCH) figures quick

figures: setup ## Execute missing runs; draw the main figures in results/figures, write results.md
	$(BENCH) figures$(FOLDER)

appendix: setup ## Execute missing runs; draw the figures of single questions: robustness, tuning budget, depths, twins
	$(BENCH) figures context_length forward_variability out_of_the_box robustness sensitivity tuning_budget twins$(FOLDER)

report: setup ## Write results/report.html and report.md: which strategy to use, and why (after make figures)
	$(BENCH) report$(FOLDER)

measured: setup ## Train on 4 ranks of this machine; draw results/figures/measured_gantt.{pdf,png,csv}
	$(BENCH) figures measured_gantt

fidelity: setup ## Train and predict 63 programs on this machine (about an hour); draw results/figures/fidelity.{pdf,png,csv}
	$(PYTHON) -m entrain_bench.lab fidelity

gpu-check: setup ## Check training on this machine's GPUs; write results/gpu-check-<date>/ (OPTIONS=--help)
	$(PYTHON) -m entrain_bench.lab gpu-check $(OPTIONS)

claims: setup ## Execute missing runs; write results/claims.md and results/results.md
	$(BENCH) figures claims results
	@$(BENCH) claims | tail -n 2

calibration: setup ## Fit constants to published runs, print errors of sources left out, write results/calibration.md
	$(BENCH) figures calibration
	$(BENCH) ledger fit=true

verify: setup ## Recompute every committed result and list every value that is not bit-identical
	$(BENCH) verify

reference: setup ## Update results/reference and docs, and list every change
	$(BENCH) reference

# A worker takes neighbours, which compile the same loops, before it takes from the other's.
TEST = $(PYTHON) -m pytest -n auto --dist worksteal -q

test: setup ## Run the quick tests; WIDE=1: also those that take seconds or repeat for every strategy (PART=0/5: a fifth)
	$(if $(PART),PART=$(PART) )$(TEST)$(if $(WIDE), -m 'not slow and not site')

test-slow: setup ## Run the slow tests; SEED=1 draws other combinations of parts
	SEED=$(or $(SEED),0) $(PYTHON) -m pytest -q -m slow

test-site: docs ## Build the site and open its pages and MLflow's in a browser (needs chromium and chromedriver)
	$(PYTHON) -m pytest -q -m site

mutants: setup ## Run mutation testing on the core (about half an hour): SEED=0 COUNT=100
	PYTHONPATH=tests $(PYTHON) -m mutants --seed $(or $(SEED),0) --count $(or $(COUNT),100)

fuzz: setup ## Test 1000 random command lines and 1000 broken traces: SEED=0 COUNT=1000 (no traceback, at most 60 s each)
	COUNT=$(or $(COUNT),1000) $(PYTHON) -m pytest -q -n0 --timeout=0 --hypothesis-seed=$(or $(SEED),0) tests/test_fuzz.py

tamper: setup ## Change a folder of 40 runs 500 times; no changed number may be shown, no command may crash: SEED=0 N=500
	SEED=$(or $(SEED),0) N=$(or $(N),500) $(PYTHON) -m pytest -q -n0 --timeout=0 tests/tamper

bench: setup ## Benchmark the suite itself (up to five minutes); write results/bench.json
	$(PYTHON) -m entrain_bench.lab bench

ui: setup ## Show the runs in MLflow on 127.0.0.1:5000; print links to answers
	$(BENCH) ui

docs: setup ## Build the documentation as a site, offline, warnings as errors (a minute): build/docs/html/index.html
	PYTHONPATH=docs $(PYTHON) -m sitegen

docs-serve: docs ## Build it and serve it on 127.0.0.1: PORT=8000
	$(PYTHON) -m http.server --bind 127.0.0.1 --directory build/docs/html $(or $(PORT),8000)

lint: setup ## Check style, types, import contracts and the words of docs and help
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	PYTHONPATH=tests $(PYTHON) -m prose

clean: ## Remove the environment, caches and generated results (keeps results/reference)
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find results -mindepth 1 -maxdepth 1 ! -name reference ! -name README.md -exec rm -rf {} +
