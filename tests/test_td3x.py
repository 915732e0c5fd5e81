"""What a user of SB3 does with an algorithm must work with TD3X: training, callbacks, logs, envs, buffers, policies."""

import contextlib
import copy
import io
import math
import multiprocessing
import pathlib
import pickle
import time
import warnings
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, DictObs, Episode, counting_vec_env, readable, tiny, vec_env
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack, VecNormalize
from stable_baselines3.td3 import policies as sb3_policies
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch import nn

from sb3_td3x import TD3X, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_td3x.buffers import PackedReplayBuffer


def make(env: Any = None, **kwargs: Any) -> TD3X:
    """A tiny agent."""
    return TD3X("MlpPolicy", CountingEnv() if env is None else env, **tiny(**kwargs))


def noise(size: int = 1) -> NormalActionNoise:
    return NormalActionNoise(np.zeros(size), 0.1 * np.ones(size))


def assert_same_weights(first: TD3X, second: TD3X) -> None:
    expected, actual = first.policy.state_dict(), second.policy.state_dict()
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert th.equal(value, actual[key]), key


def logged(model: TD3X) -> dict[str, Any]:
    """What was recorded since the last dump."""
    return dict(model.logger.name_to_value)


# Learning


class Imitate(gym.Env[np.ndarray, np.ndarray]):
    """The best action is half the observation; episodes are ten steps long."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.steps = 0
        self.target = np.zeros(1, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = -float((action[0] - self.target[0] / 2) ** 2)
        self.steps += 1
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, reward, False, self.steps == 10, {}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("option", [{}, {"clipped_double_q": False}, {"n_steps": 3}, {"gamma": 0.0}], ids=readable)
def test_learns(option: dict[str, Any]) -> None:
    kwargs = tiny(gamma=0.5, learning_rate=3e-3, batch_size=32, tau=0.05, learning_starts=100, action_noise=noise())
    model = TD3X("MlpPolicy", Imitate(), **{**kwargs, "policy_kwargs": {"net_arch": [32, 32]}, **option})
    returns: list[Any] = []
    for timesteps in (0, 700):
        model.learn(timesteps)
        returns.append(evaluate_policy(model, make_vec_env(Imitate, seed=1), n_eval_episodes=5)[0])
    assert returns[0] < -0.5
    assert returns[1] > -0.1


@pytest.mark.lowest_sb3
def test_env_as_string_and_default_arguments() -> None:
    model = TD3X("MlpPolicy", "Pendulum-v1", buffer_size=1000, device="cpu").learn(120)
    assert model.num_timesteps == 120
    assert model._n_updates == 20
    action, state = model.predict(model.observation_space.sample())
    assert model.action_space.contains(action)
    assert state is None


def test_defaults_are_sb3_s() -> None:
    sb3, td3x = TD3("MlpPolicy", "Pendulum-v1"), TD3X("MlpPolicy", "Pendulum-v1")
    for name in (
        *("learning_rate", "buffer_size", "learning_starts", "batch_size", "tau", "gamma", "train_freq"),
        *("gradient_steps", "action_noise", "optimize_memory_usage", "n_steps", "policy_delay"),
        *("target_policy_noise", "target_noise_clip", "_stats_window_size", "tensorboard_log", "verbose", "seed"),
    ):
        assert getattr(td3x, name) == getattr(sb3, name), name
    assert [p.shape for p in td3x.actor.parameters()] == [p.shape for p in sb3.actor.parameters()]


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_same_seed_same_agent(n_envs: int, normalize: bool) -> None:
    models = []
    for _ in range(2):
        env: Any = make_vec_env("Pendulum-v1", n_envs, seed=3)
        env = VecNormalize(env) if normalize else env
        action_noise = OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1))
        models.append(make(env, action_noise=action_noise, action_noise_decay=0.99, gradient_steps=-1).learn(60))
        np.random.uniform(size=7)  # noqa: NPY002 - what happens between two trainings does not matter
    assert_same_weights(*models)
    assert_same_weights(*(model.learn(30, reset_num_timesteps=False) for model in models[:1] * 2))


def test_set_random_seed() -> None:
    models = []
    for _ in range(2):
        model = make("Pendulum-v1", seed=1)
        model.set_random_seed(11)
        models.append(model.learn(40))
    assert_same_weights(*models)
    other = make("Pendulum-v1", seed=1)
    other.set_random_seed(12)
    other.learn(40)
    assert not th.equal(next(other.actor.parameters()), next(models[0].actor.parameters()))


def test_length_of_a_training() -> None:
    """Integral numbers of any type, as SB3's users write them; what remains of a finished one may be negative."""
    model = TD3X("MlpPolicy", CountingEnv(), **tiny())
    for timesteps in (7.0, np.int64(7), 7):
        assert model.learn(timesteps).num_timesteps == 7  # type: ignore[arg-type]
        assert type(model._total_timesteps) is int
    assert model.learn(-3, reset_num_timesteps=False).num_timesteps == 7
    # Until a callback stops it
    assert model.learn(math.inf, StopTrainingOnMaxEpisodes(1, verbose=0)).num_timesteps <= 5  # type: ignore[arg-type]
    for bad in (7.5, "7", None, math.nan):
        with pytest.raises(ValueError, match=r"total_timesteps=.* is not allowed, expected an integer$"):
            model.learn(bad)  # type: ignore[arg-type]


@pytest.mark.lowest_sb3
def test_learn_twice() -> None:
    model = make(action_noise=noise(), action_noise_decay=0.9).learn(20)
    assert (model.num_timesteps, model._n_updates, model._exploration_timesteps) == (20, 15, 15)
    model.learn(10, reset_num_timesteps=False)
    assert (model.num_timesteps, model._n_updates, model._exploration_timesteps) == (30, 25, 25)
    # As in SB3 the warm-up begins anew; the decay of the noise goes on
    model.learn(10, reset_num_timesteps=True)
    assert (model.num_timesteps, model._n_updates, model._exploration_timesteps) == (10, 30, 30)
    assert model.action_noise_scale == pytest.approx(0.9**30)
    assert model.replay_buffer.pos == 40


def test_continued_training_is_one_training() -> None:
    """Without a reset, two halves are the whole, also in the middle of an episode."""
    whole = make("Pendulum-v1", action_noise=noise()).learn(60)
    halves = make("Pendulum-v1", action_noise=noise()).learn(31)
    halves.learn(29, reset_num_timesteps=False)
    assert_same_weights(whole, halves)


class Lost(BaseCallback):
    """Ends a training in the middle of an episode, before its last step is stored."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def _on_step(self) -> bool:
        if self.num_timesteps == 8 and self.how == "error":
            raise LookupError
        return self.num_timesteps != 8


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("how", ["stopped", "error"])
@pytest.mark.parametrize("kwargs", [{}, {"n_steps": 3}], ids=readable)
def test_training_that_was_broken_off_goes_on_with_new_episodes(kwargs: dict[str, Any], how: str) -> None:
    """The observation says which episode a step is of."""
    model = make(CountingEnv([Episode(5, True)]), **kwargs)
    with contextlib.suppress(LookupError):
        model.learn(20, Lost(how))
    model.learn(6, reset_num_timesteps=False)
    buffer = model.replay_buffer
    steps = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (3, 0)]
    assert buffer.observations[:13, 0].tolist() == [[*step] for step in steps]
    assert (buffer.observations[:13, 0, 0] == buffer.next_observations[:13, 0, 0]).all()
    assert np.flatnonzero(buffer.dones[:13, 0]).tolist() == [4, 6, 11]
    assert np.flatnonzero(buffer.timeouts[:13, 0]).tolist() == [6]


class OwnBuffer(NStepReplayBuffer):
    """A user's own."""


def test_training_with_the_user_s_own_buffer_goes_on_as_in_sb3() -> None:
    """Nothing is known of it by which its open episodes could be ended."""
    kwargs = {"replay_buffer_class": OwnBuffer, "replay_buffer_kwargs": {"n_steps": 2}}
    model = (
        make(CountingEnv([Episode(50, True)]), **kwargs).learn(20, Lost("stopped")).learn(6, reset_num_timesteps=False)
    )
    assert set(model.replay_buffer.observations[:13, 0, 0]) == {0}


@pytest.mark.lowest_sb3
def test_hindsight_ends_where_a_training_was_broken_off() -> None:
    env = BitFlippingEnv(n_bits=3, continuous=True, max_steps=4)
    model = TD3X("MultiInputPolicy", env, **tiny(replay_buffer_class=HerReplayBuffer, learning_starts=1000))
    model.learn(100, StopTrainingOnMaxEpisodes(2)).learn(9, reset_num_timesteps=False)
    assert isinstance(model.replay_buffer, HerReplayBuffer)
    assert model.replay_buffer.ep_length.max() <= 4


# Frequencies


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(
    ("kwargs", "n_envs", "updates", "ratio"),
    [
        ({}, 1, 40, 1),
        ({}, 4, 10, 1 / 4),
        ({"gradient_steps": -1}, 4, 40, 1),
        ({"gradient_steps": 8}, 4, 80, 2),
        ({"train_freq": 2, "gradient_steps": 1}, 1, 20, 1 / 2),
        ({"train_freq": (2, "step"), "gradient_steps": -1}, 4, 40, 1),
        ({"train_freq": 5, "gradient_steps": 2}, 1, 16, 2 / 5),
        ({"train_freq": (1, "episode"), "gradient_steps": -1}, 1, 40, 1),
        ({"train_freq": (2, "episode"), "gradient_steps": 2}, 1, 10, 2 / 8),
    ],
    ids=readable,
)
def test_updates_per_env_step(kwargs: dict[str, Any], n_envs: int, updates: int, ratio: float) -> None:
    model = make(counting_vec_env(n_envs), learning_starts=0, **kwargs)
    model.learn(40, log_interval=None)
    assert model._n_updates == updates
    assert logged(model)["train/updates_per_env_step"] == pytest.approx(ratio)


def test_no_updates_in_the_warm_up_and_with_no_gradient_steps() -> None:
    assert make(learning_starts=30).learn(30)._n_updates == 0
    assert make(gradient_steps=0).learn(30)._n_updates == 0
    assert make(learning_starts=0).learn(1)._n_updates == 1


# Callbacks


class CountCalls(BaseCallback):
    """Counts what SB3 calls when; stops after some steps if asked to."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.calls = {"start": 0, "rollout start": 0, "step": 0, "rollout end": 0, "end": 0}
        self.stop_after = stop_after

    def _on_training_start(self) -> None:
        self.calls["start"] += 1

    def _on_rollout_start(self) -> None:
        self.calls["rollout start"] += 1

    def _on_step(self) -> bool:
        self.calls["step"] += 1
        assert {"actions", "buffer_actions", "new_obs", "rewards", "dones", "infos"} <= self.locals.keys()
        return self.calls["step"] != self.stop_after

    def _on_rollout_end(self) -> None:
        self.calls["rollout end"] += 1

    def _on_training_end(self) -> None:
        self.calls["end"] += 1


@pytest.mark.lowest_sb3
def test_callbacks_are_called() -> None:
    callback = CountCalls()
    make(train_freq=2).learn(20, callback)
    assert callback.calls == {"start": 1, "rollout start": 10, "step": 20, "rollout end": 10, "end": 1}


@pytest.mark.lowest_sb3
def test_callback_stops_training() -> None:
    callback = CountCalls(stop_after=13)
    model = make().learn(100, callback)
    assert model.num_timesteps == callback.calls["step"] == 13
    assert callback.calls["end"] == 1
    assert model.replay_buffer.pos == 12
    model.learn(5, reset_num_timesteps=False)
    assert model.num_timesteps == 18


def test_function_and_list_as_callback() -> None:
    stop_at_seven = make().learn(10, lambda local_variables, _: local_variables["num_collected_steps"] < 7)
    assert stop_at_seven.num_timesteps == 10
    assert make().learn(10, lambda local_variables, _: local_variables["self"].num_timesteps < 7).num_timesteps == 7
    callbacks: list[BaseCallback] = [CountCalls(), CountCalls(stop_after=4)]
    assert make().learn(10, callbacks).num_timesteps == 4


@pytest.mark.lowest_sb3
def test_evaluation_checkpoints_and_events(tmp_path: pathlib.Path) -> None:
    counter = CountCalls()
    evaluation = EvalCallback(
        VecNormalize(counting_vec_env(1), training=False, norm_reward=False),
        callback_on_new_best=StopTrainingOnRewardThreshold(1e9),
        callback_after_eval=StopTrainingOnNoModelImprovement(100),
        n_eval_episodes=2,
        eval_freq=10,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path),
        verbose=0,
    )
    checkpoints = CheckpointCallback(10, str(tmp_path), save_replay_buffer=True, save_vecnormalize=True)
    callbacks = CallbackList([evaluation, checkpoints, EveryNTimesteps(8, counter)])
    model = make(VecNormalize(counting_vec_env(2)), action_noise=noise()).learn(60, callbacks)
    assert evaluation.last_mean_reward == pytest.approx((15 + 6) / 2)
    assert counter.calls["step"] == 7
    saved = np.load(tmp_path / "evaluations.npz")
    np.testing.assert_array_equal(saved["timesteps"], [20, 40, 60])
    best = TD3X.load(tmp_path / "best_model")
    assert best.num_timesteps == 20
    last = TD3X.load(tmp_path / "rl_model_60_steps", env=VecNormalize(counting_vec_env(2)))
    assert_same_weights(last, last)
    last.load_replay_buffer(tmp_path / "rl_model_replay_buffer_60_steps.pkl")
    assert last.replay_buffer.pos == 29  # callbacks come before the step is stored
    VecNormalize.load(str(tmp_path / "rl_model_vecnormalize_60_steps.pkl"), counting_vec_env(2))
    assert last.learn(10, reset_num_timesteps=False).num_timesteps == 70
    assert model.num_timesteps == 60


@pytest.mark.parametrize(
    ("callback", "timesteps"),
    [
        (
            lambda: EvalCallback(
                counting_vec_env(1), StopTrainingOnRewardThreshold(1.0, verbose=0), eval_freq=7, verbose=0
            ),
            7,
        ),
        (lambda: StopTrainingOnMaxEpisodes(3), 13),
    ],
)
def test_stopping_callbacks_of_sb3(callback: Any, timesteps: int) -> None:
    assert make().learn(100, callback()).num_timesteps == timesteps


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert make().learn(20, progress_bar=True).num_timesteps == 20
    assert "20/20" in "".join(capsys.readouterr())


# Logs


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 4])
def test_tensorboard(tmp_path: pathlib.Path, n_envs: int) -> None:
    model = make(
        counting_vec_env(n_envs),
        tensorboard_log=str(tmp_path),
        learning_rate=LinearSchedule(1e-2, 0.0, 1.0),
        qf_learning_rate="lin_1e-3",
        action_noise=noise(),
        action_noise_decay=0.99,
        reward_shaping=[{"sb3_td3x.shaping.RewardScale": {"scale": 2.0}}],
    )
    model.learn(80, log_interval=2)
    (folder,) = tmp_path.iterdir()
    assert folder.name == "TD3X_1"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {
        *("train/actor_loss", "train/critic_loss", "train/q_mean", "train/learning_rate", "train/qf_learning_rate"),
        *("train/updates_per_env_step", "rollout/action_noise_scale", "rollout/shaped_reward_mean"),
        *("rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps"),
    } == set(events.Tags()["scalars"])
    last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert last["train/updates_per_env_step"] == pytest.approx(1 / n_envs)
    assert last["train/learning_rate"] == pytest.approx(10 * last["train/qf_learning_rate"], rel=1e-4)
    step = events.Scalars("rollout/action_noise_scale")[-1].step
    assert last["rollout/action_noise_scale"] == pytest.approx(0.99 ** (step - (5 if n_envs == 1 else 8)), rel=1e-4)
    assert all(np.isfinite(value) for value in last.values())


def test_tensorboard_names_of_runs(tmp_path: pathlib.Path) -> None:
    model = make(tensorboard_log=str(tmp_path))
    model.learn(8)
    model.learn(8, tb_log_name="mine")
    model.learn(8, tb_log_name="mine", reset_num_timesteps=False)
    model.learn(8, tb_log_name="mine")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["TD3X_1", "mine_1", "mine_2"]


@pytest.mark.lowest_sb3
def test_own_logger(tmp_path: pathlib.Path) -> None:
    model = make(action_noise=noise())
    model.set_logger(configure(str(tmp_path), ["csv", "json"]))
    model.learn(40, log_interval=1)
    header = (tmp_path / "progress.csv").read_text().splitlines()[0]
    assert "train/n_updates" in header
    assert "train/q_mean" in header
    assert "shaped" not in header


def test_logs_say_nothing_of_what_is_off() -> None:
    model = make().learn(20, log_interval=None)
    assert not [name for name in logged(model) if "noise" in name or "shaped" in name]


def test_logged_means_are_those_of_the_updates() -> None:
    """The losses over all updates of one ``train``; with no actor's update among them, none of the actor."""
    model = make(policy_delay=100, gradient_steps=3).learn(20, log_interval=None)
    assert "train/actor_loss" not in logged(model)
    assert logged(model)["train/n_updates"] == model._n_updates == 45
    assert logged(model)["train/learning_rate"] == logged(model)["train/qf_learning_rate"] == 1e-3


def test_table_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    make(verbose=1).learn(30, log_interval=1)
    output = capsys.readouterr().out
    for name in ("ep_rew_mean", "actor_loss", "critic_loss", "q_mean", "updates_per_env_step"):
        assert name in output


# Envs


@pytest.mark.lowest_sb3
def test_subprocesses() -> None:
    env = SubprocVecEnv([CountingEnv] * 2, start_method="fork")
    model = make(env, action_noise=noise(), gradient_steps=-1).learn(40)
    assert model._n_updates == 36
    assert model.replay_buffer.pos == 20
    env.close()


@pytest.mark.lowest_sb3
def test_vec_normalize(tmp_path: pathlib.Path) -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0))
    model = make(env, action_noise=noise()).learn(60)
    assert model.get_vec_normalize_env() is env
    assert np.abs(model.replay_buffer.observations[:30]).max() > 1  # raw
    model.save(tmp_path / "agent")
    env.save(str(tmp_path / "statistics.pkl"))
    again = VecNormalize.load(str(tmp_path / "statistics.pkl"), make_vec_env("Pendulum-v1", 2))
    loaded = TD3X.load(tmp_path / "agent", env=again).learn(20)
    assert loaded.get_vec_normalize_env() is again


def test_set_env() -> None:
    model = make().learn(20)
    other = CountingEnv([Episode(7, False)], first_episode=50)
    model.set_env(other)
    model.learn(10, reset_num_timesteps=False)
    np.testing.assert_array_equal(model.replay_buffer.observations[20:30, 0, 0], [50] * 7 + [51] * 3)
    with pytest.raises(AssertionError, match="number of environments"):
        model.set_env(counting_vec_env(2))


BOXES: dict[str, spaces.Box] = {
    "[-3, 1]": spaces.Box(-3, 1, (1,), np.float32),
    "per dimension": spaces.Box(np.array([-2, 0, 5], np.float32), np.array([-1, 10, 5.5], np.float32)),
    "float64": spaces.Box(-2, 0.1, (2,), np.float64),
    "17": spaces.Box(-0.4, 0.4, (17,), np.float32),
    "two axes": spaces.Box(-1, 2, (2, 3), np.float32),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", BOXES)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_actions_are_always_inside_their_bounds(case: str, n_envs: int) -> None:
    space = BOXES[case]

    class Strict(CountingEnv):
        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            assert action.shape == space.shape
            assert (action >= space.low).all()
            assert (action <= space.high).all()
            return super().step(action)

    strong = NormalActionNoise(np.zeros(space.shape), 3 * np.ones(space.shape))
    envs = vec_env(*(Strict(action_space=space) for _ in range(n_envs)))
    model = make(envs, action_noise=strong).learn(40 * n_envs)
    stored = model.replay_buffer.actions[:40]
    assert (np.abs(stored) == 1).any()  # clipped noise
    assert np.abs(stored).max() <= 1
    action, _ = model.predict(np.zeros((5, 2), np.float32))
    assert action.shape == (5, *space.shape)
    assert (action >= space.low).all()
    assert (action <= space.high).all()


class Fork(BaseCallback):
    """Starts a process that lives longer than the training."""

    def _on_training_start(self) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        self.process.start()

    def _on_step(self) -> bool:
        return True


def test_training_does_not_wait_for_processes_of_callbacks() -> None:
    env = SubprocVecEnv([CountingEnv] * 2, start_method="fork")
    callback = Fork()
    make(env).learn(20, callback)
    assert callback.process.is_alive()
    callback.process.kill()
    env.close()


# Buffers


def test_n_steps() -> None:
    model = make(counting_vec_env(2), n_steps=3, gamma=0.9).learn(60)
    assert isinstance(model.replay_buffer, PackedReplayBuffer)
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (3, 0.9)


@pytest.mark.parametrize("from_file", [False, True])
def test_n_steps_end_where_learn_resets_the_envs(from_file: bool, tmp_path: pathlib.Path) -> None:
    """Rewards are 1, 2, ... 5, and from the reset on again."""
    env = counting_vec_env(1, [Episode(100, True)])
    model = make(env, n_steps=3, gamma=1.0).learn(5)
    if from_file:
        model.save(tmp_path / "agent")
        model.save_replay_buffer(tmp_path / "buffer")
        model = TD3X.load(tmp_path / "agent", env=env)
        model.load_replay_buffer(tmp_path / "buffer")
        model.learn(5, reset_num_timesteps=False)
    else:
        model.learn(5)
    batch = model.replay_buffer._get_samples(np.arange(7))
    assert batch.rewards.ravel().tolist() == [6, 9, 12, 9, 5, 6, 9]
    assert batch.next_observations.tolist() == [[0, 3], [0, 4], [0, 5], [0, 5], [0, 5], [1, 3], [1, 4]]
    assert not batch.dones.any()


def test_n_steps_go_on_where_learn_does(tmp_path: pathlib.Path) -> None:
    model = make(counting_vec_env(1, [Episode(100, True)]), n_steps=3, gamma=1.0).learn(5)
    model.learn(5, reset_num_timesteps=False)
    batch = model.replay_buffer._get_samples(np.arange(7))
    assert batch.rewards.ravel().tolist() == [6, 9, 12, 15, 18, 21, 24]


@pytest.mark.lowest_sb3
def test_memory_optimized_buffer() -> None:
    options = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
    model = make(buffer_size=20, **options).learn(50)
    assert model.replay_buffer.full
    assert model.replay_buffer.optimize_memory_usage
    with pytest.warns(UserWarning, match="truncated"):
        model.learn(10)


@pytest.mark.lowest_sb3
def test_her(tmp_path: pathlib.Path) -> None:
    env = BitFlippingEnv(n_bits=3, continuous=True, max_steps=3)
    model = TD3X(
        "MultiInputPolicy",
        env,
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 2, "goal_selection_strategy": "future"},
        **tiny(),
    ).learn(40)
    assert isinstance(model.replay_buffer, HerReplayBuffer)
    model.save(tmp_path / "agent")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = TD3X.load(tmp_path / "agent", env=env)
    loaded.load_replay_buffer(tmp_path / "buffer")
    loaded.learn(10, reset_num_timesteps=False)
    assert loaded.num_timesteps == 50
    assert "env" not in loaded.replay_buffer_kwargs
    without_env = TD3X.load(tmp_path / "agent")
    obs: Any = env.reset()[0]
    np.testing.assert_array_equal(without_env.predict(obs)[0], TD3X.load(tmp_path / "agent", env=env).predict(obs)[0])


class LoggingBuffer(ReplayBuffer):
    """A user's own buffer."""

    def __init__(self, *args: Any, note: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note


def test_own_buffer_class() -> None:
    model = make(replay_buffer_class=LoggingBuffer, replay_buffer_kwargs={"note": "mine"}).learn(10)
    assert isinstance(model.replay_buffer, LoggingBuffer)
    assert model.replay_buffer.note == "mine"
    assert isinstance(make().replay_buffer, PackedReplayBuffer)
    with pytest.warns(UserWarning, match=r"n_steps=3"):
        make(replay_buffer_class=LoggingBuffer, n_steps=3)


# Policies


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("channels_last", [False, True])
def test_images(channels_last: bool) -> None:
    env = FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=False, channel_first=not channels_last)
    policy_kwargs = {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}}
    model = TD3X("CnnPolicy", env, **tiny(policy_kwargs=policy_kwargs, buffer_size=30)).learn(12)
    assert model.replay_buffer.observations.dtype == np.uint8
    assert model.replay_buffer.obs_shape == (1, 36, 36)
    action, _ = model.predict(model.observation_space.sample())
    assert model.action_space.contains(action)


def test_stacked_frames() -> None:
    env = VecFrameStack(counting_vec_env(2), n_stack=3)
    model = make(env, action_noise=noise()).learn(40)
    np.testing.assert_array_equal(model.replay_buffer.next_observations[4, 0], [0, 3, 0, 4, 0, 5])


@pytest.mark.lowest_sb3
def test_dict_observations() -> None:
    env = vec_env(DictObs(CountingEnv()), DictObs(CountingEnv()))
    model = TD3X("MultiInputPolicy", env, **tiny()).learn(40)
    assert isinstance(model.replay_buffer, PackedReplayBuffer)
    with pytest.raises(ValueError, match="MultiInputPolicy"):
        TD3X("MlpPolicy", env, **tiny())


class WithParity(DictObs):
    """Has a number beside the arrays, which SB3's replay buffers take another shape for."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        assert isinstance(self.observation_space, spaces.Dict)
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "parity": spaces.Discrete(2)})

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {**super().observation(observation), "parity": int(observation[1]) % 2}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("hook", [None, lambda batch: (batch.rewards, batch.terminations)], ids=["raw", "shaped"])
def test_dict_observations_with_a_number(n_envs: int, hook: Any) -> None:
    env = vec_env(*(WithParity(CountingEnv()) for _ in range(n_envs)))
    model = TD3X("MultiInputPolicy", env, **tiny(reward_shaping=hook)).learn(40)
    buffer: Any = model.replay_buffer
    parities = (buffer.observations["count"][: buffer.pos, :, 1] % 2).ravel()
    np.testing.assert_array_equal(buffer.observations["parity"][: buffer.pos].ravel(), parities)
    last_obs: Any = model._last_obs
    assert last_obs["parity"].shape == (n_envs,)


@pytest.mark.lowest_sb3
def test_her_with_numbers() -> None:
    env = BitFlippingEnv(n_bits=3, continuous=True, max_steps=3, discrete_obs_space=True)
    model = TD3X("MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, **tiny()).learn(40)
    assert model._n_updates == 35


class Doubled(BaseFeaturesExtractor):
    """A user's own features extractor."""

    def __init__(self, observation_space: spaces.Box, features_dim: int = 4) -> None:
        super().__init__(observation_space, features_dim)
        self.layer = nn.Linear(observation_space.shape[0], features_dim)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.layer(2 * observations)
        return features


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(
    "policy_kwargs",
    [
        {"features_extractor_class": Doubled, "features_extractor_kwargs": {"features_dim": 5}},
        {"features_extractor_class": Doubled, "share_features_extractor": True},
        {"net_arch": {"pi": [6], "qf": [8, 7]}, "n_critics": 3},
        {"net_arch": []},
        {"activation_fn": nn.Tanh},
        {"activation_fn": nn.Tanh, "critic_activation_fn": "relu"},
        {"optimizer_class": th.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}},
        {"optimizer_class": th.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.1, "foreach": True}},
        {"layer_norm": True, "actor_layer_norm": True},
        {"stochastic_actor": True},
        {"n_critics": 1},
    ],
    ids=readable,
)
def test_policy_kwargs(policy_kwargs: dict[str, Any]) -> None:
    model = make(policy_kwargs={"net_arch": [8], **policy_kwargs}).learn(20)
    zip_file = io.BytesIO()
    model.save(zip_file)
    zip_file.seek(0)
    loaded = TD3X.load(zip_file, env=model.env, trusted=True)
    assert_same_weights(model, loaded)
    assert loaded.learn(20)._n_updates == 30


class OwnPolicy(MlpPolicy):
    """A user's own policy, of TD3X's."""


class OwnSB3Policy(sb3_policies.TD3Policy):
    """A user's own policy, of SB3's."""


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("policy_class", [MlpPolicy, OwnPolicy, sb3_policies.MlpPolicy, OwnSB3Policy])
@pytest.mark.parametrize("n_critics", [1, 2, 3])
def test_policy_classes(policy_class: type[Any], n_critics: int, tmp_path: pathlib.Path) -> None:
    """All of them learn the same as SB3's, are saved and loaded, and converted where SB3's TD3 can have them."""
    kwargs = tiny(policy_kwargs={"net_arch": [8], "n_critics": n_critics})
    model = TD3X(policy_class, CountingEnv(), **kwargs).learn(20)
    sb3 = TD3(sb3_policies.MlpPolicy, CountingEnv(), **kwargs).learn(20)
    for key, value in sb3.policy.state_dict().items():
        np.testing.assert_allclose(model.policy.state_dict()[key].numpy(), value.numpy(), rtol=1e-5, atol=2e-6)
    model.save(tmp_path / "agent")
    loaded = TD3X.load(tmp_path / "agent", env=CountingEnv(), trusted=True)
    assert_same_weights(model, loaded)
    assert type(loaded.policy) is type(model.policy)
    loaded.learn(20)
    if policy_class is OwnPolicy:
        with pytest.raises(ValueError, match="OwnPolicy"):
            model.to_sb3()
        return
    converted = model.to_sb3()
    obs = np.ones((3, 2), np.float32)
    np.testing.assert_allclose(converted.predict(obs)[0], model.predict(obs)[0], atol=1e-6)
    converted.learn(10, reset_num_timesteps=False)


def test_policy_aliases() -> None:
    assert TD3X.policy_aliases == {"MlpPolicy": MlpPolicy, "CnnPolicy": CnnPolicy, "MultiInputPolicy": MultiInputPolicy}
    with pytest.raises(ValueError, match="Policy LstmPolicy unknown"):
        TD3X("LstmPolicy", CountingEnv())


@pytest.mark.parametrize(
    "policy_kwargs", [{}, {"layer_norm": True, "n_critics": 3}, {"stochastic_actor": True}], ids=readable
)
def test_policy_alone_is_pickled_and_saved(policy_kwargs: dict[str, Any], tmp_path: pathlib.Path) -> None:
    model = make(policy_kwargs={"net_arch": [8], **policy_kwargs}).learn(20)
    obs = np.ones((3, 2), np.float32)
    expected, _ = model.predict(obs, deterministic=True)
    pickled = cloudpickle.loads(cloudpickle.dumps(model.policy))
    model.policy.save(str(tmp_path / "policy"))
    saved = MlpPolicy.load(str(tmp_path / "policy"))
    for policy in (pickled, saved):
        np.testing.assert_array_equal(policy.predict(obs, deterministic=True)[0], expected)
        for key, value in model.policy.state_dict().items():
            assert th.equal(policy.state_dict()[key], value), key


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize(
    "kwargs", [{}, {"precision": "bfloat16"}, {"policy_kwargs": {"net_arch": [8], "layer_norm": True}}], ids=readable
)
def test_agent_is_pickled(kwargs: dict[str, Any], dump: Any) -> None:
    """As Ray, joblib and processes do."""
    model = make(**kwargs).learn(20)
    pickled = pickle.loads(dump(model))
    assert pickled.actor is pickled.policy.actor
    assert pickled.critic_target is pickled.policy.critic_target
    assert_same_weights(model, pickled)
    # Both draw from the same global generators
    for agent in (model, pickled):
        agent.set_random_seed(1)
        agent.learn(10)
    assert_same_weights(model, pickled)


def test_agent_without_networks_is_copied() -> None:
    model = TD3X("MlpPolicy", CountingEnv(), **tiny(), _init_setup_model=False)
    assert copy.deepcopy(model).learning_rate == model.learning_rate


class Remembering(FlattenExtractor):
    """Keeps what it computed last, which cannot be copied."""

    def __init__(self, observation_space: spaces.Space) -> None:
        super().__init__(observation_space)
        self.scale = nn.Parameter(th.ones(1))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        self.last = super().forward(observations) * self.scale
        return self.last


def test_agent_with_what_cannot_be_copied_is_pickled() -> None:
    model = make(policy_kwargs={"net_arch": [8], "features_extractor_class": Remembering}).learn(20)
    assert_same_weights(model, pickle.loads(pickle.dumps(model)))


def test_predict() -> None:
    model = make(CountingEnv(action_space=spaces.Box(-3, 1, (1,))))
    obs = np.zeros(2, np.float32)
    single, _ = model.predict(obs)
    assert single.shape == (1,)
    batch, _ = model.predict(np.stack([obs, obs]), deterministic=True)
    np.testing.assert_allclose(batch, [single, single])
    with pytest.raises(ValueError, match="observation shape"):
        model.predict(np.zeros(3, np.float32))
    stochastic = make(policy_kwargs={"net_arch": [8], "stochastic_actor": True})
    assert (stochastic.predict(obs, deterministic=True)[0] == stochastic.predict(obs, deterministic=True)[0]).all()
    assert (stochastic.predict(obs)[0] != stochastic.predict(obs)[0]).any()


def test_noise_beside_a_stochastic_actor_is_announced() -> None:
    with pytest.warns(UserWarning, match="action_noise is not used"):
        make(action_noise=noise(), policy_kwargs={"net_arch": [8], "stochastic_actor": True}).learn(12)


@pytest.mark.lowest_sb3
def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make(
            VecNormalize(counting_vec_env(2)), action_noise=noise(), reward_shaping="sb3_td3x.shaping.FallPenalty"
        )
        model.learn(40)
        zip_file = io.BytesIO()
        model.save(zip_file)
        zip_file.seek(0)
        TD3X.load(zip_file, env=counting_vec_env(3)).learn(30)
