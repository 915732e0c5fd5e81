"""Bad arguments are refused at construction and at loading, and unusual ones are allowed."""

import io
import re
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, DictObs, counting_vec_env, readable, saved_and_loaded, tiny_agent, vec_env, zip_of
from gymnasium import spaces
from noises import normal_noise
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize, VecTransposeImage

from sb3_td3x import TD3X
from sb3_td3x.shaping import FallPenalty, RewardScale, ShapingBatch

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [NAN, INF, -INF, "0.5", "", None, True, False, [0.5], (), {}, 1j, np.nan, np.bool_(True)]
NO_INTEGERS = [*NO_NUMBERS, 1.5, np.float64(2.5)]


# At construction

BAD_RATES = [-1e-3, "exp_1e-3", "lin_x", "lin_", "lin", "_1e-3", "lin_1e-3_2", "lin-1e-3", "lin_1.2.3", "lin_."]
BAD_VALUES: dict[str, list[Any]] = {
    "policy_delay": [*NO_INTEGERS, 0, -1],
    "policy_checkpoint_episodes": [*NO_INTEGERS, -1],
    "top_quantiles_to_drop_per_net": [*NO_INTEGERS, -1],
    "tau": [*NO_NUMBERS, -0.1, 1.0001, 2],
    "actor_average_tau": [*NO_NUMBERS, -1e-4, 1.0001],
    "gamma": [*NO_NUMBERS, -0.01, 1.0001, 99],
    "target_policy_noise": [*NO_NUMBERS, -0.2],
    "target_noise_clip": [*NO_NUMBERS, -0.5],
    "action_noise_decay": [*NO_NUMBERS, 0, -0.5, 1.0001],
    "action_noise_min_scale": [*NO_NUMBERS, -0.1, 1.0001],
    "prioritized_replay_alpha": [*NO_NUMBERS, -0.1, 1.0001],
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
    "learning_rate": [*NO_NUMBERS, *BAD_RATES],
    "qf_learning_rate": [*(value for value in NO_NUMBERS if value is not None), *BAD_RATES],
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_refused_with_the_name_the_value_and_what_is_allowed(name: str) -> None:
    for value in BAD_VALUES[name]:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not allowed, expected ")):
            tiny_agent(**{name: value})


@pytest.mark.parametrize("name", ["learning_rate", "qf_learning_rate"])
@pytest.mark.parametrize(
    "value",
    ["lin_-1e-3", "lin_nan", "lin_inf", lambda _: NAN, lambda _: -1.0, lambda _: INF, lambda _: "x", lambda _: None],
)
def test_bad_schedules_are_refused_with_the_name_of_the_argument(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b.* is not allowed, expected "):
        tiny_agent(**{name: value})


def test_frame_stack_around_vec_normalize_is_refused() -> None:
    """SB3 fails later, in its replay buffer."""
    env = VecFrameStack(VecNormalize(DummyVecEnv([CountingEnv])), n_stack=2)
    with pytest.raises(ValueError, match=r"VecNormalize.*frame stacking.*\(2,\).*\(4,\)"):
        tiny_agent(env).learn(10)


def test_arguments_of_replay_buffers_are_checked() -> None:
    for value in ("no", 0, None):
        with pytest.raises(ValueError, match=rf"handle_timeout_termination={value!r} is not allowed, expected "):
            tiny_agent(replay_buffer_kwargs={"handle_timeout_termination": value})
    with pytest.raises(ValueError, match=r"handle_timeouts is no argument of ReplayBuffer.*did you mean handle_time"):
        tiny_agent(replay_buffer_kwargs={"handle_timeouts": True})
    # SB3 writes n_steps into the user's dictionary, which TD3X must still accept
    own = {"handle_timeout_termination": True}
    tiny_agent(cls=TD3, n_steps=3, replay_buffer_kwargs=own)
    tiny_agent(n_steps=3, replay_buffer_kwargs=own)


@pytest.mark.parametrize("policy", [None, 5, []])
def test_bad_policies_are_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"policy={policy!r} is not allowed, expected ")):
        tiny_agent(policy=policy)


@pytest.mark.parametrize("env", [5, [], object])
def test_bad_envs_are_refused(env: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"env={env!r} is not allowed, expected ")):
        tiny_agent(env)


def test_activation_by_name_is_refused_for_the_actor() -> None:
    with pytest.raises(ValueError, match="activation_fn='relu' is not allowed, expected a class"):
        tiny_agent(policy_kwargs={"activation_fn": "relu"})


class WithImage(DictObs):
    """A wrapper that adds an image with the channels last."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "image": image})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {**super().observation(observation), "image": np.zeros((36, 36, 3), dtype=np.uint8)}


def test_images_with_channels_in_another_order_are_refused() -> None:
    """SB3 fails later, in its replay buffer."""

    def learn(env: VecEnv) -> None:
        tiny_agent(env, "MultiInputPolicy").learn(10)

    keys = ["count", "minus"]
    with pytest.raises(ValueError, match=r"VecTransposeImage.*\(36, 36, 3\), the agent \(3, 36, 36\)"):
        learn(VecNormalize(vec_env(WithImage(CountingEnv())), norm_obs_keys=keys))
    learn(VecNormalize(VecTransposeImage(vec_env(WithImage(CountingEnv()))), norm_obs_keys=keys))


@pytest.mark.parametrize("name", ["learning_rate", "qf_learning_rate"])
def test_a_schedule_that_becomes_nan_stops_training_before_the_weights_are_lost(name: str) -> None:
    model = tiny_agent(**{name: lambda progress_remaining: 1e-3 if progress_remaining > 0.5 else NAN})
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
def test_bad_train_freq_pairs_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^train_freq=.* is not allowed, expected "):
        tiny_agent(train_freq=value)


def test_train_freq_in_episodes_is_refused_with_several_envs() -> None:
    with pytest.raises(ValueError, match=r"^train_freq=.* is not allowed with 2 envs, expected "):
        tiny_agent(vec_env(CountingEnv(), CountingEnv()), train_freq=(1, "episode"))


class NotAnActionNoise:
    """An object with the methods of an action noise, but another base class."""

    def __call__(self) -> np.ndarray:
        return np.zeros(1)

    def reset(self) -> None:
        pass


@pytest.mark.parametrize(
    "bad_noise",
    [
        *(normal_noise(sigma) for sigma in (-0.1, NAN, INF)),
        NormalActionNoise(np.array([NAN]), np.ones(1)),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), -np.ones(1)),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.array([NAN])),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), theta=NAN),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), dt=INF),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), initial_noise=np.array([NAN])),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), initial_noise=np.zeros(3)),
        NormalActionNoise(np.array(["a"]), np.ones(1)),
        NormalActionNoise(np.array([10**400]), np.ones(1)),
        NormalActionNoise(0.0, 0.1),
        OrnsteinUhlenbeckActionNoise(0.0, 0.1),
        normal_noise(size=2),
        normal_noise(size=3),
        NormalActionNoise(np.zeros(1), np.ones(2)),
        NormalActionNoise(np.zeros(2), np.ones(1)),
        OrnsteinUhlenbeckActionNoise(np.zeros(2), np.ones(2)),
        VectorizedActionNoise(normal_noise(-0.1), 1),
        VectorizedActionNoise(normal_noise(size=2), 2),
        NotAnActionNoise(),
        NormalActionNoise,
        0.1,
        "normal",
        np.zeros(1),
    ],
    ids=readable,
)
def test_bad_action_noises_are_refused(bad_noise: Any) -> None:
    with pytest.raises(ValueError, match=r"^action_noise=.* is not allowed, expected "):
        tiny_agent(action_noise=bad_noise)


def test_action_noise_must_have_a_shape_that_broadcasts_to_the_actions() -> None:
    env = CountingEnv(action_space=spaces.Box(-1, 1, (2, 3), np.float32))
    for shape in ((6,), (2,), (3, 2), (4,)):
        with pytest.raises(ValueError, match=r"(?s)^action_noise=.* is not allowed, expected "):
            tiny_agent(env, action_noise=NormalActionNoise(np.zeros(shape), 0.1 * np.ones(shape)))
    for fitting in ((2, 3), (3,), (1,)):
        tiny_agent(env, action_noise=NormalActionNoise(np.zeros(fitting), 0.1 * np.ones(fitting))).learn(12)


@pytest.mark.parametrize("option", ["n_critics", "n_quantiles"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None, True, NAN])
def test_bad_numbers_of_critics_and_quantiles_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r} is not allowed, expected ")):
        tiny_agent(policy_kwargs={option: value})


@pytest.mark.parametrize("value", [5, True, ["logs"]])
def test_bad_log_folders_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"tensorboard_log={value!r} is not allowed, expected ")):
        tiny_agent(tensorboard_log=value)


@pytest.mark.parametrize(
    "net_arch", [8, "8", [8.0], [0], [-1], ["8"], [True], {"pi": [8], "qf": [8.5]}, {"pi": [8]}, [[8]]]
)
def test_bad_layers_are_refused(net_arch: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"net_arch={net_arch!r} is not allowed, expected ")):
        tiny_agent(policy_kwargs={"net_arch": net_arch})


def test_memory_optimized_buffer_needs_two_rows() -> None:
    options = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
    with pytest.raises(ValueError, match=r"^buffer_size=3 is not allowed .*optimize_memory_usage.* at least 4"):
        tiny_agent(counting_vec_env(2), buffer_size=3, **options)
    tiny_agent(counting_vec_env(2), buffer_size=4, **options).learn(20)


@pytest.mark.parametrize("option", ["layer_norm", "actor_layer_norm", "stochastic_actor"])
@pytest.mark.parametrize("value", ["False", "no", None, 0, 2, NAN])
def test_bad_switches_of_the_networks_are_refused(option: str, value: Any) -> None:
    """Any string would turn the option on, even ``"False"``."""
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r} is not allowed, expected True or False")):
        tiny_agent(policy_kwargs={"net_arch": [8], option: value})


def test_some_quantiles_must_be_left() -> None:
    message = "top_quantiles_to_drop_per_net=3 is not allowed with n_quantiles=3, expected an integer in [0, 2]"
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_agent(policy_kwargs={"net_arch": [8], "n_quantiles": 3}, top_quantiles_to_drop_per_net=3)


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
    # Its width overflows
    spaces.Box(-3e38, 3e38, (2,), np.float32),
]


@pytest.mark.parametrize("action_space", BAD_ACTION_SPACES, ids=readable)
@pytest.mark.parametrize("n_envs", [1, 2])
def test_bad_action_spaces_are_refused(action_space: spaces.Space, n_envs: int) -> None:
    with pytest.raises(ValueError, match=r"^action_space=.* is not allowed, expected "):
        tiny_agent(vec_env(*(CountingEnv(action_space=action_space) for _ in range(n_envs))))


def test_bad_hook_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.* did you mean 'sb3_td3x.shaping.FallPenalty'"):
        tiny_agent(reward_shaping="sb3_td3x.shaping.FalPenalty")


def her_agent(**kwargs: Any) -> TD3X:
    env = BitFlippingEnv(n_bits=2, continuous=True)
    return tiny_agent(env, "MultiInputPolicy", **{"replay_buffer_class": HerReplayBuffer, **kwargs})


@pytest.mark.parametrize("hook", [RewardScale(0.5), {"sb3_td3x.shaping.RewardScale": {"scale": 0.5}}, FallPenalty()])
def test_hook_is_refused_with_her(hook: Any) -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.* is not allowed with HerReplayBuffer"):
        her_agent(reward_shaping=hook)


class OwnHer(HerReplayBuffer):
    """A user's HER buffer."""


def test_hook_is_refused_with_a_subclass_of_her() -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.* is not allowed with OwnHer"):
        her_agent(replay_buffer_class=OwnHer, reward_shaping=RewardScale(0.5))


NO_TIMEOUTS: dict[str, dict[str, Any]] = {
    "optimize_memory_usage": {
        "optimize_memory_usage": True,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
    },
    "handle_timeout_termination": {"replay_buffer_kwargs": {"handle_timeout_termination": False}},
}


def ends_at_three(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """Change terminations in a plain function, which is known only when it runs."""
    return batch.rewards, batch.next_observations[:, 1] == 3


@pytest.mark.parametrize("option", NO_TIMEOUTS)
@pytest.mark.parametrize(
    "hook", [FallPenalty(), "sb3_td3x.shaping.FallPenalty", [RewardScale(2.0), FallPenalty()]], ids=readable
)
def test_hooks_that_declare_to_change_terminations_are_refused_without_timeouts(option: str, hook: Any) -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.*FallPenalty.* is not allowed.*optimize_memory_usage"):
        tiny_agent(reward_shaping=hook, **NO_TIMEOUTS[option])
    assert tiny_agent(reward_shaping=RewardScale(2.0), **NO_TIMEOUTS[option]).learn(12).num_timesteps == 12


@pytest.mark.parametrize("option", NO_TIMEOUTS)
def test_functions_that_change_terminations_stop_training_without_timeouts(option: str) -> None:
    model = tiny_agent(reward_shaping=ends_at_three, **NO_TIMEOUTS[option])
    with pytest.raises(ValueError, match=r"^reward_shaping=.*ends_at_three.* is not allowed.*optimize_memory_usage"):
        model.learn(20)
    assert model.replay_buffer.pos == 2


def test_optimize_memory_usage_is_refused_with_timeouts_and_dictionaries() -> None:
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        tiny_agent(optimize_memory_usage=True)
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        tiny_agent(DictObs(CountingEnv()), "MultiInputPolicy", optimize_memory_usage=True)


def test_priorities_are_refused_with_a_replay_buffer_class() -> None:
    with pytest.raises(ValueError, match=r"prioritized_replay_alpha=0.4 is not allowed with replay_buffer_class=R"):
        tiny_agent(prioritized_replay_alpha=0.4, replay_buffer_class=ReplayBuffer)


def test_bad_replay_buffer_classes_are_refused() -> None:
    for bad in ("ReplayBuffer", 5, dict, ReplayBuffer(1, spaces.Box(-1, 1), spaces.Box(-1, 1))):
        with pytest.raises(ValueError, match=r"^replay_buffer_class=.* is not allowed, expected "):
            tiny_agent(replay_buffer_class=bad)


# Unusual values that are allowed


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
        {"action_noise": normal_noise(0.0)},
        {"action_noise": NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)), "action_noise_decay": 1e-9},
        {"action_noise_min_scale": 1},
        {"prioritized_replay_alpha": 1, "learning_starts": 0, "buffer_size": 1, "batch_size": 1},
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
        # Integers as YAML files often write them
        {"buffer_size": 1e3, "batch_size": 4.0, "learning_starts": 1e1, "gradient_steps": 1.0, "train_freq": 2.0},
        {"policy_delay": 2.0, "n_steps": 3.0, "stats_window_size": 1e2, "policy_kwargs": {"n_critics": 3.0}},
        {"top_quantiles_to_drop_per_net": 0.0, "policy_kwargs": {"n_quantiles": 5.0}},
        {"buffer_size": np.int64(100), "batch_size": np.int32(4), "tau": np.float32(0.01), "gamma": np.float64(0.9)},
        {"learning_rate": np.float32(1e-3), "train_freq": np.int64(2), "policy_delay": np.uint8(2)},
    ],
    ids=readable,
)
def test_unusual_values_are_allowed(kwargs: dict[str, Any]) -> None:
    model = tiny_agent(**kwargs).learn(40)
    assert model.num_timesteps == 40
    for key, value in model.policy.state_dict().items():
        assert th.isfinite(value).all(), key
    saved_and_loaded(model, env=model.get_env()).learn(10)


# At loading


@pytest.fixture(scope="module")
def saved() -> bytes:
    """The zip file of an agent."""
    return zip_of(tiny_agent(action_noise=normal_noise()).learn(20)).getvalue()


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_refused_at_loading(saved: bytes, name: str) -> None:
    # One value of each kind: out of range, NaN, another type
    for value in [*BAD_VALUES[name][-1:], NAN, "0.5"]:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not allowed, expected ")):
            TD3X.load(io.BytesIO(saved), **{name: value})


def test_bad_objects_are_refused_at_loading(saved: bytes) -> None:
    with pytest.raises(ValueError, match=r"^action_noise=.* is not allowed, expected "):
        TD3X.load(io.BytesIO(saved), action_noise=normal_noise(size=2))
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
def test_unknown_arguments_are_refused_at_loading(saved: bytes, name: str, closest: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b.* is no argument of .*{closest}"):
        TD3X.load(io.BytesIO(saved), **{name: 0.5})


def test_unknown_arguments_name_the_closest_one() -> None:
    with pytest.raises(
        ValueError, match=r"^acton_noise_decay is no argument of TD3X\(\), did you mean action_noise_decay"
    ):
        tiny_agent(acton_noise_decay=0.9)
    with pytest.raises(ValueError, match=r"^net_arc is no argument of TD3XPolicy\(\), did you mean net_arch\?"):
        tiny_agent(policy_kwargs={"net_arc": [8]})


def test_unknown_policy_kwargs_of_images() -> None:
    with pytest.raises(ValueError, match=r"^net_arc is no argument of CnnPolicy\(\), did you mean net_arch\?"):
        tiny_agent(policy="CnnPolicy", policy_kwargs={"net_arc": [8]})


def test_a_subclass_may_have_more_arguments() -> None:
    class Subclass(TD3X):
        def __init__(self, *args: Any, temperature: float = 1.0, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.temperature = temperature

    model = Subclass("MlpPolicy", CountingEnv(), temperature=0.5, device="cpu", buffer_size=10)
    assert model.temperature == 0.5


@pytest.mark.parametrize(
    ("device", "closest"), [("gpu", ""), ("cuda0", "cuda"), ("CPU", ""), (None, ""), ("cp", "cpu")]
)
def test_unknown_devices_are_refused(device: Any, closest: str) -> None:
    with pytest.raises(ValueError, match=rf"^device={device!r} is not allowed, expected one of .*{closest}"):
        tiny_agent(device=device)


def test_envs_with_other_spaces_are_refused_at_loading(saved: bytes) -> None:
    with pytest.raises(ValueError, match="Action spaces do not match"):
        TD3X.load(io.BytesIO(saved), env=CountingEnv(action_space=spaces.Box(-2, 2, (1,))))
    with pytest.raises(ValueError, match="Action spaces do not match"):
        TD3X.load(io.BytesIO(saved), env=CountingEnv(action_space=spaces.Discrete(2)))
    with pytest.raises(ValueError, match="Observation spaces do not match"):
        TD3X.load(io.BytesIO(saved), env=DictObs(CountingEnv()))


def test_envs_with_other_spaces_are_refused_by_set_env() -> None:
    model = tiny_agent()
    with pytest.raises(ValueError, match="Action spaces do not match"):
        model.set_env(CountingEnv(action_space=spaces.Box(-2, 2, (1,))))


# The comparison with SB3 in docs/guides/from-sb3.md

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


def refused(algorithm: Any) -> list[str]:
    """Return the arguments that the constructor of an algorithm refuses."""
    names = []
    for name, value in SIXTEEN_BAD_VALUES:
        try:
            tiny_agent("Pendulum-v1", cls=algorithm, **{name: value})
        except (AssertionError, TypeError, ValueError):
            names.append(name)
    return names


def test_td3x_refuses_all_of_sixteen_bad_values_where_td3_refuses_two() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(SIXTEEN_BAD_VALUES) == len(refused(TD3X)) == 16
        assert refused(TD3) == ["learning_rate", "learning_rate"]
