# NovaInfer. Every target sets up what it needs in .venv/ and build/; `make help` lists them.
#
#   PYTHON=python3.12 make test    another interpreter (3.11 or later)
#   CXX=clang++ make test          another compiler
#   make run ARGS="--port 9000"    arguments for `llaisys serve`
#   make test ARGS="--suite core"  arguments for scripts/run_tests.py
#   make test PYTEST_ARGS="-k kv"  arguments for pytest

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
NATIVE := build/native
CLIENTS := build/clients
PIP := $(PY) -m pip --disable-pip-version-check -q
CMAKE := $(BIN)/cmake
CTEST := $(BIN)/ctest
NINJA := $(abspath $(BIN)/ninja)

ifeq ($(origin CXX),default)
CXX := $(firstword $(foreach c,g++ clang++ c++,$(if $(shell command -v $(c) 2>/dev/null),$(c))))
endif
ifeq ($(origin CC),default)
CC := $(firstword $(foreach c,gcc clang cc,$(if $(shell command -v $(c) 2>/dev/null),$(c))))
endif
export CC CXX
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

# What goes into the wheel: a change in any of these reinstalls the package (incrementally).
SOURCES := pyproject.toml CMakeLists.txt $(wildcard README.md LICENSE) \
  $(shell find cmake src include python webui -type f -not -path '*/__pycache__/*' 2>/dev/null)
# Directories too: a deleted file changes only its directory.
SOURCES += $(shell find src include python webui -type d -not -name __pycache__ 2>/dev/null)
CPP_FILES = $(shell find src include test/cpp -type f \
  \( -name '*.cpp' -o -name '*.cc' -o -name '*.hpp' -o -name '*.h' -o -name '*.c' \
     -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # the tools below use all cores themselves
.PHONY: help run build test cpp-test py-test test-ray clients lint format bench sanitize asan tsan cross-test clean \
  check-tools

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
	  awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

# ---- set-up -------------------------------------------------------------------------------------

check-tools:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: '$(PYTHON)' not found. Install Python 3.11 or later, or set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); NovaInfer needs Python 3.11 or later." \
	    "Set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module (Debian and Ubuntu: install python3-venv)." >&2; exit 1; }
	@test -n "$(CXX)" && command -v $(firstword $(CXX)) >/dev/null 2>&1 || { \
	  echo "error: no C++ compiler found (looked for $(if $(CXX),'$(CXX)',g++ clang++ and c++))." \
	    "Install g++ or clang++, or set CXX=..." >&2; exit 1; }
	@mkdir -p build && printf 'int main() { return 0; }\n' | \
	  $(CXX) -std=c++17 -x c++ -fsyntax-only - 2>/dev/null || { \
	  echo "error: '$(CXX)' does not compile C++17. Install g++ 9+ or clang++ 10+, or set CXX=..." >&2; \
	  exit 1; }

# Requirements come from pyproject.toml, so that they are written down once.
# $(1): build | base | the name of an extra
requirements = $(PY) -c 'import sys, tomllib; d = tomllib.load(open("pyproject.toml", "rb")); \
  p = d["project"]; t = {"build": d["build-system"]["requires"], "base": p["dependencies"], \
  **p["optional-dependencies"]}; print(*[r for n in sys.argv[1:] for r in t[n]], sep="\n")' $(1)

$(VENV)/.created: | check-tools
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: pyproject.toml $(VENV)/.created
	@$(call requirements,build base) > build/requirements-base.txt
	$(PIP) install -r build/requirements-base.txt
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.base
	@$(call requirements,base test) > build/requirements-test.txt
	$(PIP) install -r build/requirements-test.txt
	@touch $@

# Clients that are tested pin other versions than we do: an environment of their own.
$(CLIENTS)/.installed: pyproject.toml $(VENV)/.created
	@$(call requirements,clients) > build/requirements-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check -q install -r build/requirements-clients.txt
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.base
	@$(call requirements,dev) > build/requirements-dev.txt
	$(PIP) install -r build/requirements-dev.txt
	@touch $@

# The wheel is built in build/native, where the C++ tests are built too: everything compiles once.
$(VENV)/.installed: $(SOURCES) $(VENV)/.base
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-build-isolation --no-deps --force-reinstall \
	  -C build-dir=$(NATIVE) -C cmake.args=-GNinja .
	@touch $@

# ---- use ----------------------------------------------------------------------------------------

build: $(VENV)/.installed ## set up .venv, build the core, install the package

# The default model has a head that drafts (docs/guides/speculative_decoding.md); with ARGS that is the user's choice.
DRAFTS = {"method": "eagle", "num_speculative_tokens": 6}

run: $(VENV)/.installed ## serve the default model with the web chat (ARGS="..." as for `llaisys serve`)
	@$(PY) -m llaisys serve $(or $(ARGS),--speculative-config '$(DRAFTS)')

bench: $(VENV)/.installed ## kernels against this machine's limits (ARGS="..." as for `llaisys bench ops`)
	@$(PY) -m llaisys bench ops $(ARGS)

# ---- test ---------------------------------------------------------------------------------------

test: cpp-test py-test ## C++ unit tests, then the Python tests

cpp-test: $(VENV)/.base ## C++ unit tests only
	$(CMAKE) -S . -B $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) \
	  -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_WERROR=ON -DCMAKE_BUILD_TYPE=Release
	$(CMAKE) --build $(NATIVE)
	$(CTEST) --test-dir $(NATIVE) --output-on-failure -j $(JOBS)

clients: $(CLIENTS)/.installed ## the packages that test/clients runs, in build/clients

py-test: $(VENV)/.test $(VENV)/.installed $(CLIENTS)/.installed ## Python tests only (PYTEST_ARGS="...")
	@scripts/ensure_browser.sh $(PY)
	$(PY) scripts/run_tests.py $(ARGS) $(if $(PYTEST_ARGS),-- $(PYTEST_ARGS))

test-ray: $(VENV)/.test $(VENV)/.installed ## the tests of Ray, which is installed for them
	@$(call requirements,ray) > build/requirements-ray.txt
	$(PIP) install -r build/requirements-ray.txt
	$(PY) -m pytest test/engine/test_ray.py test/server/test_ray_replicas.py $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy, clang-format, layer check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run -Werror $(CPP_FILES))
	$(PY) scripts/check_layers.py

format: $(VENV)/.dev ## rewrite sources in the house format
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .
	$(if $(CPP_FILES),$(BIN)/clang-format -i $(CPP_FILES))

# ---- sanitizers ---------------------------------------------------------------------------------

# Python tests that drive the native core; they run against the sanitized library.
SANITIZE_PY_TESTS := $(filter-out %/test_core_parity.py %/test_core_decode_batch.py, \
  $(wildcard test/core/test_*.py))
ASAN := build/asan
TSAN := build/tsan
# TSan cannot map its shadow under some kernels' address randomisation: switch it off if possible.
NO_ASLR = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

sanitize: asan tsan ## ASan + UBSan over all C++ and core Python tests, TSan over the threaded ones

asan: $(VENV)/.test $(VENV)/.installed
	$(CMAKE) -S . -B $(ASAN) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) \
	  -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_WERROR=ON -DLLAISYS_SANITIZE=address,undefined
	$(CMAKE) --build $(ASAN)
	ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 $(CTEST) --test-dir $(ASAN) --output-on-failure -j $(JOBS)
ifeq ($(SANITIZE_PY_TESTS),)
	@echo "no core Python tests yet"
else
	@preload="$$(ldd $(ASAN)/libllaisys.so | awk '/libasan|libclang_rt.asan/ { print $$3 }') \
	  $$(ldd $(ASAN)/libllaisys.so | awk '/libubsan|libstdc/ { print $$3 }')" && \
	echo "Python tests under ASan, preloading" $$preload && \
	LD_PRELOAD="$$(echo $$preload)" LLAISYS_LIBRARY=$(abspath $(ASAN))/libllaisys.so \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(PY) -m pytest -q -p no:cacheprovider --capture=sys $(SANITIZE_PY_TESTS) $(PYTEST_ARGS)
endif

tsan: $(VENV)/.base
	$(CMAKE) -S . -B $(TSAN) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) \
	  -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_WERROR=ON -DLLAISYS_SANITIZE=thread
	$(CMAKE) --build $(TSAN) --target tsan_tests
	TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
	  $(NO_ASLR) $(CTEST) --test-dir $(TSAN) -L tsan --output-on-failure

cross-test: ## C++ tests for aarch64 under qemu (needs a cross compiler and qemu-user)
	scripts/cross_test.sh

clean: ## remove build/, .venv/ and caches
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
