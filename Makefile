# `make demo` and `make test` do all the set-up themselves. VENV, PYTHON and JOBS may be given: make test JOBS=4
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
DEMO := configs/smollm2_135m_8da4w.yaml
PACKAGE := dist/smollm2_135m_8da4w
QUESTION := What is the capital of France?
BIN := $(VENV)/bin

.PHONY: setup demo test zoo bench lint format clean

setup: $(VENV)/.ready

# torch by itself first: asked for by exact version alone, it can come from a local CPU file or a CPU index.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off "$$(sed -n 's/^ *"\(torch==[0-9.]*\)",.*/\1/p' pyproject.toml)"
	$(BIN)/python -m pip install --progress-bar off --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/pteline build $(DEMO) --verbose
	$(BIN)/pteline check $(PACKAGE)
	$(BIN)/pteline run $(PACKAGE) "$(QUESTION)" --stats
	$(BIN)/pteline bench $(PACKAGE)

# First the fast ones, which say at once what is wrong; then rows of the model zoo; then those that build the real model.
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not real and not zoo"
	$(BIN)/python -m pytest -n $(JOBS) --dist load -m zoo_ci
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m real

# Every row of the model zoo; writes docs/zoo.md and tests/zoo/results.json anew.
zoo: setup
	rm -rf build/zoo && mkdir -p build/zoo
	ZOO_WRITE=build/zoo $(BIN)/python -m pytest -n $(JOBS) --dist load tests/zoo
	$(BIN)/python -m tests.zoo build/zoo

# On a machine that does nothing else. BENCH holds more options: make bench BENCH="--slow --rounds 30"
bench: setup $(foreach each,8da4w 8da4w_all 8da8w,dist/smollm2_135m_$(each)/manifest.json)
	$(BIN)/python -m benchmarks --write docs/benchmarks.md $(BENCH)

dist/%/manifest.json: | setup
	$(BIN)/pteline build configs/$*.yaml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache
