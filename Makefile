# Everything starts here: `make help`

PYTHON ?= python3
ENV ?= Pendulum-v1
LOGS ?= logs
EVAL_FREQ ?= 5000
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
LOWEST_SB3 := 2.7.0
LOWEST := .lowest/$(LOWEST_SB3)

.DEFAULT_GOAL := help
.PHONY: help venv train enjoy test lint docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make train ENV=LunarLanderContinuous-v3        another environment"
	@echo '  make train ARGS="-n 50000 --seed 1"            more options for rl_zoo3.train'
	@echo "  make enjoy ENV=MountainCarContinuous-v0        watch the trained agent of an environment"
	@echo "  make enjoy ARGS=--no-render                    without a display"
	@echo "  make venv PYTHON=python3.12                    another Python"

venv: $(INSTALLED) ## set up .venv with this package (editable) and the tools of its tests

$(INSTALLED): setup.cfg setup.py pyproject.toml constraints.txt sb3_td3x.pth sb3_td3x.start
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[tests]"
	touch $@

# The zoo numbers its runs: the one just trained is the newest folder
train: $(INSTALLED) ## train td3x on ENV (default Pendulum-v1) through the zoo, and evaluate it
	$(BIN)/python -m rl_zoo3.train --algo td3x --env $(ENV) -f $(LOGS) --eval-freq $(EVAL_FREQ) -P $(ARGS)
	@run=$$(ls -td $(LOGS)/td3x/$(subst /,-,$(ENV))_* | head -n 1); \
	best=; if test -e $$run/best_model.zip; then best=--load-best; fi; \
	$(BIN)/python -m rl_zoo3.enjoy --algo td3x --env $(ENV) -f $(LOGS) $$best --no-render -n 5000 && \
	echo && \
	echo "Run:         $$run" && \
	{ test -z "$$best" || echo "Best agent:  $$run/best_model.zip"; } && \
	echo "Last agent:  $$run/$(subst /,-,$(ENV)).zip" && \
	echo "Watch it:    $(BIN)/python -m rl_zoo3.enjoy --algo td3x --env $(ENV) -f $(LOGS) $$best"

enjoy: $(INSTALLED) ## watch the agent of ENV from rl-trained-agents
	$(BIN)/python -m rl_zoo3.enjoy --algo td3x --env $(ENV) -f rl-trained-agents $(ARGS)

test: lint docs $(LOWEST) ## check style, types and docs, run all tests, and the short suite on the lowest supported SB3
	$(BIN)/python -m pytest -n 2 --dist loadgroup
	PYTHONPATH=$(LOWEST) $(BIN)/python -m pytest -m lowest_sb3

$(LOWEST): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ stable-baselines3==$(LOWEST_SB3)
	touch $@

lint: $(INSTALLED) ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED) ## build the docs in build/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

clean: ## remove everything that was built, but not the logs
	rm -rf .venv .lowest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
