# make demo | test | systemd-test | soak | fuzz | gpu-test | gpu-memcheck | gpu-racecheck | gpu-bench | cubins | wheel | inventory | protocol | settings | lint | format
#
# Each target sets up what it needs in .venv, from PYTHON_BASE and the versions in constraints.txt.
# With PYTHON=python3 that interpreter is used as it is and nothing is set up.

PYTHON_BASE ?= python3
JOBS ?= $(shell nproc)
VENV := .venv
SOURCES := daemon client kernels tests
CUDA_SOURCES = $(shell find kernels/latentd_kernels/csrc -name "*.cu" -o -name "*.cuh")

GPU_TESTS ?= tests
MEMCHECK_SKIP ?= 10944 or 102400 or 8192x2048 or 3072x1536 or 4096x512 or v2-lite or distribution or within_its_bounds or within_the_bounds or before_its_append or context_of_32k
KERNEL_TESTS ?= $(filter-out %bench.py %branches.py %device_faults.py %graphs.py %isolation.py %sameness.py %long_context.py %prefix_cache.py,$(wildcard tests/gpu/test_*.py))

ifdef PYTHON
PY := $(PYTHON)
BIN :=
export PYTHONPATH := daemon:client:kernels:tests:$(PYTHONPATH)
else
PY := $(VENV)/bin/python
BIN := $(VENV)/bin/
SETUP_DAEMON := $(VENV)/.daemon
SETUP_TEST := $(VENV)/.test
SETUP_COMPILER := $(VENV)/.compiler
endif

.PHONY: demo test systemd-test soak fuzz gpu-test gpu-memcheck gpu-racecheck gpu-bench cubins native-cubins gpu-cubins wheel inventory protocol settings lint format clean

demo: $(SETUP_DAEMON) native-cubins
	$(PY) -m latentd demo

# The order goes from quick to slow; pytest opens the wheel that was built just before.
test: lint cubins wheel
	LATENTD_WHEEL=build/wheel $(PY) -m pytest -m "not gpu"

# The units under a systemd of its own; what was seen is in build/systemd.txt.
systemd-test: $(SETUP_TEST)
	mkdir -p build
	LATENTD_TRANSCRIPT=build/systemd.txt $(PY) -m pytest -v tests/systemd tests/unit/test_systemd_units.py

# A daemon under its clients, then random operations on the engine, without a model or a device.
SOAK_S ?= 3600
SOAK_ENGINE_S ?= 600
soak: $(SETUP_TEST)
	PYTHONPATH=tests:$$PYTHONPATH $(PY) tests/soak_daemon.py --seconds $(SOAK_S)
	PYTHONPATH=tests:$$PYTHONPATH $(PY) tests/soak.py --seconds $(SOAK_ENGINE_S)

# Mutated messages at the codec (ten an example) and at a daemon, garbage on its sockets.
FUZZ_EXAMPLES ?= 100000
FUZZ_MESSAGES ?= 1000000
fuzz: $(SETUP_TEST)
	PYTHONPATH=tests:$$PYTHONPATH $(PY) tests/fuzz_codec.py --examples $(FUZZ_EXAMPLES)
	PYTHONPATH=tests:$$PYTHONPATH $(PY) tests/fuzz.py --messages $(FUZZ_MESSAGES)

gpu-test: $(SETUP_TEST) native-cubins
	$(PY) -m pytest -m gpu $(GPU_TESTS)

# Left out are cases whose kernels other cases launch too and whose float64 references take minutes when instrumented;
# before_its_append, whose race cannot show where kernels do not overlap; and test_bench, which times.
# API errors are not reported: a kernel's parameters are counted by asking until the driver refuses.
gpu-memcheck: $(SETUP_TEST) native-cubins
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
	  $(PY) -m pytest -m gpu $(KERNEL_TESTS) -k "not ($(MEMCHECK_SKIP))"

# Small cases of every kernel of sm_90a, in cubins of their own that know their source lines.
gpu-racecheck: $(SETUP_TEST) $(SETUP_COMPILER)
	$(PY) -m latentd_kernels.build --arch sm_90a --line-info build/racecheck --jobs $(JOBS)
	$(PY) tests/racecheck.py

gpu-bench: $(SETUP_TEST) native-cubins
	$(PY) -m latentd bench attention --parts
	$(PY) -m latentd bench attention --numerics landed --no-torch
	$(PY) -m latentd bench attention --chunk
	$(PY) -m latentd bench linear
	$(PY) -m latentd bench moe
	$(PY) -m latentd bench step
	$(PY) tests/bench/bench_engine.py --device cuda
	$(PY) tests/bench/bench_sharing.py
	$(PY) tests/bench/bench_drafts.py
	$(PY) tests/bench/bench_saving.py
	$(PY) tests/bench/bench_transfer.py
	$(PY) tests/bench/bench_streams.py
	$(PY) tests/bench/bench_openai.py --steps 200
	$(PY) tests/bench/bench_daemon.py
	$(PY) tests/bench/bench_load.py

cubins: $(SETUP_TEST) $(SETUP_COMPILER)
	$(PY) -m latentd_kernels.build --jobs $(JOBS)

# Cubins for the GPU of this machine, unless current ones are there; none without a driver.
native-cubins: $(SETUP_DAEMON)
	@$(PY) -c "from latentd_kernels.driver import device_count; raise SystemExit(0 if device_count() else 3)"; \
	case $$? in \
	0) $(MAKE) --no-print-directory gpu-cubins ;; \
	3) echo "no NVIDIA driver here: no cubins are built, the cpu backend runs" ;; \
	*) exit 1 ;; \
	esac

gpu-cubins: $(SETUP_DAEMON) $(SETUP_COMPILER)
	$(PY) -m latentd_kernels.build --arch native --if-needed --jobs $(JOBS)

wheel: cubins
	rm -rf build/wheel
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .

inventory: $(SETUP_TEST)
	$(PY) -m latentd_kernels.inventory

# docs/protocol.json, docs/protocol-vectors.json and the types in the tables of docs/protocol.md.
protocol: $(SETUP_TEST)
	PYTHONPATH=tests:$$PYTHONPATH $(PY) tests/protocol_files.py

# docs/settings.md and systemd/latentd.toml.
settings: $(SETUP_TEST)
	PYTHONPATH=tests:$$PYTHONPATH $(PY) tests/settings_files.py

lint: $(SETUP_TEST)
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m mypy
	$(BIN)lint-imports
	$(BIN)clang-format --dry-run -Werror $(CUDA_SOURCES)

format: $(SETUP_TEST)
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)
	$(BIN)clang-format -i $(CUDA_SOURCES)

clean:
	rm -rf build dist kernels/latentd_kernels/cubin

# Set-up. An editable install compiles nothing here: the targets above compile what they need.
INSTALL = LATENTD_CUBINS=none $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(VENV)/bin/python:
	$(PYTHON_BASE) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'latentd needs Python 3.11 or later')"
	$(PYTHON_BASE) -m venv $(VENV)

$(VENV)/.daemon: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[daemon]"
	@touch $@

$(VENV)/.test: $(VENV)/.daemon
	$(INSTALL) -e ".[daemon,test]"
	@touch $@

# The compiler wheels, on a machine without an nvcc.
$(VENV)/.compiler: $(VENV)/.daemon
	@wheels="$$($(PY) -m latentd_kernels.build --wheels)"; \
	if [ -n "$$wheels" ]; then echo "no nvcc on the PATH: installing the compiler wheels"; $(INSTALL) $$wheels; fi
	@touch $@
