# Two commands on a fresh machine (Python 3.11 or newer, git, make):
#
#     make verify     sets everything up and runs the main job: port the embedded checkpoint, and prove the port
#     make test       sets everything up and passes the tests
#
# VENV=folder puts the environment elsewhere, PYTHON=command chooses the Python that makes it, and ARGS="..." is handed
# to the tool that a target runs: make test ARGS="-k notation".  HASHES=no installs the same versions from an index that
# serves builds of its own; otherwise only files that PyPI has are installed.  VERSIONS=lowest or VERSIONS=newest takes
# torch and transformers as old, or everything as new, as pyproject.toml allows: name a VENV of its own with it.

VENV ?= .venv
ARGS ?=
HASHES ?= yes
VERSIONS ?= pinned
TAG ?=
SOURCES ?= build/conversions

# The first Python that is new enough.
PYTHON ?= $(shell for python in python3 python python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; exit; }; \
	done)

python = $(VENV)/bin/python
# A worker that dies ends the run and names its test: xdist's replacement of it has waited for ever.  Files are run in
# order: xdist would begin with those of most tests, and long ones of few tests would be left to one worker in the end.
pytest = $(python) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
setup  = $(or $(PYTHON),$(error porting needs Python 3.11 or newer, and found none; name one: make PYTHON=...)) \
	scripts/setup_environment.py $(VENV) --versions $(VERSIONS) $(if $(filter no,$(HASHES)),--no-hashes)

.DEFAULT_GOAL := help
.PHONY: help verify test test-slow test-all lint types docs wheel families references registry conversions first-contact causes bench crash fuzz sbom audit release format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

verify: ## set up, then port the embedded checkpoint and prove the port, layer by layer
	@$(setup)
	$(VENV)/bin/porting verify $(ARGS)

test: ## set up, then run the tests: the default tier
	@$(setup) --dev
	$(pytest) $(ARGS)

test-slow: ## set up, then run the tests that are not in the default tier
	@$(setup) --dev
	$(pytest) -m "slow and not hub and not unsampled" $(ARGS)

test-all: ## set up, then run all tests
	@$(setup) --dev
	$(pytest) -m "not hub" $(ARGS)

lint: ## check style and formatting
	@$(setup) --dev
	$(python) -m ruff check $(ARGS)
	$(python) -m ruff format --check

types: ## check types, strictly
	@$(setup) --dev
	$(python) -m mypy $(ARGS)

docs: ## build the documentation site in build/site; ARGS=--dirty, or any other option of mkdocs build
	@$(setup) --dev
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict $(ARGS)

wheel: ## build sdist and wheel, install the wheel into an empty environment and use it there
	@$(setup) --dev
	$(python) -m scripts.prove_wheel $(if $(filter no,$(HASHES)),--no-hashes) $(ARGS)

families: ## prove every family in every module, and print the verdicts
	@$(setup) --dev
	$(python) -m scripts.families $(ARGS)

references: ## verify every model type of transformers that can be built small; ARGS=--write renews the page
	@$(setup) --dev
	$(python) -m scripts.references $(ARGS)

registry: ## convert a small checkpoint of each entry of transformers' registry, both ways, and compare with transformers
	@$(setup) --dev
	$(python) -m scripts.transformers_registry $(ARGS)

conversions: ## try the conversions of docs/conversions.md against the projects' own code, installed into SOURCES=folder
	@$(setup) --dev
	$(python) -m scripts.conversions "$(SOURCES)" --fetch $(ARGS)

first-contact: ## try suggest on the models of a list that you write, ARGS="list.py", and print the score
	@$(setup) --dev
	$(python) -m scripts.first_contact $(ARGS)

causes: ## plant every mistake of the catalogue into every port, and print what the proof says of it
	@$(setup) --dev
	$(python) -m scripts.causes $(ARGS)

bench: ## measure: loading, forward passes, verification, planning
	@$(setup) --dev
	$(python) -m scripts.benchmark $(ARGS)

crash: ## kill conversions at 200 random moments, and see that the same command completes them
	@$(setup) --dev
	$(python) -m scripts.crash $(ARGS)

fuzz: ## fuzz what reads strangers' bytes, a fixed number of executions
	@$(setup) --dev
	$(python) -m scripts.fuzz $(ARGS)

sbom: ## list what is installed, in build/sbom.json (CycloneDX)
	@$(setup) --dev
	@mkdir -p build
	$(python) -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json \
		$(python)

audit: ## look the pinned versions up in PyPI's data on vulnerabilities, where that can be reached
	@$(setup) --dev
	$(python) -m scripts.audit

release: ## with TAG=v1.2.3: what is published under that tag, tried, in dist/; its notes in build/release-notes.md
	@$(setup) --dev
	$(python) -m scripts.release_notes "$(TAG)" --output build/release-notes.md
	$(python) -m scripts.prove_wheel --keep dist $(if $(filter no,$(HASHES)),--no-hashes)

format: ## rewrite the sources in the project's format
	@$(setup) --dev
	$(python) -m ruff check --fix-only
	$(python) -m ruff format

clean: ## remove caches and build outputs; the environment stays
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find porting models mappings tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
