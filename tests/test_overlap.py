"""``overlap_updates``: updates during the last env step of a rollout."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from callbacks import At, stop
from comparing import assert_identical, everything
from envs import CountingEnv, counting_vec_env, tiny_agent
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint


class Recorder(BaseCallback):
    """
    Record how updates and actions are interleaved.

    ``updates`` lists the buffer position and learning rate of each update, ``actions`` the number of updates before
    each action.
    """

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[tuple[int, float]] = []
        self.actions: list[int] = []

    def _on_training_start(self) -> None:
        model: Any = self.model
        sample, sample_action = model.replay_buffer.sample, model._sample_action

        def recorded_sample(*args: Any, **kwargs: Any) -> Any:
            self.updates.append((model.replay_buffer.pos, model.actor.optimizer.param_groups[0]["lr"]))
            return sample(*args, **kwargs)

        def recorded_action(*args: Any, **kwargs: Any) -> Any:
            self.actions.append(model._n_updates)
            return sample_action(*args, **kwargs)

        model.replay_buffer.sample, model._sample_action = recorded_sample, recorded_action

    def _on_step(self) -> bool:
        return True


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(
    ("n_envs", "kwargs"),
    [
        (1, {}),
        (3, {"gradient_steps": -1}),
        (1, {"train_freq": 4, "gradient_steps": 7}),
        (2, {"train_freq": 3, "gradient_steps": -1, "n_steps": 3}),
        (1, {"learning_starts": 0}),
    ],
)
def test_updates_only_miss_the_newest_transition(n_envs: int, kwargs: dict[str, Any]) -> None:
    """The number, times and learning rates of the updates are the same, and the newest policy acts."""
    recorders = []
    for overlap in (False, True):
        model = tiny_agent(counting_vec_env(n_envs), overlap_updates=overlap, learning_rate="lin_1e-2", **kwargs)
        recorders.append(Recorder())
        model.learn(24 * n_envs, recorders[-1])
    without, overlapped = recorders
    assert overlapped.actions == without.actions
    expected = [(max(size - 1, size == 1), rate) for size, rate in without.updates]
    assert overlapped.updates == expected
    assert len(expected) > 10


def env_functions() -> list[Callable[[], CountingEnv]]:
    return [lambda: CountingEnv(first_episode=0), lambda: CountingEnv(first_episode=100)]


@pytest.mark.parametrize("kwargs", [{}, {"n_steps": 3, "gradient_steps": 2, "train_freq": 2}])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_vec_env_gives_the_same_agent(kwargs: dict[str, Any], normalize: bool) -> None:
    found = []
    for make_env in (DummyVecEnv, SubprocVecEnv):
        env: VecEnv = make_env(env_functions())
        model = tiny_agent(VecNormalize(env) if normalize else env, overlap_updates=True, **kwargs).learn(60)
        found.append(everything(model))
        env.close()
    assert_identical(*found)


def test_it_changes_the_training() -> None:
    """An update at the same time has one transition less to sample from."""
    on, off = (everything(tiny_agent(overlap_updates=overlap).learn(40)) for overlap in (True, False))
    assert any(not np.array_equal(on[key], off[key]) for key in on)


def test_her_before_its_first_complete_episode() -> None:
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=3, continuous=True, max_steps=3), 1)
    kwargs = {"overlap_updates": True, "replay_buffer_class": HerReplayBuffer, "learning_starts": 3}
    model = tiny_agent(env, "MultiInputPolicy", **kwargs).learn(20)
    assert model._n_updates == 17


def test_with_a_users_replay_buffer() -> None:
    class OwnBuffer(ReplayBuffer):
        pass

    assert tiny_agent(overlap_updates=True, replay_buffer_class=OwnBuffer).learn(40)._n_updates == 35


@pytest.mark.parametrize("train_freq", [(1, "episode"), (2, "episode")])
def test_train_freq_in_episodes_is_refused(train_freq: tuple[int, str]) -> None:
    with pytest.raises(ValueError, match=r"^overlap_updates=True is not allowed with train_freq=\(., 'episode'\)"):
        tiny_agent(overlap_updates=True, train_freq=train_freq)


def fail() -> None:
    raise RuntimeError


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("interruption", [stop, fail, interrupt])
def test_no_update_is_skipped_after_an_interruption(interruption: Any) -> None:
    model = tiny_agent(overlap_updates=True)
    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        model.learn(40, At(20, interruption))
    assert model.num_timesteps == 20
    n_updates = model._n_updates
    model.learn(10, reset_num_timesteps=False)
    assert model._n_updates == n_updates + 10


def test_an_error_in_an_update_does_not_confuse_envs_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pending results must not be read as those of the next reset."""
    model = tiny_agent(SubprocVecEnv(env_functions()), overlap_updates=True)
    with monkeypatch.context() as context:
        context.setattr(model.replay_buffer, "sample", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.learn(40)
    model.learn(20)
    np.testing.assert_array_equal(model.env.reset()[:, 1], 0)
    model.env.close()


def test_exact_trainings_resume_bit_for_bit(tmp_path: Path) -> None:
    def train(name: str, resumed: bool = False, *callbacks: BaseCallback) -> TD3X:
        env = make_vec_env("Pendulum-v1", 2)
        callbacks = (ResumableCheckpoint(tmp_path / name, 10, exact=True), *callbacks)
        if resumed:
            model = TD3X.resume(tmp_path / name, env, device="cpu")
        else:
            model = tiny_agent(env, overlap_updates=True, train_freq=2)
        return model.learn(100 - model.num_timesteps, [*callbacks], reset_num_timesteps=not resumed)

    expected = everything(train("whole"))
    with pytest.raises(RuntimeError):
        train("parts", False, At(24, fail))
    assert_identical(expected, everything(train("parts", True)))


def test_evaluations_saving_and_loading(tmp_path: Path) -> None:
    callback = EvalCallback(counting_vec_env(1), eval_freq=10, log_path=str(tmp_path), verbose=0)
    model = tiny_agent(overlap_updates=True).learn(40, callback)
    assert callback.evaluations_timesteps == [10, 20, 30, 40]
    model.save(tmp_path / "agent")
    loaded = TD3X.load(tmp_path / "agent", env=counting_vec_env(1))
    assert loaded.overlap_updates
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded._n_updates > model._n_updates
