# Everything from a fresh checkout: `make train` trains, `make test` checks. `make` alone lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# More arguments of `distlion train` or of pytest: make train ARGS="--workers 2 --steps 100"
ARGS ?=
# Schedules that `make simulate` plays.
SEEDS ?= 10000
# Of `make soak` and `make fuzz`.
MINUTES ?= 30

BIN := $(VENV)/bin
# `make train` without ARGS: votes, then AdamW on the same data, and a race of both over two links.
TRAINED := --rule majority-orthogonal-betas-90-95 --lr 4e-3 --beside global-adamw-betas-90-95 --beside-lr 4e-3 \
    --exchange all-reduce --steps 300 --race 100mbit,1gbit
# What is installed in place: distlion with extras, and the packages around it.
TRAIN_PACKAGES := -e . -e lab -e netlab
TEST_PACKAGES := -e '.[integrations,gpu,dev]' -e lab -e netlab -e flower
DOCS_PACKAGES := -e '.[integrations,gpu,dev,docs]' -e lab -e netlab -e flower
# The kernels for GPUs need none to be tested: Triton interprets them, in a process where this is set.
INTERPRETED := TRITON_INTERPRET=1
# What `make test` runs beside everything else; tests/harness.py marks it.
APART := tests/crew tests/distributed campaigns/fuzz tests/integrations
# Of these, what leaves the processors alone for long: crews wait for members that are silent or may still come.
WAITING := tests/crew tests/integrations
# The library and a few tests of what is around it; with ARGS, whatever these name.
QUICK := not slow and not apart$(if $(ARGS),, and not around)
# Where the core that is built with sanitizers is kept between runs.
SANITIZED := build/sanitize
# Flower needs older versions of packages than others do.
FLOWER := build/flower
# What `make finetune` downloads and writes.
FINETUNE := build/finetune
# How lines are shown that neither quick tests nor those of trainers reach, nor processes that they start.
MISSING := term-missing:skip-covered

# An environment variable that stops Python from keeping compiled modules would cost seconds in every process.
export PYTHONDONTWRITEBYTECODE :=
# The tools that build the package are bound too.
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help train finetune test test-all test-lab test-flower test-benchmarks simulate fuzz bits bench gpu lint docs sanitize soak wheel format clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  SEEDS=$(SEEDS)  ARGS="more arguments of distlion train, or of pytest"'

train: $(VENV)/.ready-train  ## set up, then train a small language model with four local workers that vote, then with AdamW, and let both race over slow links
	@$(BIN)/distlion train $(or $(ARGS),$(TRAINED))

finetune: $(VENV)/.ready-test  ## download a pretrained network and mails (100 MB), and fine-tune with votes, then with DDP and AdamW
	@$(BIN)/python benchmarks/finetune fetch $(FINETUNE) --only minilm spam
	$(BIN)/python benchmarks/finetune unpack $(FINETUNE)
	for before in "" --before; do
	    OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/09_finetune.py \
	        --model $(FINETUNE)/minilm --data $(FINETUNE)/spam --folder $(FINETUNE)/results $$before $(ARGS)
	done

test: $(VENV)/.ready-test  ## set up, then run every check and the library's quick tests, and sum up
	@$(run_parts)
	# Three lanes that take equally long: the folders that tests/harness.py keeps apart, in two parts, and all others.
	others() {
	    part "tests" $(BIN)/pytest $(if $(ARGS),--ignore=tests/test_docs.py,$(APART:%=--ignore=%)) -m "$(QUICK)" $(ARGS)
	    $(if $(ARGS),$(docs_part))
	}
	crews() {
	    $(if $(ARGS),,part "crews" $(BIN)/pytest -m "not slow" $(WAITING))
	    $(INTERPRETED) part "GPU kernels" $(BIN)/pytest tests/kernels/test_interpreted.py tests/distributed/test_gpu_*.py -m "not slow"
	}
	aside others
	aside crews
	$(code_parts)
	part "workers" $(BIN)/pytest -m "not slow and apart" $(or $(ARGS),$(filter-out $(WAITING),$(APART)))
	rejoin
	sum_up

test-all: $(VENV)/.ready-test  ## what `make test` runs, with coverage, and then everything that takes long
	@$(run_parts)
	$(code_parts)
	$(docs_part)
	part "tests" $(BIN)/pytest --ignore=tests/test_docs.py -m "not slow" --cov --cov-report=$(if $(ARGS),$(MISSING)) $(ARGS)
	$(if $(ARGS),,part "trainers" $(BIN)/pytest tests/integrations -m slow --cov --cov-append --cov-report=$(MISSING) --cov-fail-under=95)
	part "site" make --no-print-directory docs
	part "slow tests" $(BIN)/pytest -m slow $(if $(ARGS),,--ignore=tests/integrations) $(ARGS)
	part "Flower" make --no-print-directory test-flower ARGS=
	$(INTERPRETED) part "GPU kernels" $(BIN)/pytest tests/kernels tests/votes/test_cut_parameters.py tests/distributed/test_gpu_*.py -k "triton or interpreted or gpu"
	part "sanitizers" make --no-print-directory sanitize ARGS=
	part "soak" $(BIN)/python campaigns/soak --minutes 1
	part "fuzz" make --no-print-directory fuzz MINUTES=$(MINUTES) ARGS=
	part "mutations" $(BIN)/python campaigns/mutations
	sum_up

test-lab: $(VENV)/.ready-test  ## run all tests of the commands in lab/ and netlab/
	@$(BIN)/pytest lab/tests netlab/tests $(ARGS)

test-benchmarks: $(VENV)/.ready-test  ## run all tests of the programs in benchmarks/
	@$(BIN)/pytest benchmarks/tests $(ARGS)

test-flower: $(FLOWER)/.ready  ## run all tests of flower/ in an environment of its own, which has Flower
	@PATH="$(CURDIR)/$(FLOWER)/bin:$$PATH" FLWR_TELEMETRY_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 \
	    "$(FLOWER)/bin/python" -m pytest flower/tests $(ARGS)

simulate: $(VENV)/.ready-test  ## play SEEDS schedules of failing workers in simulated networks; with SEED=17 only that one, told line by line
	@PYTHONPATH=tests:campaigns $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

fuzz: $(VENV)/.ready-test  ## play random programs over the public API for MINUTES; with SEED=17 only that one, cut down to what it takes to fail
	@PYTHONPATH=tests:campaigns $(BIN)/python -m fuzz $(if $(SEED),--seed $(SEED),--minutes $(MINUTES)) $(ARGS)

bits: $(VENV)/.ready-test  ## compare the bits of short training runs with those on record; ARGS="check nodes" only some, ARGS=record writes them anew
	@PYTHONPATH=tests:campaigns $(BIN)/python -m bits $(or $(ARGS),check)

bench: $(VENV)/.ready-test  ## run every program in benchmarks/
	@shopt -s nullglob
	programs=(benchmarks/*.py benchmarks/*/__main__.py)
	if [ $${#programs[@]} -eq 0 ]; then echo "There is no benchmark in benchmarks/ yet."; exit 0; fi
	$(run_parts)
	for program in "$${programs[@]}"; do part "$${program%/__main__.py}" $(BIN)/python "$${program%/__main__.py}"; done
	sum_up

gpu: $(VENV)/.ready-test  ## on a machine with a GPU: check and measure everything there, into benchmarks/results/gpu.md
	@$(BIN)/python benchmarks/gpu $(ARGS)

lint: $(VENV)/.ready-test  ## run the static checks only
	@$(run_parts)
	$(code_parts)
	$(docs_part)
	sum_up

docs: $(VENV)/.ready-docs  ## build the site into build/site, warnings being errors, check its links, and make the report, build/report.pdf
	@rm -rf build/site
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c docs -b html -d build/doctrees . build/site
	$(BIN)/python docs/site_links.py build/site
	$(BIN)/python docs/report.py build/report.pdf

sanitize: $(SANITIZED)/.ready  ## build the C++ core with AddressSanitizer and UBSan, and test the kernels with it
	@preload="$$($${CXX:-c++} -print-file-name=libasan.so):$$($${CXX:-c++} -print-file-name=libubsan.so)"
	# Not leaks: the interpreter keeps a lot until it ends. Not the emulated processor, which has a core of its own.
	LD_PRELOAD="$$preload" ASAN_OPTIONS=detect_leaks=0 "$(SANITIZED)/bin/python" -m pytest -q \
	    -p no:cacheprovider --ignore=tests/kernels/test_architectures.py tests/kernels tests/wire/test_frame*.py tests/wire/test_endpoint.py $(ARGS)

soak: $(VENV)/.ready-test  ## as root: kill, stop and cut off workers for MINUTES, and compare with a quiet run
	@$(BIN)/python campaigns/soak --minutes $(MINUTES) $(ARGS)

wheel: $(VENV)/.ready-test  ## build the wheels into dist/, install that of distlion in a clean environment, and test the kernels with it
	@rm -rf dist build/wheel
	export DISTLION_RELEASE=1
	echo "building the wheels ..."
	$(BIN)/python -m pip wheel -qq --no-deps --wheel-dir dist . ./lab ./netlab ./flower
	echo "installing it in a clean environment ..."
	"$(PYTHON)" -m venv build/wheel
	build/wheel/bin/python -m pip install -qq -c constraints.txt "$$(echo dist/distlion-*.whl)[test]"
	(cd build/wheel && bin/python -m pytest -q -p no:cacheprovider "$(CURDIR)/tests/kernels" $(ARGS))
	ls -l dist

format: $(VENV)/.ready-test  ## format the source and fix what ruff can fix
	@$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and everything that was generated
	@rm -rf "$(VENV)" build dist htmlcov .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Recipes are whole scripts: a function that one line defines is there for the next.
.ONESHELL:

# part NAME COMMAND...: run one part and note how it went; aside FUNCTION: run the parts of a function beside those that
# follow; rejoin: wait for all of these, show and note them; sum_up: show all notes, fail if one part failed.
define run_parts
lines=(); failures=0; empty=0; asides=(); scratch=$$(mktemp -d); log=$$scratch/log; trap 'rm -rf "$$scratch"' EXIT
part() {
    local name=$$1 started=$$SECONDS verdict=passed status=0 counted=""
    shift
    echo; echo "=== $$name"
    "$$@" </dev/null 2>&1 | tee "$$log" || status=$$?
    # Pytest ends with 5 where it finds no test: another part may have those that ARGS asks for.
    if [[ $$status == 5 && -n '$(if $(ARGS),some)' ]]; then verdict=empty; empty=$$((empty + 1))
    elif [ $$status -ne 0 ]; then verdict=FAILED; failures=$$((failures + 1)); fi
    if [[ $$1 == */pytest ]]; then counted=$$(tail -n 1 "$$log" | sed 's/\x1b\[[0-9;]*m//g; s/^=* *//; s/ *=*$$//'); fi
    if grep -q "Total coverage: " "$$log"; then counted+=", coverage $$(sed -n 's/.*Total coverage: //p' "$$log")"; fi
    lines+=("$$(printf '%-14s %-7s %4d s  %s' "$$name" "$$verdict" $$((SECONDS - started)) "$$counted")")
}
aside() {
    asides+=("$$1")
    (
        # A shell lets what it runs in the background ignore Ctrl-C.
        trap - INT EXIT
        lines=(); failures=0; empty=0; log=$$scratch/log-$$1
        "$$@"
        printf '%s\n' "$$failures" "$$empty" "$${lines[@]}" >"$$scratch/notes-$$1"
    ) </dev/null >"$$scratch/shown-$$1" 2>&1 &
}
rejoin() {
    local more_failures more_empty line name
    wait || true
    for name in "$${asides[@]}"; do
        cat "$$scratch/shown-$$name"
        {
            read -r more_failures; read -r more_empty
            while IFS= read -r line; do lines+=("$$line"); done
        } <"$$scratch/notes-$$name"
        failures=$$((failures + more_failures)); empty=$$((empty + more_empty))
    done
}
sum_up() {
    echo; echo "=== summary"
    printf '%s\n' "$${lines[@]}"
    if [ $$empty -gt 1 ]; then echo "there is no test that ARGS asks for"; exit 1; fi
    if [ $$failures -gt 0 ]; then echo "$$failures of $${#lines[@]} parts FAILED"; exit 1; fi
    echo "all $${#lines[@]} parts passed"
}
endef

define code_parts
part "ruff check" $(BIN)/ruff check .
part "ruff format" $(BIN)/ruff format --check .
part "mypy" $(BIN)/mypy
part "import-linter" $(BIN)/lint-imports --no-logo
endef

define docs_part
part "docs" $(BIN)/pytest -q tests/test_docs.py
endef

# What Debian and Ubuntu keep in packages of their own: ensurepip, without which a virtual environment has no pip, the
# headers of Python, and a compiler for the C++ core.
define system_packages
packages=()
version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || packages+=("python$$version-venv")
[ -e "$$("$(PYTHON)" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || packages+=("python$$version-dev")
command -v "$${CXX:-c++}" >/dev/null || packages+=(g++)
if [ $${#packages[@]} -gt 0 ]; then
    if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "distlion needs a C++20 compiler and Python with its headers and venv; install what is missing, on Debian and Ubuntu with" >&2
        echo "    sudo apt-get install $${packages[*]}" >&2
        exit 1
    fi
    echo "installing $${packages[*]} ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update && apt-get -qq install -y --no-install-recommends "$${packages[@]}" >/dev/null
fi
endef

# install EXTRAS: the package in place with its extras. A recent pip chooses versions in half the time of the one that
# comes with Python 3.11, and modules are compiled when first imported: together 120 s of processor time less.
define install
$(system_packages)
started=$$SECONDS
echo "installing distlion into $(VENV): some minutes ..."
(while sleep 15; do echo "  $$((SECONDS - started)) s"; done) & clock=$$!
trap 'kill $$clock 2>/dev/null || true' EXIT
$(BIN)/python -m pip install -qq --no-compile -c constraints.txt pip </dev/null
$(BIN)/python -m pip install --progress-bar off --no-compile --no-warn-conflicts -c constraints.txt $(1) </dev/null \
    2> >(grep -v '^WARNING' >&2) | awk '$(pip_progress)'
echo "installed in $$((SECONDS - started)) s"
endef

# What pip is at, out of its log: large downloads, the C++ core, unpacking.
define pip_progress
/Downloading .*\([0-9.]+ MB\)/ { size = $$(NF - 1); sub(/^\(/, "", size); name = $$2; sub(/.*\//, "", name); sub(/-(cp|py)[0-9].*/, "", name)
    if (size >= 5) print "  downloading " name " (" size " MB)" }
/Building editable for .*: started/ { print "  building the C++ core" }
/^Installing collected packages/ { print "  unpacking " NF - 3 " packages" }
{ fflush() }
endef

CORE_SOURCES := CMakeLists.txt $(wildcard csrc/*)

$(VENV)/.ready-train: pyproject.toml lab/pyproject.toml netlab/pyproject.toml flower/pyproject.toml constraints.txt $(CORE_SOURCES) | $(VENV)/.created
	@$(call install,$(TRAIN_PACKAGES))
	touch $@

$(VENV)/.ready-test: pyproject.toml lab/pyproject.toml netlab/pyproject.toml flower/pyproject.toml constraints.txt $(CORE_SOURCES) | $(VENV)/.created
	@$(call install,$(TEST_PACKAGES))
	touch $(VENV)/.ready-train $@

$(VENV)/.ready-docs: pyproject.toml lab/pyproject.toml netlab/pyproject.toml flower/pyproject.toml constraints.txt $(CORE_SOURCES) | $(VENV)/.created
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	    echo "$$($(BIN)/python --version) is too old for the site, whose tools need 3.11 or later: make docs PYTHON=... VENV=build/venv-docs" >&2
	    exit 1
	fi
	$(call install,$(DOCS_PACKAGES))
	touch $(VENV)/.ready-train $(VENV)/.ready-test $@

# An environment that sees all packages of $(VENV) except for distlion, which it has in place, with sanitizers in the core.
$(SANITIZED)/.ready: $(VENV)/.ready-test
	@rm -rf "$(SANITIZED)"
	$(BIN)/python -m venv --without-pip "$(SANITIZED)"
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
	$(BIN)/python -c "$$purelib" > "$$("$(SANITIZED)/bin/python" -c "$$purelib")/packages.pth"
	echo "building the core with sanitizers ..."
	$(BIN)/python -m pip --python "$(SANITIZED)/bin/python" install -qq --no-compile --no-deps --force-reinstall \
	    -C cmake.define.DISTLION_SANITIZE=ON -C cmake.define.DISTLION_WERROR=ON -C build-dir="$(SANITIZED)/cmake" -e .
	touch $@

# Own packages first, then all of $(VENV), distlion included: what is installed in place needs more than a path.
$(FLOWER)/.ready: constraints-flower.txt $(VENV)/.ready-test
	@rm -rf "$(FLOWER)"
	$(BIN)/python -m venv "$(FLOWER)"
	echo "installing flwr into $(FLOWER) ..."
	"$(FLOWER)/bin/python" -m pip install -qq --no-compile -c constraints-flower.txt 'flwr[simulation]' 2> >(grep -v '^WARNING' >&2)
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$purelib")')" > "$$("$(FLOWER)/bin/python" -c "$$purelib")/others.pth"
	touch $@

$(VENV)/.created:
	@if ! command -v "$(PYTHON)" >/dev/null; then echo "$(PYTHON) was not found: install Python 3.10 or later, or name one: make PYTHON=..." >&2; exit 1; fi
	if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
	    echo "$(PYTHON) is $$("$(PYTHON)" --version), distlion needs 3.10 or later: make PYTHON=..." >&2
	    exit 1
	fi
	$(system_packages)
	echo "creating $(VENV) ..."
	"$(PYTHON)" -m venv "$(VENV)"
	touch $@
