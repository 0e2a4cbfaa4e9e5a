# make demo: the main job on real text, report at the end.   make test: every test.   make docs: the site.   make build: the
# package.   All work from nothing.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# The half that needs no torch; its tests run with torch blocked from import.
DECIDING := tests/core tests/index tests/models tests/data tests/cost tests/plan tests/sim tests/report tests/config/test_run_config.py

# Tests start many processes: none compiles again what another has.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-deciding test-training test-deep lint docs build bench pages clean

demo: $(STAMP)
	$(BIN)/lengthwise demo

test: $(STAMP)
	$(MAKE) -j 2 --no-print-directory test-deciding test-training

# Import rules, and the half without torch. Tests with ranks mostly wait for one another: four at a time keep two cores
# busy, all but what this takes. What it says comes when it ends, in one piece.
test-deciding: $(STAMP)
	@mkdir -p build
	@{ $(BIN)/lint-imports --no-logo && $(BIN)/pytest -n 0 -p tests.no_torch $(DECIDING); } \
	> build/test-deciding.txt 2>&1; \
	status=$$?; cat build/test-deciding.txt; exit $$status

test-training: $(STAMP)
	$(BIN)/pytest -n 4 --dist loadfile $(addprefix --ignore=,$(DECIDING))

test-deep: $(STAMP)
	$(BIN)/pytest -m deep

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/style_counts.py
	$(MAKE) docs

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Neither this nor the test of the package fetches anything: the backend is there already.
build: $(STAMP)
	rm -rf build/lib build/dist
	mkdir -p build/dist
	$(BIN)/python -c "import setuptools.build_meta as b; b.build_sdist('build/dist'); b.build_wheel('build/dist')"

# Every page of simulated numbers; an hour of one core. With ARGS=--check nothing is written, and stale rows of the first
# four fail, in some twenty minutes.
pages: $(STAMP)
	$(BIN)/python benchmarks/paper_tables.py $(ARGS)
	$(BIN)/python benchmarks/compare_policies.py $(ARGS)
	$(BIN)/python benchmarks/calibration.py $(ARGS)
	$(BIN)/python benchmarks/figures $(ARGS)
ifeq ($(ARGS),)
	$(BIN)/python benchmarks/policy_grid.py --cells 210 --steps 2
	$(BIN)/python benchmarks/step_size.py
	$(BIN)/python benchmarks/planning.py --only scale,policies,assignments --rewrite
	$(BIN)/python tools/step_timelines.py
endif

bench: $(STAMP)
	$(BIN)/python benchmarks/demo_policies.py
	$(BIN)/python benchmarks/prediction.py

$(STAMP): pyproject.toml constraints/cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints/cpu.txt $(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf .venv outputs build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
