# make demo    what kvprobe does, on this machine: leaves reports/demo.html
# make test    the tests; make lint    the linters
# make test-servers    the tests that need real servers; make test-gpu    those that need an NVIDIA GPU
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
# pip would compile one file after another, and packages' own tests as well; here all cores do, without these.
INSTALL = $(PIP) install --no-compile -e $(1) && { $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true; }
TESTS  ?= tests
# More than cores: a third of the time tests wait for programs that they started, or for a clock.
WORKERS ?= $(shell echo $$(( $$(nproc) * 3 / 2 )))

# make interleave    real threads under a scheduler; make mutants    deliberate bugs: which live?
# make simulate    random histories of the engine in virtual time; make soak    engines for an hour on the real clock
.PHONY: demo release test lint analyze fuzz fuzz-native format native-test simulate interleave mutants soak test-servers check-newest test-gpu docs clean

demo: $(VENV)/.installed
	$(BIN)/kvprobe demo --report reports/demo.html

# Files with slow tests begin (tests/conftest.py). Servers' own files come from the package index once (20 MB, cached).
# Compiled before: tests start kvprobe often, and where PYTHONDONTWRITEBYTECODE is set each start would compile it anew.
test: $(VENV)/.test
	$(BIN)/python -m compileall -q -j 0 -x '/(test_|conftest)[^/]*$$' kvprobe patches tests
	KVPROBE_DOWNLOAD=1 $(BIN)/python -m pytest -rsfE -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart=0 -m "not servers and not gpu" $(TESTS)

# The servers' real packages, from the index (some GB): three environments, because they want different libraries, and
# another with vLLM 0.33's Python files over the second (tests/servers/vllm33.py).
SERVERS := .venv-servers
VLLM    := .venv-vllm
VLLM33  := .venv-vllm33
# One test may start a whole engine several times, on a busy machine.
WHOLE   := -o faulthandler_timeout=1500
SGLANG  := .venv-sglang
OWN     := $(wildcard tests/servers/test_vllm_*.py tests/servers/test_sglang_*.py)
test-servers:
	$(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/pip install -q torch==2.13.0
	$(SERVERS)/bin/pip install -q -e . -r tests/servers/requirements.txt
	$(SERVERS)/bin/pip install -q --no-deps lmcache==0.5.6
	KVPROBE_DOWNLOAD=1 $(SERVERS)/bin/python -m pytest tests/patches tests/weights/test_load.py \
		tests/recordings/test_reduce.py $(filter-out $(OWN),$(wildcard tests/servers/test_*.py))
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q torch==2.13.0
	$(VLLM)/bin/pip install -q -e . -r tests/servers/requirements-vllm.txt
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pytest $(WHOLE) tests/servers/test_vllm_*.py
	$(VLLM)/bin/python tests/servers/vllm33.py $(VLLM33)
	$(VLLM33)/bin/python -m pytest $(WHOLE) tests/servers/test_vllm_*.py
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -q torch==2.13.0
	$(SGLANG)/bin/pip install -q -e . -r tests/servers/requirements-sglang.txt
	$(SGLANG)/bin/pip install -q --no-deps sglang==0.5.23
	$(SGLANG)/bin/python -m pytest $(WHOLE) tests/servers/test_sglang_*.py

# Which adapters no longer fit the newest release of each server (from the package index; some MB); for a weekly job.
check-newest: $(VENV)/.installed
	$(BIN)/kvprobe patches --check-newest

# With a Python that has torch for the GPU, pytest and kvprobe's dependencies: PYTHON=... make test-gpu
test-gpu:
	$(PYTHON) -m kvprobe.native.build >/dev/null
	$(PYTHON) -m pytest -m gpu tests/gpu tests/commands/test_stats.py
	KVPROBE_TEST_DEVICE=cuda CUDA_DEVICE_MAX_CONNECTIONS=32 $(PYTHON) -m pytest \
		tests/patches/test_store_race.py tests/patches/test_sglang.py tests/patches/test_sglang_copies.py \
		-k "race or no_order_is_lost"

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(find kvprobe/native -name '*.[ch]')

format: $(VENV)/.lint
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .
	$(BIN)/clang-format -i $$(find kvprobe/native -name '*.[ch]')

# N mutants of recordings, over all formats, from number FIRST on; a million takes some 35 minutes of one core.
N ?= 20000
fuzz: $(VENV)/.test
	$(BIN)/python tests/recordings/fuzz.py $(N)

# libFuzzer over the native readers of recordings, RUNS times for traces and as often for SQLite files; needs clang.
RUNS ?= 200000
fuzz-native: $(VENV)/.test
	$(BIN)/python tests/native/fuzz_trace.py $(RUNS)

# Random histories of the engine in virtual time, from seed FIRST on, with FAULTS calls that fail in each.
HISTORIES ?= 10000
FAULTS    ?= 1
simulate: $(VENV)/.test
	$(BIN)/python -m tests.simulate $(or $(FIRST),0) --count $(HISTORIES) --faults $(FAULTS)

# Interleavings of the engine's real threads, from FIRST on, on all cores.
INTERLEAVINGS ?= 100000
interleave: $(VENV)/.test
	$(BIN)/python -m tests.simulate $(or $(FIRST),0) --threads --count $(INTERLEAVINGS)

# Deliberate bugs, one at a time, of the C and the Python: each must be caught or stand in tests/mutants/explained.txt.
MUTANTS_C      ?= 200
MUTANTS_PYTHON ?= 100
mutants: $(VENV)/.test
	$(PIP) install -e '.[mutants]'
	$(BIN)/python -m tests.mutants --c $(MUTANTS_C) --python $(MUTANTS_PYTHON) --seed $(or $(FIRST),0)

# Engines used for SECONDS on the real clock (DEVICE=cuda: on a GPU): does anything grow?
SECONDS ?= 3600
DEVICE  ?= host
soak: $(VENV)/.installed
	$(BIN)/python benchmarks/soak.py --seconds $(SECONDS) --device $(DEVICE)

# gcc's analyzer over the native part.
analyze:
	find kvprobe/native -name '*.c' | xargs -P $$(nproc) -n 1 \
		gcc -std=gnu11 -O1 -fanalyzer -Werror -Ikvprobe/native/src -Ikvprobe/native/hostrt -c -o /dev/null

# The native libraries again, with the compiler's checkers on, under the tests that drive them.
native-test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not servers and not gpu" tests/native

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { echo "kvprobe: $(PYTHON) cannot make a virtual environment (Debian: apt-get install python3-venv)" >&2; exit 1; }

SOURCES := pyproject.toml $(wildcard kvprobe/instrument/carried/*.py) $(shell find kvprobe/native -name '*.[ch]' -o -name build.py)
$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@command -v $${CC:-cc} >/dev/null || { echo "kvprobe: no C compiler: install one (Debian: apt-get install gcc) or set CC" >&2; exit 1; }
	$(call INSTALL,.)
	$(BIN)/python -m kvprobe.native.build >/dev/null
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(call INSTALL,'.[test]')
	touch $@

$(VENV)/.lint: $(VENV)/.installed
	$(call INSTALL,'.[lint]')
	touch $@

# The documentation: build/docs/index.html, every command, cause, format, variable and public name; build/man/kvprobe.1.
docs: $(VENV)/.installed
	$(PIP) install -e '.[docs]'
	$(BIN)/python docs/pages.py build/docs-source
	$(BIN)/sphinx-build -q -W -c docs build/docs-source build/docs
	$(BIN)/sphinx-build -q -W -b man -c docs build/docs-source build/man

# What is published, in dist/: built twice, compared, tried (docs/releasing.md). Needs a cross compiler for aarch64.
release: $(VENV)/.installed
	@command -v aarch64-linux-gnu-gcc >/dev/null || { echo "kvprobe: no compiler for aarch64 (Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)" >&2; exit 1; }
	$(PIP) install -e '.[release]'
	$(BIN)/python .ci/release.py dist

clean:
	rm -rf $(VENV) $(SERVERS) $(VLLM) $(VLLM33) $(SGLANG) kvprobe/native/lib build dist
