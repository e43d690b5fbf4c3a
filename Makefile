# Two commands on a fresh machine: `make demo` and `make test`. Each does all of its own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
HOST_SIDE = $(shell $(BIN)/python -c "from launcher import kit; print(*kit.NAMES)")
SOURCES := launcher trainer tests benchmarks scripts examples

.PHONY: help demo test lint audit bench bench-full soak cluster cluster-down clean

help:
	@echo "make demo          train 4 ranks on this machine"
	@echo "make test          lint, types and tests"
	@echo "make audit         what ruff and the installed packages tell of security (docs/security.md)"
	@echo "make bench         speed, beside what people would use instead"
	@echo "make bench-full    also what takes longer; MNIST=DIR names the folder of the whole MNIST"
	@echo "make soak SECONDS=900   faults at random on test hosts, and a look after each; FAULTS=200 SEED=1 OUT=FILE"
	@echo "make cluster N=4 RATE=200mbit   test hosts to try ringctl on; make cluster-down ends them"

demo: $(VENV)/.demo
	$(BIN)/ringctl launch --local --world 4

# Most tests wait for something most of the time, so there are more of them at once than processors, and what
# only looks at the sources runs beside them.
test: $(VENV)/.dev $(VENV)/.debian
	$(MAKE) lint >$(VENV)/lint.log 2>&1 & \
	$(BIN)/python -m pytest -n $(or $(JOBS),6) --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$! || { cat $(VENV)/lint.log; exit 1; }; exit $$tests

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --target=3.8- $(HOST_SIDE)

# Without a connection; with one, also: pipx run pip-audit -r constraints.txt
audit: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/python -m pip check
	$(BIN)/python scripts/audit.py

bench: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python -m benchmarks

bench-full: $(VENV)/.dev $(VENV)/.debian
	MNIST="$(MNIST)" $(BIN)/python -m benchmarks --full

soak: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),$(if $(FAULTS),86400,900)) --seed $(or $(SEED),1) $(if $(FAULTS),--faults $(FAULTS)) $(if $(OUT),--out $(OUT))

cluster: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python scripts/cluster up --hosts $(or $(N),4) $(if $(RATE),--rate $(RATE))

cluster-down:
	$(BIN)/python scripts/cluster down

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: asked for together with anything that admits a newer one, pip may take
# a build with gigabytes of CUDA.
$(VENV)/.torch: constraints.txt $(VENV)/bin/python
	$(PIP) $$(grep '^torch==' constraints.txt) $$(grep '^numpy==' constraints.txt)
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) --constraint constraints.txt --config-settings editable_mode=compat --editable '.[trainer]'
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) --constraint constraints.txt --config-settings editable_mode=compat --editable '.[trainer,dev]'
	touch $@ $(VENV)/.demo

# What the test hosts are made of. Without root, what is installed has to do.
$(VENV)/.debian: tests/cluster/packages.txt $(VENV)/bin/python
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  missing=$$(for p in $$(grep -v '^#' $<); do dpkg -s $$p >/dev/null 2>&1 || echo $$p; done); \
	  [ -z "$$missing" ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $$missing; } >/dev/null; \
	fi
	touch $@
