# Everything a person needs: `make demo` and `make test`; both call `make install` first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PROPERTIES ?= quick

.PHONY: install demo test test-fast lint docs clean

install: $(BIN)/.installed

$(BIN)/.installed: setup.cfg constraints.txt container/ensure-python
	PYTHON=$(PYTHON) container/ensure-python $(VENV)
	touch $@

demo: install
	$(BIN)/python examples/demo/demo.py

test: PROPERTIES = thorough
test: test-fast
	container/ensure-docker
	container/ensure-browser
	$(BIN)/python -m pytest tests -m "cluster or browser or slow"

# Importing the frameworks takes longer than many a test, and all of theirs are slow.
test-fast: install
	$(BIN)/python -m pytest tests -m "not cluster and not browser and not slow" -n auto --dist worksteal \
		--ignore-glob="*/test_integrations_*.py" --hypothesis-profile=$(PROPERTIES)

lint: install
	$(BIN)/ruff check .
	$(BIN)/python -m mypy -p cadenza
	$(BIN)/lint-imports --config setup.cfg

# The site goes to build/site; a dead link or a page outside the navigation fails.
docs: $(BIN)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(BIN)/.docs: $(BIN)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	container/down --all || true
	rm -rf $(VENV) .cluster build *.egg-info
