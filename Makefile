# The verbs of this project. `make run` and `make test` need python3 (3.11 or newer), make and git, and nothing else.
PYTHON ?= python3
VENV   ?= .venv
WHEEL_VENV ?= .venv-wheel
BIN    := $(VENV)/bin
ARGS   ?=
# What can differ in the wheel: files, entry points, data. (tests/acme runs the whole suite on installed wheels too.)
WHEEL_TESTS := $(addprefix $(CURDIR)/tests/,core registry cli checkpoint)
export PYTHON

.PHONY: run test lint unit conformance interpreted interpreted-nvidia interpreted-rocm interpreted-gfx950 wheel clean

run: $(VENV)/.ready            ## the main job: Engram on real text, checked against float64
	$(BIN)/engram-core run $(ARGS)

test: lint unit conformance interpreted wheel  ## everything that CI runs

lint: $(VENV)/.ready           ## style and types, before anything slow
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The sources against which the FlashInfer call is tested; installing it would bring CUDA.
FLASHINFER := .peers/flashinfer_python-0.7.4-py3-none-any.whl
$(FLASHINFER): | $(VENV)/.ready
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .peers flashinfer-python==0.7.4

unit: $(VENV)/.ready $(FLASHINFER) ## the project's own tests, on the checkout
	$(BIN)/pytest -n 2 $(ARGS)

conformance: $(VENV)/.ready    ## the suite that a backend author runs, on the reference
	$(BIN)/pytest --pyargs engram_conformance --engram-backend=reference -p no:cacheprovider -q

# The whole suite, the published size included, on the kernels of both GPU backends, in Triton's interpreter on the CPU,
# each on one core. What needs a GPU's streams and graphs, or two devices, is reported as not run, with that reason.
# Five minutes on two cores; --engram-size=small takes two.
interpreted: $(VENV)/.ready    ## the suite on the GPU backends' kernels, in Triton's interpreter
	$(MAKE) --no-print-directory -j2 interpreted-nvidia interpreted-rocm interpreted-gfx950

interpreted-nvidia interpreted-rocm: interpreted-%:
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest --pyargs engram_conformance --engram-backend=$* --engram-device=cpu \
		--engram-size=full -p no:cacheprovider -q

# gfx950's product needs tl.dot_scaled, which the interpreter has from 3.8 on: a second, newer Triton beside the pinned one.
NEXT_TRITON := .triton-3.9.0
$(NEXT_TRITON): | $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part triton==3.9.0
	mv $@.part $@

interpreted-gfx950: $(NEXT_TRITON)
	PYTHONPATH=$(CURDIR)/$(NEXT_TRITON) TRITON_INTERPRET=1 $(BIN)/pytest -q -p no:cacheprovider tests/rocm/interpreted/test_rocm_scaled.py
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(NEXT_TRITON) $(BIN)/python tests/rocm/on_cuda.py --device cpu --size small \
		--forms rocm-as-gfx950 --no-ranks -k "wkv or step-whole" --out $(NEXT_TRITON)/reports

wheel: $(VENV)/.ready          ## what users install: a file forgotten in the wheel is found only here
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . >/dev/null
	.ci/venv.sh $(WHEEL_VENV) "$$(ls dist/*.whl)[conformance,demo]" pytest-timeout pytest-xdist hypothesis triton
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/*.whl
	cd / && $(CURDIR)/$(WHEEL_VENV)/bin/pytest -n 2 -p no:cacheprovider -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -m "not slow" $(WHEEL_TESTS)
	cd / && $(CURDIR)/$(WHEEL_VENV)/bin/pytest --pyargs engram_conformance --engram-backend=reference -k "hash or rows" -p no:cacheprovider -q

$(VENV)/.ready: pyproject.toml .ci/constraints.txt .ci/venv.sh
	.ci/venv.sh $(VENV) --editable ".[dev,demo,conformance,examples]"
	@touch $@

clean:                         ## what make made
	rm -rf $(VENV) $(WHEEL_VENV) .triton-* dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
