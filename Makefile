# GPU=cuda12 or GPU=cuda13 installs JAX for that CUDA; without it everything runs on the CPU.
GPU ?=
ifneq ($(filter-out cuda12 cuda13,$(GPU)),)
$(error GPU must be cuda12 or cuda13, got $(GPU))
endif

BIN := .venv/bin
ON_CPU := JAX_PLATFORMS=cpu
# Tests compile more than they compute: not optimized, in one thread, and fusions not through MLIR, which takes twice as
# long but which jaxlib 0.12 cannot do without.
QUICKLY_COMPILED := XLA_FLAGS='--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 \
	--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true'
PYTEST_ON_GPU := $(BIN)/pytest -m gpu
PYTEST_ON_CPU := $(ON_CPU) $(QUICKLY_COMPILED) $(BIN)/pytest -n logical --maxprocesses 8
PLATFORM := $(if $(GPU),,$(ON_CPU))
# Python keeps the bytecode of what it imports, also where the environment forbids it: tests start many processes, which
# would each compile the source of JAX and of transformers again.
unexport PYTHONDONTWRITEBYTECODE

# A stamp says what .venv holds, so that a second run installs nothing.
DEMO_STAMP := .venv/.installed-demo$(GPU:%=-%)
DEV_STAMP := .venv/.installed-dev$(GPU:%=-%)
$(DEMO_STAMP): EXTRAS := demo$(GPU:%=,%)
$(DEMO_STAMP): STAMPS := $(DEMO_STAMP)
# dev is test, docs and the cuda12 plugin, to compile with; with a GPU the plugin comes from its extra.
$(DEV_STAMP): EXTRAS := $(if $(GPU),$(GPU:%=docs,test,%),dev)
$(DEV_STAMP): STAMPS := $(DEMO_STAMP) $(DEV_STAMP)
# Two CUDA plugins would clash, so the other one's goes when GPU changes.
OTHER_CUDA := $(if $(filter cuda13,$(GPU)),cuda12,cuda13)

.PHONY: help demo test test-ci test-all test-gpu test-benchmarks test-oldest test-versions sanitize lint docs notebooks venv clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make demo      train a small MoE model and write jgg-demo.png'
	@echo 'make test      run the tests that every change needs, with GPU=... those that need a GPU too'
	@echo 'make test-ci   run the thorough tests too, as CI does'
	@echo 'make test-all  run the sweeps too: more kinds of GPU and models, plain JAX'
	@echo 'make test-gpu  run only the tests that need a GPU'
	@echo 'make test-benchmarks  run the tests of benchmarks/, as a workflow does every night'
	@echo 'make test-oldest    run a few with the oldest versions of Python, JAX, Triton and Flax, as before a release'
	@echo 'make test-versions  run many with the oldest, middle and newest versions, and print a table'
	@echo 'make sanitize  run the kernels under compute-sanitizer, TOOLS=memcheck,initcheck,racecheck or some of these'
	@echo 'make lint      check style, formatting and types'
	@echo 'make docs      build the site of the documentation into site/'
	@echo 'make notebooks    run the notebooks that need no GPU, write them with their outputs'
	@echo 'make venv      install everything for development into .venv'
	@echo 'make clean     remove .venv, builds, caches and outputs'
	@echo
	@echo 'GPU=cuda12, GPU=cuda13  install JAX for that CUDA and use the GPU'
	@echo 'PYTHON=/path/to/python  make .venv with this Python, 3.12 or newer'
	@echo 'ARGS="..."              more arguments for jgg demo, pytest or the notebooks to run'

demo: $(DEMO_STAMP)
	$(PLATFORM) $(BIN)/jgg demo $(ARGS)

test: $(DEV_STAMP)
	$(PYTEST_ON_CPU) $(ARGS)
	$(if $(GPU),$(PYTEST_ON_GPU) $(ARGS))

test-ci: $(DEV_STAMP)
	$(PYTEST_ON_CPU) -m 'not gpu and not sweep' $(ARGS)

test-all: $(DEV_STAMP)
	$(PYTEST_ON_CPU) -m 'not gpu' $(ARGS)
	$(if $(GPU),$(PYTEST_ON_GPU) $(ARGS))

# On the GPU; what needs none runs on the CPU, where it is quicker.
test-gpu: $(DEV_STAMP)
	$(PYTEST_ON_GPU) $(ARGS)

test-benchmarks: $(DEV_STAMP)
	$(PYTEST_ON_CPU) benchmarks/tests $(ARGS)

# They make their own environments in .versions, and keep them.
test-oldest: $(BIN)/python
	$(BIN)/python tools/versions.py --folder .versions --only oldest --quick

test-versions: $(BIN)/python
	$(BIN)/python tools/versions.py --folder .versions

sanitize: $(DEV_STAMP)
	$(BIN)/python -m tests.programs.sanitize $(if $(TOOLS),--tools $(TOOLS)) $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# The variable silences what the theme says of versions of mkdocs that pyproject.toml does not allow.
docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(DEV_STAMP)
	$(BIN)/python -m tools.notebooks $(ARGS)

venv: $(DEV_STAMP)

# The plugin brings jax-cuda12-pjrt, which compiling does not need. It looks for CUDA's libraries and a GPU whenever JAX
# starts, and writes a traceback if there are none.
# versions.py has the version that `jgg --version` reads from what was installed. Python compiles what it imports; pip
# would compile all, for a quarter of a minute.
$(DEMO_STAMP) $(DEV_STAMP): pyproject.toml jgg/core/versions.py $(BIN)/python
	@echo 'Installing jgg[$(EXTRAS)] into .venv, which takes a few minutes.'
	@rm -f .venv/.installed-*
	@$(BIN)/python -m pip uninstall -qq -y jax-$(OTHER_CUDA)-plugin jax-$(OTHER_CUDA)-pjrt
	@$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -e '.[$(EXTRAS)]'
	$(if $(GPU),,@$(BIN)/python -m pip uninstall -qq -y jax-cuda12-pjrt)
	@touch $(STAMPS)

$(BIN)/python:
	@python=$$(sh tools/find_python.sh) && echo "Using $$python" && "$$python" -m venv --clear .venv

clean:
	rm -rf .venv .versions build dist site jgg.egg-info .pytest_cache .ruff_cache jgg-demo.png jgg-demo.json jgg-gemms.png jgg-gemms.json jgg-layers.png jgg-layers.json jgg-scale.json sanitize
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
