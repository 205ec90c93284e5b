# Everything from a fresh checkout: `make train` trains, `make test` checks. `make` alone lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# More arguments of `distlion train` or of pytest: make train ARGS="--workers 2 --steps 100"
ARGS ?=

BIN := $(VENV)/bin
TRAIN_EXTRAS := train
TEST_EXTRAS := train,netlab,dev

# An environment variable that stops Python from keeping compiled modules would cost seconds in every process.
export PYTHONDONTWRITEBYTECODE :=
# The tools that build the package are bound too.
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help train test bench lint format clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  ARGS="more arguments of distlion train, or of pytest"'

train: $(VENV)/.ready-train  ## set up, then train a small language model with four local workers
	@$(BIN)/distlion train $(ARGS)

test: $(VENV)/.ready-test  ## set up, then run every check and every test, and sum up
	@$(run_parts)
	part "ruff check" $(BIN)/ruff check .
	part "ruff format" $(BIN)/ruff format --check .
	part "mypy" $(BIN)/mypy
	part "import-linter" $(BIN)/lint-imports --no-logo
	part "docs" $(BIN)/pytest -q tests/test_docs.py
	part "tests" $(BIN)/pytest --ignore=tests/test_docs.py --cov --cov-report=term-missing:skip-covered $(ARGS)
	sum_up

bench: $(VENV)/.ready-test  ## run every program in benchmarks/
	@shopt -s nullglob
	programs=(benchmarks/*.py)
	if [ $${#programs[@]} -eq 0 ]; then echo "There is no benchmark in benchmarks/ yet."; exit 0; fi
	$(run_parts)
	for program in "$${programs[@]}"; do part "$$program" $(BIN)/python "$$program"; done
	sum_up

lint: $(VENV)/.ready-test  ## run the static checks only
	@$(run_parts)
	part "ruff check" $(BIN)/ruff check .
	part "ruff format" $(BIN)/ruff format --check .
	part "mypy" $(BIN)/mypy
	part "import-linter" $(BIN)/lint-imports --no-logo
	sum_up

format: $(VENV)/.ready-test  ## format the source and fix what ruff can fix
	@$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and everything that was generated
	@rm -rf "$(VENV)" build dist htmlcov .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Recipes are whole scripts: a function that one line defines is there for the next.
.ONESHELL:

# part NAME COMMAND...: run one part and note how it went; sum_up: show all notes, fail if one part failed.
define run_parts
lines=(); failures=0; log=$$(mktemp); trap 'rm -f "$$log"' EXIT
part() {
    local name=$$1 started=$$SECONDS verdict=passed counted=""
    shift
    echo; echo "=== $$name"
    "$$@" </dev/null 2>&1 | tee "$$log" || { verdict=FAILED; failures=$$((failures + 1)); }
    if [[ $$1 == */pytest ]]; then counted=$$(tail -n 1 "$$log" | sed 's/\x1b\[[0-9;]*m//g; s/^=* *//; s/ *=*$$//'); fi
    lines+=("$$(printf '%-14s %-7s %4d s  %s' "$$name" "$$verdict" $$((SECONDS - started)) "$$counted")")
}
sum_up() {
    echo; echo "=== summary"
    printf '%s\n' "$${lines[@]}"
    if [ $$failures -gt 0 ]; then echo "$$failures of $${#lines[@]} parts FAILED"; exit 1; fi
    echo "all $${#lines[@]} parts passed"
}
endef

# install EXTRAS: the package in place with its extras. A recent pip chooses versions in half the time of the one that
# comes with Python 3.11, and modules are compiled when first imported: together 120 s of processor time less.
define install
started=$$SECONDS
echo "installing distlion[$(1)] into $(VENV): about a minute without further output ..."
$(BIN)/python -m pip install -qq --no-compile -c constraints.txt pip </dev/null
$(BIN)/python -m pip install -qq --no-compile --no-warn-conflicts -c constraints.txt -e '.[$(1)]' </dev/null
echo "installed in $$((SECONDS - started)) s"
endef

$(VENV)/.ready-train: pyproject.toml constraints.txt | $(VENV)/.created
	@$(call install,$(TRAIN_EXTRAS))
	touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt | $(VENV)/.created
	@$(call install,$(TEST_EXTRAS))
	touch $(VENV)/.ready-train $@

$(VENV)/.created:
	@if ! command -v "$(PYTHON)" >/dev/null; then echo "$(PYTHON) was not found: install Python 3.10 or later, or name one: make PYTHON=..." >&2; exit 1; fi
	if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
	    echo "$(PYTHON) is $$("$(PYTHON)" --version), distlion needs 3.10 or later: make PYTHON=..." >&2
	    exit 1
	fi
	# Debian keeps ensurepip, without which a virtual environment has no pip, in a package of its own.
	if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then
	    package=$$("$(PYTHON)" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
	    if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
	        echo "$(PYTHON) cannot create virtual environments: install its venv package, on Debian and Ubuntu with" >&2
	        echo "    sudo apt-get install $$package" >&2
	        exit 1
	    fi
	    echo "installing $$package ..."
	    export DEBIAN_FRONTEND=noninteractive
	    apt-get -qq update && apt-get -qq install -y --no-install-recommends "$$package" >/dev/null
	fi
	echo "creating $(VENV) ..."
	"$(PYTHON)" -m venv "$(VENV)"
	touch $@
