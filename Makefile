# make demo: set everything up and watch a policy learn. make test: set everything up and pass every check and test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONWARNINGS ?=

.PHONY: setup demo test check unit web format clean

setup: $(STAMP) web

$(STAMP): pyproject.toml constraints.txt hatch_build.py src/hotloop/snapshots/codecs/kernel.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hotloop needs Python 3.11 or newer; this is $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11."; exit 3; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,s3,fast,dev]'
	@touch $@

# The page. Without Node everything else works, and `hotloop lab` says what is missing.
web: $(STAMP)
	@if [ ! -f web/package.json ]; then :; \
	elif command -v npm >/dev/null 2>&1; then $(MAKE) --no-print-directory src/hotloop/lab/static/index.html; \
	else echo "npm is not installed: the page (hotloop lab) is not built; everything else works."; fi

src/hotloop/lab/static/index.html: $(shell find web -path web/node_modules -prune -o -type f -print 2>/dev/null)
	cd web && npm ci --silent --no-audit --no-fund && npm run --silent build

demo: setup
	$(BIN)/hotloop run

check: setup
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/docs

unit: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/unit

# The browser driver keeps an event loop running in its process, so the page has a run of its own. Many tests wait for
# processes, so three workers keep two cores busy; the folders with the slow tests come first in the order of names.
test: setup check
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/browser
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/browser

format: setup
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

clean:
	rm -rf $(VENV) build dist src/hotloop/lab/static web/node_modules
