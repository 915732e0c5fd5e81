"""Saving and loading: damaged zips, agents of SB3's TD3 and DDPG, agents for SB3, parameters, replay memory."""

import base64
import io
import json
import pathlib
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import CountingEnv, DictObs, counting_vec_env, tiny
from gymnasium import spaces
from sb3_contrib import TQC, CrossQ
from stable_baselines3 import DDPG, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.utils import LinearSchedule, configure_logger
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from sb3_td3x import TD3X
from sb3_td3x.policies import TD3XPolicy
from sb3_td3x.shaping import FallPenalty, RewardScale, ShapingBatch


def make(env: Any = None, **kwargs: Any) -> TD3X:
    """A tiny agent."""
    return TD3X("MlpPolicy", CountingEnv() if env is None else env, **tiny(**kwargs))


def noise(sigma: float = 0.1) -> NormalActionNoise:
    return NormalActionNoise(np.zeros(1), sigma * np.ones(1))


def zip_of(model: BaseAlgorithm) -> io.BytesIO:
    """What ``save`` writes, ready to be read."""
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    return file


def sample_obs(model: BaseAlgorithm, number: int = 20) -> Any:
    """Observations to compare predictions on."""
    space = model.observation_space
    if isinstance(space, spaces.Dict):
        samples = [space.sample() for _ in range(number)]
        return {key: np.stack([sample[key] for sample in samples]) for key in space}
    return np.stack([space.sample() for _ in range(number)])


def assert_same_predictions(first: BaseAlgorithm, second: BaseAlgorithm) -> None:
    obs = sample_obs(first)
    np.testing.assert_allclose(
        second.predict(obs, deterministic=True)[0], first.predict(obs, deterministic=True)[0], atol=1e-6
    )


def assert_same(expected: Any, actual: Any, rtol: float = 0, atol: float = 0, where: str = "") -> None:
    """Compare nested dictionaries and lists of tensors and numbers."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key in expected:
            assert_same(expected[key], actual[key], rtol, atol, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), where
        for idx, pair in enumerate(zip(expected, actual, strict=True)):
            assert_same(*pair, rtol, atol, f"{where}/{idx}")
    elif th.is_tensor(expected):
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=rtol, atol=atol, err_msg=where)
    else:
        assert expected == actual, where


def optimizer_states(model: BaseAlgorithm) -> dict[str, Any]:
    """The state of the optimizers, without their options, of which SB3's do not know the kernel's."""
    return {name: params["state"] for name, params in model.get_parameters().items() if name.endswith("optimizer")}


def assert_same_agent(expected: OffPolicyAlgorithm, actual: OffPolicyAlgorithm) -> None:
    """Networks, optimizers, counters and arguments that TD3 and TD3X share."""
    assert_same(expected.policy.state_dict(), actual.policy.state_dict())
    assert_same(optimizer_states(expected), optimizer_states(actual))
    for name in (
        *("num_timesteps", "_n_updates", "_episode_num", "_total_timesteps", "_current_progress_remaining", "n_envs"),
        *("buffer_size", "learning_starts", "batch_size", "tau", "gamma", "train_freq", "gradient_steps", "n_steps"),
        *("policy_delay", "target_policy_noise", "target_noise_clip", "optimize_memory_usage", "_stats_window_size"),
        *("observation_space", "action_space", "seed"),
    ):
        assert getattr(expected, name) == getattr(actual, name), name
    assert [actual.lr_schedule(progress) for progress in (1, 0.5, 0)] == [expected.lr_schedule(p) for p in (1, 0.5, 0)]
    for name in ("critic", "actor"):
        rates = [getattr(model, name).optimizer.param_groups[0]["lr"] for model in (expected, actual)]
        assert rates[0] == rates[1], name


def train_on_same_data(models: list[Any], data: OffPolicyAlgorithm, updates: int = 20) -> None:
    """Further updates of all, on the transitions of one and with the same random draws."""
    for model in models:
        for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
            if hasattr(data.replay_buffer, name):
                setattr(model.replay_buffer, name, getattr(data.replay_buffer, name))
        assert data.replay_buffer is not None
        model.replay_buffer.pos, model.replay_buffer.full = data.replay_buffer.pos, data.replay_buffer.full
        if isinstance(data.replay_buffer, HerReplayBuffer):
            for name in ("infos", "ep_start", "ep_length", "_current_ep_start"):
                setattr(model.replay_buffer, name, getattr(data.replay_buffer, name))
        model.set_logger(configure_logger(verbose=0))
        np.random.seed(3)  # noqa: NPY002 - what SB3's buffers draw from
        th.manual_seed(3)
        model._current_progress_remaining = 0.4
        model.train(gradient_steps=updates, batch_size=16)


def assert_same_updates(expected: OffPolicyAlgorithm, actual: OffPolicyAlgorithm) -> None:
    assert_same(expected.policy.state_dict(), actual.policy.state_dict(), rtol=1e-5, atol=2e-6)


# Files that are no agents


def no_zip(good: bytes) -> bytes:
    return b"gamma: 0.99\n" * 1000


def without(*names: str) -> Callable[[bytes], bytes]:
    """A zip without some of its files."""

    def change(good: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                if name not in names:
                    new.writestr(name, old.read(name))
        return file.getvalue()

    return change


def with_content(name: str, content: bytes) -> Callable[[bytes], bytes]:
    """A zip with another content of one of its files."""

    def change(good: bytes) -> bytes:
        file = io.BytesIO(without(name)(good))
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(name, content)
        return file.getvalue()

    return change


def flipped(name: str, compressed: bool) -> Callable[[bytes], bytes]:
    """A zip in which some bytes of one file have changed, as on a failing disk."""

    def change(good: bytes) -> bytes:
        file = io.BytesIO()
        compression = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(file, "w", compression) as new:
            for old_name in old.namelist():
                new.writestr(old_name, old.read(old_name))
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(name)
        damaged = bytearray(file.getvalue())
        start = info.header_offset + 30 + len(name)
        if compressed:
            # No such kind of block: the decompression itself fails, before any checksum is compared
            damaged[start] = 0xFF
        else:
            damaged[start + info.file_size // 2] ^= 0xFF
        return bytes(damaged)

    return change


def first(percent: int) -> Callable[[bytes], bytes]:
    """A zip that was cut short."""
    return lambda good: good[: len(good) * percent // 100]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "no zip": no_zip,
    "a zip of nothing": without(
        *("data", "policy.pth", "actor.optimizer.pth", "critic.optimizer.pth"), "pytorch_variables.pth"
    ),
    **{f"first {percent}%": first(percent) for percent in (1, 10, 50, 90, 99)},
    "first 3 bytes": lambda good: good[:3],
    "last byte missing": lambda good: good[:-1],
    "last 30 bytes missing": lambda good: good[:-30],
    "first 100 bytes missing": lambda good: good[100:],
    "zeros at the end": lambda good: good[: len(good) // 2] + bytes(len(good) - len(good) // 2),
    "without data": without("data"),
    "without policy": without("policy.pth"),
    "without an optimizer": without("critic.optimizer.pth"),
    "data empty": with_content("data", b""),
    "data no json": with_content("data", b"\x80\x00gamma"),
    "data a json list": with_content("data", b"[1, 2]"),
    "data a json number": with_content("data", b"1"),
    "data of something else": with_content("data", b'{"gamma": 0.99}'),
    "policy empty": with_content("policy.pth", b""),
    "policy no state": with_content("policy.pth", b"nothing"),
    "flipped data": flipped("data", compressed=False),
    "flipped policy": flipped("policy.pth", compressed=False),
    "flipped compressed data": flipped("data", compressed=True),
    "flipped compressed policy": flipped("policy.pth", compressed=True),
}


@pytest.fixture(scope="module")
def saved() -> bytes:
    """The zip of a tiny agent."""
    return zip_of(make(action_noise=noise()).learn(20)).getvalue()


def assert_one_clear_sentence(error: BaseException, name: str) -> None:
    """One line with the file's name, and no traceback of zipfile, json or pickle behind it."""
    message = str(error)
    assert name in message
    assert "\n" not in message
    assert len(message) < 400
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_in_one_sentence(saved: bytes, tmp_path: pathlib.Path, damage: str) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(DAMAGES[damage](saved))
    model = make()
    for load in (TD3X.load, model.set_parameters):
        for source in (path, str(tmp_path / "agent"), io.BytesIO(path.read_bytes())):
            with pytest.raises(ValueError, match=r"zip|agent|damaged") as error:
                load(source)
            assert_one_clear_sentence(error.value, "he file" if isinstance(source, io.BytesIO) else str(source))


@pytest.mark.parametrize("damage", ["without data", "without policy", "data of something else"])
def test_incomplete_zip_is_not_called_another_algorithm_s(saved: bytes, tmp_path: pathlib.Path, damage: str) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(DAMAGES[damage](saved))
    with pytest.raises(ValueError, match="agent") as error:
        TD3X.load(path)
    assert "another algorithm" not in str(error.value)


def test_missing_file(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "missing.zip", str(tmp_path / "no" / "folder.zip")):
        for load in (TD3X.load, make().set_parameters):
            with pytest.raises(FileNotFoundError) as error:
                load(path)
            # As it was given, but for the ending
            assert error.value.filename == f"{str(path).removesuffix('.zip')}.zip"


def test_folder_is_no_agent(tmp_path: pathlib.Path) -> None:
    with pytest.raises((IsADirectoryError, PermissionError, ValueError), match=tmp_path.name):
        TD3X.load(tmp_path)


OTHER_ALGORITHMS: dict[str, Callable[[], BaseAlgorithm]] = {
    "PPO": lambda: PPO("MlpPolicy", "Pendulum-v1", n_steps=8, batch_size=8, device="cpu"),
    "SAC": lambda: SAC("MlpPolicy", "Pendulum-v1", buffer_size=1, device="cpu"),
    "DQN": lambda: DQN("MlpPolicy", "CartPole-v1", buffer_size=1, device="cpu"),
    "TQC": lambda: TQC("MlpPolicy", "Pendulum-v1", buffer_size=1, device="cpu"),
    "CrossQ": lambda: CrossQ("MlpPolicy", "Pendulum-v1", buffer_size=1, device="cpu"),
}


@pytest.mark.parametrize("algorithm", OTHER_ALGORITHMS)
def test_zip_of_another_algorithm_is_refused_in_one_sentence(tmp_path: pathlib.Path, algorithm: str) -> None:
    path = tmp_path / "agent.zip"
    OTHER_ALGORITHMS[algorithm]().save(path)
    for load in (TD3X.load, make("Pendulum-v1").set_parameters):
        with pytest.raises(ValueError, match=r"saved by another algorithm.*TD3X.*TD3.*DDPG") as error:
            load(path)
        assert_one_clear_sentence(error.value, str(path))


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
# Small, damped steps, since rounding errors grow with images, see test_parity.py
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
    "4 envs": (TD3, "MlpPolicy", forked_envs, {"action_noise": noise(), "gradient_steps": -1}),
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
    "ddpg dict": (DDPG, "MultiInputPolicy", dict_env, {"action_noise": noise()}),
    "ddpg 3 critics": (DDPG, "MlpPolicy", CountingEnv, {"policy_kwargs": {"net_arch": [8], "n_critics": 3}}),
}


def sb3_agent(case: str) -> TD3:
    """An agent of SB3 that has been trained a little."""
    algorithm, policy, make_env, kwargs = SB3_AGENTS[case]
    env = make_env()
    model = algorithm(policy, env, **tiny(**kwargs))
    # 19 updates and more: no multiple of any policy_delay used here
    model.learn(24)
    return model


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", SB3_AGENTS)
def test_agent_of_sb3_predicts_the_same_and_goes_on_where_it_stopped(case: str) -> None:
    sb3 = sb3_agent(case)
    # Of a function there is only its code
    td3x = TD3X.load(zip_of(sb3), env=sb3.env, device="cpu", trusted=case == "function as schedule")
    assert_same_predictions(sb3, td3x)
    assert_same_agent(sb3, td3x)
    assert isinstance(td3x.replay_buffer, type(sb3.replay_buffer))
    # SB3's own continuation, also from the zip
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
    """From the zip on: the same transitions, actions and noise included."""
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
    """Nothing that is pickled in the zip names this package."""
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
    td3x = make(action_noise=noise()).learn(20)
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


def test_agent_that_was_loaded_without_env_goes_to_sb3(saved: bytes) -> None:
    loaded = TD3X.load(io.BytesIO(saved))
    assert_same_predictions(loaded, loaded.to_sb3())
    her = TD3X("MultiInputPolicy", goal_env(), **tiny(**HER)).learn(12)
    loaded = TD3X.load(zip_of(her))
    assert_same_predictions(loaded, loaded.to_sb3())


@pytest.mark.parametrize("through_zip", [False, True])
def test_every_update_of_an_agent_for_sb3_counts_once(through_zip: bool) -> None:
    """Adam's own counter of updates is a tensor, one for each of SB3's parameters."""
    sb3 = make(policy_kwargs={"net_arch": [8], "n_critics": 3}).learn(20).to_sb3()
    if through_zip:
        sb3 = TD3.load(zip_of(sb3), env=CountingEnv())
    steps = [{idx: float(entry["step"]) for idx, entry in optimizer_states(sb3)["critic.optimizer"].items()}]
    sb3.learn(1, reset_num_timesteps=False)
    steps.append({idx: float(entry["step"]) for idx, entry in optimizer_states(sb3)["critic.optimizer"].items()})
    assert steps == [dict.fromkeys(range(12), 15.0), dict.fromkeys(range(12), 16.0)]


def test_agents_with_the_same_parameters_train_independently() -> None:
    model, other = make(seed=1).learn(20), make(seed=2)
    other.set_parameters(model.get_parameters())
    before = deepcopy(model.get_parameters())
    other.learn(20)
    assert_same(before, model.get_parameters())


LEFT_BEHIND: dict[str, Any] = {
    "qf_learning_rate": 1e-4,
    "action_noise_decay": 0.99,
    "action_noise_min_scale": 0.1,
    "reward_shaping": FallPenalty(),
    "clipped_double_q": False,
    "precision": "bfloat16",
}


@pytest.mark.filterwarnings("ignore:precision='bfloat16' is not used")
@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_what_sb3_has_not_is_left_behind_with_a_warning(name: str) -> None:
    model = make(**{name: LEFT_BEHIND[name]})
    with pytest.warns(UserWarning, match=name) as warned:
        sb3 = model.to_sb3()
    assert len(warned) == 1
    assert_same_predictions(model, sb3)
    assert not hasattr(sb3, name)


@pytest.mark.parametrize(
    "options",
    [{"layer_norm": True}, {"actor_layer_norm": True}, {"critic_activation_fn": "tanh"}, {"stochastic_actor": True}],
    ids=str,
)
def test_networks_that_sb3_has_not_are_refused(options: dict[str, Any]) -> None:
    model = make(policy_kwargs={"net_arch": [8], **options})
    with pytest.raises(ValueError, match=next(iter(options))):
        model.to_sb3()


def test_network_options_that_are_off_do_not_hinder() -> None:
    off = {"layer_norm": False, "actor_layer_norm": False, "critic_activation_fn": None, "stochastic_actor": False}
    model = make(policy_kwargs={"net_arch": [8], **off})
    sb3 = model.to_sb3()
    assert sb3.policy_kwargs == {"net_arch": [8]}
    assert_same_predictions(model, sb3)


# One's own zips

EVERYTHING: dict[str, Any] = {
    "learning_rate": "lin_1e-3",
    "qf_learning_rate": "lin_7e-4",
    "action_noise_decay": 0.99,
    "action_noise_min_scale": 0.1,
    "reward_shaping": {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}},
    "clipped_double_q": False,
    "policy_delay": 3,
    "n_steps": 3,
    "train_freq": (2, "step"),
}


def test_agent_with_all_of_td3x_s_own_arguments_is_saved_whole(tmp_path: pathlib.Path) -> None:
    model = make(action_noise=noise(), **EVERYTHING).learn(31)
    model.save(tmp_path / "agent")
    loaded = TD3X.load(tmp_path / "agent", env=CountingEnv())
    assert_same_agent(model, loaded)
    for name in EVERYTHING:
        assert repr(getattr(loaded, name)) == repr(getattr(model, name)), name
    assert loaded.qf_lr_schedule(0.5) == pytest.approx(3.5e-4)
    assert loaded.lr_schedule(0.5) == pytest.approx(5e-4)
    assert loaded.action_noise_scale == model.action_noise_scale == pytest.approx(0.99**27)
    loaded.learn(10)
    assert loaded.action_noise_scale == pytest.approx(0.99**32)


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("policy_kwargs", [{"n_critics": 3}, {"layer_norm": True, "actor_layer_norm": True}], ids=str)
def test_training_goes_on_as_if_it_had_not_been_interrupted(policy_kwargs: dict[str, Any]) -> None:
    """The delay counter and the optimizers go on: 17 updates are no multiple of the delay."""
    model = make(policy_kwargs={"net_arch": [8], **policy_kwargs}, policy_delay=5).learn(22)
    assert model._n_updates == 17
    loaded = TD3X.load(zip_of(model), env=model.env)
    train_on_same_data([loaded, model], model, updates=9)
    assert_same(dict(model.policy.state_dict()), dict(loaded.policy.state_dict()))


def test_zip_never_contains_the_replay_buffer() -> None:
    sizes = []
    for buffer_size in (10, 100_000):
        model = make(buffer_size=buffer_size).learn(12)
        sizes.append(len(zip_of(model).getvalue()))
        loaded = TD3X.load(zip_of(model), env=model.env)
        assert loaded.replay_buffer.pos == 0
        sizes.append(len(zip_of(loaded.learn(12)).getvalue()))
    assert max(sizes) - min(sizes) < 1000
    with zipfile.ZipFile(zip_of(model)) as archive:
        attributes = json.loads(archive.read("data"))
    assert not {"replay_buffer", "_replay_buffer", "env", "_shaping"} & attributes.keys()


def test_agent_that_only_plays_takes_no_replay_memory() -> None:
    file = zip_of(make(buffer_size=1_000_000))
    for env in (None, CountingEnv()):
        file.seek(0)
        tracemalloc.start()
        loaded = TD3X.load(file, env=env)
        loaded.predict(np.zeros(2, np.float32))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert loaded._replay_buffer is None
        assert peak < 5e6
        assert len(zip_of(loaded).getvalue()) == pytest.approx(len(file.getvalue()), abs=500)
        assert loaded._replay_buffer is None
    assert loaded.replay_buffer.buffer_size == 1_000_000
    assert loaded.replay_buffer is loaded._replay_buffer


class RecordingBuffer(ReplayBuffer):
    """Keeps what was sampled from it."""

    samples: list[Any]

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        self.samples = [*getattr(self, "samples", []), super().sample(*args, **kwargs)]
        return self.samples[-1]


@pytest.mark.parametrize("loaded", [False, True])
def test_demonstrations_in_the_replay_buffer_are_used(loaded: bool) -> None:
    """Before the first step, after construction and after loading."""
    model = make(learning_starts=0, batch_size=64, replay_buffer_class=RecordingBuffer)
    if loaded:
        model = TD3X.load(zip_of(model), env=CountingEnv(), replay_buffer_class=RecordingBuffer)
    obs = np.full((1, 2), 7, np.float32)
    for _ in range(50):
        model.replay_buffer.add(obs, obs, np.zeros((1, 1)), np.array([100.0]), np.array([True]), [{}])
    model.learn(1)
    assert model.replay_buffer.pos == 51
    assert isinstance(model.replay_buffer, RecordingBuffer)
    assert (model.replay_buffer.samples[0].rewards == 100).sum() > 50


def test_replay_buffer_is_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    model = make().learn(30)
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = TD3X.load(zip_of(model), env=CountingEnv())
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert loaded.replay_buffer.pos == 30
    np.testing.assert_array_equal(loaded.replay_buffer.observations, model.replay_buffer.observations)
    loaded.learn(10, reset_num_timesteps=False)
    assert loaded.replay_buffer.pos == 40
    # An agent that never trained saves an empty one, as SB3's
    TD3X.load(zip_of(model)).save_replay_buffer(tmp_path / "empty")
    loaded.load_replay_buffer(tmp_path / "empty.pkl")
    assert loaded.replay_buffer.size() == 0


def test_replay_buffer_of_sb3_is_used(tmp_path: pathlib.Path) -> None:
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny(n_steps=3)).learn(20)
    sb3.save_replay_buffer(tmp_path / "buffer")
    model = make(n_steps=3)
    model.load_replay_buffer(tmp_path / "buffer")
    assert isinstance(model.replay_buffer, NStepReplayBuffer)
    assert model.learn(10).replay_buffer.pos == 30


@pytest.mark.parametrize(
    ("saved", "wanted", "message"),
    [
        ({}, {"n_steps": 3}, "n_steps=1, expected 3"),
        ({"n_steps": 3}, {}, "n_steps=3, expected 1"),
        ({"n_steps": 3}, {"n_steps": 3, "gamma": 0.5}, "gamma=0.99, expected 0.5"),
        ({"env": counting_vec_env(2)}, {}, "n_envs=2, expected 1"),
    ],
)
def test_replay_buffer_of_another_kind_is_refused(
    tmp_path: pathlib.Path, saved: dict[str, Any], wanted: dict[str, Any], message: str
) -> None:
    """Else training would go on with the wrong returns, or fail in the middle; the own buffer stays."""
    make(**saved).learn(20).save_replay_buffer(tmp_path / "buffer.pkl")
    model = make(**wanted).learn(10)
    with pytest.raises(ValueError, match=message):
        model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert model.replay_buffer.pos == 10
    model.learn(10)


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("algorithm", [TD3X, TD3])
def test_agent_with_noise_changes_its_number_of_envs(algorithm: type[Any], before: int, after: int) -> None:
    model = algorithm("MlpPolicy", counting_vec_env(before), **tiny(action_noise=noise())).learn(24)
    env = counting_vec_env(after)
    loaded = TD3X.load(zip_of(model), env=env)
    loaded.learn(24)
    assert loaded.n_envs == loaded.replay_buffer.n_envs == after
    assert isinstance(loaded.action_noise, VectorizedActionNoise) == (after > 1)
    assert loaded.replay_buffer.pos == 24 // after
    again = TD3X.load(zip_of(loaded), env=counting_vec_env(before)).learn(12)
    assert again.replay_buffer.pos == 12 // before


def add_one(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """A hook."""
    return batch.rewards + 1, batch.terminations


def test_zoo_s_enjoy_loads_with_custom_objects() -> None:
    custom_objects = {
        "learning_rate": 0.0,
        "lr_schedule": lambda _: 0.0,
        "clip_range": lambda _: 0.0,
        "observation_space": CountingEnv().observation_space,
        "action_space": CountingEnv().action_space,
    }
    model = make(**{**EVERYTHING, "reward_shaping": f"{__name__}.add_one"}, action_noise=noise()).learn(20)
    loaded = TD3X.load(zip_of(model), env=CountingEnv(), custom_objects=custom_objects, device="cpu", buffer_size=1)
    assert_same_predictions(model, loaded)
    assert loaded.learning_rate == loaded.lr_schedule(1.0) == 0
    assert loaded.qf_lr_schedule(1.0) == pytest.approx(7e-4)
    assert loaded.buffer_size == 1
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny())
    assert_same_predictions(sb3, TD3X.load(zip_of(sb3), custom_objects=custom_objects))


def test_zoo_s_continued_training_loads_with_its_hyperparameters(tmp_path: pathlib.Path) -> None:
    model = make(action_noise=noise()).learn(20)
    hyperparams: dict[str, Any] = {
        "learning_rate": LinearSchedule(5e-3, 0.0, 1.0),
        "qf_learning_rate": "lin_2e-3",
        "gamma": 0.9,
        "tau": 0.1,
        "buffer_size": 50,
        "learning_starts": 3,
        "batch_size": 8.0,
        "train_freq": 2,
        "gradient_steps": -1,
        "n_steps": 2,
        "action_noise": noise(0.3),
        "action_noise_decay": 0.9,
        "reward_shaping": [{"sb3_td3x.shaping.RewardScale": {"scale": 0.5}}, f"{__name__}.add_one"],
        "policy_delay": 4,
    }
    env = counting_vec_env(2)
    loaded = TD3X.load(
        zip_of(model), env=env, seed=5, verbose=0, tensorboard_log=str(tmp_path), device="cpu", **hyperparams
    )
    loaded.learn(20)
    assert loaded.lr_schedule(1.0) == 5e-3
    assert loaded.qf_lr_schedule(1.0) == 2e-3
    assert loaded.train_freq.frequency == 2  # type: ignore[union-attr]
    assert (loaded.gamma, loaded.batch_size, loaded.policy_delay) == (0.9, 8, 4)
    assert isinstance(loaded.replay_buffer, NStepReplayBuffer)
    assert (loaded.replay_buffer.n_steps, loaded.replay_buffer.gamma) == (2, 0.9)
    np.testing.assert_allclose(loaded.replay_buffer.rewards[:4, 0], 0.5 * np.arange(1, 5) + 1)
    assert isinstance(loaded.action_noise, VectorizedActionNoise)
    assert list(tmp_path.glob("*/events*"))


def test_gamma_of_a_loaded_agent_reaches_its_n_step_buffer() -> None:
    model = make(n_steps=3, gamma=0.9)
    loaded = TD3X.load(zip_of(model), gamma=0.5)
    assert isinstance(loaded.replay_buffer, NStepReplayBuffer)
    assert loaded.replay_buffer.gamma == 0.5
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny(n_steps=3, gamma=0.9))
    loaded = TD3X.load(zip_of(sb3), gamma=0.5, n_steps=2)
    assert isinstance(loaded.replay_buffer, NStepReplayBuffer)
    assert (loaded.replay_buffer.gamma, loaded.replay_buffer.n_steps) == (0.5, 2)
    assert not isinstance(TD3X.load(zip_of(sb3), n_steps=1).replay_buffer, NStepReplayBuffer)


@pytest.mark.parametrize("algorithm", [TD3, TD3X])
def test_buffer_class_that_ignores_n_steps_still_does_after_loading(algorithm: type[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = algorithm("MlpPolicy", CountingEnv(), **tiny(n_steps=3, replay_buffer_class=ReplayBuffer))
    with pytest.warns(UserWarning, match="n_steps=3 is not used"):
        loaded = TD3X.load(zip_of(model))
    assert type(loaded.replay_buffer) is ReplayBuffer


# Parameters


def test_parameters_go_around() -> None:
    # The number of updates, on which the delayed ones depend, is no parameter: odd in both
    model, other = make(seed=1).learn(20), make(seed=2).learn(10)
    other.set_parameters(model.get_parameters())
    assert_same(model.get_parameters(), other.get_parameters())
    assert_same_predictions(model, other)
    train_on_same_data([model, other], model)
    assert_same({**model.policy.state_dict()}, {**other.policy.state_dict()})


@pytest.mark.lowest_sb3
def test_parameters_have_sb3_s_layout() -> None:
    sb3, td3x = TD3("MlpPolicy", CountingEnv(), **tiny()).learn(20), make()
    td3x.set_parameters(sb3.get_parameters())
    assert_same(sb3.get_parameters()["policy"], td3x.get_parameters()["policy"])
    assert_same(optimizer_states(sb3), optimizer_states(td3x))
    sb3.set_parameters(td3x.get_parameters())  # type: ignore[arg-type]


def test_parameters_from_a_path(tmp_path: pathlib.Path) -> None:
    for algorithm in (TD3, TD3X):
        source: Any = algorithm("MlpPolicy", CountingEnv(), **tiny())
        source.learn(20)
        source.save(tmp_path / "agent")
        for path in (tmp_path / "agent", str(tmp_path / "agent.zip"), zip_of(source)):
            model = make(seed=3)
            model.set_parameters(path)
            assert_same_predictions(source, model)
            assert_same(optimizer_states(source), optimizer_states(model))


def test_some_parameters_only_if_the_match_need_not_be_exact() -> None:
    model, other = make(seed=1), make(seed=2)
    params = {"policy": model.get_parameters()["policy"]}
    with pytest.raises(ValueError, match=r"critic\.optimizer"):
        other.set_parameters(params)
    other.set_parameters(params, exact_match=False)
    assert_same_predictions(model, other)
    actor = {key: value for key, value in params["policy"].items() if key.startswith("actor.")}
    third = make(seed=3)
    with pytest.raises(RuntimeError, match="Missing key"):
        third.set_parameters({**model.get_parameters(), "policy": actor})
    critic = {key: value.clone() for key, value in third.critic.state_dict().items()}
    third.set_parameters({"policy": actor}, exact_match=False)
    assert_same_predictions(model, third)
    assert_same(critic, dict(third.critic.state_dict()))


def test_parameters_of_one_critic_only_if_the_match_need_not_be_exact() -> None:
    source, model = make(seed=1), make(seed=2)
    second = {key: value.clone() for key, value in model.policy.state_dict().items() if ".qf1." in key}
    first = {key: value for key, value in source.policy.state_dict().items() if key.startswith("critic.qf0.")}
    with pytest.raises(RuntimeError, match=r"Missing key.*critic\.qf1\.0\.weight"):
        make(seed=2).set_parameters({**source.get_parameters(), "policy": first})
    model.set_parameters({"policy": first}, exact_match=False)
    assert_same({**second, **first}, {key: model.policy.state_dict()[key] for key in {**second, **first}})


def test_parameters_of_a_policy_without_memory() -> None:
    source = make(seed=1)
    with th.device("meta"):
        policy: Any = type("Meta", (TD3XPolicy,), {"device": th.device("meta")})(
            source.observation_space, source.action_space, lambda _: 0.0, net_arch=[8]
        )
    policy.load_state_dict(source.policy.state_dict(), assign=True)
    assert {parameter.device.type for parameter in policy.parameters()} == {"cpu"}


def test_set_parameters_leaves_the_given_dictionary_alone() -> None:
    params = make(seed=1).learn(20).get_parameters()
    keys = {name: list(value) for name, value in params.items()}
    make(seed=2).set_parameters(params)
    assert {name: list(value) for name, value in params.items()} == keys


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        make().set_parameters({"nonsense": {}}, exact_match=False)


@pytest.mark.parametrize(("own", "given"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_parameters_of_another_number_of_critics_are_refused(own: int, given: int) -> None:
    source = make(policy_kwargs={"net_arch": [8], "n_critics": given}).learn(20)
    model = make(policy_kwargs={"net_arch": [8], "n_critics": own})
    before = {key: value.clone() for key, value in model.policy.state_dict().items()}
    with pytest.raises(ValueError, match="saved with other policy_kwargs"):
        model.set_parameters(source.get_parameters())
    with pytest.raises(ValueError, match="saved with other policy_kwargs"):
        model.set_parameters(zip_of(source))
    assert_same(before, dict(model.policy.state_dict()))
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        model.set_parameters({"policy": source.get_parameters()["policy"]})


def test_parameters_of_other_layers_are_refused() -> None:
    source, model = make(policy_kwargs={"net_arch": [9]}).learn(20), make()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.set_parameters(source.get_parameters())


# Odds and ends of saving


def test_env_is_not_needed_for_any_use_but_training(saved: bytes) -> None:
    loaded = TD3X.load(io.BytesIO(saved))
    loaded.predict(np.zeros(2, np.float32))
    zip_of(loaded)
    loaded.get_parameters()
    with pytest.raises((AssertionError, ValueError), match=r"env"):
        loaded.learn(10)
    loaded.set_env(DummyVecEnv([CountingEnv]))
    assert loaded.learn(10).num_timesteps == 10


def test_hook_with_a_lambda_is_saved_by_value() -> None:
    model = make(reward_shaping=[lambda batch: (batch.rewards + 10, batch.terminations), RewardScale(2.0)])
    with pytest.raises(ValueError, match=r"reward_shaping.*trusted=True"):
        TD3X.load(zip_of(model), env=CountingEnv())
    loaded = TD3X.load(zip_of(model), env=CountingEnv(), trusted=True).learn(3)
    np.testing.assert_array_equal(loaded.replay_buffer.rewards[:3, 0], [22, 24, 26])


def test_system_info_is_printed(saved: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    TD3X.load(io.BytesIO(saved), print_system_info=True)
    output = capsys.readouterr().out
    assert "CURRENT SYSTEM INFO" in output
    assert "SAVED MODEL SYSTEM INFO" in output
