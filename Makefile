# Two commands do everything: `make pipeline` and `make test`. Each makes .venv and installs into it when pyproject.toml has changed.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check

.PHONY: pipeline worked test lab

# Rollouts, traces, filter, fine-tuning, evaluation, RL, evaluation: everything lands in out/. QUICK=1 is a small one.
pipeline: .venv/installed
	@QUICK=$(QUICK) .venv/bin/python tools/pipeline.py

# The pages of nbs/pipeline with the outputs of the last full run
worked: pipeline
	cp out/notebooks/*.ipynb nbs/pipeline/
	.venv/bin/nbdev-clean

test: .venv/installed
	.venv/bin/python -m pytest -q

lab: .venv/installed
	.venv/bin/jupyter lab nbs

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "synth_lab needs Python 3.11 or newer; $(PYTHON) is older. Name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@
