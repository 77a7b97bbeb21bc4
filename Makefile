# NovaInfer. Every target sets up what it needs in .venv/ and build/; `make help` lists them.
#
#   PYTHON=python3.12 make test    another interpreter (3.11 or later)
#   CXX=clang++ make test          another compiler
#   make build CUDA=1              with CUDA, without a GPU too; CUDA=0: without CUDA; else: if a GPU is found
#   make build CUDA=1 CUDA_ARCHITECTURES="80 90a"
#   make wheel CUDA=1              a wheel with CUDA, for CUDA_ARCHITECTURES or 90a and 80
#   make run ARGS="--port 9000"    more arguments for `llaisys serve`
#   make test ARGS="--suite core"  arguments for scripts/run_tests.py
#   make test PYTEST_ARGS="-k kv"  arguments for pytest
#   VERBOSE=1 make build           all output of pip, CMake and the compiler

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
CUDA ?=
CUDA_ARCHITECTURES ?=
WERROR ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

STARTED := $(shell date +%s)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
NATIVE := build/native
TOOLS := build/tools
CLIENTS := build/clients
AGENTS := build/agents
LOGS := build/logs
# pip's own bytecode, 8 MB, stays out of the environment that users keep.
PYCACHE := env PYTHONPYCACHEPREFIX=$(abspath build/pycache)
PIP := $(PYCACHE) $(PY) -m pip --disable-pip-version-check --no-input
PIP_INSTALL := $(PIP) install --progress-bar off
CMAKE := $(TOOLS)/bin/cmake
CTEST := $(TOOLS)/bin/ctest
NINJA := $(abspath $(TOOLS)/bin/ninja)
STEP = $(PYTHON) scripts/step.py
NETWORK_HINT := --hint "Check the network connection and the package index of pip, then run the same command again."
COMPILER_HINT := --hint "Needed: g++ 9 or clang++ 10, or later; CXX=... selects another one."

ifeq ($(origin CXX),default)
CXX := $(firstword $(foreach c,g++ clang++ c++,$(if $(shell command -v $(c) 2>/dev/null),$(c))))
endif
ifeq ($(origin CC),default)
CC := $(firstword $(foreach c,gcc clang cc,$(if $(shell command -v $(c) 2>/dev/null),$(c))))
endif
export CC CXX
# Packages are installed without bytecode; Python writes that of the modules it imports.
unexport PYTHONDONTWRITEBYTECODE
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
.PHONY: help run build develop test test-packages cpp-test py-test test-ray test-agents clients cuda-build lint format bench bench-check sanitize asan \
  asan-build attack-nightly tsan cross-test clean check-tools native changed-options wheel wheel-test \
  fetch-model

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
	  awk -F '\t' '{ printf "  make %-14s %s\n", $$1, $$2 }'

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
	@$(STEP) "Creating $(VENV)" $(LOGS)/venv.txt -- $(PYCACHE) $(PYTHON) -m venv $(VENV)
	@$(PIP) uninstall --yes setuptools >> $(LOGS)/venv.txt 2>&1 # 10 MB that Python 3.11 puts there
	@touch $@

$(VENV)/.base: pyproject.toml $(VENV)/.created
	@$(call requirements,base) > build/requirements-base.txt
	@$(STEP) $(NETWORK_HINT) "Installing packages" $(LOGS)/packages.txt -- \
	  $(PIP_INSTALL) --no-compile -r build/requirements-base.txt
	@touch $@

# What builds the package has an environment of its own: CMake is 80 MB that `make run` does not need later.
$(TOOLS)/.installed: pyproject.toml $(VENV)/.created
	@$(call requirements,build) > build/requirements-build.txt
	@$(PYTHON) -m venv --without-pip $(TOOLS)
	@$(STEP) $(NETWORK_HINT) "Installing build tools" $(LOGS)/tools.txt -- \
	  $(PIP) --python $(TOOLS)/bin/python install --progress-bar off --no-compile -r build/requirements-build.txt
	@touch $@

# The pip of Python 3.11 takes minutes of CPU time to resolve what the tests need, a later one seconds.
$(TOOLS)/.pip: $(TOOLS)/.installed
	@$(STEP) $(NETWORK_HINT) "Installing pip" $(LOGS)/pip.txt -- \
	  $(PIP) --python $(TOOLS)/bin/python install --progress-bar off --no-compile "pip>=25"
	@touch $@
LATER_PIP := $(PYCACHE) $(TOOLS)/bin/python -m pip --disable-pip-version-check --no-input

# The packages of .base too: resolving them apart from the others would take as long again.
$(VENV)/.test: pyproject.toml $(VENV)/.created $(TOOLS)/.pip
	@$(call requirements,base test) > build/requirements-test.txt
	@$(STEP) $(NETWORK_HINT) "Installing what the tests need" $(LOGS)/test-packages.txt -- \
	  $(LATER_PIP) --python $(PY) install --progress-bar off --no-compile -r build/requirements-test.txt
	@touch $(VENV)/.base $@

# Clients that are tested pin other versions than we do: an environment of their own.
$(CLIENTS)/.installed: pyproject.toml $(TOOLS)/.pip
	@$(call requirements,clients) > build/requirements-clients.txt
	@$(PYTHON) -m venv --without-pip $(CLIENTS)
	@$(STEP) $(NETWORK_HINT) "Installing clients to test with" $(LOGS)/clients.txt -- \
	  $(LATER_PIP) --python $(CLIENTS)/bin/python install --progress-bar off --no-compile \
	  -r build/requirements-clients.txt
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.base
	@$(call requirements,dev) > build/requirements-dev.txt
	@$(STEP) $(NETWORK_HINT) "Installing linters" $(LOGS)/dev-packages.txt -- \
	  $(PIP_INSTALL) -r build/requirements-dev.txt
	@touch $@

# ---- native library -----------------------------------------------------------------------------

# CMake's cache keeps an option that is not given again: `make build CUDA=1; make run` has CUDA.
space := $(subst ,, )
cuda_1 := ON
cuda_0 := OFF
CUDA_VALUE := $(or $(cuda_$(CUDA)),$(CUDA))
CUDA_LIST := $(subst $(space),;,$(strip $(CUDA_ARCHITECTURES)))
CONFIGURE = $(CMAKE) -S . -B $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) -DCMAKE_BUILD_TYPE=Release \
  $(if $(CUDA),-DLLAISYS_CUDA=$(CUDA_VALUE)) \
  $(if $(CUDA_LIST),-DLLAISYS_CUDA_ARCHITECTURES="$(CUDA_LIST)") \
  $(if $(WERROR),-DLLAISYS_WERROR=$(WERROR))
configure = $(STEP) $(COMPILER_HINT) "Configuring" $(LOGS)/configure.txt -- $(CONFIGURE) $(1) && \
  sed -n 's/^-- \(CUDA: .*\)/\1/p' $(LOGS)/configure.txt
compile = $(STEP) $(COMPILER_HINT) "Compiling $(1)" $(LOGS)/compile.txt -- $(CMAKE) --build $(2)

# A phony prerequisite where an option differs from that of the last build.
cached = $(shell sed -n 's/^$(1):[A-Z]*=//p' $(NATIVE)/CMakeCache.txt 2>/dev/null)
ifneq ($(and $(CUDA),$(filter-out $(call cached,LLAISYS_CUDA),$(CUDA_VALUE))),)
CHANGED := changed-options
endif
ifneq ($(and $(CUDA_LIST),$(filter-out $(call cached,LLAISYS_CUDA_ARCHITECTURES),$(CUDA_LIST))),)
CHANGED := changed-options
endif
changed-options:

native: $(TOOLS)/.installed
	@$(call configure)
	@$(call compile,the core,$(NATIVE)) --target llaisys_package

# The wheel is built in build/native, where the C++ tests are built too: everything compiles once.
pack = rm -rf build/wheel && PATH="$(abspath $(TOOLS)/bin):$$PATH" \
  $(STEP) $(COMPILER_HINT) "Packing" $(LOGS)/wheel.txt -- \
  $(PIP) --python $(TOOLS)/bin/python wheel --no-build-isolation --no-deps -w build/wheel \
  --config-settings=build-dir=$(NATIVE) --config-settings=cmake.args=-GNinja .

# $(1): commands; they run while the packages are installed and, for `make run`, the model is fetched.
with_packages = { $(MAKE) --no-print-directory $(VENV)/.base $(MODEL) || rm -f $(VENV)/.base; } | cat & \
  packages=$$!; { $(1); }; status=$$?; wait $$packages; test -f $(VENV)/.base && exit $$status

$(VENV)/.installed: $(SOURCES) $(TOOLS)/.installed $(CHANGED)
	@$(call with_packages,$(call configure) && \
	  $(call compile,the core,$(NATIVE)) --target llaisys_package && $(pack))
	@$(STEP) "Installing llaisys" $(LOGS)/install.txt -- \
	  $(PIP_INSTALL) --no-deps --force-reinstall build/wheel/*.whl
	@rm -f $(VENV)/.editable
	@touch $@

# `make develop` replaces the package by a link to python/, which loads the library from build/native.
$(VENV)/.editable: pyproject.toml $(VENV)/.base $(TOOLS)/.installed
	@PATH="$(abspath $(TOOLS)/bin):$$PATH" PYTHONPATH=$$($(TOOLS)/bin/python -c \
	  'import sysconfig; print(sysconfig.get_path("purelib"))') $(STEP) "Installing llaisys" $(LOGS)/install.txt -- \
	  $(PIP_INSTALL) --no-build-isolation --no-deps --config-settings=wheel.cmake=false --editable .
	@rm -f $(VENV)/.installed
	@touch $@

# What `make run` and the tests use: the editable package once there is one, else the installed one.
PACKAGE := $(if $(wildcard $(VENV)/.editable),develop,$(VENV)/.installed)

# ---- wheels to distribute -----------------------------------------------------------------------

$(TOOLS)/.wheel: $(TOOLS)/.installed
	@$(call requirements,wheel) > build/requirements-wheel.txt
	@$(STEP) $(NETWORK_HINT) "Installing auditwheel" $(LOGS)/auditwheel.txt -- \
	  $(PIP) --python $(TOOLS)/bin/python install --progress-bar off --no-compile -r build/requirements-wheel.txt
	@touch $@

# auditwheel names the oldest glibc that the libraries run on; it decides the platform tag. A wheel with
# CUDA has a version of its own: VERSION+cuda. The options of build/native are as before afterwards.
WHEEL_CUDA := $(or $(CUDA_VALUE),OFF)
wheel: $(TOOLS)/.wheel ## a manylinux wheel in dist/ (CUDA=1: with CUDA)
	@$(call configure,-DLLAISYS_CUDA=$(WHEEL_CUDA) -DLLAISYS_CUDA_ARCHITECTURES="$(or $(CUDA_LIST),90a;80)")
	@$(call compile,the core,$(NATIVE)) --target llaisys_package
	@$(if $(filter ON,$(WHEEL_CUDA)),export LLAISYS_CUDA_WHEEL=1;) $(pack)
	@PATH="$(abspath $(TOOLS)/bin):$$PATH" $(STEP) "Checking with auditwheel" $(LOGS)/auditwheel.txt -- \
	  auditwheel repair --wheel-dir dist build/wheel/*.whl
	@$(call configure,-DLLAISYS_CUDA=$(or $(call cached,LLAISYS_CUDA),AUTO) \
	  -DLLAISYS_CUDA_ARCHITECTURES="$(call cached,LLAISYS_CUDA_ARCHITECTURES)")
	@ls -l dist

wheel-test: wheel ## install that wheel in a new environment without a compiler, and serve from it
	@$(PYTHON) scripts/check_wheel.py dist/*.whl

# ---- use ----------------------------------------------------------------------------------------

build: $(VENV)/.installed ## set up .venv, build the core, install the package (CUDA=1: with CUDA)

develop: $(VENV)/.editable native ## the same, but editable: Python from python/, the library from build/native

# A model that cannot be fetched now is an error of the server.
run: MODEL := fetch-model
fetch-model: $(VENV)/.base
	@PYTHONPATH=python $(STEP) "Fetching the model" $(LOGS)/model.txt -- \
	  $(PY) scripts/run_server.py --fetch $(ARGS) || true

run: $(PACKAGE) ## serve the default model with the web chat (ARGS="..." adds arguments of `llaisys serve`)
	@LLAISYS_STARTED=$(STARTED) $(PY) scripts/run_server.py $(ARGS)

bench: $(PACKAGE) ## kernels against this machine's limits (ARGS="..." as for `llaisys bench ops`)
	@$(PY) -m llaisys bench ops $(ARGS)

bench-check: $(PACKAGE) native ## fail when slower than the baseline of this kind of machine (ARGS="--base REVISION")
	@$(PY) scripts/bench_check.py $(ARGS)

# ---- test ---------------------------------------------------------------------------------------

# Packages are installed while the core compiles.
test: $(TOOLS)/.installed ## C++ unit tests, then the Python tests
	@$(MAKE) --no-print-directory test-packages | cat & packages=$$!; \
	$(MAKE) --no-print-directory cpp-test; status=$$?; \
	wait $$packages; exit $$status
	@$(MAKE) --no-print-directory py-test

test-packages: $(VENV)/.test $(CLIENTS)/.installed
	@scripts/ensure_browser.sh $(PY)

cpp-test: $(TOOLS)/.installed ## C++ unit tests only
	@$(call configure,-DLLAISYS_BUILD_TESTS=ON)
	@$(call compile,the core and its tests,$(NATIVE))
	$(CTEST) --test-dir $(NATIVE) --output-on-failure -j $(JOBS)

cuda-build: $(TOOLS)/.installed ## compile CUDA for CUDA_ARCHITECTURES (90a and 80), check others; needs no GPU
	@$(call configure,-DLLAISYS_CUDA=ON -DLLAISYS_CUDA_ARCHITECTURES="$(or $(CUDA_LIST),90a;80)" -DLLAISYS_BUILD_TESTS=ON)
	@$(call compile,CUDA,$(NATIVE)) --target llaisys_cuda cuda_tests
	@$(STEP) "Compiling to PTX: 89, 100, 120, checks" $(LOGS)/ptx.txt -- scripts/check_cuda_ptx.sh
	@$(call configure,-DLLAISYS_CUDA=$(or $(call cached,LLAISYS_CUDA),AUTO) \
	  -DLLAISYS_CUDA_ARCHITECTURES="$(call cached,LLAISYS_CUDA_ARCHITECTURES)")

clients: $(CLIENTS)/.installed ## the packages that test/clients runs, in build/clients

py-test: $(VENV)/.test $(PACKAGE) $(CLIENTS)/.installed ## Python tests only (PYTEST_ARGS="...")
	@scripts/ensure_browser.sh $(PY)
	$(PY) scripts/run_tests.py $(ARGS) $(if $(PYTEST_ARGS),-- $(PYTEST_ARGS))

test-ray: $(VENV)/.test $(PACKAGE) ## the tests of Ray, which is installed for them
	@$(call requirements,ray) > build/requirements-ray.txt
	@$(STEP) $(NETWORK_HINT) "Installing Ray" $(LOGS)/ray.txt -- $(PIP_INSTALL) -r build/requirements-ray.txt
	$(PY) -m pytest test/engine/test_ray.py test/server/test_ray_replicas.py $(PYTEST_ARGS)

# Agents pin their dependencies, each other ones: an environment per file of requirements.
AGENT_FILES := $(wildcard test/clients/agents/*.txt)
AGENT_NAMES := $(notdir $(AGENT_FILES:.txt=))

$(AGENTS)/%/.installed: test/clients/agents/%.txt $(VENV)/.created
	@$(PYTHON) -m venv --without-pip $(AGENTS)/$*
	@$(STEP) $(NETWORK_HINT) "Installing $*" $(LOGS)/agents-$*.txt -- \
	  $(PIP) --python $(AGENTS)/$*/bin/python install --progress-bar off --no-compile -r $<
	@touch $@

$(AGENTS)/node/.installed: test/clients/agents/package.json
	@mkdir -p $(AGENTS)/node && cp $< $(AGENTS)/node/
	@$(STEP) --hint "Needed: node 20 and npm, or later." "Installing Codex CLI and Claude Code" \
	  $(LOGS)/agents-node.txt -- npm --prefix $(AGENTS)/node install --no-audit --no-fund
	@touch $@

test-agents: $(VENV)/.test $(PACKAGE) $(AGENTS)/node/.installed $(AGENT_NAMES:%=$(AGENTS)/%/.installed) ## agents, guidance and Open WebUI, installed (9 GB) for their tests
	$(PY) -m pytest test/clients/test_agents.py test/clients/test_agent_clients.py $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy, clang-format, layers, words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run -Werror $(CPP_FILES))
	$(PY) scripts/check_layers.py
	$(PY) scripts/check_words.py

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

# $(1): test files, $(2): environment; run them against the sanitized library
asan_pytest = preload="$$(ldd $(ASAN)/libllaisys.so | awk '/libasan|libclang_rt.asan/ { print $$3 }') \
	  $$(ldd $(ASAN)/libllaisys.so | awk '/libubsan|libstdc/ { print $$3 }')" && \
	echo "Python tests under ASan, preloading" $$preload && \
	LD_PRELOAD="$$(echo $$preload)" LLAISYS_LIBRARY=$(abspath $(ASAN))/libllaisys.so \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(2) $(PY) -m pytest -q -p no:cacheprovider --capture=sys $(1) $(PYTEST_ARGS)

asan: asan-build
	ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 $(CTEST) --test-dir $(ASAN) --output-on-failure -j $(JOBS)
	@$(call asan_pytest,$(SANITIZE_PY_TESTS))

ASAN_CONFIGURE = $(CMAKE) -S . -B $(ASAN) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) \
	  -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_WERROR=ON -DLLAISYS_SANITIZE=address,undefined

asan-build: $(TOOLS)/.installed $(VENV)/.test $(PACKAGE)
	$(ASAN_CONFIGURE)
	$(CMAKE) --build $(ASAN)

# Attack tests that run on the sanitized library. The others compile grammars, whose processes have
# memory limits that ASan's shadow memory exceeds, or measure times.
NIGHTLY_NATIVE := $(wildcard test/core/test_capi_fuzz*.py) test/attack/test_mutated_model_files.py \
  test/attack/test_tokens_under_pressure.py test/attack/test_exhaustion.py
NIGHTLY_REST := $(filter-out $(NIGHTLY_NATIVE),$(wildcard test/attack/test_*.py) \
  $(shell grep -l '^from nightly' test/*/test_*.py | grep -v attack))

attack-nightly: $(TOOLS)/.installed $(VENV)/.test $(PACKAGE) ## attack and fuzz tests at full size, on ASan + UBSan where native
	$(ASAN_CONFIGURE)
	$(CMAKE) --build $(ASAN) --target llaisys
	@$(call asan_pytest,$(NIGHTLY_NATIVE),LLAISYS_TEST_PRESSURE=1000)
	LLAISYS_TEST_PRESSURE=1000 $(PY) -m pytest -q -p no:cacheprovider $(NIGHTLY_REST) $(PYTEST_ARGS)

tsan: $(TOOLS)/.installed
	$(CMAKE) -S . -B $(TSAN) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) \
	  -DLLAISYS_BUILD_TESTS=ON -DLLAISYS_WERROR=ON -DLLAISYS_SANITIZE=thread
	$(CMAKE) --build $(TSAN) --target cpp_tests
	TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
	  $(NO_ASLR) $(CTEST) --test-dir $(TSAN) -L tsan --output-on-failure

cross-test: ## C++ tests for aarch64 under qemu (needs a cross compiler and qemu-user)
	scripts/cross_test.sh

clean: ## remove build/, .venv/ and caches
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
