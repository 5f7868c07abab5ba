# What one does with a checkout; `make` alone lists it. Nothing here asks a question or needs a GPU.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-rare test-reference test-drivers test-proof test-exchange test-wheel fuzz prove-wgpu bench bench-reference bench-gpu lint

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q

help:  ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: .venv/ready  ## virtual environment in .venv, and a Vulkan driver if there is none
	@scripts/install_vulkan.sh

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1): install one and say 'make PYTHON=python3.11 $(MAKECMDGOALS)'." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: setup  ## fine-tune the demo model and see what it answered before and after
	$(BIN)/wgpu-lora demo

test: setup  ## every test but those that have a target of their own
	$(PYTEST) -n $(JOBS) -m 'not reference and not rare'

test-fast: setup  ## the same without the slow ones
	$(PYTEST) -n $(JOBS) -m 'not reference and not slow and not rare'

test-rare: setup  ## processes killed at random, leases under contention, the demo's data: what is long and seldom changes
	$(PYTEST) -n $(JOBS) -m rare

.venv/reference: .venv/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[reference]'
	@touch $@

test-reference: setup .venv/reference  ## re-derive golden fixtures with torch, transformers, PEFT and bitsandbytes
	$(PYTEST) -m reference

# Everything that computes on the device, at lavapipe's other subgroup sizes (`make test` runs at the default one); then
# the core subset without subgroups, at WebGPU's default limits, and with another vendor's compiler.
GPU_TESTS := $(addsuffix .py,$(addprefix tests/,gpu/test_kernels gpu/test_program models/test_weights models/test_logits infer/test_generate \
  infer/test_evaluate train/test_training_golden train/test_resume))
test-drivers: setup  ## other subgroup sizes, no subgroups, default limits, another driver
	scripts/install_vulkan.sh --swiftshader .drivers
	@run() { echo "=== $$*"; env "$$@" $(PYTEST) -n $(JOBS) -m "$$only" $$tests || exit 1; }; \
	lavapipe=$$(compgen -G '/usr/share/vulkan/icd.d/lvp_icd*.json' | head -1 || true); \
	if [ -n "$$lavapipe" ]; then \
	  only='not reference and not slow' tests='$(GPU_TESTS)'; \
	  for width in 128 512; do run VK_DRIVER_FILES=$$lavapipe LP_NATIVE_VECTOR_WIDTH=$$width; done; \
	  only=drivers tests=tests; \
	  run VK_DRIVER_FILES=$$lavapipe WGPU_LORA_NO_SUBGROUPS=1; \
	  run VK_DRIVER_FILES=$$lavapipe WGPU_LORA_DEFAULT_LIMITS=1; \
	else only=drivers tests=tests; echo "Mesa's lavapipe is not here: only SwiftShader is tested."; fi; \
	run VK_DRIVER_FILES=$(CURDIR)/.drivers/swiftshader.json

test-proof: setup  ## that the proof fails when it should; whole runs of it, so minutes
	$(PYTEST) tests/proof/runs

# Where there is but one device, SwiftShader is the second: beside a GPU, or beside the software driver that is there.
PROVE ?=
prove-wgpu: setup  ## prove on this machine that it all runs on wgpu, without CUDA (PROVE='--devices 0,1 --out proof')
	@kinds=$$($(BIN)/wgpu-lora info --json | $(BIN)/python -c 'import json, sys; print(*(a["kind"] for a in json.load(sys.stdin)["adapters"]))' || true); \
	case "$$kinds" in '' | *' '*) ;; *) \
	  scripts/install_vulkan.sh --swiftshader .drivers || echo "A second device cannot be had here: the proof says what that leaves open."; \
	  second=$(CURDIR)/.drivers/swiftshader.json; \
	  first=$${VK_DRIVER_FILES:-$$(compgen -G '/usr/share/vulkan/icd.d/lvp_icd*.json' | head -1 || true)}; \
	  if [ ! -f "$$second" ]; then :; \
	  elif [ "$$kinds" = software ]; then export VK_DRIVER_FILES=$${first:+$$first:}$$second; \
	  else export VK_ADD_DRIVER_FILES=$$second; fi;; \
	esac; \
	$(BIN)/wgpu-lora prove $(PROVE)

# llama.cpp has no wheels: it is compiled, which takes some minutes. Not for this very processor: virtual machines name
# instructions, such as AMX's, that they then refuse.
.venv/exchange: .venv/reference
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) CMAKE_ARGS='-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF' \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[exchange]'
	@touch $@

test-exchange: setup .venv/exchange  ## that llama.cpp takes our GGUF files and answers as we do
	$(PYTEST) tests/exchange

test-wheel: setup  ## build the wheel, install it into an empty environment and run the demo from it
	scripts/check_wheel.sh

.venv/fuzz: .venv/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[fuzz]'
	@touch $@

FUZZ ?=
fuzz: setup .venv/fuzz  ## a million mutated files through everything that reads other people's (FUZZ='--inputs N TARGET')
	$(BIN)/python scripts/fuzz.py --jobs $(JOBS) $(FUZZ)

BENCH_SHAPE ?=
bench: setup  ## every brick under pytest-benchmark, figures in bench.json (BENCH_SHAPE=qwen2.5-0.5b: at its size)
	WGPU_LORA_BENCH_SHAPE=$(BENCH_SHAPE) $(PYTEST) tests/benchmarks --benchmark-only --benchmark-json=bench.json

bench-reference: setup .venv/reference  ## a training step beside PyTorch + PEFT in f32, the two taking turns
	$(BIN)/python scripts/bench_reference.py --json bench-reference.json

BENCH_GPU ?=
bench-gpu: setup  ## everything about this GPU in bench-gpu.json (BENCH_GPU=--quick: does it all run?)
	$(BIN)/python scripts/bench_gpu.py --json bench-gpu.json $(BENCH_GPU)

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
