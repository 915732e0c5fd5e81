"""Agents' files: their layout, and what comes back from them."""

import io
import json
import math
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import hostile
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, counting_vec_env, tiny, tiny_agent, zip_of
from gymnasium import spaces
from noises import normal_noise
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from torch import nn

from sb3_td3x import TD3X
from sb3_td3x.files.agent import UNSAVED, read_agent
from sb3_td3x.files.records import to_record
from sb3_td3x.policies import TD3XPolicy
from sb3_td3x.shaping import (
    ActionCost,
    FallPenalty,
    RewardClip,
    RewardOffset,
    RewardScale,
    make_reward_shaping,
)


def saved(model: Any) -> bytes:
    """Return what ``save`` writes."""
    return zip_of(model).getvalue()


def attributes_of(content: bytes) -> dict[str, Any]:
    """Return the attributes in a file, before an agent changes them."""
    return read_agent(io.BytesIO(content), TD3X(TD3XPolicy, None, _init_setup_model=False))[0]


@pytest.fixture(scope="module")
def good() -> bytes:
    """Return the file of a tiny agent with most of what an agent may have."""
    return saved(tiny_agent(action_noise=normal_noise(), learning_rate=LinearSchedule(1e-3, 0.0, 1.0)).learn(20))


@pytest.fixture(scope="module")
def good_sb3() -> bytes:
    """Return the file of the same agent of SB3."""
    return saved(TD3("MlpPolicy", CountingEnv(), **tiny(action_noise=normal_noise())).learn(20))


# What is written


def test_layout_is_sb3_s(good: bytes) -> None:
    members = hostile.members_of(good)
    assert members.keys() == {
        *("_sb3_td3x_version", "data", "policy.pth", "actor.optimizer.pth", "critic.optimizer.pth"),
        *("pytorch_variables.pth", "_stable_baselines3_version", "system_info.txt"),
    }
    data = json.loads(members["data"], parse_constant=pytest.fail)
    assert data["gamma"] == 0.99
    assert data["num_timesteps"] == 20
    for name in members:
        if name.endswith(".pth"):
            th.load(io.BytesIO(members[name]), weights_only=True)


ZOO = {
    "learning_rate": ConstantSchedule(1e-3),
    "qf_learning_rate": "lin_7e-4",
    "reward_shaping": {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}},
    "action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1)),
    "policy_kwargs": {"net_arch": [8], "activation_fn": nn.Tanh, "optimizer_class": th.optim.AdamW},
    "train_freq": (2, "step"),
    "tensorboard_log": "logs",
}


def zoo_agent() -> TD3X:
    from rl_zoo3.utils import SimpleLinearSchedule

    return tiny_agent(counting_vec_env(3), **{**ZOO, "learning_rate": SimpleLinearSchedule(1e-3)})


def her_agent() -> TD3X:
    kwargs = {"n_sampled_goal": 2, "goal_selection_strategy": "final"}
    return TD3X(
        "MultiInputPolicy",
        BitFlippingEnv(n_bits=2, continuous=True),
        **tiny(replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs=kwargs),
    )


WITHOUT_PICKLES: dict[str, Callable[[], TD3X]] = {
    "default": tiny_agent,
    "zoo": zoo_agent,
    "her": her_agent,
    "hooks": lambda: tiny_agent(
        reward_shaping=[
            FallPenalty(warmup=9),
            RewardScale(2.0),
            RewardOffset(-0.1),
            ActionCost(0.1, 5),
            RewardClip(-1, 1),
        ]
    ),
    "made hook": lambda: tiny_agent(reward_shaping=make_reward_shaping([FallPenalty(), RewardScale(2.0)])),
    "schedule": lambda: tiny_agent(learning_rate=FloatSchedule(LinearSchedule(1e-3, 1e-4, 0.5))),
    "path": lambda: tiny_agent(tensorboard_log=pathlib.Path("logs")),
    "numpy numbers": lambda: tiny_agent(gamma=np.float32(0.9), target_policy_noise=np.float64(0.1)),
    "unusual numbers": lambda: tiny_agent(seed=2**31),
    "noise of lists": lambda: tiny_agent(action_noise=NormalActionNoise([0.0], [0.1])),  # type: ignore[arg-type]
    "noise of two shapes": lambda: tiny_agent(
        CountingEnv(action_space=spaces.Box(-1, 1, (4,), np.float32)),
        action_noise=OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(4), initial_noise=np.zeros(4)),
    ),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", WITHOUT_PICKLES)
def test_agent_needs_no_pickle_and_comes_back_the_same(
    case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some write logs into the current directory
    monkeypatch.chdir(tmp_path)
    model = WITHOUT_PICKLES[case]().learn(24)
    content = saved(model)
    assert not [name for name in hostile.members_of(content) if name.startswith("pickled")]
    loaded = TD3X.load(io.BytesIO(content))
    # `load` seeds it again, as in SB3
    assert attributes_of(content)["action_space"].np_random.random() == model.action_space.np_random.random()
    before, after = vars(model), vars(loaded)
    saved_names = {name for name in before if name in json.loads(hostile.members_of(content)["data"])}
    assert {"_last_obs", "ep_info_buffer", "action_noise", "train_freq", "observation_space"} <= saved_names
    for name in saved_names:
        assert repr(after[name]) == repr(before[name]), name
        assert type(after[name]) is type(before[name]) or name == "learning_rate", name
    progress = np.linspace(0, 1, 50)
    assert [loaded.lr_schedule(it) for it in progress] == [model.lr_schedule(it) for it in progress]
    obs = model.observation_space.sample()
    np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("cls", [TD3X, TD3])
@pytest.mark.parametrize("steps", [12.0, np.int64(12), np.float32(12)], ids=repr)
def test_numbers_of_steps_come_back_as_integers(cls: type[TD3], steps: Any) -> None:
    """Users of SB3 write ``learn(1e6)``."""
    model = cls("MlpPolicy", CountingEnv(), **tiny(verbose=True)).learn(steps).learn(12, reset_num_timesteps=False)
    loaded = TD3X.load(io.BytesIO(saved(model.learn(steps))), env=CountingEnv())
    assert loaded._total_timesteps == steps
    assert type(loaded._total_timesteps) is int
    assert type(loaded._num_timesteps_at_start) is int
    assert loaded.verbose == 1
    loaded.learn(12, reset_num_timesteps=False)
    assert loaded.num_timesteps == 24


def test_any_number_of_steps_of_sb3_comes_back(good_sb3: bytes) -> None:
    for steps in (11.5, math.inf):
        model = TD3.load(io.BytesIO(good_sb3), env=CountingEnv()).learn(steps, StopTrainingOnMaxEpisodes(2))
        assert TD3X.load(io.BytesIO(saved(model)))._total_timesteps == steps


def test_counters_are_whole_numbers(good: bytes) -> None:
    scalar = to_record(np.int64(1))
    counters = ("n_envs", "num_timesteps", "_num_timesteps_at_start", "_n_updates", "_episode_num")
    for name in (*counters, "_exploration_timesteps", "_rollout_timesteps", "_stats_window_size"):
        for value in (1.0, scalar):
            loaded = TD3X.load(io.BytesIO(hostile.with_data(good, **{name: value})))
            assert getattr(loaded, name) == 1
            assert type(getattr(loaded, name)) is int
        for value in (1.5, to_record(math.inf), to_record(math.nan), True, "1", None, [1]):
            with pytest.raises(ValueError, match=f"bad {name}: "):
                TD3X.load(io.BytesIO(hostile.with_data(good, **{name: value})))


def test_saving_replaces_the_file_as_a_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_agent()
    model.save(tmp_path / "agent")
    before = (tmp_path / "agent.zip").read_bytes()

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(th, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        model.save(tmp_path / "agent")
    assert (tmp_path / "agent.zip").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["agent.zip"]


def test_names_and_folders_are_sb3_s(tmp_path: pathlib.Path) -> None:
    model, sb3 = tiny_agent(), TD3("MlpPolicy", CountingEnv(), **tiny())
    (tmp_path / "ours" / "folder.d").mkdir(parents=True)
    (tmp_path / "sb3" / "folder.d").mkdir(parents=True)
    for folder, agent in ((tmp_path / "ours", model), (tmp_path / "sb3", sb3)):
        for name in ("agent", "agent.zip", "v1.5", "new/agent", "folder.d"):
            with warnings.catch_warnings(record=True):
                agent.save(str(folder / name))
    ours, theirs = (
        {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")} for name in ("ours", "sb3")
    )
    assert ours == theirs


def test_replaced_method_is_not_saved() -> None:
    model = tiny_agent()
    model.train = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert TD3X.load(io.BytesIO(saved(model))).train.__func__ is TD3X.train  # type: ignore[attr-defined]


def test_include_and_exclude_are_sb3_s() -> None:
    file = zip_of(tiny_agent(), exclude=["ep_info_buffer"], include=["lr_schedule"])
    data = json.loads(hostile.members_of(file.getvalue())["data"])
    assert "ep_info_buffer" not in data
    assert "lr_schedule" in data
    assert TD3X.load(file).ep_info_buffer is None


def test_no_attribute_is_forgotten(good: bytes) -> None:
    """Each attribute of an agent is either saved or made again."""
    model = tiny_agent(action_noise=normal_noise()).learn(20)
    data = json.loads(hostile.members_of(good)["data"])
    assert vars(model).keys() <= {*data, *model._excluded_save_params()}
    assert not UNSAVED & data.keys()


def test_attributes_that_are_made_again_are_not_read(good: bytes) -> None:
    unsaved = dict.fromkeys((*UNSAVED, "policy", "device", "env", "_logger", "replay_buffer"), 1)
    TD3X.load(io.BytesIO(hostile.with_data(good, **unsaved)), env=CountingEnv()).learn(10)


def test_replay_buffer_in_the_agent_s_file() -> None:
    """SB3 can pickle the replay buffer there."""
    file = io.BytesIO()
    with pytest.raises(ValueError, match=r"include=\['replay_buffer'\] is not allowed, expected no replay_buffer"):
        tiny_agent().save(file, include=["replay_buffer"])
    assert not file.getvalue()
    sb3_model = TD3("MlpPolicy", CountingEnv(), **tiny()).learn(10)
    sb3_model.save(file, include=["replay_buffer"])
    assert TD3X.load(io.BytesIO(file.getvalue()), trusted=True).num_timesteps == 10


class WithTemperature(TD3X):
    """An algorithm with a further tensor."""

    def _setup_model(self) -> None:
        super()._setup_model()
        self.log_alpha: th.Tensor | None = th.zeros(1)

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        states, variables = super()._get_torch_save_params()
        return states, [*variables, "log_alpha"]


def test_tensors_of_a_subclass_come_back() -> None:
    model, file = WithTemperature("MlpPolicy", CountingEnv(), **tiny()), io.BytesIO()
    model.log_alpha = th.full((1,), 7.0)
    model.save(file)
    loaded = WithTemperature.load(io.BytesIO(file.getvalue()))
    assert loaded.log_alpha == 7
    # One that has no value yet
    model.log_alpha = None
    no_value = io.BytesIO()
    model.save(no_value)
    assert WithTemperature.load(io.BytesIO(no_value.getvalue())).log_alpha == 0
    # The class has none
    assert not hasattr(TD3X.load(io.BytesIO(file.getvalue())), "log_alpha")
    loaded.set_parameters(io.BytesIO(file.getvalue()))


# Agents of SB3


def test_reading_agrees_with_sb3(good_sb3: bytes) -> None:
    ours = attributes_of(good_sb3)
    theirs = vars(TD3.load(io.BytesIO(good_sb3), device="cpu"))
    assert {"action_noise", "_last_obs", "ep_info_buffer", "train_freq", "observation_space"} <= ours.keys()
    for name, value in ours.items():
        assert repr(value) == repr(theirs[name]), name
        assert type(value) is type(theirs[name])


@pytest.mark.lowest_sb3
def test_space_of_gym_becomes_gymnasium_s(good_sb3: bytes) -> None:
    """Agents of SB3 before version 2 are read without Gym."""
    for space in (spaces.Box(-2, 1, (3,)), spaces.Box(0, 255, (2, 2), np.uint8)):
        pickled = cloudpickle.dumps(space).replace(b"\x8c\x14gymnasium.spaces.box", b"\x8c\x0egym.spaces.box")
        assert b"gymnasium" not in pickled
        assert attributes_of(hostile.with_pickle(good_sb3, "anything", pickled))["anything"] == space


def test_attributes_do_not_hide_methods(good: bytes) -> None:
    model = TD3X.load(io.BytesIO(hostile.with_data(good, predict=1, action_noise_scale=1)))
    assert callable(model.predict)
