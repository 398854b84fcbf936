# make demo | test | test-emulated | fuzz | amx-rig | lint | bench | clean: each from a fresh clone,
# needing only Python >= 3.10.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_TOKENS ?= 96
DEMO_TARGET ?= auto
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-emulated fuzz amx-rig lint bench clean

demo: $(VENV)/.ready
	$(BIN)/python docs/demo/demo.py --target $(DEMO_TARGET) --max-new-tokens $(DEMO_TOKENS)

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n auto --dist worksteal

# The kernels' tests again, for target amx, its tile instructions emulated: on any AVX-512 CPU.
test-emulated: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n auto --dist worksteal -p tests.without_amx tests/amx tests/ops \
		tests/compiler/test_language_dot.py tests/compiler/test_tile_registers.py \
		--ignore tests/ops/test_linear_errors.py --ignore tests/ops/test_linear_torch.py

# Two thousand random programs, on the interpreter and on every target that this CPU runs.
fuzz: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n auto -m fuzz tests/fuzz

# AMX code on a Xeon in software that nobody here wrote; needs ../shared/amx-rig (docs/amx.md).
amx-rig: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m amx_rig -rs tests/rig

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/amxq bench

# One environment serves every target: the package (editable) with its extras.
$(VENV)/.ready: setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("amxq needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --progress-bar off --constraint constraints.txt --editable '.[all,test]'
	touch $@

clean:
	rm -rf $(VENV) .demo build dist amxq.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
