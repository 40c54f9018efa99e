# Two commands: `make run` does the main job, `make test` every check. Both set themselves up.
PYTHON ?= python3
bin := .venv/bin

.PHONY: run test lint types imports unit docs coverage hf-common verify bench bench-check clean

run: .venv/installed
	$(bin)/shaped reproduce all --scale quick --out out

# Pyright has one thread: beside the tests it takes what they leave of two cores.
test: lint imports
	$(MAKE) --no-print-directory --jobs 2 types unit
	$(MAKE) --no-print-directory docs

lint: .venv/installed
	$(bin)/ruff check .
	$(bin)/ruff format --check .

types: .venv/installed
	$(bin)/pyright --warnings

imports: .venv/installed
	$(bin)/lint-imports

unit: .venv/installed
	$(bin)/pytest

# The site, in out/docs: runs every block of the documents and the gallery; warnings are errors, links are checked, no network is used.
docs: .venv/installed
	rm -rf out/docs out/docs-work
	$(bin)/sphinx-build -W --keep-going -n -q -d out/docs-work docs out/docs
	$(bin)/python docs/building/check_site.py out/docs
	@echo "open out/docs/index.html"

# The share of lines that the tests run, by file; those that they run in processes of their own do not count.
coverage: .venv/installed
	$(bin)/pytest --cov=shaped --cov-report=term:skip-covered

# transformers' own tests over the models of this package; fetches them through pip the first time.
hf-common: .venv/installed
	$(bin)/python tests/hf/common/run.py -n 2 -q

# Checks that take longer than a test may: a thousand damaged folders of each kind, transformers' own tests, the laws of
# blocks and of gradients, the solver's step, predictions and diagnoses of every family, mutations.
verify: .venv/installed hf-common
	PYTHONPATH=tests $(bin)/python tests/damage.py --count 1000
	PYTHONPATH=tests:tests/figures $(bin)/python tests/figures/damaged_figures.py --count 1000
	PYTHONPATH=tests/layers $(bin)/python tests/layers/explicit.py --networks 200000
	PYTHONPATH=tests/gradients $(bin)/python tests/gradients/verify_gradients.py --networks 20000 --subset
	$(bin)/python benchmarks/steps.py --tokens 4,16
	PYTHONPATH=tests:tests/hf $(bin)/python tests/diagnosis/verify_families.py
	PYTHONPATH=tests/hf $(bin)/python tests/hf/families.py --width 64 --depth 6 --models 64
	PYTHONPATH=tests/hf $(bin)/python tests/hf/family_gradients.py --depth 4 --models 256 --samples 1000
	$(bin)/python benchmarks/mutation/mutations.py --count 100 --least 0.85 --out out/mutations-sample.json

bench: .venv/installed
	for benchmark in limit finite attention train; do $(bin)/python benchmarks/$$benchmark.py || exit 1; done

# Fails if a ratio of times is more than 10 % worse than the committed one; `python benchmarks/check.py --write` commits new ones.
bench-check: .venv/installed
	$(bin)/python benchmarks/check.py

# Made anew whenever what is to be installed changes; the file is written last, so an interrupted install is tried again.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shaped needs Python 3.11 or newer, found " + sys.version)'
	$(PYTHON) -m venv .venv
	$(bin)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .cache out
