# The commands of this project. `make demo` and `make test` need Python 3.11 or newer and nothing else.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
NIGHTLY ?= .venv-nightly
DEMO ?= runs/demo
DEMO_STEPS ?= 200

BIN := $(VENV)/bin
# The environment is made again when pyproject.toml changes, or when another checkout made it.
WANTED := $(CURDIR) $(shell sha256sum pyproject.toml | cut -c1-16)

.PHONY: demo test test-slow test-nightly lint types check install install-nightly clean

demo: install
	@if [ ! -d $(DEMO)/data ]; then \
	  $(BIN)/python examples/bert_phase1/corpus.py $(DEMO)/corpus.txt && \
	  $(BIN)/trn-dist data prepare --input $(DEMO)/corpus.txt --out $(DEMO)/data --vocab_size 8000 --num_shards 8; \
	fi
	$(BIN)/torchx run -s local_cwd trn_dist.components:ddp -j 1x2 --script examples/bert_phase1/train.py -- \
	  --data_dir $(DEMO)/data --output_dir $(DEMO)/out --device cpu-xla --model tiny --enable_fp32 \
	  --batch_size 16 --grad_accum_usteps 1 --lr 1e-3 --warmup_steps 50 --max_steps 2000 \
	  --steps_this_run $(DEMO_STEPS) --steps_per_ckpt 100

# Everything but the tests marked slow, which `make check` runs too.
test: install
	$(BIN)/pytest -m "not slow"

test-slow: install
	$(BIN)/pytest -m slow

# The other torchx that people have installed; it needs an environment of its own.
test-nightly: install install-nightly
	TRN_DIST_TEST_PYTHON=$(abspath $(BIN))/python $(NIGHTLY)/bin/pytest tests/components tests/launcher

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

check: lint types test test-slow test-nightly

install:
	@if [ "$$(cat $(VENV)/.installed 2>/dev/null)" != "$(WANTED)" ]; then \
	  echo "installing into $(VENV): about 7 GB the first time" && \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet -e '.[dev]' && \
	  echo "$(WANTED)" > $(VENV)/.installed; \
	fi

install-nightly:
	@if [ "$$(cat $(NIGHTLY)/.installed 2>/dev/null)" != "$(WANTED)" ]; then \
	  $(PYTHON) -m venv $(NIGHTLY) && \
	  $(NIGHTLY)/bin/python -m pip install --quiet torchx-nightly pytest pytest-timeout pytest-socket hypothesis && \
	  $(NIGHTLY)/bin/python -m pip install --quiet --no-deps -e . && \
	  echo "$(WANTED)" > $(NIGHTLY)/.installed; \
	fi

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
