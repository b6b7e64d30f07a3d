# `make test` and `make demo` do everything from set-up on. They use the active environment where it
# has torch >= 2.10 and pip may write to it, else they make .venv with the pins of requirements.txt.
# `make TORCH=torch==2.11.0 test` uses an environment of its own with that torch.
TORCH ?= torch==2.13.0

# Exit status 0: the active environment is fit. Semicolons, as $(shell) drops line ends.
define FIT
import importlib.metadata, os, pip, sys, sysconfig;
version = importlib.metadata.version("torch").split(".");
marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED");
managed = sys.prefix == sys.base_prefix and os.path.exists(marker);
writable = os.access(sysconfig.get_path("purelib"), os.W_OK);
sys.exit((int(version[0]), int(version[1])) < (2, 10) or managed or not writable)
endef
ifeq ($(origin TORCH),file)
ACTIVE := $(shell python3 -c '$(FIT)' 2>/dev/null && python3 -c 'import sys; print(sys.executable)')
VENV := .venv
else
VENV := .venv-$(subst =,-,$(TORCH))
endif

PYTHON := $(or $(ACTIVE),$(VENV)/bin/python)
PIP := $(PYTHON) -m pip --disable-pip-version-check
# A process takes whole files' worth of tests, so that the ranks that it started serve many of them.
WORKERS ?= 2
PYTEST = $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal
CLANG_FORMAT := $(PYTHON) -c 'from clang_format import clang_format; clang_format()'
# The core and the CPU backend: what is C. Its rules are in .cppcheck.
CPPCHECK := $(PYTHON) -m cppcheck --quiet -U__CUDACC__ --std=c11 --enable=warning,style,performance,portability \
	--suppressions-list=.cppcheck --error-exitcode=1 -Icsrc
# Compiling for every GPU takes minutes: a machine without one does so for `make cuda` and `wheel`.
BUILD_CUDA := $(or $(FLCE_CUDA),$(if $(wildcard /dev/nvidiactl),,0))
ONLY := env -u FLCE_CUDA_ARCHS $(if $(ARCHS),FLCE_CUDA_ARCHS="$(ARCHS)")
HOST := $(shell uname -m)
MACHINE ?= $(HOST)
CROSS = $(if $(filter $(HOST),$(MACHINE)),,$(PYTHON) tools/cross.py $(MACHINE))
READY := build/ready$(subst /,-,$(PYTHON))
FRAMEWORKS := build/frameworks$(subst /,-,$(PYTHON))
C_SOURCES := $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
SOURCES := setup.py pyproject.toml $(C_SOURCES)
C_FILES := $(filter-out %.map,$(C_SOURCES)) $(wildcard tests/c/*.[ch] tests/parallel/*.cpp tests/parallel/*.h)

.PHONY: test test-c sanitize-threads test-py test-integrations integrations demo demo-hf lint format cuda wheel sdist \
	sbom hub docs pictures bench-readme clean python

test: test-c test-py

test-c:
	$(MAKE) -C tests/c -j2

# Races in the C core and the CPU backend: ranks that are threads, ranges on three threads.
sanitize-threads:
	$(MAKE) -C tests/c -j2 SANITIZE=thread

# `make test-py TESTS=tests/core/test_accuracy.py WORKERS=0`: some tests, in one process.
test-py: $(READY)
	$(PYTEST) $(TESTS)

# The frameworks of flce.integrations and flce.fuse that pyproject.toml names.
integrations: $(FRAMEWORKS)

test-integrations: $(FRAMEWORKS)
	$(PYTEST) $(wildcard tests/frameworks/test_integrations*.py) \
		$(patsubst %,tests/frameworks/test_%.py,docs_frameworks finetune_hf framework_benchmark) \
		$(patsubst %,tests/fuse/test_fuse_%.py,deepspeed loops peft rl tp trainer transformers)

demo: $(READY)
	$(PYTHON) examples/train_lm.py --out demo $(if $(STEPS),--steps $(STEPS))

demo-hf: $(FRAMEWORKS)
	$(PYTHON) examples/finetune_hf.py --out demo $(if $(STEPS),--steps $(STEPS))

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(C_FILES)
	$(CPPCHECK) csrc/core csrc/cpu

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(C_FILES)

# For all architectures, or `make cuda ARCHS="80 90"`; so too the wheel.
cuda: $(READY)
	$(ONLY) FLCE_CUDA=1 $(PYTHON) setup.py build_clib build_ext --inplace

# For every glibc >= 2.28, torch >= 2.10 and Python >= 3.10, with CUDA or without; then its checks.
# MACHINE=aarch64: for that machine, by the compilers of the packages {gcc,g++}-aarch64-linux-gnu.
wheel: $(READY)
	rm -rf build/lib.* dist/flce-*_$(MACHINE).whl  # modules deleted since would go into the wheel
	$(PIP) install -q --group release
	$(CROSS)
	$(ONLY) FLCE_MACHINE=$(MACHINE) FLCE_GLIBC=2.28 FLCE_CUDA=1 \
		$(PIP) wheel -v --no-build-isolation --no-deps --wheel-dir dist .
	$(ONLY) $(PYTHON) tests/check_wheel.py dist/flce-*_$(MACHINE).whl

sdist: $(READY)
	$(PYTHON) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'

sbom: $(READY)
	$(PYTHON) tools/sbom.py dist/flce-*_$(MACHINE).whl

# The layout of Hugging Face's kernel hub, in build/hub; FLCE_CUDA=0 for its CPU build alone.
hub: $(READY)
	$(PIP) install -q --group release
	$(CROSS)
	FLCE_MACHINE=$(MACHINE) $(PYTHON) tools/hub.py build/hub

# The site, in build/site. Fails where a page or a link is missing; fetches nothing.
docs: $(READY)
	$(PYTHON) docs/make_api.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

# docs/pictures, from the records in benchmarks/results.
pictures: $(READY)
	$(PYTHON) benchmarks/pictures.py

# The first table of README.md under "Time and memory", on a GPU; whichever of the others is not
# installed (liger-kernel, cut-cross-entropy) is left out.
bench-readme: $(READY)
	$(PYTHON) benchmarks/bench.py head gemma mid 8192x4096x32000 small --save auto --budget default \
		--passes step --peers eager torch.compile liger cce --json build/bench-readme.json

# Prints the interpreter that the other targets use.
python: $(READY)
	@echo $(PYTHON)

clean:
	rm -rf build dist flce/*.so flce/libflce_cuda.txt *.egg-info
	$(MAKE) -C tests/c clean

# Never a range for torch: what is there satisfies flce's own, so pip leaves it as it is.
$(READY): $(SOURCES) | $(if $(ACTIVE),,$(VENV)/torch-is-there)
	$(PIP) install $(if $(ACTIVE),,-c requirements.txt) "pip>=25.1" "setuptools>=77" wheel
	FLCE_CUDA=$(BUILD_CUDA) $(PIP) install $(if $(ACTIVE),,-c requirements.txt) \
		$(if $(filter 0,$(BUILD_CUDA)),,-v) --no-build-isolation --group tests --group dev --group docs -e ".[example]"
	@mkdir -p $(@D) && touch $@

# An extra's packages without flce, which would be built anew. torch is named with the version that
# is there, so that no framework replaces it.
define EXTRA
import importlib.metadata, sys, tomllib;
project = tomllib.load(open("pyproject.toml", "rb"))["project"];
print("torch==" + importlib.metadata.version("torch"));
print(*project["optional-dependencies"][sys.argv[1]])
endef
$(FRAMEWORKS): requirements-integrations.txt $(READY)
	$(PIP) install $(if $(ACTIVE),,-c requirements.txt -c requirements-integrations.txt) \
		$$($(PYTHON) -c '$(strip $(EXTRA))' integrations)
	@touch $@

$(VENV)/torch-is-there:
	@python3 -c 'import ensurepip, venv' || { echo "flce: no torch >= 2.10 in a writable environment," \
		"and this python3 cannot make one: install its venv package (python3-venv), or activate an" \
		"environment with torch" >&2; exit 1; }
	python3 -m venv --clear $(VENV)
	$(PIP) install $(TORCH)
	@touch $@
