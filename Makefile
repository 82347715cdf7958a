# make run    sets up, runs every case at size smoke on the CPU, prints the table, writes the page
# make test   sets up, runs the fast tests
# make quick  those of them that start no process, compile nothing and load no framework
# make check  lint, types and all tests, as CI runs it
# make engines  the tests of engines that live in a virtual environment of their own; a part of make check
# make browser  the tests of the page in a real browser; a part of make check
# make docs   the tables of docs/ and README.md that are made from records
# make screenshots  the pictures of docs/images, anew
# make long   the tests that take longer than CI may
# make faults every fault of docs/faults.md, and its table anew
# make hard   every attack of docs/faults.md, and its table anew
# make gpu-test  the tests that need a device, on a machine that has one

PYTHON ?= python3
BIN := .venv/bin
RECORDS := records/smoke
# What a file makes once, such as a launch of eight ranks, is made once; files that take longest begin first (tests/conftest.py).
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup run test quick check engines engine-megatron engine-paddle browser docs screenshots long faults hard gpu-test lint types clean

setup: .venv/ready

# A suitable torch in the current environment (a GPU build, say) is used as it is; otherwise one is installed.
.venv/ready: pyproject.toml setup.sh
	rm -rf .venv
	PYTHON=$(PYTHON) sh setup.sh
	touch $@

run: setup
	rm -rf $(RECORDS)
	$(BIN)/steelyard run smoke --accelerator cpu --out $(RECORDS)
	$(BIN)/steelyard report $(RECORDS) --format html --to $(RECORDS)/page.html

test: setup
	$(BIN)/python -m pytest $(PARALLEL)

# What models and their weights compute, and what many processes or real data show, takes longer than a glance.
SLOW := engines engine_megatron engine_paddle ranks real hosts faults hard gpu kernels models training scoring weights browser
quick: setup
	$(BIN)/python -m pytest $(PARALLEL) --quick $(SLOW:%=--ignore=tests/%) -m "not process and not full and not gpu and not long"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests

types: setup
	$(BIN)/mypy

# Linters and the set-up of the engines' and the browser's environments wait for one core each: two at a time.
check: setup
	$(MAKE) -j 2 types lint .venv-paddle/ready .venv-browser/ready .venv-megatron/ready
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/engine_paddle --ignore=tests/engine_megatron --ignore=tests/browser -m "not gpu and not long"
	$(MAKE) engines
	$(MAKE) browser

engines: engine-megatron engine-paddle

engine-megatron: .venv-megatron/ready
	.venv-megatron/bin/python -m pytest -n 2 --dist loadfile tests/engine_megatron -m "not gpu and not long"

engine-paddle: setup .venv-paddle/ready
	$(BIN)/python -m pytest tests/engine_paddle -m "not gpu and not long"

# Without torch: two stacks of GPU libraries in one process are nobody's promise.
.venv-paddle/ready:
	rm -rf .venv-paddle
	$(PYTHON) -m venv .venv-paddle
	.venv-paddle/bin/python -m pip install --quiet -e '.[paddle]'
	touch $@

# It sees all of .venv, torch among it, and adds what the engine needs. `addsitedir` reads the .pth files there too.
.venv-megatron/ready: .venv/ready
	rm -rf .venv-megatron
	$(BIN)/python -m venv .venv-megatron
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > .venv-megatron/seen.pth
	mv .venv-megatron/seen.pth "$$(.venv-megatron/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	.venv-megatron/bin/python -m pip install --quiet -e '.[megatron]'
	touch $@

# Skipped with the reason (-rs) where there is no browser and none can be installed.
browser: .venv-browser/ready
	.venv-browser/bin/python -m pytest $(PARALLEL) -rs tests/browser

docs: setup
	$(BIN)/python tests/docs_tables.py

screenshots: .venv-browser/ready
	.venv-browser/bin/python tests/browser/screenshots.py docs/images

.venv-browser/ready: .venv/ready tests/browser/setup.sh
	BIN=$(BIN) sh tests/browser/setup.sh

long: setup
	$(BIN)/python -m pytest -m long

faults: setup
	FAULTS_TABLE=docs/faults.md $(BIN)/python -m pytest tests/faults -m "not gpu"

hard: setup
	ATTACKS_TABLE=docs/faults.md $(BIN)/python -m pytest tests/hard tests/faults/test_pickles.py -m "not gpu"

gpu-test: setup
	$(BIN)/python -m pytest -m gpu

clean:
	rm -rf .venv .venv-* records .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
