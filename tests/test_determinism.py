"""The same seed gives the same agent, bit for bit, and TD3X draws the same global random numbers as SB3's TD3."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from comparing import assert_identical, everything, global_states
from envs import DictObs, counting_vec_env, saved_and_loaded, tiny_agent, zip_of
from noises import normal_noise
from processes import run_python
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback, EvalCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import configure_logger, set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_td3x import TD3X


def pendulum() -> gym.Env:
    return Monitor(gym.make("Pendulum-v1"))


def pendulums(n_envs: int) -> VecEnv:
    return DummyVecEnv([pendulum] * n_envs)


def normalized_pendulums(n_envs: int) -> VecEnv:
    return VecNormalize(pendulums(n_envs))


def pendulums_in_processes(n_envs: int) -> VecEnv:
    return SubprocVecEnv([pendulum] * n_envs, start_method="fork")


def dict_pendulum(n_envs: int) -> VecEnv:
    return DummyVecEnv([lambda: DictObs(pendulum())] * n_envs)


def trained(make_env: Callable[[int], VecEnv], n_envs: int, seed: int, callback: Any = None, **kwargs: Any) -> TD3X:
    """Train an agent for 100 timesteps, about 80 of them with updates."""
    policy = "MultiInputPolicy" if make_env is dict_pendulum else "MlpPolicy"
    env = make_env(n_envs)
    model = tiny_agent(env, policy, **{"seed": seed, "learning_starts": 20, "gradient_steps": -1, **kwargs})
    model.learn(100, callback=callback)
    env.close()
    return model


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "no noise": lambda: {},
    "noise": lambda: {"action_noise": normal_noise(0.3)},
    "correlated noise with decay": lambda: {
        "action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.3 * np.ones(1)),
        "action_noise_decay": 0.99,
        "action_noise_min_scale": 0.1,
    },
    "n-step returns": lambda: {"action_noise": normal_noise(0.3), "n_steps": 3},
    "shaping": lambda: {
        "action_noise": normal_noise(0.3),
        "reward_shaping": [{"sb3_td3x.shaping.RewardScale": {"scale": 0.1}}],
    },
    "stochastic actor, three critics": lambda: {
        "policy_kwargs": {"net_arch": [8], "stochastic_actor": True, "n_critics": 3, "layer_norm": True}
    },
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("case", SETTINGS)
def test_same_seed_same_agent(case: str, n_envs: int) -> None:
    """Another seed gives another agent."""
    first, second, other = (everything(trained(pendulums, n_envs, seed, **SETTINGS[case]())) for seed in (3, 3, 4))
    assert_identical(first, second)
    # The weights of all networks differ. Biases of a layer normalization may be equal
    assert not any(np.array_equal(first[key], other[key]) for key in first if key.endswith("0.weight"))


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("make_env", [dict_pendulum, normalized_pendulums])
def test_same_seed_same_agent_with_other_envs(make_env: Callable[[int], VecEnv]) -> None:
    first, second = (everything(trained(make_env, 2, 3, **SETTINGS["noise"]())) for _ in range(2))
    assert_identical(first, second)


def test_same_seed_same_agent_with_envs_in_processes() -> None:
    """It equals the agent of the same envs in one process."""
    first, second, third = (
        everything(trained(make_env, 2, 3, **SETTINGS["shaping"]()))
        for make_env in (pendulums_in_processes, pendulums_in_processes, pendulums)
    )
    assert_identical(first, second)
    assert_identical(first, third)


def test_random_numbers_drawn_before_do_not_matter() -> None:
    first = everything(trained(pendulums, 1, 3, **SETTINGS["noise"]()))
    random.random(), np.random.rand(7), th.rand(7)  # noqa: NPY002
    assert_identical(first, everything(trained(pendulums, 1, 3, **SETTINGS["noise"]())))


def test_evaluations_checkpoints_and_conversions_do_not_change_the_training(tmp_path: Path) -> None:

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls % 10 == 0:
                assert isinstance(self.model, TD3X)
                self.model.get_parameters()
                self.model.to_sb3()
            return True

    eval_env = DummyVecEnv([pendulum])
    callback = CallbackList(
        [
            EvalCallback(eval_env, n_eval_episodes=1, eval_freq=40, verbose=0, warn=False),
            CheckpointCallback(30, str(tmp_path), save_replay_buffer=True),
            Look(),
        ]
    )
    expected = everything(trained(pendulums, 1, 3, **SETTINGS["noise"]()))
    actual = everything(trained(pendulums, 1, 3, callback=callback, **SETTINGS["noise"]()))
    assert len(list(tmp_path.glob("*.zip"))) == 3
    assert_identical(expected, actual)


# Global random generators, compared with SB3's TD3

SHARED_SETTINGS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "one env": (1, lambda: {}),
    "noise": (1, lambda: {"action_noise": normal_noise(0.3)}),
    "four envs": (4, lambda: {"action_noise": normal_noise(0.3), "gradient_steps": -1}),
    "n-step returns": (1, lambda: {"action_noise": normal_noise(0.3), "n_steps": 3}),
    "other critics": (1, lambda: {"policy_kwargs": {"net_arch": [8], "n_critics": 3}, "policy_delay": 3}),
    "episodes": (1, lambda: {"train_freq": (1, "episode"), "gradient_steps": 5}),
    "no seed": (1, lambda: {"seed": None, "action_noise": normal_noise(0.3)}),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", SHARED_SETTINGS)
def test_training_draws_the_same_random_numbers_as_sb3(case: str) -> None:
    n_envs, make_kwargs = SHARED_SETTINGS[case]
    states = []
    for cls in (TD3, TD3X):
        set_random_seed(9)
        model = tiny_agent(pendulums(n_envs), cls=cls, **make_kwargs())
        if make_kwargs().get("seed", 0) is None:
            model.action_space.seed(0)
        model.learn(220 if case == "episodes" else 60)
        states.append(global_states())
    assert states[0] == states[1]


def test_new_options_draw_no_random_numbers() -> None:
    additions: dict[str, Any] = {
        "action_noise_decay": 0.9,
        "qf_learning_rate": "lin_1e-3",
        "clipped_double_q": False,
        "reward_shaping": {"sb3_td3x.shaping.RewardClip": {"low": -1, "high": 1}},
    }
    states = []
    for kwargs in ({}, additions):
        tiny_agent(pendulums(1), action_noise=normal_noise(0.3), **kwargs).learn(50)
        states.append(global_states())
    assert states[0] == states[1]


@pytest.mark.parametrize("stochastic", [False, True])
def test_predict_and_save_draw_no_random_numbers(stochastic: bool) -> None:
    """Only the samples of a stochastic actor are random, not its deterministic predictions."""
    model = tiny_agent(
        action_noise=None if stochastic else normal_noise(0.3),
        policy_kwargs={"net_arch": [8], "stochastic_actor": stochastic},
    )
    model.learn(20)
    before = global_states()
    obs = np.ones((3, 2), np.float32)
    first, _ = model.predict(obs, deterministic=True)
    second, _ = model.predict(obs, deterministic=True)
    np.testing.assert_array_equal(first, second)
    if not stochastic:
        np.testing.assert_array_equal(model.predict(obs, deterministic=False)[0], first)
    model.save(io.BytesIO())
    model.save_replay_buffer(io.BytesIO())
    model.set_parameters(model.get_parameters())
    assert global_states() == before


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("seed", [None, 0])
def test_load_draws_what_sb3_draws(seed: int | None) -> None:
    """SB3's ``load`` seeds the generators if the agent has a seed, and draws initial weights."""
    states = []
    for cls in (TD3, TD3X):
        model = tiny_agent(cls=cls, seed=seed)
        for env in (None, counting_vec_env(2)):
            zip_file = zip_of(model)
            set_random_seed(5)
            loaded = cls.load(zip_file, env=env, device="cpu")
            loaded.predict(np.ones(2, np.float32))
            states.append(global_states())
    assert states[:2] == states[2:]


def test_conversion_to_sb3_draws_no_random_numbers_and_sets_no_seed() -> None:
    model = tiny_agent()
    model.learn(10)
    th.rand(3)
    before = global_states()
    model.to_sb3()
    assert global_states() == before


# Operations that must not change later updates


def ready_to_train() -> TD3X:
    """Return an agent in the middle of its training, after an odd number of updates."""
    model = tiny_agent()
    model.learn(30)
    model.set_logger(configure_logger(verbose=0))
    assert model._n_updates % 2 == 1
    return model


def after_more_updates(model: TD3X) -> dict[str, np.ndarray]:
    set_random_seed(2)
    model.train(gradient_steps=7, batch_size=8)
    return everything(model)


def test_saving_and_loading_does_not_change_later_updates() -> None:
    """Optimizer states, the delay counter and the target networks are restored."""
    expected = after_more_updates(ready_to_train())
    model = ready_to_train()
    loaded = saved_and_loaded(model, env=counting_vec_env(1))
    loaded.replay_buffer = model.replay_buffer
    loaded.set_logger(configure_logger(verbose=0))
    assert_identical(expected, after_more_updates(loaded))


@pytest.mark.parametrize("way", ["to_sb3", "set_parameters"])
def test_training_a_copy_does_not_change_the_agent(way: str) -> None:
    """The copy shares neither weights nor optimizer states with the agent."""
    expected = after_more_updates(ready_to_train())
    model = ready_to_train()
    before = everything(model)
    copy: TD3 | TD3X
    if way == "to_sb3":
        copy = model.to_sb3()
    else:
        copy = tiny_agent()
        copy.set_parameters(model.get_parameters())
    copy.replay_buffer = model.replay_buffer
    copy.set_logger(configure_logger(verbose=0))
    copy.train(gradient_steps=5, batch_size=8)
    assert_identical(before, everything(model))
    assert_identical(expected, after_more_updates(model))


# Importing the package

IMPORT_SCRIPT = """
import hashlib, random, sys
import numpy as np
import torch as th
from stable_baselines3 import TD3
from stable_baselines3.common.noise import NormalActionNoise

th.set_num_threads(1)

def states():
    return repr((random.getstate(), np.random.get_state(), th.get_rng_state().tolist()))

def result():
    model = TD3("MlpPolicy", "Pendulum-v1", seed=3, learning_starts=20, batch_size=8, buffer_size=500, device="cpu",
                policy_kwargs=dict(net_arch=[8]), action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)))
    model.learn(80)
    weights = b"".join(value.numpy().tobytes() for value in model.policy.state_dict().values())
    return hashlib.sha256(weights).hexdigest()

before = result()
assert "sb3_td3x" not in sys.modules
state = states()
settings = th.get_default_dtype(), th.get_num_threads(), th.are_deterministic_algorithms_enabled()
import sb3_td3x
assert states() == state, "random state"
assert (th.get_default_dtype(), th.get_num_threads(), th.are_deterministic_algorithms_enabled()) == settings
assert result() == before, "TD3 learns other weights"
print("unchanged")
"""


def test_importing_the_package_changes_nothing_for_sb3(tmp_path: Path) -> None:
    """Neither random states nor PyTorch's settings nor results of SB3's TD3 change."""
    process = run_python(tmp_path, "-c", IMPORT_SCRIPT)
    assert process.stdout.split() == ["unchanged"], process.stderr
