# `make` lists the targets. Each does the set-up that it needs, in .venv.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo engine test test-long lint wheel-test clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
MODEL ?= nano
QUANT ?= nvfp4
TARGET ?= sm120

BIN := .venv/bin
INSTALLED := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
	  printf '  make %-11s %s\n' "$$name" "$$text"; done

setup: $(INSTALLED) ## make .venv with everything that is needed, at the versions of constraints.txt

$(INSTALLED): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,quantize]'
	@touch $@

# --- engines ---------------------------------------------------------------------------------------------------------
# engines/<model>-<quant>-<target>, where a folder or a Hugging Face id is the model's name with -- for its slashes. What is
# there is kept; `make -B engine` makes it anew.
comma := ,
NAME := $(subst /,--,$(patsubst /%,%,$(MODEL:%/=%)))-$(QUANT)
CHECKPOINT := $(if $(filter bf16,$(QUANT)),$(MODEL),checkpoints/$(NAME))
ENGINE := engines/$(NAME)-$(subst $(comma),-,$(TARGET))
NANO := $(if $(filter nano,$(MODEL)),$(wildcard dgemma_trt/nano/checkpoint/*))

engine: $(ENGINE)/manifest.json ## quantize and build: MODEL=nano|FOLDER|HF-ID QUANT=nvfp4|fp8|bf16 TARGET=sm120[,sm89]
	@echo 'The engine is in $(ENGINE).'

checkpoints/$(NAME)/config.json: $(NANO) | $(INSTALLED)
	$(BIN)/dgemma-trt quantize '$(MODEL)' --quant '$(QUANT)' --out 'checkpoints/$(NAME)' --force
	@touch '$@'

$(ENGINE)/manifest.json: $(if $(filter bf16,$(QUANT)),$(NANO),checkpoints/$(NAME)/config.json) | $(INSTALLED)
	$(BIN)/dgemma-trt build '$(CHECKPOINT)' --target '$(TARGET)' --out '$(ENGINE)' --force

demo: ## build the nano checkpoint's NVFP4 engine and ask it a question
	@$(MAKE) --no-print-directory engine MODEL=nano QUANT=nvfp4 TARGET=sm120
	$(BIN)/dgemma-trt run --engine engines/nano-nvfp4-sm120 --prompt 'What is the capital of France?' --watch

# --- checks ----------------------------------------------------------------------------------------------------------

test: lint ## lint, format, types, and all tests but the long ones
	$(BIN)/pytest -m 'not long'

test-long: $(INSTALLED) ## the tests that take minutes
	$(BIN)/pytest -m long

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@rm -rf .cache/typing && mkdir -p .cache/typing/dgemma_trt
	@ln -s $(addprefix ../../../,$(filter-out %/__pycache__,$(wildcard dgemma_trt/*)) build plugins quantize runtime) .cache/typing/dgemma_trt/
	$(BIN)/mypy | sed -E 's#^\.cache/typing/(dgemma_trt/(build|plugins|quantize|runtime)/)?#\2/#; s#^/##'

# `python -m build` cannot run here, since build/ is a package of ours; pip and pyproject-build can.
wheel-test: ## build a wheel, install it in a clean environment, run it outside the repository
	rm -rf .cache/wheel
	$(PYTHON) -m venv .cache/wheel/venv
	.cache/wheel/venv/bin/pip wheel --quiet --no-deps --wheel-dir .cache/wheel .
	.cache/wheel/venv/bin/pip install --quiet -c constraints.txt .cache/wheel/dgemma_trt-*.whl
	cd / && '$(CURDIR)/.cache/wheel/venv/bin/python' -c 'import dgemma_trt.build, dgemma_trt.cli, dgemma_trt.nano, dgemma_trt.plugins, dgemma_trt.quantize, dgemma_trt.runtime'
	cd / && '$(CURDIR)/.cache/wheel/venv/bin/dgemma-trt' run --engine nano --prompt 'What is the capital of France?'
	rm -rf .cache/wheel

clean: ## remove .venv, caches and the nano checkpoint's outputs
	rm -rf .venv .cache dist checkpoints/nano-* engines/nano-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
