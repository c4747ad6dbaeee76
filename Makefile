# Everything runs in .venv, which scripts/setup.sh makes and keeps up to date.
#
#   make train [ARGS="--mesh.data 4"]   train the quickstart; ARGS are added to its command line
#   make test  [ARGS="-k mesh"]         lint, types, tests; ARGS are added to pytest's
#   make setup                          only .venv (make setup-dev: with the tools of make test)
#
# PYTHON=/path/to/python chooses the Python of .venv; EXTRAS=cuda (or tpu, hf, parquet, ...) adds extras.

PYTHON ?=
EXTRAS ?=
ARGS ?=
RUN = .venv/bin/python

SETUP = @PYTHON='$(PYTHON)' sh scripts/setup.sh $(EXTRAS)

.PHONY: setup setup-dev train test
.NOTPARALLEL:

setup:
	$(SETUP)

setup-dev:
	$(SETUP) dev

train: setup
	$(RUN) scripts/train.py --config configs/quickstart.yaml $(ARGS)

test: setup-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)
