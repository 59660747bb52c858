# `make help` lists what there is. Everything runs in .venv, which `make setup` creates in a minute or two.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-long fuzz lint format bench scaling soak memory docs docs-serve docs-tools mkdocs reference clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11; run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	@$(RUN) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)  # mends one that was left half made
	@echo "Installing into $(VENV) (PyTorch and CUDA libraries are a few GB the first time) ..."
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@VIRTUAL_ENV=$(abspath $(VENV)) $(VENV)/bin/uv pip install --quiet --compile-bytecode -c constraints.txt -e '.[test]'
	@touch $@

demo: setup ## three volunteers train a ViT together on this machine
	@$(RUN) -m swarm demo --peers 3

test: setup ## run the tests, all but the long ones
	@$(RUN) -m pytest -m "not long"

test-long: setup ## run the long ones: a soak, the lab, exactness, memory, footprint, many models, some slow programs and attacks
	@$(RUN) -m pytest -m long

test-fast: setup ## run the quick unit tests, about two minutes; without fuzzing, and the checks of documents and structure
	@$(RUN) -m pytest -m "not slow" tests/unit --ignore tests/unit/fuzz --ignore tests/unit/project

FUZZ_TIMES ?= 10
fuzz: setup ## parsers of strangers' bytes read over 100,000 damaged and false messages, a few minutes
	@FUZZ_TIMES=$(FUZZ_TIMES) $(RUN) -m pytest tests/unit/fuzz

lint: setup ## check style
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

format: setup ## fix style
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

scaling: setup ## the same recipe under DDP with one and with two processes
	@$(RUN) -m baseline_ddp.scaling --repetitions 3

bench: setup ## what the swarm costs against a plain Trainer, taking turns
	@$(RUN) -m swarm bench

MINUTES ?= 30
soak: setup ## five peers on an emulated internet, and a fault every half minute (MINUTES=30)
	@$(RUN) -m analysis soak --minutes $(MINUTES)

memory: setup ## whether two peers' memory grows over 2,000 rounds
	@$(RUN) -m analysis memory

MERMAID := 11.9.0
# Where links to files that are no pages lead: to `origin`, if that is on the web.
REPOSITORY ?= $(shell git remote get-url origin 2> /dev/null | \
	sed -nE 's,^(https://|ssh://git@|git@)([A-Za-z0-9.-]+)[:/]([^:@]+)$$,https://\2/\3,p' | sed -E 's,(\.git)?/?$$,/blob/HEAD,')
docs: docs-tools reference ## write the reference pages and build the site into build/site
	@SWARM_DOCS_REPOSITORY=$(REPOSITORY) NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "The site: build/site/index.html"

docs-serve: docs-tools reference ## show the site at http://127.0.0.1:8000 and follow changes
	@SWARM_DOCS_REPOSITORY=$(REPOSITORY) NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

reference: setup # what docs/ has from the code
	@$(RUN) docs/make_reference.py
	@$(RUN) docs/make_import_graph.py > /dev/null

mkdocs: setup # what builds the site, and what its test needs
	@test -x $(VENV)/bin/mkdocs || \
		VIRTUAL_ENV=$(abspath $(VENV)) $(VENV)/bin/uv pip install --quiet -c constraints.txt -e '.[docs]'

docs-tools: mkdocs
	@test -e build/mermaid.min.js || { mkdir -p build && cd build && npm pack --silent mermaid@$(MERMAID) >/dev/null 2>&1 && \
		tar xzf mermaid-$(MERMAID).tgz --strip-components 2 package/dist/mermaid.min.js && rm mermaid-$(MERMAID).tgz; } || \
		echo "No npm: browsers will fetch what draws diagrams from the internet."

clean: ## remove the environment and caches, keep runs
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
