"""Agents' files: what comes back from them, and that nothing in them is run."""

import base64
import functools
import io
import json
import math
import pathlib
import pickle
import random
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import hostile
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, counting_vec_env, tiny
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from torch import nn

from sb3_td3x import TD3X
from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.files.agent import open_agent, read_agent
from sb3_td3x.files.atomic import FileRefused
from sb3_td3x.files.inspect import describe_agent
from sb3_td3x.files.records import from_plain, to_plain
from sb3_td3x.files.tensors import TensorInfo, describe_state, load_state
from sb3_td3x.policies import TD3XPolicy
from sb3_td3x.shaping import (
    ActionCost,
    FallPenalty,
    RewardClip,
    RewardOffset,
    RewardScale,
    ShapingBatch,
    make_reward_shaping,
)


def make(env: Any = None, **kwargs: Any) -> TD3X:
    """A tiny agent."""
    return TD3X("MlpPolicy", CountingEnv() if env is None else env, **tiny(**kwargs))


def saved(model: Any) -> bytes:
    """What ``save`` writes."""
    file = io.BytesIO()
    model.save(file)
    return file.getvalue()


def noise() -> NormalActionNoise:
    return NormalActionNoise(np.zeros(1), 0.1 * np.ones(1))


@pytest.fixture(scope="module")
def good() -> bytes:
    """The file of a tiny agent with most of what an agent may have."""
    return saved(make(action_noise=noise(), learning_rate=LinearSchedule(1e-3, 0.0, 1.0)).learn(20))


@pytest.fixture(scope="module")
def good_sb3() -> bytes:
    """The same of SB3."""
    return saved(TD3("MlpPolicy", CountingEnv(), **tiny(action_noise=noise())).learn(20))


def assert_refused(content: bytes, path: pathlib.Path, readers: Any = None) -> None:
    """Each reader refuses the file at once, in one sentence that names it, with nothing behind it."""
    path.write_bytes(content)
    for read in readers or (TD3X.load, make().set_parameters):
        with pytest.raises(ValueError, match="agent") as error:
            read(path)
        message = str(error.value)
        assert str(path) in message
        assert "\n" not in message
        assert len(message) < 1000
        assert error.value.__cause__ is None
        assert error.value.__context__ is None or error.value.__suppress_context__


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

    return make(counting_vec_env(3), **{**ZOO, "learning_rate": SimpleLinearSchedule(1e-3)})


def her_agent() -> TD3X:
    kwargs = {"n_sampled_goal": 2, "goal_selection_strategy": "final"}
    return TD3X(
        "MultiInputPolicy",
        BitFlippingEnv(n_bits=2, continuous=True),
        **tiny(replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs=kwargs),
    )


PLAIN: dict[str, Callable[[], TD3X]] = {
    "default": make,
    "zoo": zoo_agent,
    "her": her_agent,
    "hooks": lambda: make(
        reward_shaping=[
            FallPenalty(warmup=9),
            RewardScale(2.0),
            RewardOffset(-0.1),
            ActionCost(0.1, 5),
            RewardClip(-1, 1),
        ]
    ),
    "made hook": lambda: make(reward_shaping=make_reward_shaping([FallPenalty(), RewardScale(2.0)])),
    "schedule": lambda: make(learning_rate=FloatSchedule(LinearSchedule(1e-3, 1e-4, 0.5))),
    "path": lambda: make(tensorboard_log=pathlib.Path("logs")),
    "numpy numbers": lambda: make(gamma=np.float32(0.9), target_policy_noise=np.float64(0.1)),
    "unusual numbers": lambda: make(seed=2**31),
    "noise of lists": lambda: make(action_noise=NormalActionNoise([0.0], [0.1])),  # type: ignore[arg-type]
    "noise of two shapes": lambda: make(
        CountingEnv(action_space=spaces.Box(-1, 1, (4,), np.float32)),
        action_noise=OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(4), initial_noise=np.zeros(4)),
    ),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", PLAIN)
def test_agent_is_plain_and_comes_back_the_same(case: str) -> None:
    model = PLAIN[case]().learn(24)
    content = saved(model)
    assert not [name for name in hostile.members_of(content) if name.startswith("pickled")]
    loaded = TD3X.load(io.BytesIO(content))
    # `load` seeds it again, as in SB3
    attributes, _ = read_agent(io.BytesIO(content), TD3X)
    assert attributes["action_space"].np_random.random() == model.action_space.np_random.random()
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
    """SB3's users write ``learn(1e6)``."""
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
    scalar = to_plain(np.int64(1))
    counters = ("n_envs", "num_timesteps", "_num_timesteps_at_start", "_n_updates", "_episode_num")
    for name in (*counters, "_exploration_timesteps", "_rollout_timesteps", "_stats_window_size"):
        for value in (1.0, scalar):
            loaded = TD3X.load(io.BytesIO(hostile.with_data(good, **{name: value})))
            assert getattr(loaded, name) == 1
            assert type(getattr(loaded, name)) is int
        for value in (1.5, to_plain(math.inf), to_plain(math.nan), True, "1", None, [1]):
            with pytest.raises(ValueError, match=f"bad {name}: "):
                TD3X.load(io.BytesIO(hostile.with_data(good, **{name: value})))


def test_saving_replaces_the_file_as_a_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
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
    model, sb3 = make(), TD3("MlpPolicy", CountingEnv(), **tiny())
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
    model = make()
    model.train = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert TD3X.load(io.BytesIO(saved(model))).train.__func__ is TD3X.train  # type: ignore[attr-defined]


def test_include_and_exclude_are_sb3_s() -> None:
    file = io.BytesIO()
    make().save(file, exclude=["ep_info_buffer"], include=["lr_schedule"])
    data = json.loads(hostile.members_of(file.getvalue())["data"])
    assert "ep_info_buffer" not in data
    assert "lr_schedule" in data
    assert TD3X.load(io.BytesIO(file.getvalue())).ep_info_buffer is None


def test_replay_buffer_in_the_agent_s_file() -> None:
    """SB3 pickles it there if it is asked to."""
    file = io.BytesIO()
    with pytest.raises(ValueError, match=r"include=\['replay_buffer'\] is not allowed, expected no replay_buffer"):
        make().save(file, include=["replay_buffer"])
    assert not file.getvalue()
    sb3_model = TD3("MlpPolicy", CountingEnv(), **tiny()).learn(10)
    sb3_model.save(file, include=["replay_buffer"])
    assert TD3X.load(io.BytesIO(file.getvalue()), trusted=True).num_timesteps == 10


class WithNote(TD3X):
    """Has an attribute of its own."""

    note: Any = None


@pytest.mark.parametrize("note", [np.zeros(52 * 2**20, np.uint8), [0] * 300_001], ids=["array", "list"])
def test_large_attributes_need_trust(note: Any) -> None:
    model, file = WithNote("MlpPolicy", CountingEnv(), **tiny()), io.BytesIO()
    model.note = note
    with pytest.warns(UserWarning, match="will load with trusted=True only: its attributes are large"):
        model.save(file)
    with pytest.raises(ValueError, match=r"too large.*TD3X\.load takes it with trusted=True"):
        WithNote.load(io.BytesIO(file.getvalue()))
    loaded = WithNote.load(io.BytesIO(file.getvalue()), trusted=True)
    np.testing.assert_array_equal(loaded.note, note)


class WithTemperature(TD3X):
    """Has a tensor of its own beside the networks."""

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
    # One that is not there yet
    model.log_alpha = None
    no_value = io.BytesIO()
    model.save(no_value)
    assert WithTemperature.load(io.BytesIO(no_value.getvalue())).log_alpha == 0
    # Of a class that has none
    assert not hasattr(TD3X.load(io.BytesIO(file.getvalue())), "log_alpha")
    loaded.set_parameters(io.BytesIO(file.getvalue()))


# What only a pickle can hold


class OwnNoise(ActionNoise):
    """A user's noise."""

    def __call__(self) -> np.ndarray:
        return np.zeros(1)


class OwnPolicy(TD3XPolicy):
    """A user's policy."""


class OwnBuffer(ReplayBuffer):
    """A user's replay buffer."""


def own_hook(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """A user's hook."""
    return batch.rewards + 1, batch.terminations


OWN: dict[str, tuple[str, Any]] = {
    "learning_rate": ("learning_rate", lambda progress: 1e-3 * progress),
    "qf_learning_rate": ("qf_learning_rate", lambda progress: 1e-3 * progress),
    "action_noise": ("action_noise", OwnNoise()),
    "replay_buffer_class": ("replay_buffer_class", OwnBuffer),
    "reward_shaping": ("reward_shaping", own_hook),
    "policy_kwargs": ("policy_kwargs", {"net_arch": [8], "activation_fn": type("Own", (nn.ReLU,), {})}),
}


@pytest.mark.parametrize("case", [*OWN, "policy_class"])
def test_user_s_own_objects_are_refused_by_name_unless_trusted_or_given(case: str, tmp_path: pathlib.Path) -> None:
    if case == "policy_class":
        value: Any = OwnPolicy
        model = TD3X(OwnPolicy, CountingEnv(), **tiny())
    else:
        _, value = OWN[case]
        model = make(**{case: value})
    path = tmp_path / "agent.zip"
    model.learn(12).save(path)
    assert f"pickled.{case}.pkl" in hostile.members_of(path.read_bytes())
    with pytest.raises(ValueError, match=rf"agent\.zip .*{case}.*custom_objects.*trusted=True"):
        TD3X.load(path)
    assert case in describe_agent(path)
    for kwargs in ({"trusted": True}, {"custom_objects": {case: value}}, {case: value}):
        loaded = TD3X.load(path, env=CountingEnv(), **kwargs)
        assert type(getattr(loaded, case)) is type(value)
        loaded.learn(12)
    # Weights need no trust
    model.set_parameters(path)


def test_object_that_its_numbers_do_not_make_comes_back_from_a_pickle(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    theta: Any = np.array([0.15])
    make(action_noise=OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), theta)).learn(12).save(path)
    with pytest.raises(ValueError, match=r"agent\.zip .*action_noise.*trusted=True"):
        TD3X.load(path)
    noise = TD3X.load(path, trusted=True).action_noise
    assert isinstance(noise, OrnsteinUhlenbeckActionNoise)
    assert noise._theta == theta
    assert TD3X.load(path, action_noise=None).action_noise is None


class OwnExtractor(FlattenExtractor):
    """A user's features extractor, which has numbers that are no sizes and looks at tensors."""

    def __init__(self, observation_space: spaces.Space, table: Any) -> None:
        super().__init__(observation_space)
        self.scale = 1 / th.as_tensor(table, dtype=th.float32).sum().item()

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return super().forward(observations) * self.scale


OWN_NETWORKS: dict[str, dict[str, Any]] = {
    "table": {"features_extractor_class": OwnExtractor, "features_extractor_kwargs": {"table": list(range(101))}},
    "number": {"features_extractor_class": OwnExtractor, "features_extractor_kwargs": {"table": 2_000_000}},
    "partial": {"features_extractor_class": functools.partial(OwnExtractor, table=[1.0])},
    "function": {"features_extractor_class": lambda space: OwnExtractor(space, [1.0])},
}


def own_networks(case: str) -> dict[str, Any]:
    return {"net_arch": [8], **OWN_NETWORKS[case]}


@pytest.mark.parametrize("case", OWN_NETWORKS)
def test_user_s_own_networks_come_back(case: str) -> None:
    model = make(policy_kwargs=own_networks(case)).learn(12)
    content = saved(model)
    with pytest.raises(ValueError, match=r"policy_kwargs.*custom_objects.*trusted=True"):
        TD3X.load(io.BytesIO(content))
    given = own_networks(case)
    for kwargs in ({"trusted": True}, {"custom_objects": {"policy_kwargs": given}}, {"policy_kwargs": given}):
        loaded = TD3X.load(io.BytesIO(content), env=CountingEnv(), **kwargs)
        obs = model.observation_space.sample()
        np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
        loaded.learn(12)


def test_tensors_of_other_networks_than_the_user_s_own_are_refused() -> None:
    kwargs = own_networks("table")
    others = hostile.members_of(saved(make(policy_kwargs={**kwargs, "net_arch": [9]})))
    content = hostile.with_members(saved(make(policy_kwargs=kwargs)), policy__pth=others["policy.pth"])
    with pytest.raises((ValueError, RuntimeError), match="size mismatch"):
        TD3X.load(io.BytesIO(content), trusted=True)


def test_run_with_the_user_s_own_networks_goes_on(tmp_path: pathlib.Path) -> None:
    make(policy_kwargs=own_networks("number")).learn(20, ResumableCheckpoint(tmp_path))
    with pytest.raises(ValueError, match=r"policy_kwargs.*trusted=True"):
        TD3X.resume(tmp_path, CountingEnv())
    model = TD3X.resume(tmp_path, CountingEnv(), trusted=True)
    assert model.learn(10, ResumableCheckpoint(tmp_path), reset_num_timesteps=False).num_timesteps == 30


def test_trusted_file_of_a_class_that_is_not_here(good_sb3: bytes) -> None:
    content = hostile.with_pickle(good_sb3, "anything", b"cnot_installed\nNothing\n.")
    with pytest.raises(ValueError, match=r"anything, which cannot.*ModuleNotFoundError.*custom_objects"):
        TD3X.load(io.BytesIO(content), trusted=True)
    TD3X.load(io.BytesIO(content), trusted=True, custom_objects={"anything": 1})


def test_hook_that_a_file_names_is_not_imported(tmp_path: pathlib.Path) -> None:
    path, sentinel = tmp_path / "agent.zip", tmp_path / "sentinel"
    content = saved(make())
    for spec in (
        {"os.mkdir": {"path": str(sentinel)}},
        {"subprocess.Popen": {"args": ["mkdir", str(sentinel)]}},
        [{"sb3_td3x.shaping.RewardScale": {"scale": 1.0}}, {"os.mkdir": {"path": str(sentinel)}}],
        {"sb3_td3x.shaping.PotentialShaping": {"potential": {"subprocess.Popen": {"args": ["mkdir", str(sentinel)]}}}},
        {"sb3_td3x.shaping.ShapingChain": {"hooks": [{"subprocess.Popen": {"args": ["mkdir", str(sentinel)]}}]}},
        f"{__name__}.own_hook",
    ):
        path.write_bytes(hostile.with_data(content, reward_shaping=spec))
        loaded = TD3X.load(path, env=CountingEnv())
        loaded.predict(np.zeros(2, np.float32))
        for learn in (loaded.learn, loaded.learn):
            with pytest.raises(ValueError, match=r"reward_shaping=.*trusted=True"):
                learn(10)
        # A copy is no more trusted
        path.write_bytes(saved(loaded))
        with pytest.raises(ValueError, match=r"reward_shaping=.*trusted=True"):
            TD3X.load(path, env=CountingEnv()).learn(10)
    assert not sentinel.exists()
    TD3X.load(path, env=CountingEnv(), reward_shaping=f"{__name__}.own_hook").learn(10)
    TD3X.load(path, env=CountingEnv(), trusted=True).learn(10)
    loaded.reward_shaping = own_hook
    loaded.learn(10)


def test_copy_of_an_agent_with_a_hook_of_the_module_goes_on() -> None:
    model = make(reward_shaping=[{"sb3_td3x.shaping.RewardScale": {"scale": 2}}, "sb3_td3x.shaping.FallPenalty"])
    loaded = TD3X.load(io.BytesIO(saved(model)), env=CountingEnv()).learn(3)
    np.testing.assert_array_equal(loaded.replay_buffer.rewards[:3, 0], [2, 4, 6])


# Hostile files


def torch_attacks(content: bytes, path: str) -> Iterator[tuple[str, bytes]]:
    """State dictionaries that are not what they should be."""
    for name in ("os.mkdir", "eval", "in a list", "old opcodes", "extension code"):
        pickled = hostile.GADGETS[name](path)
        yield f"{name} in a state", hostile.torch_with_pickle(content, pickled)
        yield f"{name} instead of a state", pickled
    yield "nothing", b""
    yield "text", b"nothing"
    yield "nested gadget", hostile.torch_file({"state": {0: {"step": hostile.Call(print, path)}}, "param_groups": []})
    yield "huge tensor", hostile.torch_file({"actor.mu.0.weight": hostile.HugeTensor((2**20, 2**20), (0, 0))})
    yield "tensor outside of its memory", hostile.torch_file({"a": hostile.HugeTensor((2, 4), (2**30, 1))})
    yield "negative shape", hostile.torch_file({"a": hostile.HugeTensor((-1,), (1,))})
    yield "a list", hostile.torch_file([th.zeros(3)])
    yield "no tensors", hostile.torch_file({"a": 1})
    yield "truncated", content[: len(content) // 2]
    yield "compressed", hostile.plain_zip(hostile.members_of(content), zipfile.ZIP_DEFLATED)
    for name, trick in hostile.zip_tricks(content):
        if "member" not in name and "checksum" not in name:
            yield name, trick


def hostile_states(good: bytes, path: str) -> Iterator[tuple[str, bytes]]:
    members = hostile.members_of(good)
    for member in ("policy.pth", "actor.optimizer.pth", "critic.optimizer.pth", "pytorch_variables.pth"):
        for name, content in torch_attacks(members[member], path):
            yield f"{member}: {name}", hostile.sealed_zip({**members, member: content})


def hostile_data(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Attributes that are not what they should be."""
    array = {":plain:": "array", "dtype": "<f4", "shape": [2], "data": base64.b64encode(bytes(8)).decode()}
    box = json.loads(hostile.members_of(good)["data"])["observation_space"]
    for name, changed in {
        "attribute instead of a method": {"predict": 1},
        "attribute instead of a property": {"replay_buffer": 1},
        "dunder attribute": {"__class__": 1},
        "no identifier": {"a b": 1},
        "class that is not listed": {"policy_class": {":plain:": "class", "path": "subprocess.Popen"}},
        "class of another kind": {"policy_class": {":plain:": "class", "path": "torch.optim.adam.Adam"}},
        "object that is not listed": {"action_noise": {":plain:": "object", "path": "os.mkdir", "state": {}}},
        "object of another kind": {"observation_space": {":plain:": "array", "dtype": "<f4", "shape": [], "data": ""}},
        "object of nothing": {"action_noise": {**box, "path": "stable_baselines3.common.noise.NormalActionNoise"}},
        "unknown kind": {"action_noise": {":plain:": "pickle", "data": ""}},
        "array of objects": {"_last_obs": {**array, "dtype": "|O"}},
        "array larger than its data": {"_last_obs": {**array, "shape": [2**40]}},
        "array of a negative size": {"_last_obs": {**array, "shape": [-1]}},
        "array of structures": {"_last_obs": {**array, "dtype": "V" + "9" * 12}},
        "array of no base64": {"_last_obs": {**array, "data": "%"}},
        "other generator": {
            "action_space": _with_generator(good, {"bit_generator": "MT19937", "state": {"pos": 2**31}})
        },
        "wide layers": {"policy_kwargs": {"net_arch": [2**40]}},
        "wide layers within the limit": {"policy_kwargs": {"net_arch": [2**20, 2**20]}},
        "many layers": {"policy_kwargs": {"net_arch": [8] * 101}},
        "negative layer": {"policy_kwargs": {"net_arch": [-8]}},
        "no layers": {"policy_kwargs": {"net_arch": "big"}},
        "many critics": {"policy_kwargs": {"net_arch": [8], "n_critics": 10**9}},
        "many layers of many critics": {"policy_kwargs": {"net_arch": [1] * 100, "n_critics": 1000}},
        "many layers of many critics, alone": {
            "policy_kwargs": {"net_arch": {"pi": [1], "qf": [1] * 100}, "n_critics": 1000}
        },
        "other layers": {"policy_kwargs": {"net_arch": [9]}},
        "unknown argument": {"policy_kwargs": {"net_arch": [8], "nonsense": 1}},
        "optimizer as an activation": {
            "policy_kwargs": {"activation_fn": {":plain:": "class", "path": "torch.optim.adam.Adam"}}
        },
        "no policy_kwargs": {"policy_kwargs": None},
        "huge space": {"observation_space": {**box, "state": {**box["state"], "low": {**array, "shape": [2**50]}}}},
        "other space": {"action_space": box},
        "too many values": {"ep_info_buffer": [0] * 300_001},
        "negative number of envs": {"n_envs": -1},
        "text as a counter": {"num_timesteps": "many"},
        "unknown argument of the optimizer": {"policy_kwargs": {"net_arch": [8], "optimizer_kwargs": {"nonsense": 1}}},
        "pickle that is not there": {"action_noise": {":pickled:": "nothing"}},
    }.items():
        yield name, hostile.with_data(good, **changed)
    yield "deep", hostile.with_members(good, data=b'{"policy_class":' + b"[" * 100_000)
    deep = json.dumps({**json.loads(hostile.members_of(good)["data"]), "a": 1})
    yield (
        "deep lists",
        hostile.with_members(good, data=deep.replace('"a": 1', '"a": ' + "[" * 500 + "]" * 500).encode()),
    )
    yield "huge number", hostile.with_members(good, data=deep.replace('"a": 1', '"a": ' + "9" * 10_000).encode())
    yield "large", hostile.with_members(good, data=b" " * (64 * 2**20 + 1))


def _with_generator(good: bytes, state: Any) -> Any:
    space = json.loads(hostile.members_of(good)["data"])["action_space"]
    space["state"]["_np_random"] = {":plain:": "generator", "state": state}
    return space


@pytest.mark.parametrize("attribute", ["action_noise", "policy_class", "_last_obs", "policy_kwargs", "anything"])
def test_gadget_that_sb3_would_run_is_refused(attribute: str, good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    path, sentinel = tmp_path / "agent.zip", tmp_path / "sentinel"
    for name, gadget in hostile.GADGETS.items():
        content = hostile.with_pickle(good_sb3, attribute, gadget(str(sentinel)))
        assert_refused(content, path, [TD3X.load])
        describe_agent(path)
        make().set_parameters(path)
        assert not sentinel.exists(), name


def test_gadgets_are_real(good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    """SB3 runs them: else the test above would say nothing."""
    ran = 0
    for name, gadget in hostile.GADGETS.items():
        sentinel = tmp_path / "".join(filter(str.isalpha, name))
        content = hostile.with_pickle(good_sb3, "anything", gadget(str(sentinel)))
        try:
            TD3.load(io.BytesIO(content), device="cpu")
        except Exception as error:  # some stop after they have run
            print(name, error)
        ran += sentinel.exists()
    assert ran >= 10


def test_gadget_where_nothing_is_read_does_nothing(good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    sentinel = tmp_path / "sentinel"
    for attribute in ("lr_schedule", "actor_batch_norm_stats"):
        TD3X.load(io.BytesIO(hostile.with_pickle(good_sb3, attribute, hostile.GADGETS["exec"](str(sentinel)))))
    assert not sentinel.exists()


def test_gadget_in_a_member_of_its_own_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    path, sentinel = tmp_path / "agent.zip", tmp_path / "sentinel"
    for gadget in hostile.GADGETS.values():
        content = hostile.with_data(good, action_noise={":pickled:": "a noise"})
        content = hostile.with_members(content, pickled__action_noise__pkl=gadget(str(sentinel)))
        assert_refused(content, path, [TD3X.load])
        describe_agent(path)
        assert not sentinel.exists()


def test_hostile_state_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    sentinel, number = tmp_path / "sentinel", 0
    for name, content in hostile_states(good, str(sentinel)):
        print(name)
        start = time.monotonic()
        assert_refused(content, tmp_path / "agent.zip")
        assert time.monotonic() - start < 5
        assert not sentinel.exists()
        number += 1
    assert number >= 80


def test_state_that_takes_long_to_read_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    """Small as a pickle, but it stands in many places, or is multiplied."""
    members = hostile.members_of(good)
    huge, ones = int.from_bytes(random.Random(0).randbytes(2_000_000), "big"), (1,) * 100_000
    for value, key in (
        (hostile.nested([0], 15), "0"),
        (hostile.Items(hostile.nested([0], 15), 1), "0"),
        (th.zeros(4), hostile.nested((0,), 15)),
        (hostile.HugeTensor((huge, huge), (huge, huge)), "0"),
        ([hostile.HugeTensor(ones, ones) for _ in range(2000)], None),
    ):
        for member in ("policy.pth", "critic.optimizer.pth"):
            changed = (
                hostile.torch_file(value)
                if key is None
                else hostile.torch_with_pickle(members[member], hostile.torch_pickle(value, key))
            )
            start = time.process_time()
            assert_refused(hostile.sealed_zip({**members, member: changed}), tmp_path / "agent.zip")
            assert time.process_time() - start < 8


def reshaped_in_a_state() -> bytes:
    pickled = hostile.torch_pickle({"a": hostile.ReshapedTensor((2**10, 2**10), (0, 0))})
    return hostile.torch_with_pickle(hostile.torch_file({"a": th.zeros(4)}), pickled)


def reshaped_in_versions() -> bytes:
    state = th.nn.Linear(1, 1).state_dict()
    vars(state)["_metadata"] = hostile.ReshapedTensor((2**10, 2**10), (0, 0))
    return hostile.torch_file(state)


def old_format_before_it() -> bytes:
    old = io.BytesIO()
    th.save({"b": th.zeros(1000)}, old, _use_new_zipfile_serialization=False)
    return old.getvalue() + hostile.torch_file({"a": th.zeros(3)})


def another_pickle(name: str) -> bytes:
    members = hostile.members_of(hostile.torch_file({"a": th.zeros(3)}))
    folder = next(iter(members)).partition("/")[0]
    return hostile.plain_zip({**members, f"{folder}/{name}": hostile.torch_pickle({"b": 1})})


def another_directory() -> bytes:
    """Python 3.11 looks for it where it should stand, PyTorch where it is said to."""
    content = bytearray(hostile.torch_file({"a": th.zeros(3)}))
    assert content[-42:-38] == b"PK\6\7"
    content[-34:-26] = (7).to_bytes(8, "little")
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (reshaped_in_a_state(), "more to it than PyTorch writes"),
        (reshaped_in_versions(), "more to it than PyTorch writes"),
        (old_format_before_it(), "no zip file that PyTorch writes"),
        (another_pickle("DATA.PKL"), "damaged"),
        (another_pickle("x/DATA.pkl"), "damaged"),
        (another_pickle("DATA/0"), "no zip file that PyTorch writes"),
        (another_pickle("../x"), "has a path for a name"),
        (another_directory(), "no zip file that PyTorch writes|damaged"),
    ],
    ids=["state", "versions", "old format", "case", "folder", "memory", "outside", "directory"],
)
def test_state_is_described_as_pytorch_reads_it(content: bytes, reason: str) -> None:
    with pytest.raises(FileRefused, match=reason):
        describe_state(content, "it")


def test_state_that_is_not_what_was_described() -> None:
    content = hostile.torch_file({"a": th.zeros(3), 5: [1, (2.0,)]})
    description = describe_state(content, "it")
    assert load_state(content, "cpu", "it", description)["a"].tolist() == [0, 0, 0]
    for other in ({"a": TensorInfo((4,), th.float32)}, {"a": TensorInfo((3,), th.float64)}, {5: [1, (2,)]}, {5: [1]}):
        with pytest.raises(FileRefused, match="holds other tensors than it says"):
            load_state(content, "cpu", "it", {**description, **other})


@pytest.mark.parametrize("metadata", [5, {}, "text"])
def test_versions_of_modules_that_are_none(metadata: Any, good: bytes, tmp_path: pathlib.Path) -> None:
    state = make().policy.state_dict()
    vars(state)["_metadata"] = metadata
    content = hostile.with_members(good, policy__pth=hostile.torch_file(state))
    assert_refused(content, tmp_path / "agent.zip", [TD3X.load])


def test_keys_of_one_hash_are_refused(good: bytes, good_sb3: bytes) -> None:
    """All multiples of 2 ** 61 - 1 have the hash 0, and a dictionary looks at all of them for each."""
    keys = [number * (2**61 - 1) for number in range(1, 20_001)]
    items = {":plain:": "dict", "items": [[key, 0] for key in keys]}
    pickled = pickle.dumps([dict.fromkeys([number], 0) for number in keys])
    for content in (hostile.with_data(good, note=items), hostile.with_pickle(good_sb3, "note", pickled)):
        start = time.process_time()
        with pytest.raises(ValueError, match=r"keys that are no text|as key"):
            TD3X.load(io.BytesIO(content))
        assert time.process_time() - start < 8


def test_dictionaries_of_many_numbers_need_trust() -> None:
    """They are pickled."""
    model, file = WithNote("MlpPolicy", CountingEnv(), **tiny()), io.BytesIO()
    model.note = dict.fromkeys(range(2000), 0.5)
    model.save(file)
    with pytest.raises(ValueError, match=r"note \(it holds a dictionary of 2000 keys that are no text\)"):
        WithNote.load(io.BytesIO(file.getvalue()))
    assert WithNote.load(io.BytesIO(file.getvalue()), trusted=True).note == model.note


def test_long_number_in_a_schedule_is_refused_soon(good: bytes) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match="learning_rate="):
        TD3X.load(io.BytesIO(hostile.with_data(good, learning_rate="lin_" + "1" * 2**15 + "x")))
    assert time.process_time() - start < 8


def test_optimizer_of_many_parameters_is_refused_soon(good: bytes) -> None:
    number = 200_000
    entry: dict[str, Any] = {}
    state = dict.fromkeys(range(number - 40_000, number), entry)
    optimizer = hostile.torch_file({"state": state, "param_groups": [{"params": list(range(number))}]})
    content = hostile.with_members(good, **{"critic.optimizer__pth": optimizer})
    start = time.process_time()
    with pytest.raises(ValueError, match=r"critic\.optimizer holds the state of 200000 parameters"):
        make().set_parameters(io.BytesIO(content))
    assert time.process_time() - start < 8


def test_hostile_attribute_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    for name, content in hostile_data(good):
        print(name)
        start = time.process_time()
        tracemalloc.start()
        assert_refused(content, tmp_path / "agent.zip", [TD3X.load])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert time.process_time() - start < 8, name
        # Of the file, as it is written, read and decoded
        assert peak < 30e6 + 10 * len(content), name


def test_network_for_each_of_many_images_is_not_made(good: bytes) -> None:
    images = {str(key): spaces.Box(0, 255, (1, 36, 36), np.uint8) for key in range(101)}
    policy = {":plain:": "class", "path": "sb3_td3x.policies.MultiInputPolicy"}
    content = hostile.with_data(good, observation_space=to_plain(spaces.Dict(images)), policy_class=policy)
    with pytest.raises(ValueError, match="observation_space of 101 images, expected at most 100"):
        TD3X.load(io.BytesIO(content))


@pytest.mark.parametrize(
    ("name", "value"), [("gamma", "high"), ("gamma", 10**400), ("tau", math.inf), ("train_freq", []), ("seed", 0.5)]
)
def test_hostile_argument_is_refused_by_its_name(good: bytes, name: str, value: Any) -> None:
    content = hostile.with_data(good, **{name: to_plain(value)})
    with pytest.raises(ValueError, match=rf"^{name}="):
        TD3X.load(io.BytesIO(content))


def test_what_is_made_anew_is_not_read(good: bytes) -> None:
    anew = dict.fromkeys(("policy", "device", "env", "_logger", "_replay_buffer", "_shaping", "lr_schedule"), 1)
    TD3X.load(io.BytesIO(hostile.with_data(good, **anew)), env=CountingEnv()).learn(10)


def test_zip_trick_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    for name, content in hostile.zip_tricks(good):
        print(name)
        assert_refused(content, tmp_path / "agent.zip")


def test_every_flipped_byte_is_found(good: bytes, tmp_path: pathlib.Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "agent.zip"
    # All bytes of the zip file's own structures at the end, and as many elsewhere
    positions = [*range(len(good) - 400, len(good)), *rng.sample(range(len(good) - 400), 700)]
    for position in positions:
        damaged = bytearray(good)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"agent\.zip is .*(damaged|zip file)") as error:
            open_agent(path)
        assert "\n" not in str(error.value)


def test_file_cut_anywhere_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    for length in range(0, len(good), max(1, len(good) // 200)):
        path.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"agent\.zip is .*zip file"):
            open_agent(path)


def test_archive_in_a_larger_file_is_read(good: bytes) -> None:
    assert open_agent(io.BytesIO(b"something before it" + good)).is_sealed


def test_pickle_with_one_part_in_many_places_is_refused(good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    """A list of lists of lists, ten times the same each: small as a pickle, huge as anything else."""
    value: Any = [0.0]
    for _ in range(12):
        value = [value] * 10
    start = time.monotonic()
    assert_refused(hostile.with_pickle(good_sb3, "anything", pickle.dumps(value)), tmp_path / "agent.zip", [TD3X.load])
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (hostile.nested([0], 3, 45), "more than 300000 parts"),
        ([hostile.Array(bytes(2**20))] * 100, "arrays take more than"),
        (b"\x80\x04" + b"N0" * 120_000 + b"N.", "more than 500000 operations"),
    ],
    ids=["parts", "arrays", "operations"],
)
def test_limits_are_those_of_all_pickles_together(value: Any, reason: str, good_sb3: bytes) -> None:
    pickled = value if isinstance(value, bytes) else pickle.dumps(value)
    content = hostile.with_pickle(good_sb3, "anything", pickled)
    TD3X.load(io.BytesIO(content))
    for name in ("anything_else", "more", "and_more"):
        content = hostile.with_pickle(content, name, pickled)
    with pytest.raises(ValueError, match=reason):
        TD3X.load(io.BytesIO(content))
    tracemalloc.start()
    assert "pickles: " in describe_agent(io.BytesIO(content))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300e6


def test_reading_agrees_with_sb3(good_sb3: bytes) -> None:
    ours, _ = read_agent(io.BytesIO(good_sb3), TD3X, "cpu")
    theirs = vars(TD3.load(io.BytesIO(good_sb3), device="cpu"))
    assert {"action_noise", "_last_obs", "ep_info_buffer", "train_freq", "observation_space"} <= ours.keys()
    for name, value in ours.items():
        assert repr(value) == repr(theirs[name]), name
        assert type(value) is type(theirs[name])


@pytest.mark.lowest_sb3
def test_space_of_gym_becomes_gymnasium_s(good_sb3: bytes) -> None:
    """Zips of SB3 before version 2, without Gym."""
    for space in (spaces.Box(-2, 1, (3,)), spaces.Box(0, 255, (2, 2), np.uint8)):
        pickled = cloudpickle.dumps(space).replace(b"\x8c\x14gymnasium.spaces.box", b"\x8c\x0egym.spaces.box")
        assert b"gymnasium" not in pickled
        loaded, _ = read_agent(io.BytesIO(hostile.with_pickle(good_sb3, "anything", pickled)), TD3X, "cpu")
        assert loaded["anything"] == space


def test_space_of_a_box_of_integers_keeps_what_it_knows() -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.int64)
    loaded = from_plain(json.loads(json.dumps(to_plain(space))))
    assert not loaded.bounded_below.any()
    assert loaded == space
