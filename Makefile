# Every target makes .venv by itself and says what it is doing. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
BENCH ?= kda
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Also for the kernels of JupyterLab, which load torch before k3lite (see k3lite/__init__.py).
export GOMP_SPINCOUNT ?= 10000

# The part of JupyterLab that asks on its first start for leave to fetch news, and looks for newer versions.
ANNOUNCEMENTS := @jupyterlab/apputils-extension:announcements
PIP_FAILED := k3lite: the installation stopped, see above; it needs the network (or pip's cache) and some GB of disk. \
  The same command goes on from there

.PHONY: help lab book apps pictures mutants needle ep test lint bench notebooks clean

help:
	@echo "make lab        open JupyterLab on the first notebook"
	@echo "make book       build the course as a static site in build/book, from the stored outputs"
	@echo "make apps       serve the explorers alone, without JupyterLab (PORT=8866)"
	@echo "make needle     train a small K3 and measure where it finds hidden facts (about 3 minutes on two cores)"
	@echo "make ep         train a small MoE model on two ranks and on one, and compare the losses (about 2 minutes)"
	@echo "make test       unit and oracle tests, every notebook under nbval, browser tests"
	@echo "make bench      speed of the fast forms beside the plain ones and others (KDA; BENCH=decode, moe, mx or generate)"
	@echo "make notebooks  run every notebook and keep its outputs"
	@echo "make pictures   take the pictures of the explorers in docs/explorers, and of all pages in out/pages"
	@echo "make mutants    break what each chapter teaches and see its notebook turn red (hours; CHAPTERS='05 06')"
	@echo "make clean      remove .venv"

# One stamp for each set of packages; a change of the pins installs again.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "k3lite: no python3 found; install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "k3lite: $$($(PYTHON) --version) is too old; install Python 3.11 and run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "k3lite: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "k3lite: python's venv module is missing (on Debian: apt-get install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.course: $(VENV)/.python pyproject.toml constraints.txt
	@echo "k3lite: installing the course's packages at pinned versions (a few minutes the first time)"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[course]' || { echo "$(PIP_FAILED)"; exit 1; }
	@$(BIN)/jupyter labextension disable --level=sys_prefix $(ANNOUNCEMENTS) 2>$(VENV)/.quiet || { cat $(VENV)/.quiet; exit 1; }
	@touch $@

$(VENV)/.site: $(VENV)/.course
	@echo "k3lite: installing what the site and the apps need"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[course,site]' || { echo "$(PIP_FAILED)"; exit 1; }
	@touch $@

$(VENV)/.test: $(VENV)/.course tests/oracles/requirements.txt
	@echo "k3lite: installing the test tools and the independent implementations that the tests compare with"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[course,site,test]' || { echo "$(PIP_FAILED)"; exit 1; }
	@$(BIN)/pip install --quiet --no-deps --requirement tests/oracles/requirements.txt || { echo "$(PIP_FAILED)"; exit 1; }
	@touch $@

lab: $(VENV)/.course
	@echo "k3lite: opening JupyterLab on notebooks/00_start_here.ipynb (Ctrl-C ends it)"
	@$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb \
	  $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

book: $(VENV)/.site
	@$(BIN)/python -m book.build $(ARGS)

apps: $(VENV)/.site
	@$(BIN)/python -m book.apps $(if $(PORT),--port $(PORT)) $(ARGS)

pictures: $(VENV)/.test
	@$(BIN)/python tests/browser/pictures.py $(ARGS)

mutants: $(VENV)/.test
	@$(BIN)/python -m tests.mutants $(CHAPTERS)

needle: $(VENV)/.course
	@$(BIN)/k3lite needle $(ARGS)

# One thread a rank: two ranks keep two cores busy.
ep: $(VENV)/.course
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(or $(RANKS),2) -m k3lite.cli train ep $(ARGS)

lint: $(VENV)/.test
	@echo "k3lite: lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

test: $(VENV)/.test
	@echo "k3lite: unit and oracle tests, notebooks under nbval, browser tests"
	@$(BIN)/python -m pytest tests notebooks --nbval --nbval-current-env --nbval-cell-timeout=90 \
	  --nbval-sanitize-with tests/sanitize.cfg $(ARGS)

bench: $(VENV)/.test
	@$(BIN)/k3lite bench $(BENCH) --threads 1 $(ARGS)

notebooks: $(VENV)/.test
	@$(BIN)/python -m tests.notebooks.execute $(ARGS)

clean:
	rm -rf $(VENV)
