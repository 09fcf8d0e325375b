# Everything a person needs: `make demo` and `make test`; both call `make install` first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

ARGS ?=
# The release of Slurm, which is that of a release of Debian: 26.05 (forky) or 24.11 (trixie, Debian 13).
SLURM ?= 26.05
export SLURM
DEBS := dist/debs$(addprefix -,$(filter-out 26.05,$(SLURM)))

.PHONY: install demo test test-fast test-guide test-metrics test-packages test-sites test-slurm test-upgrade test-vm measure faults soak fuzz lint wheels debs rpms release docs clean

install: $(BIN)/.installed

$(BIN)/.installed: setup.cfg constraints.txt container/ensure-python
	PYTHON=$(PYTHON) container/ensure-python $(VENV)
	touch $@

demo: install
	$(BIN)/python examples/demo/demo.py

# Every ring of tests, with the time of each at the end; the image of the cluster is built while the first ones run.
test: install
	$(BIN)/python tests/rings.py all

test-fast: install
	$(BIN)/python tests/rings.py fast

# The wheels of cadenza-client, cadenza-agent and cadenza, in dist/.
wheels: install
	rm -f dist/*.whl
	$(BIN)/python packaging/wheels.py dist

# Debian's packages in dist/debs, built and tried in a container; for Debian 13 in dist/debs-24.11: make debs SLURM=24.11
debs: install
	packaging/debs $(DEBS)

# RPMs in dist/rpms, with the same files.
rpms: debs
	packaging/rpms $(DEBS) $(subst debs,rpms,$(DEBS))

# All of them in dist/release with SHA256SUMS, built twice from clean clones of the last commit; the bytes are the same.
release: install
	packaging/release dist/release$(addprefix -,$(filter-out 26.05,$(SLURM)))

# Each wheel in an environment of its own, the client's on every Python from 3.9 on that is found; Debian's packages on a
# container cluster, and installed by the Ansible role; before them the comparison of two builds.
test-packages: debs release $(BIN)/.ansible
	$(BIN)/python -m pytest tests/packages -m packages

$(BIN)/.ansible: $(BIN)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[ansible]'
	touch $@

# The blocks of the pages Install, A second lane and Maintain, one by one, on a plain Slurm in containers, SLURM as above;
# those of the page on wheels: make test-guide WAY=wheels
test-guide: install
	WAY=$(WAY) $(BIN)/python -m pytest tests/guide -m packages -x

# Slurm 24.11 becomes 26.05 by Debian's packages, under running jobs.
test-upgrade: install
	packaging/debs dist/debs
	SLURM=24.11 packaging/debs dist/debs-24.11
	WAY=upgrade SLURM=24.11 $(BIN)/python -m pytest tests/guide/test_slurm_upgrade.py -m packages

# A site's rarer cases on the container cluster, too long for a ring.
test-sites: install
	$(BIN)/python tests/rings.py sites

# The cluster's tests of what depends on the release of Slurm: make test-slurm SLURM=24.11
test-slurm: install
	$(BIN)/python tests/rings.py release

# Each query of examples/prometheus in a Prometheus on the container cluster, the alerts' own tests, and exporters' files.
test-metrics: install
	$(BIN)/python -m pytest tests/cluster/test_metrics.py

# Cgroup v2 and systemd: a virtual machine with Debian's kernel; `container/vm` shows its console. First a whole cluster
# on one host, then the blocks of the pages Install and Maintain on three machines.
test-vm: install debs
	$(BIN)/python -m pytest tests/vm/test_vm.py -m vm
	$(BIN)/python -m pytest tests/vm/test_guide_vm.py -m vm -x

# Figures that depend on the machine; minutes each.
measure: install
	$(BIN)/python tests/rings.py measure
	$(BIN)/python benchmarks/speed/turns.py

# Faults on the container cluster by a seeded schedule: make faults ARGS='--seed 2 --kills 100', ARGS='--outages'
faults: install
	$(BIN)/python benchmarks/faults/faults.py $(ARGS)

# Thousands of short jobs on 16 hosts of a container cluster; no daemon may grow: make soak ARGS='--minutes 5 --hosts 4'
soak: install
	$(BIN)/python benchmarks/replay/soak.py $(ARGS)

# A million hostile inputs through all decoders, then the fast ring with more random cases:
# make fuzz ARGS='--seed 2 --count 100000'
fuzz: install
	$(BIN)/python benchmarks/faults/fuzz.py $(ARGS)
	$(BIN)/python tests/rings.py thorough

lint: install
	$(BIN)/ruff check .
	$(BIN)/python -m mypy -p cadenza
	$(BIN)/lint-imports --config setup.cfg
	$(BIN)/python tests/lint/house_rules.py
	$(BIN)/vermin --quiet --violations --target=3.9- sidecar/client sidecar/wire.py

# The site goes to build/site; a dead link or a page outside the navigation fails.
docs: $(BIN)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(BIN)/.docs: $(BIN)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	container/down --all || true
	rm -rf $(VENV) .cluster build dist *.egg-info
