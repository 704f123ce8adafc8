# `make serve` and `make test` set everything up on their own; a second run installs nothing.
.DEFAULT_GOAL := help
.PHONY: help install serve test test-full check bench-core
.PHONY: bench-gpu bench-grammar bench-kernels bench-parts bench-model bench-quality bench-stream protos docs clean

BIN := .venv/bin
SINGLE_THREADED := tests/unit tests/property tests/kernels tests/golden
PACKAGES := access clients engine_service http_facade kernels protos scripts traces tests

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: ## the virtual environment with everything pinned; starts nothing
	@scripts/install.sh

serve: install ## engine and HTTP facade with the embedded model; ARGS="..." are firsttoken's flags
	@$(BIN)/firsttoken serve $(ARGS)

test: install ## the tests that fit in minutes; ARGS="..." are pytest's
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest -n 2 --dist loadfile $(SINGLE_THREADED)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(SINGLE_THREADED)) tests
endif

test-full: install ## the slow tests
	@scripts/install_browser.sh
	@scripts/install_eval.sh
ifdef ARGS
	$(BIN)/python -m pytest -m slow $(ARGS)
else
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal $(SINGLE_THREADED)
	$(BIN)/python -m pytest -m slow $(addprefix --ignore=,$(SINGLE_THREADED)) tests
endif

check: install ## lint, format, types, and that generated code and pages are current
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/mypy
	scripts/protos.sh --check
	$(BIN)/python scripts/structures.py --check
	$(BIN)/python scripts/compatibility.py --check
	$(BIN)/python scripts/schema_keywords.py --check

bench-core: install ## what scheduler, blocks, sampler, preemption and --batch-invariant cost
	$(BIN)/python -m engine_service.bench_core --json $(or $(JSON),build/bench-core.json)

bench-kernels: install ## each kernel beside the limits of this machine
	$(BIN)/python -m kernels.bench --json $(or $(JSON),build/bench-kernels.json)

bench-model: install ## milliseconds of a step of the model, by quantization
	$(BIN)/python -m engine_service.bench_model --json $(or $(JSON),build/bench-model.json)

bench-grammar: install ## what grammars cost: tokens, compilations, others' streams
	$(BIN)/python -m engine_service.bench_grammar --json $(or $(JSON),build/bench-grammar.json)

bench-stream: install ## CPU that the engine service and the facade take per output token
	$(BIN)/python -m engine_service.bench_stream --json $(or $(JSON),build/bench-stream.json)

bench-gpu: ## one GPU: limits, kernels, engine, transformers; without one, kernels in the interpreter
	scripts/bench_gpu.sh $(or $(JSON),build/bench-gpu.json) $(ARGS)

bench-parts: install ## where a step of the model goes, op by op
	$(BIN)/python -m engine_service.bench_parts --json $(or $(JSON),build/bench-parts.json)

bench-quality: install ## perplexity and agreement of each quantization, beside float32
	$(BIN)/python -m engine_service.bench_quality --json $(or $(JSON),build/bench-quality.json)

protos: install ## generate protos/engine_pb2*.py from protos/engine.proto
	scripts/protos.sh

docs: install ## write what docs/ takes from the code: modules, fields, schema keywords
	$(BIN)/python scripts/structures.py
	$(BIN)/python scripts/compatibility.py
	$(BIN)/python scripts/schema_keywords.py

clean: ## remove what install, tests and checks made (the imported model stays)
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
