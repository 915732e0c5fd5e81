"""Agents from and to SB3's TD3 and DDPG."""

import base64
import json
import warnings
import zipfile
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch as th
from agents import (
    assert_same,
    assert_same_agent,
    assert_same_predictions,
    assert_same_updates,
    optimizer_states,
    train_on_same_data,
)
from envs import CountingEnv, DictObs, tiny, tiny_agent, zip_of
from noises import normal_noise
from stable_baselines3 import DDPG, TD3, HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_td3x import TD3X
from sb3_td3x.shaping import FallPenalty

# Agents of SB3


def forked_envs() -> SubprocVecEnv:
    return SubprocVecEnv([CountingEnv] * 4, start_method="fork")


def image_env() -> FakeImageEnv:
    return FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=False)


def dict_env() -> DictObs:
    return DictObs(CountingEnv())


def goal_env() -> BitFlippingEnv:
    return BitFlippingEnv(n_bits=2, continuous=True)


SMALL_CNN = {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}}
# Small, damped steps, because rounding errors grow with images, see test_parity.py
IMAGES: dict[str, Any] = {
    "policy_kwargs": {**SMALL_CNN, "optimizer_kwargs": {"eps": 1e-3}},
    "learning_rate": 1e-4,
    "buffer_size": 100,
}
HER = {"replay_buffer_class": HerReplayBuffer, "replay_buffer_kwargs": {"n_sampled_goal": 2}}
# Algorithm, policy, env, arguments
SB3_AGENTS: dict[str, tuple[type[TD3], str, Callable[[], Any], dict[str, Any]]] = {
    "mlp": (TD3, "MlpPolicy", CountingEnv, {}),
    "one critic": (TD3, "MlpPolicy", CountingEnv, {"policy_kwargs": {"net_arch": [8], "n_critics": 1}}),
    "three critics": (TD3, "MlpPolicy", CountingEnv, {"policy_kwargs": {"net_arch": [8, 6], "n_critics": 3}}),
    "n-step": (TD3, "MlpPolicy", CountingEnv, {"n_steps": 3, "gamma": 0.9}),
    "delay": (TD3, "MlpPolicy", CountingEnv, {"policy_delay": 5, "tau": 0.1, "target_policy_noise": 0.1}),
    "noise": (TD3, "MlpPolicy", CountingEnv, {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1))}),
    "schedule": (TD3, "MlpPolicy", CountingEnv, {"learning_rate": LinearSchedule(1e-2, 1e-4, 1.0)}),
    "function as schedule": (TD3, "MlpPolicy", CountingEnv, {"learning_rate": lambda progress: 1e-2 * progress}),
    "4 envs": (TD3, "MlpPolicy", forked_envs, {"action_noise": normal_noise(), "gradient_steps": -1}),
    "memory optimized": (
        TD3,
        "MlpPolicy",
        CountingEnv,
        {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}},
    ),
    "cnn": (TD3, "CnnPolicy", image_env, IMAGES),
    "dict": (TD3, "MultiInputPolicy", dict_env, {"policy_kwargs": {"net_arch": [8], "n_critics": 3}}),
    "her": (TD3, "MultiInputPolicy", goal_env, HER),
    "ddpg": (DDPG, "MlpPolicy", CountingEnv, {}),
    "ddpg cnn": (DDPG, "CnnPolicy", image_env, IMAGES),
    "ddpg dict": (DDPG, "MultiInputPolicy", dict_env, {"action_noise": normal_noise()}),
    "ddpg 3 critics": (DDPG, "MlpPolicy", CountingEnv, {"policy_kwargs": {"net_arch": [8], "n_critics": 3}}),
}


def sb3_agent(case: str) -> TD3:
    """Make an agent of SB3 and train it a little."""
    algorithm, policy, make_env, kwargs = SB3_AGENTS[case]
    env = make_env()
    model = algorithm(policy, env, **tiny(**kwargs))
    # At least 19 updates, which is no multiple of any policy_delay used here
    model.learn(24)
    return model


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", SB3_AGENTS)
def test_agent_of_sb3_predicts_the_same_and_continues(case: str) -> None:
    sb3 = sb3_agent(case)
    # A function is pickled
    td3x = TD3X.load(zip_of(sb3), env=sb3.env, device="cpu", trusted=case == "function as schedule")
    assert_same_predictions(sb3, td3x)
    assert_same_agent(sb3, td3x)
    assert isinstance(td3x.replay_buffer, HerReplayBuffer) == isinstance(sb3.replay_buffer, HerReplayBuffer)
    # SB3 continues from the same zip
    again = type(sb3).load(zip_of(sb3), env=sb3.env, device="cpu")
    train_on_same_data([again, td3x], sb3)
    assert_same_updates(again, td3x)
    assert td3x._n_updates == again._n_updates > 20
    td3x.learn(12, reset_num_timesteps=False)
    assert td3x.num_timesteps == sb3.num_timesteps + 12
    if isinstance(td3x.env, SubprocVecEnv):
        td3x.env.close()


@pytest.mark.parametrize("case", ["mlp", "4 envs", "n-step"])
def test_same_rollout_as_sb3_s_own_continuation(case: str) -> None:
    """The transitions after loading are the same, with actions and noise."""
    _, _, make_env, _ = SB3_AGENTS[case]
    sb3 = sb3_agent(case)
    if isinstance(sb3.env, SubprocVecEnv):
        sb3.env.close()
    models: list[Any] = []
    for cls in (TD3, TD3X):
        env = make_env()
        models.append(cls.load(zip_of(sb3), env=env, device="cpu", seed=7, learning_starts=8).learn(40))
        if isinstance(env, SubprocVecEnv):
            env.close()
    for name in ("observations", "actions", "rewards", "dones", "timeouts"):
        expected, actual = (getattr(model.replay_buffer, name) for model in models)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5, err_msg=name)


# Agents for SB3


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", [case for case, (algorithm, *_) in SB3_AGENTS.items() if algorithm is TD3])
def test_agent_for_sb3_is_the_same(case: str) -> None:
    _, policy, make_env, kwargs = SB3_AGENTS[case]
    env = make_env()
    td3x = TD3X(policy, env, **tiny(**kwargs))
    td3x.learn(24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb3 = td3x.to_sb3()
    assert type(sb3) is TD3
    assert_same_predictions(td3x, sb3)
    assert_same_agent(td3x, sb3)

    again = TD3X.load(zip_of(sb3), env=td3x.env, device="cpu", trusted=case == "function as schedule")
    assert_same_predictions(td3x, again)
    assert_same_agent(td3x, again)

    of_sb3 = TD3.load(zip_of(sb3), env=td3x.env, device="cpu")
    assert_same_agent(td3x, of_sb3)
    own_steps, sb3_steps = td3x.num_timesteps, sb3.num_timesteps
    train_on_same_data([sb3, of_sb3, again, td3x], td3x)
    for model in (of_sb3, again, td3x):
        assert_same_updates(sb3, model)
    sb3.learn(12, reset_num_timesteps=False)
    assert (td3x.num_timesteps, sb3.num_timesteps) == (own_steps, sb3_steps + 12)
    if isinstance(env, SubprocVecEnv):
        env.close()


@pytest.mark.parametrize("case", ["mlp", "n-step", "cnn", "dict", "her", "schedule", "4 envs"])
def test_agent_for_sb3_needs_no_td3x(case: str) -> None:
    """Nothing in the zip names this package."""
    _, policy, make_env, kwargs = SB3_AGENTS[case]
    env = make_env()
    file = zip_of(TD3X(policy, env, **tiny(**kwargs)).learn(12).to_sb3())
    with zipfile.ZipFile(file) as archive:
        for name, value in json.loads(archive.read("data")).items():
            if isinstance(value, dict) and ":serialized:" in value:
                assert b"sb3_td3x" not in base64.b64decode(value[":serialized:"]), name
            assert "sb3_td3x" not in json.dumps(value), name
        for name in archive.namelist():
            assert b"sb3_td3x" not in archive.read(name), name
    if isinstance(env, SubprocVecEnv):
        env.close()


def test_agent_for_sb3_is_independent_of_its_origin() -> None:
    td3x = tiny_agent(action_noise=normal_noise()).learn(20)
    sb3 = td3x.to_sb3()
    before = {key: value.clone() for key, value in td3x.policy.state_dict().items()}
    states = th.get_rng_state(), deepcopy(np.random.get_state())  # noqa: NPY002
    td3x.to_sb3()
    assert th.equal(th.get_rng_state(), states[0])
    for before_it, after_it in zip(states[1], np.random.get_state(), strict=True):  # noqa: NPY002
        np.testing.assert_array_equal(before_it, after_it)
    optimizers = deepcopy(optimizer_states(td3x))
    sb3.learn(20)
    assert_same(before, dict(td3x.policy.state_dict()))
    assert_same(optimizers, optimizer_states(td3x))
    assert sb3.action_noise is not td3x.action_noise


def test_agent_that_was_loaded_without_env_goes_to_sb3() -> None:
    loaded = TD3X.load(zip_of(tiny_agent(action_noise=normal_noise()).learn(20)))
    assert_same_predictions(loaded, loaded.to_sb3())
    her = TD3X("MultiInputPolicy", goal_env(), **tiny(**HER)).learn(12)
    loaded = TD3X.load(zip_of(her))
    assert_same_predictions(loaded, loaded.to_sb3())


@pytest.mark.parametrize("through_zip", [False, True])
def test_every_update_of_an_agent_for_sb3_counts_once(through_zip: bool) -> None:
    """Adam counts its updates in tensors, one for each of SB3's parameters."""
    sb3 = tiny_agent(policy_kwargs={"net_arch": [8], "n_critics": 3}).learn(20).to_sb3()
    if through_zip:
        sb3 = TD3.load(zip_of(sb3), env=CountingEnv())
    steps = [{idx: float(entry["step"]) for idx, entry in optimizer_states(sb3)["critic.optimizer"].items()}]
    sb3.learn(1, reset_num_timesteps=False)
    steps.append({idx: float(entry["step"]) for idx, entry in optimizer_states(sb3)["critic.optimizer"].items()})
    assert steps == [dict.fromkeys(range(12), 15.0), dict.fromkeys(range(12), 16.0)]


LEFT_BEHIND: dict[str, Any] = {
    "qf_learning_rate": 1e-4,
    "action_noise_decay": 0.99,
    "action_noise_min_scale": 0.1,
    "reward_shaping": FallPenalty(),
    "clipped_double_q": False,
    "precision": "bfloat16",
    "top_quantiles_to_drop_per_net": 1,
}


@pytest.mark.filterwarnings("ignore:precision='bfloat16' will be slower")
@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_warning_names_what_sb3_lacks(name: str) -> None:
    model = tiny_agent(**{name: LEFT_BEHIND[name]})
    with pytest.warns(UserWarning, match=name) as warned:
        sb3 = model.to_sb3()
    assert len(warned) == 1
    assert_same_predictions(model, sb3)
    assert not hasattr(sb3, name)


@pytest.mark.parametrize(
    "options",
    [
        {"layer_norm": True},
        {"actor_layer_norm": True},
        {"critic_activation_fn": "tanh"},
        {"stochastic_actor": True},
        {"n_quantiles": 5},
    ],
    ids=str,
)
def test_networks_that_sb3_lacks_are_refused(options: dict[str, Any]) -> None:
    model = tiny_agent(policy_kwargs={"net_arch": [8], **options})
    with pytest.raises(ValueError, match=next(iter(options))):
        model.to_sb3()


def test_network_options_that_are_off_are_left_out() -> None:
    off = {"layer_norm": False, "actor_layer_norm": False, "critic_activation_fn": None, "stochastic_actor": False}
    model = tiny_agent(policy_kwargs={"net_arch": [8], "n_quantiles": 1, **off})
    sb3 = model.to_sb3()
    assert sb3.policy_kwargs == {"net_arch": [8]}
    assert_same_predictions(model, sb3)


OLD_POLICY_KWARGS: dict[str, Any] = {"net_arch": [8], "device": th.device("cpu")}


def test_device_in_policy_kwargs_of_old_versions_is_dropped() -> None:
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny()).learn(12)
    sb3.policy_kwargs = dict(OLD_POLICY_KWARGS)
    loaded = TD3X.load(zip_of(sb3))
    assert loaded.policy_kwargs == {"net_arch": [8]}
    assert_same_predictions(sb3, loaded)
