# One command from a fresh machine: `make train` or `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ADAPTED := .adapters/.ready
SERVERS := .servers/.ready

.PHONY: help train test browser test-fast golden chaos soak lint docs bench bench-check numbers peers serving-peers serving-chaos clean

help:
	@echo "make train   set up, then train a small network on real digits with 2 workers"
	@echo "make test    set up, then run the tests"
	@echo "make browser chromium for the page's test, where this is root on Debian or Ubuntu; make test does it"
	@echo "make test-fast  units and contracts that start no process, in under 3 minutes on 2 cores"
	@echo "make golden  write down anew what every strategy and placement computes (about a minute)"
	@echo "make chaos   kill workers, servers and hosts at random instants, 400 times (about an hour)"
	@echo "make soak    a long run of a tiny model, in which nothing may grow (MINUTES=30)"
	@echo "make lint    formatting, lint and types"
	@echo "make docs    the documentation as a site that can be searched, in build/site"
	@echo "make bench   ours beside PyTorch DDP, Gloo and MPICH, interleaved (about 30 minutes)"
	@echo "make bench-check  that every benchmark runs, with numbers that mean nothing (about 2 minutes)"
	@echo "make numbers make docs/benchmarks.md, README's table and its picture from benchmarks/results"
	@echo "make peers   TensorFlow in an environment of its own, for benchmarks/strategies.py"
	@echo "make serving-peers  FastAPI and LitServe in an environment of their own, for benchmarks/serving.py"
	@echo "make serving-chaos  kill model processes and damage versions while requests go on (2 minutes)"
	@echo "make clean   remove the environment and caches"

train: $(READY)
	$(BIN)/manyhands train

# Two at a time, since many tests wait for processes; a file stays together, for what its tests share.
test: $(READY) $(ADAPTED) browser
	$(BIN)/python -m pytest -n 2 --dist loadfile

# For the page's test in a real browser, which is skipped where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; } || true

# For work on the code: threads only, no process to start. A test that starts one without its mark fails.
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not processes' tests/unit tests/contracts

# A refactoring never needs this: `git diff` shows whose mathematics has changed.
golden: $(READY)
	$(BIN)/python -m tests.golden

chaos: $(READY)
	$(BIN)/python -m tests.faults.chaos --keep

MINUTES ?= 30

# Fails if memory, descriptors, threads, shared memory or the run's directory grow; the summary is committed.
soak: $(READY)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open build/site/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/adapters.py
	$(BIN)/python benchmarks/checks.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/telemetry.py
	$(BIN)/python benchmarks/diagnosis.py
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python benchmarks/extremes.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/network.py
	for section in servers traffic hiding stragglers accuracy; do $(BIN)/python benchmarks/strategies.py $$section; done
	for section in pipeline shards equality; do $(BIN)/python benchmarks/placements.py $$section; done
	$(MAKE) numbers

bench-check: $(READY)
	$(BIN)/python -m pytest -m benchmark tests/end_to_end/test_benchmarks.py

numbers: $(READY)
	$(BIN)/python -m benchmarks.report

serving-chaos: $(READY)
	$(BIN)/python -m tests.faults.serving_chaos --seconds 120

# Servers that ours is compared with, beside .venv, whose PyTorch they use.
serving-peers: $(SERVERS)

$(SERVERS): $(READY)
	rm -rf .servers && $(BIN)/python -m venv --without-pip .servers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.servers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	.servers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		fastapi==0.163.2 litserve==0.2.19
	@touch $(SERVERS)

# What we are compared with and do not depend on; benchmarks leave out what is not there.
peers: $(READY)
	test -x .peers/bin/python || $(BIN)/python -m venv .peers || \
		{ rm -rf .peers; $(PYTHON) -m virtualenv .peers; }
	.peers/bin/python -m pip install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0

# Debian ships Python without venv's pip unless python3-venv is installed; virtualenv does without it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "manyhands needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) -V`. Use: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); $(PYTHON) -m pip install --user --quiet virtualenv && $(PYTHON) -m virtualenv $(VENV); } || \
		{ echo "cannot create $(VENV); on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

# What the adapters adapt to: on top of .venv, and not in it, since manyhands does not depend on it.
$(ADAPTED): $(READY)
	rm -rf .adapters && $(BIN)/python -m venv --without-pip .adapters
	for path in "$(CURDIR)" "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; do \
		echo "$$path"; done > "$$(.adapters/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	.adapters/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		lightning transformers accelerate
	@touch $(ADAPTED)

clean:
	rm -rf $(VENV) .adapters .peers .servers .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
