"""Updates during the last env step of a rollout: their order, what they draw from, and how they end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparing import assert_identical, everything
from envs import CountingEnv, counting_vec_env, tiny, tiny_agent
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint


def make(env: Any = None, **kwargs: Any) -> TD3X:
    return tiny_agent(counting_vec_env(1) if env is None else env, **{"overlap_updates": True, **kwargs})


class Recorder(BaseCallback):
    """Lists the size of the replay buffer and the learning rate of each update, and the updates before each action."""

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
def test_only_what_is_drawn_from_is_one_step_older(n_envs: int, kwargs: dict[str, Any]) -> None:
    """As many updates at the same times with the same learning rates, and the newest policy acts."""
    recorders = []
    for overlap in (False, True):
        model = make(counting_vec_env(n_envs), overlap_updates=overlap, learning_rate="lin_1e-2", **kwargs)
        recorders.append(Recorder())
        model.learn(24 * n_envs, recorders[-1])
    without, overlapped = recorders
    assert overlapped.actions == without.actions
    expected = [(max(size - 1, size == 1), rate) for size, rate in without.updates]
    assert overlapped.updates == expected
    assert len(expected) > 10


def bodies() -> list[Callable[[], CountingEnv]]:
    return [lambda: CountingEnv(first_episode=0), lambda: CountingEnv(first_episode=100)]


@pytest.mark.parametrize("kwargs", [{}, {"n_steps": 3, "gradient_steps": 2, "train_freq": 2}])
@pytest.mark.parametrize("normalize", [False, True])
def test_same_bits_for_every_vec_env(kwargs: dict[str, Any], normalize: bool) -> None:
    found = []
    for make_env in (DummyVecEnv, SubprocVecEnv):
        env: VecEnv = make_env(bodies())
        model = make(VecNormalize(env) if normalize else env, **kwargs).learn(60)
        found.append(everything(model))
        env.close()
    assert_identical(*found)


def test_it_changes_the_training() -> None:
    """The updates of one and the same moment draw from one transition less."""
    on, off = (everything(make(overlap_updates=overlap).learn(40)) for overlap in (True, False))
    assert any(not np.array_equal(on[key], off[key]) for key in on)


def test_before_the_first_complete_episode_of_her() -> None:
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=3, continuous=True, max_steps=3), 1)
    kwargs = tiny(overlap_updates=True, replay_buffer_class=HerReplayBuffer, learning_starts=3)
    model = TD3X("MultiInputPolicy", env, **kwargs).learn(20)
    assert model._n_updates == 17


def test_with_a_replay_buffer_of_the_users_own() -> None:
    class OwnBuffer(ReplayBuffer):
        pass

    assert make(replay_buffer_class=OwnBuffer).learn(40)._n_updates == 35


@pytest.mark.parametrize("train_freq", [(1, "episode"), (2, "episode")])
def test_episodes_are_refused(train_freq: tuple[int, str]) -> None:
    with pytest.raises(ValueError, match=r"^overlap_updates=True is not allowed with train_freq=\(., 'episode'\)"):
        make(train_freq=train_freq)


class StopAt(BaseCallback):
    def __init__(self, timestep: int, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.timestep = timestep
        self.error = error

    def _on_step(self) -> bool:
        if self.num_timesteps == self.timestep and self.error is not None:
            raise self.error
        return self.num_timesteps != self.timestep


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_after_an_interruption_no_update_is_skipped(error: type[BaseException] | None) -> None:
    model = make()
    if error is None:
        model.learn(40, StopAt(20))
    else:
        with pytest.raises(error):
            model.learn(40, StopAt(20, error))
    n_updates = model._n_updates
    model.learn(10, reset_num_timesteps=False)
    assert model._n_updates == n_updates + 10


def test_an_error_in_the_updates_leaves_processes_of_envs_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers were on the way: the next reset must not take them for its own."""
    model = make(SubprocVecEnv(bodies()))
    with monkeypatch.context() as context:
        context.setattr(model.replay_buffer, "sample", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.learn(40)
    model.learn(20)
    assert model.env is not None
    np.testing.assert_array_equal(model.env.reset()[:, 1], 0)
    model.env.close()


def test_exact_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    def train(name: str, resumed: bool = False, *callbacks: BaseCallback) -> TD3X:
        env = make_vec_env("Pendulum-v1", 2)
        callbacks = (ResumableCheckpoint(tmp_path / name, 10, exact=True), *callbacks)
        model = TD3X.resume(tmp_path / name, env, device="cpu") if resumed else make(env, train_freq=2)
        return model.learn(100 - model.num_timesteps, [*callbacks], reset_num_timesteps=not resumed)

    expected = everything(train("whole"))
    with pytest.raises(RuntimeError):
        train("parts", False, StopAt(24, RuntimeError))
    assert_identical(expected, everything(train("parts", True)))


def test_evaluations_and_saving_on_the_way(tmp_path: Path) -> None:
    """What is saved is what was evaluated, and training goes on from it."""
    callback = EvalCallback(counting_vec_env(1), eval_freq=10, log_path=str(tmp_path), verbose=0)
    model = make().learn(40, callback)
    assert callback.evaluations_timesteps == [10, 20, 30, 40]
    model.save(tmp_path / "agent")
    loaded = TD3X.load(tmp_path / "agent", env=counting_vec_env(1))
    assert loaded.overlap_updates
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded._n_updates > model._n_updates
