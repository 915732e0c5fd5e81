"""Bad input: what is refused at construction and at loading, what stops training, and edge values that are fine."""

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, DictObs, Episode, Poison, counting_vec_env, readable, tiny_agent, vec_env
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.noise import (
    ActionNoise,
    NormalActionNoise,
    OrnsteinUhlenbeckActionNoise,
    VectorizedActionNoise,
)
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize, VecTransposeImage

from sb3_td3x import TD3X
from sb3_td3x.shaping import FallPenalty, RewardScale, ShapingBatch

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [NAN, INF, -INF, "0.5", "", None, True, False, [0.5], (), {}, 1j, np.nan, np.bool_(True)]
NO_INTEGERS = [*NO_NUMBERS, 1.5, np.float64(2.5)]


def make(env: Any = None, **kwargs: Any) -> TD3X:
    """A tiny agent."""
    return tiny_agent(CountingEnv() if env is None else env, **kwargs)


def noise(sigma: float = 0.1, size: int = 1) -> NormalActionNoise:
    return NormalActionNoise(np.zeros(size), sigma * np.ones(size))


# At construction

BAD_RATES = [-1e-3, "exp_1e-3", "lin_x", "lin_", "lin", "_1e-3", "lin_1e-3_2", "lin-1e-3", "lin_1.2.3", "lin_."]
BAD_VALUES: dict[str, list[Any]] = {
    "policy_delay": [*NO_INTEGERS, 0, -1],
    "tau": [*NO_NUMBERS, -0.1, 1.0001, 2],
    "gamma": [*NO_NUMBERS, -0.01, 1.0001, 99],
    "target_policy_noise": [*NO_NUMBERS, -0.2],
    "target_noise_clip": [*NO_NUMBERS, -0.5],
    "action_noise_decay": [*NO_NUMBERS, 0, -0.5, 1.0001],
    "action_noise_min_scale": [*NO_NUMBERS, -0.1, 1.0001],
    "batch_size": [*NO_INTEGERS, 0, -1],
    "buffer_size": [*NO_INTEGERS, 0, -1],
    "gradient_steps": [*NO_INTEGERS, -2],
    "learning_starts": [*NO_INTEGERS, -1],
    "n_steps": [*NO_INTEGERS, 0, -1],
    "stats_window_size": [*NO_INTEGERS, 0, -1],
    "train_freq": [*NO_NUMBERS, 1.5, 0, -1, "step"],
    "clipped_double_q": [None, 0, 1, "True", 1.0, NAN],
    "policy_kwargs": ["abc", 5, [("net_arch", [8])]],
    "replay_buffer_kwargs": ["abc", 5, [("handle_timeout_termination", True)]],
    "precision": [None, 16, "float16", "BFLOAT16", "bf16", th.bfloat16],
    "learning_rate": [
        *NO_NUMBERS,
        -1e-3,
        "exp_1e-3",
        "lin_x",
        "lin_",
        "lin",
        "_1e-3",
        "lin_1e-3_2",
        "lin-1e-3",
        "lin_1.2.3",
    ],
    "qf_learning_rate": [
        *(value for value in NO_NUMBERS if value is not None),
        *BAD_RATES,
    ],
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_value_is_refused_with_its_name_value_and_what_is_allowed(name: str) -> None:
    for value in BAD_VALUES[name]:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not allowed, expected ")):
            make(**{name: value})


@pytest.mark.parametrize("name", ["learning_rate", "qf_learning_rate"])
@pytest.mark.parametrize(
    "value",
    ["lin_-1e-3", "lin_nan", "lin_inf", lambda _: NAN, lambda _: -1.0, lambda _: INF, lambda _: "x", lambda _: None],
)
def test_bad_schedule_is_refused_with_the_argument_s_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b.* is not allowed, expected "):
        make(**{name: value})


def test_frame_stack_around_vec_normalize_is_refused() -> None:
    """SB3 would fail later, in the middle of its replay buffer."""
    env = VecFrameStack(VecNormalize(DummyVecEnv([CountingEnv])), n_stack=2)
    with pytest.raises(ValueError, match=r"VecNormalize.*frame stacking.*\(2,\).*\(4,\)"):
        make(env=env).learn(10)


def test_arguments_of_replay_buffers_are_checked() -> None:
    for value in ("no", 0, None):
        with pytest.raises(ValueError, match=rf"handle_timeout_termination={value!r} is not allowed, expected "):
            make(replay_buffer_kwargs={"handle_timeout_termination": value})
    with pytest.raises(ValueError, match=r"handle_timeouts is no argument of ReplayBuffer.*did you mean handle_time"):
        make(replay_buffer_kwargs={"handle_timeouts": True})
    # SB3 writes into the user's dictionary
    own = {"handle_timeout_termination": True}
    tiny_agent(cls=TD3, n_steps=3, replay_buffer_kwargs=own)
    make(n_steps=3, replay_buffer_kwargs=own)


@pytest.mark.parametrize("policy", [None, 5, []])
def test_policy_that_is_none(policy: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"policy={policy!r} is not allowed, expected ")):
        tiny_agent(policy=policy)


@pytest.mark.parametrize("env", [5, [], object])
def test_env_that_is_none(env: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"env={env!r} is not allowed, expected ")):
        make(env)


def test_activation_that_is_no_class() -> None:
    with pytest.raises(ValueError, match="activation_fn='relu' is not allowed, expected a class"):
        make(policy_kwargs={"activation_fn": "relu"})


class WithImage(DictObs):
    """An image, channels last, beside the arrays."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
        assert isinstance(self.observation_space, spaces.Dict)
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "image": image})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {**super().observation(observation), "image": np.zeros((36, 36, 3), dtype=np.uint8)}


def test_images_in_another_order_than_the_agent_s_are_refused() -> None:
    """SB3 would fail later, in the middle of its replay buffer."""

    def learn(env: VecEnv) -> None:
        tiny_agent(env, "MultiInputPolicy").learn(10)

    keys = ["count", "minus"]
    with pytest.raises(ValueError, match=r"VecTransposeImage.*\(36, 36, 3\), the agent \(3, 36, 36\)"):
        learn(VecNormalize(vec_env(WithImage(CountingEnv())), norm_obs_keys=keys))
    learn(VecNormalize(VecTransposeImage(vec_env(WithImage(CountingEnv()))), norm_obs_keys=keys))


@pytest.mark.parametrize("name", ["learning_rate", "qf_learning_rate"])
def test_schedule_that_turns_nan_in_training_stops_it_before_the_weights_are_lost(name: str) -> None:
    model = make(**{name: lambda progress_remaining: 1e-3 if progress_remaining > 0.5 else NAN})
    with pytest.raises(ValueError, match=rf"{name}.* is not allowed, expected "):
        model.learn(60)
    for key, value in model.policy.state_dict().items():
        assert th.isfinite(value).all(), key


@pytest.mark.parametrize(
    "value",
    [
        *((0, "step"), (-1, "episode"), (1.5, "step"), (NAN, "step"), ("1", "step"), (True, "step"), (None, "step")),
        *((1, "foo"), (1, None), (1,), (), (1, "step", 2), ["step", 1], {"frequency": 1}),
    ],
)
def test_bad_train_freq_pair_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^train_freq=.* is not allowed, expected "):
        make(train_freq=value)


def test_episodes_as_train_freq_are_refused_with_several_envs() -> None:
    with pytest.raises(ValueError, match=r"^train_freq=.* is not allowed with 2 envs, expected "):
        make(vec_env(CountingEnv(), CountingEnv()), train_freq=(1, "episode"))


class NoiseOfWrongType:
    """Has what an action noise has, but is none."""

    def __call__(self) -> np.ndarray:
        return np.zeros(1)

    def reset(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(
    "bad_noise",
    [
        *(noise(sigma) for sigma in (-0.1, NAN, INF)),
        NormalActionNoise(np.array([NAN]), np.ones(1)),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), -np.ones(1)),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.array([NAN])),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), theta=NAN),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), dt=INF),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), initial_noise=np.array([NAN])),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), initial_noise=np.zeros(3)),
        NormalActionNoise(np.array(["a"]), np.ones(1)),
        NormalActionNoise(np.array([10**400]), np.ones(1)),
        NormalActionNoise(0.0, 0.1),  # type: ignore[arg-type]
        OrnsteinUhlenbeckActionNoise(0.0, 0.1),  # type: ignore[arg-type]
        noise(size=2),
        noise(size=3),
        NormalActionNoise(np.zeros(1), np.ones(2)),
        NormalActionNoise(np.zeros(2), np.ones(1)),
        OrnsteinUhlenbeckActionNoise(np.zeros(2), np.ones(2)),
        VectorizedActionNoise(noise(-0.1), 1),
        VectorizedActionNoise(noise(size=2), 2),
        NoiseOfWrongType(),
        NormalActionNoise,
        0.1,
        "normal",
        np.zeros(1),
    ],
    ids=readable,
)
def test_bad_action_noise_is_refused(bad_noise: Any) -> None:
    with pytest.raises(ValueError, match=r"^action_noise=.* is not allowed, expected "):
        make(action_noise=bad_noise)


def test_action_noise_that_does_not_fit_an_action_of_two_axes_is_refused() -> None:
    env = CountingEnv(action_space=spaces.Box(-1, 1, (2, 3), np.float32))
    for shape in ((6,), (2,), (3, 2), (4,)):
        with pytest.raises(ValueError, match=r"(?s)^action_noise=.* is not allowed, expected "):
            make(env, action_noise=NormalActionNoise(np.zeros(shape), 0.1 * np.ones(shape)))
    for fitting in ((2, 3), (3,), (1,)):
        make(env, action_noise=NormalActionNoise(np.zeros(fitting), 0.1 * np.ones(fitting))).learn(12)


@pytest.mark.parametrize("n_critics", [0, -1, 1.5, "2", None, True, NAN])
def test_bad_number_of_critics_is_refused(n_critics: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"n_critics={n_critics!r} is not allowed, expected ")):
        make(policy_kwargs={"n_critics": n_critics})


@pytest.mark.parametrize("value", [5, True, ["logs"]])
def test_bad_folder_of_logs_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"tensorboard_log={value!r} is not allowed, expected ")):
        make(tensorboard_log=value)


@pytest.mark.parametrize(
    "net_arch", [8, "8", [8.0], [0], [-1], ["8"], [True], {"pi": [8], "qf": [8.5]}, {"pi": [8]}, [[8]]]
)
def test_bad_layers_are_refused(net_arch: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"net_arch={net_arch!r} is not allowed, expected ")):
        make(policy_kwargs={"net_arch": net_arch})


def test_buffer_of_one_row_that_is_to_hold_two_observations_is_refused() -> None:
    options = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
    with pytest.raises(ValueError, match=r"^buffer_size=3 is not allowed .*optimize_memory_usage.* at least 4"):
        make(counting_vec_env(2), buffer_size=3, **options)
    make(counting_vec_env(2), buffer_size=4, **options).learn(20)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"critic_activation_fn='rellu'.*expected .*relu"):
        make(policy_kwargs={"critic_activation_fn": "rellu"})


@pytest.mark.parametrize("option", ["layer_norm", "actor_layer_norm", "stochastic_actor"])
@pytest.mark.parametrize("value", ["False", None, 0, NAN])
def test_bad_switch_of_the_networks_is_refused(option: str, value: Any) -> None:
    """A string would turn it on, ``"False"`` too."""
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r} is not allowed, expected True or False")):
        make(policy_kwargs={"net_arch": [8], option: value})


BAD_ACTION_SPACES = [
    spaces.Discrete(2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Dict({"a": spaces.Box(-1, 1, (1,))}),
    spaces.Tuple([spaces.Box(-1, 1, (1,))]),
    spaces.Box(-np.inf, np.inf, (1,)),
    spaces.Box(np.array([-1, -np.inf], np.float32), np.ones(2, np.float32)),
    spaces.Box(-np.ones(2, np.float32), np.array([1, np.inf], np.float32)),
    spaces.Box(np.array([-1, 1], np.float32), np.ones(2, np.float32)),
    spaces.Box(0, 0, (1,)),
    spaces.Box(-1, 1, (2,), np.int32),
    # Of infinite width
    spaces.Box(-3e38, 3e38, (2,), np.float32),
]


@pytest.mark.parametrize("action_space", BAD_ACTION_SPACES, ids=readable)
@pytest.mark.parametrize("n_envs", [1, 2])
def test_bad_action_space_is_refused(action_space: spaces.Space, n_envs: int) -> None:
    with pytest.raises(ValueError, match=r"^action_space=.* is not allowed, expected "):
        make(vec_env(*(CountingEnv(action_space=action_space) for _ in range(n_envs))))


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("sb3_td3x.shaping.FalPenalty", "did you mean 'sb3_td3x.shaping.FallPenalty'"),
        ({"sb3_td3x.shapin.RewardScale": {"scale": 0.1}}, "did you mean 'sb3_td3x.shaping.RewardScale'"),
        (
            [{"sb3_td3x.shaping.RewardScale": {"scale": 0.1}}, "shaping.RewardClp"],
            "did you mean 'sb3_td3x.shaping.RewardClip'",
        ),
        ({"sb3_td3x.shaping.RewardScale": {"factor": 0.1}}, "keyword arguments allowed: scale"),
        ({"sb3_td3x.shaping.RewardScale": {"scale": NAN}}, "scale=nan is not allowed"),
        ([], "expected a list of at least one hook"),
        (5, "expected a callable"),
    ],
)
def test_bad_hook_is_refused_with_a_hint(spec: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.* is not allowed") as error:
        make(reward_shaping=spec)
    assert hint in str(error.value)


def her_model(**kwargs: Any) -> TD3X:
    env = BitFlippingEnv(n_bits=2, continuous=True)
    return tiny_agent(env, "MultiInputPolicy", **{"replay_buffer_class": HerReplayBuffer, **kwargs})


@pytest.mark.parametrize("hook", [RewardScale(0.5), {"sb3_td3x.shaping.RewardScale": {"scale": 0.5}}, FallPenalty()])
def test_hook_is_refused_with_her(hook: Any) -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.* is not allowed with HerReplayBuffer"):
        her_model(reward_shaping=hook)


class OwnHer(HerReplayBuffer):
    """A user's own HER."""


def test_hook_is_refused_with_a_subclass_of_her() -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.* is not allowed with OwnHer"):
        her_model(replay_buffer_class=OwnHer, reward_shaping=RewardScale(0.5))


NO_TIMEOUTS: dict[str, dict[str, Any]] = {
    "optimize_memory_usage": {
        "optimize_memory_usage": True,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
    },
    "handle_timeout_termination": {"replay_buffer_kwargs": {"handle_timeout_termination": False}},
}


def ends_at_three(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """A plain function that changes terminations, which shows only when it does."""
    assert isinstance(batch.next_observations, np.ndarray)
    return batch.rewards, batch.next_observations[:, 1] == 3


@pytest.mark.parametrize("option", NO_TIMEOUTS)
@pytest.mark.parametrize(
    "hook", [FallPenalty(), "sb3_td3x.shaping.FallPenalty", [RewardScale(2.0), FallPenalty()]], ids=readable
)
def test_declared_change_of_terminations_is_refused_without_timeouts_at_construction(option: str, hook: Any) -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.*FallPenalty.* is not allowed.*optimize_memory_usage"):
        make(reward_shaping=hook, **NO_TIMEOUTS[option])
    assert make(reward_shaping=RewardScale(2.0), **NO_TIMEOUTS[option]).learn(12).num_timesteps == 12


@pytest.mark.parametrize("option", NO_TIMEOUTS)
def test_change_of_terminations_by_a_function_is_refused_without_timeouts_when_it_happens(option: str) -> None:
    model = make(reward_shaping=ends_at_three, **NO_TIMEOUTS[option])
    with pytest.raises(ValueError, match=r"^reward_shaping=.*ends_at_three.* is not allowed.*optimize_memory_usage"):
        model.learn(20)
    assert model.replay_buffer.pos == 2


def test_optimize_memory_usage_is_refused_where_the_buffer_cannot_have_it() -> None:
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        make(optimize_memory_usage=True)
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        tiny_agent(DictObs(CountingEnv()), "MultiInputPolicy", optimize_memory_usage=True)


def test_replay_buffer_class_that_is_none_is_refused() -> None:
    for bad in ("ReplayBuffer", 5, dict, ReplayBuffer(1, spaces.Box(-1, 1), spaces.Box(-1, 1))):
        with pytest.raises(ValueError, match=r"^replay_buffer_class=.* is not allowed, expected "):
            make(replay_buffer_class=bad)


# Edge values that are fine


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(
    "kwargs",
    [
        {"tau": 1, "policy_delay": 1},
        {"gamma": 0},
        {"gamma": 1},
        {"learning_rate": 0},
        {"learning_rate": 0.0, "qf_learning_rate": 0},
        {"learning_rate": "lin_7e-4", "qf_learning_rate": "lin_0"},
        {"learning_rate": lambda progress_remaining: 1e-3 * progress_remaining},
        {"target_policy_noise": 0},
        {"target_noise_clip": 0},
        {"action_noise": noise(0.0)},
        {"action_noise": NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)), "action_noise_decay": 1e-9},
        {"action_noise_min_scale": 1},
        {"buffer_size": 1, "batch_size": 1},
        {"learning_starts": 0},
        {"gradient_steps": 0},
        {"gradient_steps": -1},
        {"policy_delay": 1000},
        {"n_steps": 5},
        {"train_freq": (1, "episode")},
        {"train_freq": [2, "step"]},
        {"stats_window_size": 1},
        {"clipped_double_q": np.bool_(False)},
        # YAML's way to write large integers
        {"buffer_size": 1e3, "batch_size": 4.0, "learning_starts": 1e1, "gradient_steps": 1.0, "train_freq": 2.0},
        {"policy_delay": 2.0, "n_steps": 3.0, "stats_window_size": 1e2, "policy_kwargs": {"n_critics": 3.0}},
        {"buffer_size": np.int64(100), "batch_size": np.int32(4), "tau": np.float32(0.01), "gamma": np.float64(0.9)},
        {"learning_rate": np.float32(1e-3), "train_freq": np.int64(2), "policy_delay": np.uint8(2)},
    ],
    ids=readable,
)
def test_edge_value_is_fine(kwargs: dict[str, Any]) -> None:
    model = make(**kwargs).learn(40)
    assert model.num_timesteps == 40
    for key, value in model.policy.state_dict().items():
        assert th.isfinite(value).all(), key
    zip_file = io.BytesIO()
    model.save(zip_file)
    zip_file.seek(0)
    TD3X.load(zip_file, env=model.get_env(), trusted=True).learn(10)


def test_learning_rate_of_zero_learns_nothing() -> None:
    model = make(learning_rate=0)
    before = {key: value.clone() for key, value in model.actor.state_dict().items()}
    model.learn(40)
    assert model._n_updates > 0
    for key, value in model.actor.state_dict().items():
        assert th.equal(value, before[key]), key


# At loading


@pytest.fixture(scope="module")
def saved() -> bytes:
    """The zip of a tiny agent."""
    zip_file = io.BytesIO()
    make(action_noise=noise()).learn(20).save(zip_file)
    return zip_file.getvalue()


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_value_is_refused_at_loading(saved: bytes, name: str) -> None:
    # The first value of each kind: a number out of range, NaN, another type
    for value in [*BAD_VALUES[name][-1:], NAN, "0.5"]:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not allowed, expected ")):
            TD3X.load(io.BytesIO(saved), **{name: value})


def test_bad_object_is_refused_at_loading(saved: bytes) -> None:
    with pytest.raises(ValueError, match=r"^action_noise=.* is not allowed, expected "):
        TD3X.load(io.BytesIO(saved), action_noise=noise(size=2))
    with pytest.raises(ValueError, match=r"^reward_shaping=.* did you mean 'sb3_td3x.shaping.FallPenalty'"):
        TD3X.load(io.BytesIO(saved), reward_shaping="sb3_td3x.shaping.FalPenalty")
    with pytest.raises(ValueError, match=r"^reward_shaping=.*FallPenalty.* is not allowed.*handle_timeout_termination"):
        TD3X.load(
            io.BytesIO(saved),
            reward_shaping=FallPenalty(),
            replay_buffer_kwargs={"handle_timeout_termination": False},
        )
    with pytest.raises(ValueError, match=r"^train_freq=.* is not allowed with 2 envs, expected "):
        TD3X.load(io.BytesIO(saved), env=vec_env(CountingEnv(), CountingEnv()), train_freq=(1, "episode"))
    with pytest.raises(ValueError, match=r"^policy_kwargs=.* is not allowed, expected "):
        TD3X.load(io.BytesIO(saved), policy_kwargs={"net_arch": [16]})


@pytest.mark.parametrize(
    ("name", "closest"), [("polyak", ""), ("gama", "gamma"), ("action_nois_decay", "action_noise_decay"), ("self", "")]
)
def test_unknown_argument_is_refused_at_loading(saved: bytes, name: str, closest: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b.* is no argument of .*{closest}"):
        TD3X.load(io.BytesIO(saved), **{name: 0.5})  # type: ignore[arg-type]


def test_env_with_other_spaces_is_refused_at_loading(saved: bytes) -> None:
    with pytest.raises(ValueError, match="Action spaces do not match"):
        TD3X.load(io.BytesIO(saved), env=CountingEnv(action_space=spaces.Box(-2, 2, (1,))))
    with pytest.raises(ValueError, match="Action spaces do not match"):
        TD3X.load(io.BytesIO(saved), env=CountingEnv(action_space=spaces.Discrete(2)))
    with pytest.raises(ValueError, match="Observation spaces do not match"):
        TD3X.load(io.BytesIO(saved), env=DictObs(CountingEnv()))


def test_env_with_other_spaces_is_refused_when_set() -> None:
    model = make()
    with pytest.raises(ValueError, match="Action spaces do not match"):
        model.set_env(CountingEnv(action_space=spaces.Box(-2, 2, (1,))))


# In training


def finite_buffer(model: TD3X, stored: int) -> None:
    """Assert that so many transitions of each env are stored, all of them finite."""
    buffer = model.replay_buffer
    assert (buffer.pos, buffer.full) == (stored, False)
    for name in ("observations", "next_observations", "actions", "rewards"):
        arrays = getattr(buffer, name)
        for array in arrays.values() if isinstance(arrays, dict) else [arrays]:
            assert np.isfinite(array).all(), name


def finite_when_saved(model: TD3X) -> None:
    """Assert that the agent as it was before the bad value can still be saved, loaded and used."""
    zip_file = io.BytesIO()
    model.save(zip_file)
    zip_file.seek(0)
    loaded = TD3X.load(zip_file, trusted=True)
    for key, value in loaded.policy.state_dict().items():
        assert th.isfinite(value).all(), key
    space = model.observation_space
    obs: Any = (
        {key: np.ones(2, np.float32) for key in space} if isinstance(space, spaces.Dict) else np.ones(2, np.float32)
    )
    assert np.isfinite(loaded.predict(obs)[0]).all()


EPISODES = (Episode(6, True), Episode(4, False))
# Quantity, at which reset or step, transitions stored until then, how the error names it
BAD_DATA = {
    "first reset": ("reset", 1, 0, "observation after the reset"),
    "reset after a termination": ("reset", 2, 5, "observation after the reset"),
    "reset after a time-out": ("reset", 3, 9, "observation after the reset"),
    "observation": ("observation", 3, 2, "observation"),
    "last observation before a termination": ("observation", 6, 5, "observation"),
    "last observation before a time-out": ("observation", 10, 9, "observation"),
    "observation after updates": ("observation", 18, 17, "observation"),
    "reward": ("reward", 3, 2, "reward"),
    "reward of a termination": ("reward", 6, 5, "reward"),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("normalize", [False, True], ids=["", "VecNormalize"])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_stop_training_before_they_are_stored(case: str, n_envs: int, normalize: bool) -> None:
    quantity, at, stored, named = BAD_DATA[case]
    bad_env = n_envs // 2
    # VecNormalize clips the last observation of an episode: infinity comes, and is stored, as a finite number
    for value in (NAN,) if normalize and case.startswith("last") else (NAN, INF, -INF):
        envs: list[gym.Env] = [CountingEnv(EPISODES, 100 * idx) for idx in range(n_envs)]
        envs[bad_env] = Poison(envs[bad_env], quantity, at, value)
        env: VecEnv = vec_env(*envs)
        if normalize:
            env = VecNormalize(env)
        model = make(env, learning_starts=12, action_noise=noise())
        timestep = 0 if case == "first reset" else (stored + 1) * n_envs
        with pytest.raises(ValueError, match=rf"The {named} of env {bad_env} is {value}\b.* at timestep {timestep}\b"):
            model.learn(60)
        finite_buffer(model, stored)
        finite_when_saved(model)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("quantity", ["reset", "observation"])
def test_bad_entry_of_a_dict_observation_is_named(quantity: str, n_envs: int) -> None:
    for key in ("count", "minus"):
        envs: list[gym.Env] = [DictObs(CountingEnv(EPISODES)) for _ in range(n_envs)]
        envs[-1] = Poison(envs[-1], quantity, 2, NAN, key)
        model = tiny_agent(vec_env(*envs), "MultiInputPolicy")
        with pytest.raises(ValueError, match=rf"The observation.*'{key}'.* of env {n_envs - 1} is nan"):
            model.learn(60)
        finite_buffer(model, 5 if quantity == "reset" else 1)
        finite_when_saved(model)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_bad_action_stops_training_before_the_env_sees_it(n_envs: int) -> None:
    model = make(vec_env(*(CountingEnv(EPISODES) for _ in range(n_envs))), learning_starts=0, gradient_steps=0)
    model.learn(4 * n_envs)
    with th.no_grad():
        next(model.actor.parameters()).fill_(NAN)
    with pytest.raises(ValueError, match=rf"The action of env 0 is nan at index \[0\] at timestep {4 * n_envs}\b"):
        model.learn(4, reset_num_timesteps=False)
    finite_buffer(model, 4)
    assert model.num_timesteps == 4 * n_envs
    model.save(io.BytesIO())


class BadNoise(ActionNoise):
    """Gives NaN for the second env at its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        sample = np.zeros((2, 1))
        if self.calls == 3:
            sample[1] = NAN
        return sample

    def reset(self, indices: list[int] | None = None) -> None:
        """Nothing to do."""


def test_bad_noise_stops_training() -> None:
    model = make(vec_env(CountingEnv(), CountingEnv()), learning_starts=0)
    bad_noise = BadNoise()
    model.learn(2)
    model.collect_rollouts(
        model.env,
        callback=model._init_callback(None),
        train_freq=model.train_freq,
        action_noise=bad_noise,
        replay_buffer=model.replay_buffer,
    )
    bad_noise.calls = 2
    with pytest.raises(ValueError, match=r"The action of env 1 is nan"):
        model.collect_rollouts(
            model.env,
            callback=model._init_callback(None),
            train_freq=model.train_freq,
            action_noise=bad_noise,
            replay_buffer=model.replay_buffer,
        )
    finite_buffer(model, 2)


@pytest.mark.parametrize("again", ["learn", "load"])
def test_bad_first_observation_of_a_later_training_stops_it(again: str) -> None:
    """Still in the warm-up, where no action depends on it."""
    env = vec_env(Poison(CountingEnv(EPISODES), "reset", 2))
    model = make(env, learning_starts=100).learn(3)
    if again == "load":
        zip_file = io.BytesIO()
        model.save(zip_file)
        zip_file.seek(0)
        model = TD3X.load(zip_file, env=env)
    stored = model.replay_buffer.pos
    with pytest.raises(ValueError, match="The observation after the reset of env 0 is nan"):
        model.learn(3)
    finite_buffer(model, stored)


class Float64Rewards(DummyVecEnv):
    """Gives float64 rewards, as SubprocVecEnv does."""

    def __init__(self, env_fns: list[Callable[[], gym.Env]]) -> None:
        super().__init__(env_fns)
        self.buf_rews = self.buf_rews.astype(np.float64)


def test_numbers_too_large_for_the_buffer_s_float32_stop_training() -> None:
    """A VecEnv may give rewards in float64 (SubprocVecEnv does); the buffer would turn a large one into infinity."""
    model = make(Float64Rewards([lambda: Poison(CountingEnv(EPISODES), "reward", 3, 1e39)]))
    with pytest.raises(ValueError, match="The reward of env 0 is"):
        model.learn(20)
    finite_buffer(model, 2)


class Float64Observations(gym.ObservationWrapper):
    """Observations in float64; those of the third steps are too large for float32."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation.astype(np.float64) * (1e300 if observation[1] == 3 else 1)


def test_numbers_too_large_for_the_networks_float32_stop_training() -> None:
    """A replay buffer of float64 would hold them, and the networks would turn them into infinity."""
    model = make(Float64Observations(CountingEnv(EPISODES)))
    with pytest.raises(ValueError, match="The observation of env 0 is"):
        model.learn(20)
    finite_buffer(model, 2)


def test_integers_and_images_need_no_check() -> None:
    """No float, no NaN: observations of integers pass."""

    class Integers(gym.ObservationWrapper):
        def __init__(self) -> None:
            super().__init__(CountingEnv())
            self.observation_space = spaces.Box(-1000, 1000, (2,), np.int64)

        def observation(self, observation: np.ndarray) -> np.ndarray:
            return observation.astype(np.int64)

    assert make(Integers()).learn(30).num_timesteps == 30


def test_hook_that_gives_nan_stops_training_with_its_name() -> None:
    def bad_hook(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        rewards = batch.rewards.copy()
        rewards[rewards == 3] = NAN
        return rewards, batch.terminations

    model = make(reward_shaping=bad_hook)
    with pytest.raises(ValueError, match=r"bad_hook.* returned the reward nan for env 0"):
        model.learn(20)
    finite_buffer(model, 2)
    finite_when_saved(model)


# The comparison of the README

SIXTEEN_BAD_VALUES: list[tuple[str, Any]] = [
    ("policy_delay", 0),
    ("policy_delay", 1.5),
    ("tau", -0.005),
    ("tau", 1.5),
    ("gamma", -0.1),
    ("gamma", 1.1),
    ("target_policy_noise", -0.2),
    ("target_noise_clip", -0.5),
    ("batch_size", 0),
    ("buffer_size", 0),
    ("learning_rate", -1e-3),
    ("learning_rate", NAN),
    ("gradient_steps", -2),
    ("learning_starts", -1),
    ("n_steps", 0),
    ("train_freq", 0),
]


def refused(algorithm: Callable[..., Any], bad_values: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """
    :param algorithm: an algorithm's class
    :param bad_values: names of arguments with values that make no sense
    :return: those for which the constructor raises an error
    """
    refused_values = []
    for name, value in bad_values:
        try:
            tiny_agent("Pendulum-v1", cls=algorithm, **{name: value})
        except (AssertionError, TypeError, ValueError):
            refused_values.append((name, value))
    return refused_values


def test_td3x_refuses_all_of_sixteen_bad_values_where_td3_refuses_two() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(SIXTEEN_BAD_VALUES) == len(refused(TD3X, SIXTEEN_BAD_VALUES)) == 16
        assert [name for name, _ in refused(TD3, SIXTEEN_BAD_VALUES)] == ["learning_rate", "learning_rate"]
