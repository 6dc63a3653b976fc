# FlashRecovery for Slurm. `make` alone explains itself.
#
# On a fresh Debian or Ubuntu machine `make demo` and `make test` install what is missing: system packages through
# apt-get (root or sudo), Python packages into $(VENV). A second call finds everything there and starts at once.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv integrations install-system lint format test test-fast test-torch test-matrix test-chaos test-packages test-slurm demo clean bench-detection bench-false-positives bench-mpi bench-overhead bench-seam

VENV ?= .venv
# Another index for torch, e.g. https://download.pytorch.org/whl/cpu for a smaller download without CUDA.
TORCH_INDEX ?=
TORCH ?= torch==2.13.0
# The demo's victim, 1 to 4: 1 is the node of rank 0 (NODE= leaves the choice to the demo)
NODE ?=
# More arguments for matrix, chaos and benchmarks; ARGS=--help shows them. Results of benchmarks: benchmarks/results/
ARGS ?=
# More arguments for pytest, for example: make test PYTEST="-k backward -x"
PYTEST ?=

# Network namespaces and the Slurm daemons of the dev cluster need root.
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo env "PATH=$$PATH" PYTHONDONTWRITEBYTECODE=1)
PYTHON_FILES = $(wildcard flashrec tests examples benchmarks slurm_plugin/health/checks)
SHELL_FILES = $(wildcard .ci/* sbatch_templates/*.sbatch slurm_plugin/health/flashrec-node-health slurm_plugin/packaging/build-* slurm_plugin/packaging/deb/p* slurm_plugin/hooks/flashrec-*) $(shell find . -name '*.sh' -not -path './$(VENV)/*')
C_FILES = $(wildcard slurm_plugin/*.[ch] slurm_plugin/*/*.[ch])

help:
	@echo "FlashRecovery for Slurm: a training job loses a node and goes on within seconds."
	@echo
	@echo "  make demo         see it: a Slurm cluster on this machine, a job, a power cut, the same numbers as without"
	@echo "  make demo NODE=2  the same, cutting the power of another node, 1 to 4 (1: the node of rank 0)"
	@echo "  make test         every test; needs root or sudo for the dev cluster"
	@echo "  make test-packages    the deb and rpm of the Slurm plugins, built and looked into; needs rpmbuild"
	@echo "  make test-slurm SLURM=24.11   contract, plugin, pool and recovery on another release (22.05, 24.11, 26.05)"
	@echo "  make test-fast    only the tests without Slurm and torch processes: seconds"
	@echo "  make test-torch TORCH=torch==2.14.1   the tests of the runtime on another release of torch, in an environment of its own"
	@echo "  make test-matrix [ARGS='--layouts ddp,hsdp']   every kind of parallelism, every fault; --power-cut: whole nodes"
	@echo "  make test-chaos [CASES=300] [SEED=7] [CASE=7:12]   random failures, also second and third ones; or one case again"
	@echo "  make lint         what continuous integration checks before the tests"
	@echo "  make format       let ruff and clang-format rewrite our files"
	@echo "  make venv         a virtual environment in $(VENV) with CPU torch and flashrec (editable)"
	@echo "  make integrations Accelerate, transformers and Lightning into $(VENV), for the tests of these; 230 MB"
	@echo "  make install-system   the missing system packages, through apt-get"
	@echo "  make bench-detection [ARGS='--injections 5 --rows power']   how fast failures are seen; about an hour"
	@echo "  make bench-overhead [ARGS='--blocks 5']   a step with recovery against the same step under plain torch; minutes"
	@echo "  make bench-recovery [FULL=1]   every phase of a recovery, by kind of fault and of spare; 10 minutes"
	@echo "  make bench-restore [ARGS='--sizes 16,256']   a state on its way to a replacement, against bare TCP; minutes"
	@echo "  make bench-seam   an all-reduce through our groups against one through torch's own; minutes. TORCH= as in test-torch"
	@echo "  make bench-scale [FULL=1] [ARGS='--devices 32,960']   the control plane with up to 32,768 simulated devices; 10 minutes"
	@echo "  make bench-mpi [ARGS='--agents 8 100']   what heartbeats over MPI cost; minutes"
	@echo "  make bench-peers [FULL=1] [ARGS='--rows torchrun']   the same faults under torchft, torchrun, …; 10 minutes"
	@echo "  make bench-false-positives [ARGS='--minutes 5']   a bad network and a busy machine, where none may be seen"
	@echo "  make clean        remove what was built, the virtual environment too"
	@echo
	@echo "Variables: VENV=$(VENV) PYTHON=(found) TORCH=$(TORCH) TORCH_INDEX=$(TORCH_INDEX) NODE= PYTEST="

install-system:
	@.ci/install-system

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@echo "installing Python packages into $(VENV); the first time this takes minutes"
	@test -x $(VENV)/bin/python || { python=$$(PYTHON="$(PYTHON)" .ci/find-python) && "$$python" -m venv --clear $(VENV); }
	@$(VENV)/bin/python -c 'import torch' 2>/dev/null || \
		$(VENV)/bin/python -m pip install -q $(addprefix --index-url ,$(TORCH_INDEX)) "$(TORCH)"
	@$(VENV)/bin/python -m pip install -q -e ".[torch,mpi,nvidia,stacks,dev]"
	@touch $@

FRAMEWORKS = accelerate lightning transformers
integrations: venv
	@$(VENV)/bin/python -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' \
		$(FRAMEWORKS) || $(VENV)/bin/python -m pip install -q -e ".[huggingface,lightning]"

lint: install-system venv
	$(VENV)/bin/ruff check $(PYTHON_FILES)
	$(VENV)/bin/ruff format --check $(PYTHON_FILES)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	shellcheck $(SHELL_FILES)
	$(if $(C_FILES),clang-format --dry-run -Werror $(C_FILES))

format: install-system venv
	$(VENV)/bin/ruff check --fix $(PYTHON_FILES)
	$(VENV)/bin/ruff format $(PYTHON_FILES)
	$(if $(C_FILES),clang-format -i $(C_FILES))

test: install-system venv integrations
	$(SUDO) $(VENV)/bin/python -m pytest $(PYTEST)

test-packages: install-system venv
	@command -v rpmbuild >/dev/null || { echo "rpmbuild is missing (Debian: apt-get install rpm)" >&2; exit 1; }
	$(VENV)/bin/python -m pytest tests/packaging/test_deb.py tests/packaging/rpm_package.py $(PYTEST)

test-fast: venv
	$(VENV)/bin/python -m pytest -m "not devcluster and not torch" $(PYTEST)

TORCH_VENV = build/venv-$(subst ==,-,$(TORCH))
test-torch:
	@$(MAKE) --no-print-directory venv VENV=$(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pytest tests/runtime $(PYTEST)

# Real Slurm only with ARGS=--power-cut, which needs root.
test-matrix: $(if $(findstring power-cut,$(ARGS)),install-system) venv
	$(if $(findstring power-cut,$(ARGS)),$(SUDO)) $(VENV)/bin/python -m tests.matrix $(ARGS)

SEED ?=
CASES ?= 300
CASE ?=
test-chaos: venv
	$(VENV)/bin/python -m tests.chaos --cases $(CASES) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case '$(CASE)') $(ARGS)

# On another Slurm release, in a Debian root that is kept in $$FLASHREC_ROOTS (default ~/.cache/flashrec/roots).
# STEPS= chooses steps (contract,recovery), MIRROR= another Debian mirror.
SLURM ?=
STEPS ?=
MIRROR ?=
test-slurm:
	@test -n "$(SLURM)" || { echo "which release? make test-slurm SLURM=22.05, 24.11 or 26.05" >&2; exit 2; }
	@python=$$(PYTHON="$(PYTHON)" .ci/find-python) && $(SUDO) "$$python" -B -m tests.versions $(SLURM) \
		--only="$(STEPS)" --mirror="$(MIRROR)" --torch-index="$(TORCH_INDEX)"

demo: install-system venv
	$(SUDO) $(VENV)/bin/python examples/demo/demo.py $(if $(NODE),--node $(NODE))

bench-detection: install-system venv
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(VENV)/bin/python -m pip install -q -e ".[bench]"
	$(SUDO) $(VENV)/bin/python -m benchmarks.detection $(ARGS)

bench-overhead: venv
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(VENV)/bin/python -m pip install -q -e ".[bench]"
	$(VENV)/bin/python -m benchmarks.overhead $(ARGS)

.PHONY: bench-recovery
bench-recovery: install-system venv
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(VENV)/bin/python -m pip install -q -e ".[bench]"
	$(SUDO) $(VENV)/bin/python -m benchmarks.recovery $(if $(FULL),--full) $(ARGS)

.PHONY: bench-restore
bench-restore: venv
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(VENV)/bin/python -m pip install -q -e ".[bench]"
	$(VENV)/bin/python -m benchmarks.restore $(ARGS)

# FULL=1: more rounds, and nodes that fall silent together; an hour
FULL ?=
.PHONY: bench-scale
bench-scale: venv
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(VENV)/bin/python -m pip install -q -e ".[bench]"
	$(VENV)/bin/python -m benchmarks.scale $(if $(FULL),--full) $(ARGS)

bench-seam:
	@$(MAKE) --no-print-directory venv VENV=$(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m benchmarks.seam $(ARGS)

bench-mpi: venv
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(VENV)/bin/python -m pip install -q -e ".[bench]"
	$(VENV)/bin/python -m benchmarks.mpi_heartbeats $(ARGS)

# The peers have an environment of their own; one that cannot be installed leaves its reason, and the others run.
PEERS_VENV = build/venv-peers
$(PEERS_VENV)/.installed: benchmarks/peers/requirements.txt
	@echo "installing the peers into $(PEERS_VENV); 1 GB"
	@python=$$(PYTHON="$(PYTHON)" .ci/find-python) && "$$python" -m venv --clear $(PEERS_VENV)
	@while IFS= read -r package; do \
		$(PEERS_VENV)/bin/python -m pip install -q $(addprefix --extra-index-url ,$(TORCH_INDEX)) "$$package" \
			2> "$(PEERS_VENV)/$${package%%=*}.said" || echo "$$package was not installed"; \
	done < $<
	@touch $@

# FULL=1: more repetitions, into benchmarks/results and the page of the documentation; else into build/bench-peers
FULL ?=
.PHONY: bench-peers
bench-peers: install-system venv $(PEERS_VENV)/.installed
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(VENV)/bin/python -m pip install -q -e ".[bench]"
	$(SUDO) $(VENV)/bin/python -m benchmarks.peers \
		$(if $(FULL),--repetitions 3 --blocks 10 --out benchmarks/results) $(ARGS)

bench-false-positives: install-system venv
	$(SUDO) $(VENV)/bin/python -m benchmarks.detection.quiet $(ARGS)

clean:
	rm -rf $(VENV) build slurm_plugin/build .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
