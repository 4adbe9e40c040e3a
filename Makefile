# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0

PYTHON ?= python3
VENV ?= .venv
CXX ?= g++
AARCH64_CXX ?= aarch64-linux-gnu-g++
CLANG_FORMAT ?= $(VENV)/bin/clang-format
# Used where the environment has no Paddle yet; an installed one, CPU or GPU, is kept.
PADDLE ?= paddlepaddle==3.3.1
DEMO_ARGS ?=
CASES ?=
INSTALL_ARGS ?=
PYTEST_ARGS ?=
SERIES_ARGS ?=
CUDA_BUILD_ARGS ?=
CORE_TESTS ?= tests/core
COVERAGE_TESTS ?= tests/reference tests/ops tests/packaging tests/static tests/scenarios tests/distributed tests/triton

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet $(INSTALL_ARGS)
CSRC := paddle_moe_ops/csrc
BUILD_INPUTS := setup.py $(shell find $(CSRC) -type f)
FORMAT_INPUTS := $(shell find paddle_moe_ops -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
CORE_SOURCES := $(wildcard $(CSRC)/common/*.cc $(CSRC)/cpu/*.cc $(CSRC)/layer/*.cc)

# -ffp-contract=off: sums are the same bits on every compiler.
CORE_FLAGS := -std=c++17 -fPIC -pthread -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Werror -I$(CSRC)/include -I$(CSRC)
RELEASE_FLAGS := $(CORE_FLAGS) -O3 -fno-math-errno
SANITIZERS ?= address,undefined
SANITIZE_FLAGS := $(CORE_FLAGS) -O1 -g1 -fno-omit-frame-pointer -fsanitize=$(SANITIZERS) -fno-sanitize-recover=all
# Row kernels that the tests at hand do not call, such as generic avx2: they compile three times as long with sanitizers.
UNSANITIZED ?=
# -w: with these flags GCC 12 warns of its own headers; make core judges the sources.
COVERAGE_FLAGS := $(CORE_FLAGS) -O1 -g -w --coverage

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs docs-pictures notebook drawings test test-slow test-integrations test-isa fresh-environments lint format core sanitize asan-triton fuzz coverage bench-report wheel mutants gpu-bundle gpu-sanitize gpu-fuzz gpu-standin gpu-report results-series results-check release-dry-run check-place check-place-2 check-cuda check-cuda-build check-aarch64 ci-full clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- environment and build: a stamp is newer than what it was made from, so nothing is done twice; make lint and make sanitize
# need the environment only and so work with sources that do not compile

$(VENV)/stamp-deps: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip "setuptools>=77"  # Python 3.11 brings one that takes twice the CPU time to resolve
	$(PY) -c "import paddle" 2>/dev/null || $(INSTALL) $(PADDLE)
	$(PY) -c "from setuptools.config.pyprojecttoml import load_file; of = load_file('$<')['project']; \
	  print(*of['dependencies'], *of['optional-dependencies']['dev'], sep='\n')" > $(VENV)/requirements.txt
	$(INSTALL) --requirement $(VENV)/requirements.txt
	$(INSTALL) --no-deps paddleformers==1.2.0  # examples/ernie_unzip_zip.py loads one file of it
	touch $@

$(VENV)/stamp-built: $(VENV)/stamp-deps $(BUILD_INPUTS) build/core/libpmo_core.so
	PADDLE_MOE_OPS_CORE_OBJECTS=build/core $(INSTALL) --no-build-isolation --no-deps --editable .
	touch $@

# ---- what people run

demo: $(VENV)/stamp-built ## train a small MoE language model and show that it is right; options in DEMO_ARGS
	$(PY) -m examples.demo $(DEMO_ARGS)

# A file stays with one worker: some have fixtures that take long. Files begin in the order of tests/conftest.py, where pytest-xdist
# would begin with those of many tests. A worker that dies, or a test of half an hour, ends the run: with a new worker in the old
# one's place, those that have no work left may wait for more forever (pytest-xdist 3.8).
WORKERS := --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 \
  -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true -p no:logging

# The device of tests/distributed, which they would compile otherwise.
build/stub_device/stamp: $(VENV)/stamp-deps $(shell find tests/distributed/stub_device tools/gpu_rig -name '*.h' -o -name '*.cc')
	$(PY) -c "from tests.distributed import stub_device; stub_device.build()"
	touch $@

test: $(VENV)/stamp-built core ## the test suite; options in PYTEST_ARGS
	$(PY) -m pytest tests $(WORKERS) $(PYTEST_ARGS)

test-slow: $(VENV)/stamp-built core ## the tests that `make test` leaves out
	$(PY) -m pytest tests -m slow $(PYTEST_ARGS)

# In an environment of its own: what PaddleFormers needs is nothing that the operators need.
INTEGRATIONS := .venv-integrations

$(INTEGRATIONS)/stamp: tests/integrations/requirements.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip --disable-pip-version-check install --quiet $(PADDLE) -r $<
	$(INTEGRATIONS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps paddleformers==1.2.0
	touch $@

test-integrations: $(VENV)/stamp-built $(INTEGRATIONS)/stamp ## models of PaddleFormers on the operators; options in PYTEST_ARGS
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations $(PYTEST_ARGS)

# In an environment of its own. The package's sources are read and not built, so Paddle is not needed.
DOCS := .venv-docs
PAGES := build/pages

$(DOCS)/stamp: tools/docs_requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet $(INSTALL_ARGS) --upgrade pip
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet $(INSTALL_ARGS) -r $<
	touch $@

# Pages that git does not have, and their pictures.
$(PAGES)/stamp: $(DOCS)/stamp tools/docs_pages.py tools/coverage_report.py $(shell find benchmarks -name '*.py' -o -name '*.json*')
	$(DOCS)/bin/python tools/docs_pages.py
	touch $@

# What ran on GPUs is compared with the current commit, so that page is always written.
docs: $(PAGES)/stamp ## the documentation site in build/site; every warning is an error
	$(DOCS)/bin/python tools/docs_pages.py gpu_validation.md
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

notebook: $(VENV)/stamp-built ## run examples/quick_tour.ipynb and write its outputs into it
	$(PY) tools/notebook_outputs.py

docs-pictures: docs ## the site as pictures in build/site_pictures, and a check of its pages in Chromium
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet "playwright>=1.50"
	$(DOCS)/bin/python tools/docs_pictures.py

drawings: ## docs/drawings from tools/drawings.py; needs no environment
	$(PYTHON) tools/drawings.py

test-isa: $(VENV)/stamp-built core ## the core and the operators on the AVX2 and on the generic row kernels
	for isa in avx2 generic; do \
	  PADDLE_MOE_OPS_MAX_CPU_ISA=$$isa $(PY) -m pytest tests/core tests/ops $(WORKERS) $(CASES) $(PYTEST_ARGS) || exit 1; \
	done

fresh-environments: ## install as the README says, in new environments of PYTHONS and PADDLES; docs/compatibility.md says how it went
	$(PYTHON) tools/fresh_environments.py

lint: $(VENV)/stamp-deps ## ruff, clang-format, mypy, the schemas of GitHub's files, and the check of results
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(FORMAT_INPUTS)
	$(VENV)/bin/mypy
	$(VENV)/bin/check-jsonschema --builtin-schema github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml .github/ISSUE_TEMPLATE/question.yml
	$(VENV)/bin/check-jsonschema --builtin-schema github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/check-jsonschema --builtin-schema citation-file-format CITATION.cff
	$(PY) -m benchmarks.series --check

format: $(VENV)/stamp-deps ## format Python and C++ in place
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(CLANG_FORMAT) -i $(FORMAT_INPUTS)

# ---- the framework-free core

core: build/core/libpmo_core.so ## build/core/libpmo_core.so, every warning an error

# --capture=sys lets what the sanitizers write before they end the process through.
sanitize: $(VENV)/stamp-deps build/sanitize/libpmo_core.so ## core tests under AddressSanitizer and UndefinedBehaviorSanitizer
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PMO_CORE_LIBRARY=$(CURDIR)/build/sanitize/libpmo_core.so \
	$(PY) -m pytest $(CORE_TESTS) -m "not slow and not own_program" --capture=sys -p no:cacheprovider $(WORKERS) $(CASES) $(PYTEST_ARGS)

# A copy of the tree in build/asan keeps this library apart from the one of make test. AddressSanitizer intercepts dlopen, so
# LD_LIBRARY_PATH replaces the RUNPATH of Paddle's libraries; it intercepts exceptions only if libstdc++ is preloaded too.
ASAN_TESTS ?= tests/triton tests/ops/test_native_functions.py tests/ops/test_native_recordings.py \
  $(patsubst %,tests/ops/test_triton_%.py,interpreted launch products runtime)

asan-triton: $(VENV)/stamp-deps ## interpreted Triton kernels, and the operators' library, under AddressSanitizer; ASAN_TESTS, PYTEST_ARGS
	mkdir -p build/asan
	git ls-files -z | xargs -0 cp --archive --update --parents --target-directory=build/asan
	sed -i 's/"-O3", "-g0"/"-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address"/; s/\["-O2"\]/[]/' build/asan/setup.py
	cd build/asan && \
	export LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	LD_LIBRARY_PATH="$$($(CURDIR)/$(PY) -c 'import paddle; print(paddle.__path__[0])')/libs" \
	ASAN_OPTIONS=malloc_fill_byte=165:max_malloc_fill_size=1000000000:detect_leaks=0:alloc_dealloc_mismatch=0 && \
	$(CURDIR)/$(PY) setup.py build_ext --inplace && \
	$(CURDIR)/$(PY) -m pytest $(ASAN_TESTS) --capture=sys -p no:cacheprovider $(WORKERS) $(PYTEST_ARGS)

fuzz: ## many more random params structs than in `make sanitize`
	$(MAKE) sanitize CORE_TESTS=tests/core/test_fuzz.py PYTEST_ARGS="--fuzz-cases=100000 -rP"

build/core/%.o: $(CSRC)/%.cc Makefile
	@mkdir -p $(@D)
	$(CXX) $(RELEASE_FLAGS) -MMD -MP -c $< -o $@

build/sanitize/%.o: $(CSRC)/%.cc Makefile
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE_FLAGS) -MMD -MP -c $< -o $@

$(UNSANITIZED:%=build/sanitize/cpu/row_kernels_%.o): SANITIZE_FLAGS := $(CORE_FLAGS) -O0

CORE_OBJECTS := $(CORE_SOURCES:$(CSRC)/%.cc=build/core/%.o)
SANITIZE_OBJECTS := $(CORE_SOURCES:$(CSRC)/%.cc=build/sanitize/%.o)
COVERAGE_OBJECTS := $(CORE_SOURCES:$(CSRC)/%.cc=build/coverage/%.o)
-include $(CORE_OBJECTS:.o=.d) $(SANITIZE_OBJECTS:.o=.d) $(COVERAGE_OBJECTS:.o=.d)

build/core/libpmo_core.so: $(CORE_OBJECTS)
	$(CXX) $(RELEASE_FLAGS) -shared $^ -o $@

build/sanitize/libpmo_core.so: $(SANITIZE_OBJECTS)
	$(CXX) $(SANITIZE_FLAGS) -shared $^ -o $@

# ---- coverage: of the core by the core's tests, of Python by COVERAGE_TESTS

coverage: $(VENV)/stamp-built core build/coverage/libpmo_core.so ## benchmarks/results/coverage.json: lines of the core and of Python that tests run
	find build/coverage -name '*.gcda' -delete
	PMO_CORE_LIBRARY=$(CURDIR)/build/coverage/libpmo_core.so $(PY) -m pytest $(CORE_TESTS) -m "not slow and not own_program" $(WORKERS) \
	  $(PYTEST_ARGS)
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(PY) -m pytest $(COVERAGE_TESTS) --cov=paddle_moe_ops \
	  --cov-report=json:build/coverage/python.json $(WORKERS) $(PYTEST_ARGS)
	$(PY) tools/coverage_report.py --core-tests "$(CORE_TESTS)" --python-tests "$(COVERAGE_TESTS)"

build/coverage/%.o: $(CSRC)/%.cc Makefile
	@mkdir -p $(@D)
	$(CXX) $(COVERAGE_FLAGS) -MMD -MP -c $(CURDIR)/$< -o $(CURDIR)/$@

build/coverage/libpmo_core.so: $(COVERAGE_OBJECTS)
	$(CXX) $(COVERAGE_FLAGS) -shared $^ -o $@

# ---- benchmarks (benchmarks/README.md)

bench-report: $(VENV)/stamp-deps ## docs/performance.md and docs/speed.svg from benchmarks/results; add the newest results to the series
	$(PY) -m benchmarks.kernels.report --docs docs
	$(PY) -m benchmarks.series

results-series: $(VENV)/stamp-deps ## add the newest results to benchmarks/results/series, and check them; options in SERIES_ARGS
	$(PY) -m benchmarks.series $(SERIES_ARGS)

results-check: $(VENV)/stamp-deps ## figures that are more than 3 % lower than before, or apart without a reason
	$(PY) -m benchmarks.series --check

# ---- NVIDIA GPUs (tools/gpu_rig/README.md)

gpu-bundle: $(VENV)/stamp-built ## what travels to a GPU machine: Paddle in parts, the plug-in, the operators, the core
	$(MAKE) -f tools/gpu_rig/Makefile rig place
	cp paddle_moe_ops/_C.py build/gpu/rig-2/
	$(PY) tools/gpu_rig/machine_code.py core jitter rig > build/gpu/rig-2/machine_code.json
	$(PY) tools/gpu_rig/machine_code.py core place > build/gpu/place-2/machine_code.json
	git rev-parse --short HEAD | tee build/gpu/rig-2/commit > build/gpu/place-2/commit

# On the GPU machine, which has the bundle and no environment. `peers` needs two GPUs.
SUITES ?= core hopper
TOOLS ?= memcheck racecheck initcheck synccheck
RESULTS ?= build/gpu/results
LIMIT ?= 1200
gpu-sanitize: ## compute-sanitizer over SUITES (core hopper peers) by TOOLS, LIMIT seconds each; json files in RESULTS
	$(PYTHON) tools/gpu_rig/run.py sanitize --over $(SUITES) --tools $(TOOLS) --limit $(LIMIT) --out $(RESULTS) $(PYTEST_ARGS)

gpu-fuzz: ## on a GPU machine that has the bundle: 20,000 random cases, a new seed each time; a json file in RESULTS
	$(PYTHON) tools/gpu_rig/run.py fuzz --limit $(LIMIT) --out $(RESULTS) $(PYTEST_ARGS)

gpu-standin: $(VENV)/stamp-built ## the tests of operators, graphs and scenarios on the rig's device, without a GPU; options in PYTEST_ARGS
	$(MAKE) -f tools/gpu_rig/Makefile standin
	cd build/gpu/standin/site && CI=1 GLOG_minloglevel=2 CUSTOM_DEVICE_ROOT=$(CURDIR)/build/gpu/standin/plugin \
	LD_LIBRARY_PATH="$(CURDIR)/build/gpu/standin:$$($(CURDIR)/$(PY) -c 'import paddle; print(paddle.__path__[0])')/libs" \
	$(CURDIR)/$(PY) -m pytest tests/ops tests/static tests/scenarios --device=cuda_rig:0 $(WORKERS) $(PYTEST_ARGS) && \
	RIG_DEVICE_KERNELS=1 $(CURDIR)/$(PY) -m pytest tests/rig --device=cuda_rig:0

gpu-report: $(VENV)/stamp-deps ## build/pages/gpu_validation.md from benchmarks/results/gpu_tests; fails if a point is open
	$(PY) tools/gpu_rig/report.py

check-place: $(VENV)/stamp-deps check-cuda ## compile the bindings for a CUDA build of the oldest Paddle, and the kernels for every generation
	$(MAKE) -f tools/gpu_rig/Makefile check-place PYTHON=$(PY)

# Paddle 2.6.2 is the newest one whose GPU wheel PyPI has (make gpu-bundle).
check-place-2: $(VENV)/stamp-deps ## compile the bindings for a CUDA build of Paddle 2.6.2
	$(MAKE) -f tools/gpu_rig/Makefile check-place PYTHON=$(PY) CHECKED_VERSION=2.6.2

check-cuda: ## the kernels alone, which need nvcc and no environment
	$(MAKE) -f tools/gpu_rig/Makefile check-cuda

# The path of setup.py under a GPU wheel, of which PyPI has none for Paddle 3: build, symbols, selftest, and the sizes.
check-cuda-build: $(VENV)/stamp-deps ## build by setup.py as under a GPU wheel of Paddle, and check the library; options in CUDA_BUILD_ARGS
	$(PY) tools/cuda_build.py $(CUDA_BUILD_ARGS)

# The CPU core for aarch64, whose vectors are the compiler's business; Debian has the compiler (g++-aarch64-linux-gnu).
check-aarch64: ## compile the CPU core for aarch64, every warning an error
	command -v $(AARCH64_CXX) >/dev/null || apt-get install --yes --no-install-recommends g++-aarch64-linux-gnu
	$(MAKE) build/aarch64/libpmo_core.so

build/aarch64/%.o: $(CSRC)/%.cc Makefile
	@mkdir -p $(@D)
	$(AARCH64_CXX) $(RELEASE_FLAGS) -MMD -MP -c $< -o $@

build/aarch64/libpmo_core.so: $(CORE_SOURCES:$(CSRC)/%.cc=build/aarch64/%.o)
	$(AARCH64_CXX) $(RELEASE_FLAGS) -shared $^ -o $@

# ---- the rest

AREA ?=
MUTANTS ?= 30
SEED ?= 1
MUTANTS_ARGS ?=
mutants: $(VENV)/stamp-built core ## faults that no test notices; AREA, MUTANTS, SEED, MUTANTS_ARGS (tools/mutants/README.md)
	$(PY) setup.py --quiet build_ext --inplace  # objects of the core as well, and their commands
	nice $(PY) tools/mutants/run.py $(addprefix --area ,$(AREA)) --mutants $(MUTANTS) --seed $(SEED) $(MUTANTS_ARGS)

wheel: $(VENV)/stamp-deps ## a wheel in dist/
	rm -f dist/*.whl
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	$(PY) -m zipfile --list dist/paddle_moe_ops-*.whl

release-dry-run: wheel ## the files of a release in build/release, as release.yml makes them, from this machine's wheel
	rm -rf dist/*.tar.gz build/release
	mkdir -p build && $(PY) setup.py -q egg_info --egg-base build sdist
	$(PYTHON) tools/release.py --dry-run dist/*

ci-full: CASES := --every-case  # make test and make test-slow share them
ci-full: lint core check-aarch64 check-place check-place-2 check-cuda-build sanitize fuzz test test-slow test-integrations test-isa fresh-environments ## all checks, the slow ones too

clean: ## delete what was built, not the environment
	rm -rf build dist *.egg-info $(VENV)/stamp-built paddle_moe_ops/_C.py paddle_moe_ops/_C_pd_.so paddle_moe_ops/_build_info.json
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
