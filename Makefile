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
# SB3's own tests of TD3 come in its source distribution
SB3 := $(shell sed -n 's/^stable-baselines3==//p' constraints.txt)
SB3_TESTS := .sb3/stable_baselines3-$(SB3)
SB3_TEST_NAMES := callbacks cnn custom_policy deterministic dict_env her identity n_step_replay predict run save_load \
	spaces tensorboard train_eval_mode vec_normalize

.DEFAULT_GOAL := help
.PHONY: help venv train enjoy test sb3-tests lint docs clean

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

test: lint docs $(LOWEST) sb3-tests ## check style, types and docs, run all tests, some on the lowest SB3, and SB3's own
	$(BIN)/python -m pytest -n 2 --dist loadgroup
	$(BIN)/python -m pytest -m gpu tests/learner
	PYTHONPATH=$(LOWEST) $(BIN)/python -m pytest -m lowest_sb3

# Two of them differ on purpose: the folder of a TensorBoard log is TD3X_1, and Discrete actions raise a ValueError
sb3-tests: $(SB3_TESTS)
	cd $(SB3_TESTS) && CUDA_VISIBLE_DEVICES= PYTHONPATH=$(CURDIR)/tests/helpers $(CURDIR)/$(BIN)/python -m pytest -q -n 2 -p sb3_with_td3x \
	-k "TD3X or td3" $(SB3_TEST_NAMES:%=tests/test_%.py) \
	--deselect "tests/test_spaces.py::test_action_spaces[CartPole-v1-TD3X]" \
	--deselect "tests/test_tensorboard.py::test_tensorboard[td3]"

$(SB3_TESTS): $(INSTALLED)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	--no-binary stable-baselines3 -d .sb3 stable-baselines3==$(SB3)
	tar -xzf $@.tar.gz -C .sb3
	touch $@

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
	rm -rf .venv .lowest .sb3 build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
