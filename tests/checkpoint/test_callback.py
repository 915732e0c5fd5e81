"""Checkpoints: what is in them, when they are written, and that a training goes on from them as if nothing had been."""

import contextlib
import copy
import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from comparing import assert_identical, everything, global_states
from envs import CountingEnv, DictObs, Episode, Poison, counting_vec_env, tiny, vec_env
from filelock import FileLock
from gymnasium import spaces
from processes import HOLD_LOCK, held_by_another_process
from sb3_td3x.files.segments import (
    bookkeeping,
    columns,
    read_segments,
    restore_bookkeeping,
    write_segments,
)
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import configure_logger
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize
from zoo_helpers import GoalEnv

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer, end_open_episodes
from sb3_td3x.callbacks import StopWhenSolved, tuning
from sb3_td3x.checkpoint.callback import ResumableCheckpoint, _empty_replay_buffer, read_state
from sb3_td3x.checkpoint.folder import list_checkpoints, newest_whole_checkpoint
from sb3_td3x.files.atomic import TEMPORARY_PATTERN, lock_folder

KILL_TEST = Path(__file__).parents[2] / "scripts/kill_test.py"
BOX = spaces.Box(-1, 1, (2,), np.float32)


class At(BaseCallback):
    """Does something at a timestep."""

    def __init__(self, timestep: int, action: Callable[[], Any]) -> None:
        super().__init__()
        self.timestep = timestep
        self.action = action

    def _on_step(self) -> bool:
        if self.num_timesteps == self.timestep:
            self.action()
        return True


def fail() -> None:
    raise LookupError("stopped by the test")


def pendulum() -> gym.Env:
    return Monitor(gym.make("Pendulum-v1"))


def goal_env() -> gym.Env:
    return Monitor(gym.wrappers.TimeLimit(GoalEnv(), 7))


def timesteps(folder: Path) -> int:
    """Of the newest checkpoint."""
    return int(read_state(newest_whole_checkpoint(folder))["num_timesteps"])


def go_on(folder: Path, env: VecEnv, total: int, *callbacks: BaseCallback, **kwargs: Any) -> TD3X:
    """Resume, and train until the end with the same checkpoints."""
    model = TD3X.resume(folder, env, device="cpu")
    checkpoint = ResumableCheckpoint(folder, verbose=0, **kwargs)
    return model.learn(total - model.num_timesteps, [checkpoint, *callbacks], reset_num_timesteps=False)


# Exact runs: model's arguments, envs, kind of VecNormalize

Case = tuple[Callable[[], VecEnv], Callable[[], dict[str, Any]]]


def noise() -> OrnsteinUhlenbeckActionNoise:
    return OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.3 * np.ones(1))


def rich() -> dict[str, Any]:
    return {
        "action_noise": noise(),
        "action_noise_decay": 0.99,
        "n_steps": 3,
        "learning_rate": "lin_1e-3",
        "reward_shaping": {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}},
    }


EXACT: dict[str, Case] = {
    "1 env": (lambda: VecNormalize(DummyVecEnv([pendulum])), rich),
    "8 envs": (lambda: VecNormalize(DummyVecEnv([pendulum] * 8)), rich),
    "8 envs in processes": (lambda: VecNormalize(SubprocVecEnv([pendulum] * 8, "fork")), rich),
    "packed rows, stochastic actor": (
        lambda: DummyVecEnv([pendulum] * 2),
        lambda: {"policy_kwargs": {"net_arch": [8], "stochastic_actor": True}},
    ),
    "optimize_memory_usage": (
        lambda: DummyVecEnv([pendulum]),
        lambda: {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}},
    ),
    "dictionaries": (
        lambda: VecNormalize(DummyVecEnv([lambda: DictObs(pendulum())] * 2)),
        lambda: {"policy": "MultiInputPolicy"},
    ),
    "hindsight": (
        lambda: DummyVecEnv([goal_env] * 2),
        lambda: {
            "policy": "MultiInputPolicy",
            "replay_buffer_class": HerReplayBuffer,
            "replay_buffer_kwargs": {"copy_info_dict": True},
        },
    ),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", EXACT)
def test_exact_run_is_the_same_whether_stopped_or_not(case: str, tmp_path: Path) -> None:
    """Parameters, optimizers, memory, generators and evaluations, after two stops at different places."""
    make_env, make_kwargs = EXACT[case]
    results = []
    for name, stops in (("whole", ()), ("stopped", (104, 168))):
        folder = tmp_path / name
        kwargs = {"policy": "MlpPolicy", **tiny(seed=3, learning_starts=24, buffer_size=96, gradient_steps=2)}
        kwargs.update(make_kwargs())
        env = make_env()
        evaluation = EvalCallback(
            make_env_for_evaluation(env), eval_freq=80 // env.num_envs, n_eval_episodes=1, warn=False, verbose=0
        )
        model = TD3X(kwargs.pop("policy"), env, **kwargs)
        callbacks: list[BaseCallback] = [ResumableCheckpoint(folder, 40, exact=True, verbose=0), evaluation]
        for stop in stops:
            with pytest.raises(LookupError):
                model.learn(
                    240 - model.num_timesteps,
                    [*callbacks, At(stop, fail)],
                    reset_num_timesteps=not model.num_timesteps,
                )
            env.close()
            # Whatever was drawn meanwhile
            random.random(), np.random.rand(3), th.rand(3)  # noqa: NPY002
            env = make_env()
            model = TD3X.resume(folder, env, device="cpu")
            assert model.num_timesteps == stop // 40 * 40
            evaluation = EvalCallback(
                make_env_for_evaluation(env), eval_freq=80 // env.num_envs, n_eval_episodes=1, warn=False, verbose=0
            )
            callbacks = [ResumableCheckpoint(folder, 40, exact=True, verbose=0), evaluation]
        model.learn(240 - model.num_timesteps, callbacks, reset_num_timesteps=not model.num_timesteps)
        results.append((everything(model), global_states(), evaluation.last_mean_reward, evaluation.n_calls))
        env.close()
    assert_identical(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def make_env_for_evaluation(env: VecEnv) -> VecEnv:
    """Of the same kind as the env of the training."""
    if isinstance(env.observation_space, spaces.Dict):
        inner: VecEnv = DummyVecEnv([goal_env if "desired_goal" in env.observation_space.spaces else dict_pendulum])
    else:
        inner = DummyVecEnv([pendulum])
    return VecNormalize(inner, training=False, norm_reward=False) if isinstance(env, VecNormalize) else inner


def dict_pendulum() -> gym.Env:
    return DictObs(pendulum())


def test_killed_exact_runs_in_processes_of_their_own() -> None:
    """SIGKILL at some ten random moments, by the script that does it two hundred times."""
    process = subprocess.run(
        [sys.executable, str(KILL_TEST), "--kills", "10", "--steps", "500", "--seconds", "0.3"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr


# The replay buffer on disk


def random_buffer(kind: str, size: int, n_envs: int) -> ReplayBuffer:
    if kind == "her":
        env = DummyVecEnv([goal_env] * n_envs)
        return HerReplayBuffer(
            size, env.observation_space, env.action_space, env=env, n_envs=n_envs, device="cpu", copy_info_dict=True
        )
    if kind == "dict":
        return DictReplayBuffer(size, spaces.Dict({"file": BOX, "a/b": BOX}), BOX, n_envs=n_envs, device="cpu")
    kwargs: dict[str, Any] = {"device": "cpu", "n_envs": n_envs}
    if kind == "memory":
        return ReplayBuffer(size, BOX, BOX, optimize_memory_usage=True, handle_timeout_termination=False, **kwargs)
    classes: dict[str, type[ReplayBuffer]] = {"packed": PackedReplayBuffer, "n-step": NStepReplayBuffer}
    return classes.get(kind, ReplayBuffer)(size, BOX, BOX, **kwargs)


def add_random(buffer: ReplayBuffer, rng: np.random.Generator) -> None:
    def draw(space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: draw(value) for key, value in space.spaces.items()}
        return rng.random((buffer.n_envs, *(space.shape or ())), dtype=np.float32)

    dones = rng.random(buffer.n_envs) < 0.2
    infos = [{"TimeLimit.truncated": bool(rng.random() < 0.5), "x": rng.random(2), "n": 1} for _ in dones]
    space = buffer.observation_space
    buffer.add(draw(space), draw(space), draw(buffer.action_space), draw(spaces.Box(-1, 1, ())), dones, infos)


def contents(buffer: ReplayBuffer) -> dict[str, Any]:
    arrays = {**columns(buffer), **bookkeeping(buffer)}
    lists = {name: array.tolist() for name, array in arrays.items() if array.dtype == object}
    return {**arrays, **lists, "place": (buffer.pos, buffer.full)}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("size", [1, 7, 30])
@pytest.mark.parametrize("kind", ["packed", "plain", "n-step", "memory", "dict", "her"])
def test_replay_buffer_is_the_same_after_any_number_of_segments(kind: str, size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    buffer, chain = random_buffer(kind, size, 1), None
    for n_new in (0, 3, 1, 5, 11, 7, 40, 2):
        for _ in range(n_new):
            add_random(buffer, rng)
        chain = write_segments(tmp_path, buffer, chain, n_new)
        saved = {name: array.copy() for name, array in bookkeeping(buffer).items()}
        needed = {segment.record.name for segment in chain.segments}
        for path in tmp_path.iterdir():
            if path.name not in needed:
                path.unlink()
        loaded = random_buffer(kind, size, 1)
        read_segments(tmp_path, loaded, chain)
        restore_bookkeeping(loaded, saved)
        np.testing.assert_equal(contents(loaded), contents(buffer))
        # Only what is new was written
        assert sum(segment.last - segment.first for segment in chain.segments) <= 2 * size


def test_what_cannot_be_plain_is_refused(tmp_path: Path) -> None:
    buffer = random_buffer("her", 5, 1)
    add_random(buffer, np.random.default_rng(0))
    assert isinstance(buffer, HerReplayBuffer)
    buffer.infos[0, 0] = {"thing": object()}
    with pytest.raises(ValueError, match=r"infos\['thing'\] of type object is not allowed in a checkpoint"):
        write_segments(tmp_path, buffer, None, None)


# Open episodes


def test_open_episodes_are_time_outs_after_resuming(tmp_path: Path) -> None:
    """CountingEnv gives as reward the number of the step: a sum that crosses the reset would show."""
    episodes = (Episode(4, True), Episode(50, True))
    model = TD3X("MlpPolicy", counting_vec_env(2, episodes), **tiny(n_steps=3))
    model.learn(20, ResumableCheckpoint(tmp_path, 1000, verbose=0))
    assert model.replay_buffer.dones[9].tolist() == [0, 0]

    env = counting_vec_env(2, episodes)
    resumed = TD3X.resume(tmp_path, env, device="cpu")
    buffer = resumed.replay_buffer
    assert buffer.dones[9].tolist() == buffer.timeouts[9].tolist() == [1, 1]
    assert buffer.dones[3].tolist() == [1, 1]
    assert buffer.timeouts[:9].sum() == 0
    resumed.learn(8, reset_num_timesteps=False)
    batch = buffer._get_samples(np.array([9]))
    assert batch.dones.item() == 0
    assert batch.rewards.item() == 6  # the sixth step of the second episode, alone
    assert batch.next_observations[0, 1] == 6
    # New episodes, not the old ones in their middle
    assert buffer.observations[10, :, 1].tolist() == [0, 0]


def test_open_episodes_of_hindsight_can_be_sampled_after_resuming() -> None:
    buffer = random_buffer("her", 50, 2)
    assert isinstance(buffer, HerReplayBuffer)
    rng = np.random.default_rng(0)
    for _ in range(5):
        add_random(buffer, rng)
    end_open_episodes(buffer)
    assert (buffer.ep_length[:5] > 0).all()
    assert buffer._current_ep_start.tolist() == [5, 5]
    assert buffer.dones[4].all()


def test_where_time_outs_are_unknown_open_episodes_are_terminal() -> None:
    """The next observation is overwritten by the next episode's first, and must not be bootstrapped from."""
    buffer = random_buffer("memory", 50, 2)
    add_random(buffer, np.random.default_rng(0))
    buffer.dones[0] = 0
    end_open_episodes(buffer)
    assert buffer.dones[0].all()
    assert not buffer.timeouts.any()


def test_a_mark_of_a_time_out_does_not_outlive_its_row(tmp_path: Path) -> None:
    """Without the handling of time-outs no row's mark is ever taken back."""
    kwargs = tiny(buffer_size=7, replay_buffer_kwargs={"handle_timeout_termination": False})
    model = TD3X("MlpPolicy", counting_vec_env(1), **kwargs).learn(3).learn(40)
    assert not model.replay_buffer.timeouts.any()


# When checkpoints are written


class TestWriting:
    def test_how_many_are_kept(self, tmp_path: Path) -> None:
        model = TD3X("MlpPolicy", counting_vec_env(2), **tiny())
        model.learn(47, ResumableCheckpoint(tmp_path, 10, keep=3))
        assert [path.name for path in list_checkpoints(tmp_path)] == [
            "000003_30_steps",
            "000004_40_steps",
            "000005_48_steps",
        ]
        files = {path.name for path in (tmp_path / "replay_buffer").iterdir()}
        assert len(files) == 5
        assert not list(tmp_path.rglob(TEMPORARY_PATTERN))

    def test_checkpoints_change_nothing_but_in_exact_runs(self, tmp_path: Path) -> None:
        results = []
        for callback in (None, ResumableCheckpoint(tmp_path, 10)):
            model = TD3X("MlpPolicy", counting_vec_env(2), **tiny(action_noise=noise()))
            model.learn(100, callback)
            results.append((everything(model), global_states()))
        assert_identical(results[0][0], results[1][0])
        assert results[0][1] == results[1][1]

    def test_second_learn_goes_on_in_the_same_folder(self, tmp_path: Path) -> None:
        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
        callback = ResumableCheckpoint(tmp_path, 10)
        model.learn(25, callback)
        model.learn(25, callback, reset_num_timesteps=False)
        assert timesteps(tmp_path) == 50
        assert TD3X.resume(tmp_path, counting_vec_env(1)).replay_buffer.pos == 50

    def test_training_end_twice_writes_once(self, tmp_path: Path) -> None:
        callback = ResumableCheckpoint(tmp_path, 10)
        TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(25, callback)
        before = sorted(tmp_path.rglob("*"))
        callback.on_training_end()
        assert sorted(tmp_path.rglob("*")) == before

    def test_changed_replay_buffer_is_written_whole(self, tmp_path: Path) -> None:
        """By the user, between two checkpoints."""

        class Change(BaseCallback):
            def _on_rollout_start(self) -> None:
                if self.model.num_timesteps == 25:
                    assert isinstance(self.model, TD3X)
                    self.model.replay_buffer = copy.deepcopy(self.model.replay_buffer)
                    self.model.replay_buffer.rewards += 100

            def _on_step(self) -> bool:
                return True

        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
        model.learn(35, [ResumableCheckpoint(tmp_path, 10), Change()])
        loaded = TD3X.resume(tmp_path, counting_vec_env(1)).replay_buffer
        assert loaded.rewards[0] == 101
        np.testing.assert_array_equal(loaded.rewards[:34], model.replay_buffer.rewards[:34])

    def test_no_networks_of_nan(self, tmp_path: Path) -> None:
        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())

        def poison() -> None:
            next(model.actor.parameters()).data.fill_(np.nan)

        callbacks = [ResumableCheckpoint(tmp_path, 10), At(25, poison)]
        with (
            pytest.warns(UserWarning, match="the networks hold NaN"),
            pytest.raises(ValueError, match="action of env 0"),
        ):
            model.learn(40, callbacks)
        assert timesteps(tmp_path) == 20


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """What a full disk does to longer files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestFullDisk:
    @pytest.mark.parametrize("size", [0, 100, 3000])
    def test_training_goes_on_and_old_checkpoint_stays(self, size: int, tmp_path: Path) -> None:
        """Full at the rows, the agent or the manifest; and free again at the end."""
        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
        stack = contextlib.ExitStack()
        before: dict[str, bytes] = {}

        def fill() -> None:
            before.update({str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()})
            stack.enter_context(file_size_limit(size))

        def look_and_free() -> None:
            after = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            stack.close()
            assert after == before

        callbacks = [ResumableCheckpoint(tmp_path, 10), At(25, fill), At(45, look_and_free)]
        with stack, pytest.warns(UserWarning, match="No checkpoint at timestep 30 in .* File too large"):
            model.learn(60, callbacks)
        assert timesteps(tmp_path) == 60
        loaded = TD3X.resume(tmp_path, counting_vec_env(1)).replay_buffer
        np.testing.assert_array_equal(loaded.rewards, model.replay_buffer.rewards)

    def test_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(10, ResumableCheckpoint(tmp_path / "file", 10))


# Damage


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Two checkpoints, at 40 and 50 timesteps."""
    TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(50, ResumableCheckpoint(tmp_path, 10))
    return tmp_path


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "cut short":
        del content[-10:]
    elif how == "flipped":
        content[len(content) // 2] ^= 1
    else:
        content[:] = b"{}"
    path.write_bytes(content)


class TestDamage:
    @pytest.mark.parametrize("how", ["missing", "cut short", "flipped", "another"])
    @pytest.mark.parametrize("name", ["manifest.json", "model.zip", "state.json", "rows"])
    def test_older_checkpoint_is_used(self, name: str, how: str, run_folder: Path) -> None:
        older, newest = list_checkpoints(run_folder)
        path = newest / name
        if name == "rows":
            path = max((run_folder / "replay_buffer").iterdir(), key=lambda path: int(path.stem.split("_")[1]))
        damage(path, how)
        with pytest.warns(UserWarning, match=rf"{path.name}.*Going on from {older.name}"):
            model = TD3X.resume(run_folder, counting_vec_env(1), device="cpu")
        assert model.num_timesteps == model.replay_buffer.pos == 40

    def test_damaged_checkpoint_is_replaced(self, run_folder: Path) -> None:
        older, newest = list_checkpoints(run_folder)
        damage(newest / "model.zip", "flipped")
        with pytest.warns(UserWarning, match="damaged"):
            go_on(run_folder, counting_vec_env(1), 60, save_freq=100)
        assert [path.name for path in list_checkpoints(run_folder)] == [older.name, "000006_60_steps"]
        assert newest_whole_checkpoint(run_folder)

    def test_none_is_whole(self, run_folder: Path) -> None:
        for path in list_checkpoints(run_folder):
            damage(path / "state.json", "flipped")
        with pytest.raises(ValueError, match=r"no whole checkpoint in .*; .*state.json is damaged: its checksum"):
            TD3X.resume(run_folder, counting_vec_env(1))

    def test_no_checkpoint_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="There is no whole checkpoint in"):
            TD3X.resume(tmp_path / "nowhere", counting_vec_env(1))


# Errors and signals


class Failing(gym.Wrapper):
    """Raises an error in a step of its life, or ends its process."""

    def __init__(self, env: gym.Env, at: int, action: Callable[[], Any] = fail) -> None:
        super().__init__(env)
        self.at = at
        self.action = action
        self.n_steps = 0

    def step(self, action: np.ndarray) -> Any:
        self.n_steps += 1
        if self.n_steps == self.at:
            self.action()
        return self.env.step(action)


def failing_hook(batch: Any) -> Any:
    if batch.infos[0]["step"] == 5:
        fail()
    return batch.rewards, batch.terminations


class TestErrors:
    """A checkpoint first, then the error itself, for errors at any place in a step."""

    @pytest.mark.parametrize(
        ("where", "error"),
        [("env", LookupError), ("callback", LookupError), ("hook", LookupError), ("NaN", ValueError), ("Ctrl-C", None)],
    )
    @pytest.mark.parametrize("first", [True, False])
    def test_training_is_saved(self, where: str, error: type[Exception] | None, first: bool, tmp_path: Path) -> None:
        """Before its first checkpoint, or after some."""
        env = CountingEnv([Episode(50, True)])
        wrapped: gym.Env = env
        kwargs, callbacks = {}, []
        if where == "env":
            wrapped = Failing(env, 5)
        elif where == "NaN":
            wrapped = Poison(env, "observation", 5)
        elif where == "hook":
            kwargs = {"reward_shaping": failing_hook}
        else:
            callbacks = [At(5, fail if where == "callback" else lambda: signal.raise_signal(signal.SIGINT))]
        model = TD3X("MlpPolicy", vec_env(wrapped), **tiny(n_steps=2, learning_starts=1, **kwargs))
        checkpoint = ResumableCheckpoint(tmp_path, 100 if first else 2)
        with pytest.raises(error or KeyboardInterrupt) as caught:
            model.learn(20, [*callbacks, checkpoint])
        assert where not in ("env", "callback", "hook") or caught.traceback[-1].name == "fail"
        # The fifth transition was not stored
        assert timesteps(tmp_path) == 4
        resumed = TD3X.resume(tmp_path, counting_vec_env(1), device="cpu", reward_shaping=None)
        assert resumed.replay_buffer.pos == 4
        assert resumed.replay_buffer.timeouts[3] == 1
        resumed.learn(20 - 4, ResumableCheckpoint(tmp_path, 10), reset_num_timesteps=False)
        assert timesteps(tmp_path) == 20

    def test_error_is_not_masked_by_a_full_disk(self, tmp_path: Path) -> None:
        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
        with file_size_limit(100), warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(LookupError, match="stopped by the test"):
                model.learn(20, [At(5, fail), ResumableCheckpoint(tmp_path, 100)])
        assert not list_checkpoints(tmp_path)

    def test_zoo_may_end_training_once_more_after_an_error(self, tmp_path: Path) -> None:
        callback = ResumableCheckpoint(tmp_path, 10)
        with pytest.raises(LookupError):
            TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(20, [callback, At(15, fail)])
        before = sorted(tmp_path.rglob("*"))
        callback.on_training_end()
        assert sorted(tmp_path.rglob("*")) == before
        assert timesteps(tmp_path) == 14

    def test_exact_runs_write_nothing_between(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
        with pytest.raises(LookupError):
            model.learn(20, [At(15, fail), ResumableCheckpoint(tmp_path, 10, exact=True)])
        assert timesteps(tmp_path) == 10
        assert "the run goes on from its last checkpoint" in capsys.readouterr().out

    @pytest.mark.parametrize("start_method", ["fork", "forkserver"])
    def test_dead_process_names_its_env(self, start_method: str, tmp_path: Path) -> None:
        """Also after a fork, where the other processes hold its pipe open and SB3 waits forever."""

        def make_env() -> gym.Env:
            return Monitor(CountingEnv())

        def make_dying_env() -> gym.Env:
            return Failing(make_env(), 5, lambda: os.kill(os.getpid(), signal.SIGKILL))

        env = VecNormalize(SubprocVecEnv([make_env, make_env, make_dying_env], start_method))
        model = TD3X("MlpPolicy", env, **tiny(seed=40))
        with pytest.raises(
            RuntimeError, match=r"env 2 \(.*CountingEnv.*, seed 42\) was killed by signal 9 at timestep 12"
        ):
            model.learn(60, ResumableCheckpoint(tmp_path, 100))
        assert timesteps(tmp_path) == 12


SIGNALLED = """
import signal, sys
from envs import counting_vec_env, tiny
from sb3_td3x import TD3X
from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from stable_baselines3.common.callbacks import BaseCallback

class Signal(BaseCallback):
    def _on_step(self):
        if self.num_timesteps == 15:
            signal.raise_signal(getattr(signal, sys.argv[1]))
        return True

TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(30, [Signal(), ResumableCheckpoint(sys.argv[2], 100)])
"""


class TestSignals:
    @pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
    def test_process_ends_by_the_signal(self, name: str, tmp_path: Path) -> None:
        """Which a shell shows as exit code 143 or 130."""
        process = subprocess.run(
            [sys.executable, "-c", SIGNALLED, name, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), *sys.path])},
            capture_output=True,
            text=True,
        )
        assert process.returncode == -getattr(signal, name), process.stderr
        assert timesteps(tmp_path) == 14
        assert f"the training was saved in {tmp_path}" in process.stdout or name == "SIGTERM"

    def test_earlier_handler_is_called_and_training_goes_on(self, tmp_path: Path) -> None:
        calls: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda signum, frame: calls.append(timesteps(tmp_path)))
        handler = signal.getsignal(signal.SIGTERM)
        try:
            model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
            terminate = [At(step, lambda: signal.raise_signal(signal.SIGTERM)) for step in (15, 25)]
            model.learn(30, [ResumableCheckpoint(tmp_path, 100, verbose=0), *terminate])
            assert calls == [15, 25]
            assert model.num_timesteps == 30
            assert signal.getsignal(signal.SIGTERM) is handler
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_handler_is_put_back_after_an_error(self, tmp_path: Path) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(LookupError):
            TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(10, [At(5, fail), ResumableCheckpoint(tmp_path)])
        assert signal.getsignal(signal.SIGTERM) is before

    def test_two_checkpoints_leave_no_handler_behind(self, tmp_path: Path) -> None:
        calls: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda signum, frame: calls.append(len(calls)))
        try:
            callbacks = [ResumableCheckpoint(tmp_path / name, 100, verbose=0) for name in "ab"]
            terminate = At(15, lambda: signal.raise_signal(signal.SIGTERM))
            TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(30, [*callbacks, terminate])
            assert calls == [0]
            assert all(timesteps(tmp_path / name) == 30 for name in "ab")
            for number in (1, 2):
                signal.raise_signal(signal.SIGTERM)
                assert calls[-1] == number
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_handler_of_a_callback_stays(self, tmp_path: Path) -> None:
        calls: list[int] = []
        before = signal.getsignal(signal.SIGTERM)

        def own(signum: int, frame: Any) -> None:
            calls.append(signum)

        try:
            install = At(5, lambda: signal.signal(signal.SIGTERM, own))
            checkpoint = ResumableCheckpoint(tmp_path, 100, verbose=0)
            model = TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(10, [install, checkpoint])
            assert signal.getsignal(signal.SIGTERM) is own
            # In the next training it comes second again
            terminate = At(15, lambda: signal.raise_signal(signal.SIGTERM))
            seen = At(16, lambda: calls.append(timesteps(tmp_path)))
            model.learn(10, [terminate, seen, checkpoint], reset_num_timesteps=False)
            assert calls == [signal.SIGTERM, 14]
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_training_in_another_thread(self, tmp_path: Path) -> None:
        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
        thread = threading.Thread(target=model.learn, args=(20, ResumableCheckpoint(tmp_path, 10)))
        thread.start()
        thread.join()
        assert timesteps(tmp_path) == 20


# What goes on


def test_counters_and_statistics_go_on(tmp_path: Path) -> None:
    episodes = (Episode(5, True), Episode(3, False))
    model = TD3X(
        "MlpPolicy", VecNormalize(counting_vec_env(2, episodes)), **tiny(action_noise=noise(), learning_rate="lin_1e-3")
    )
    model.learn(60, ResumableCheckpoint(tmp_path, 1000))
    resumed = TD3X.resume(tmp_path, VecNormalize(counting_vec_env(2, episodes)), device="cpu")
    for name in (
        "num_timesteps",
        "_n_updates",
        "_exploration_timesteps",
        "_episode_num",
        "_current_progress_remaining",
    ):
        assert getattr(resumed, name) == getattr(model, name)
    assert list(resumed.ep_info_buffer or ()) == list(model.ep_info_buffer or ())
    before, after = model.get_vec_normalize_env(), resumed.get_vec_normalize_env()
    assert before is not None
    assert after is not None
    # One observation more, that of the reset
    assert after.obs_rms.count == before.obs_rms.count + 2
    assert vars(after.ret_rms).keys() == vars(before.ret_rms).keys()
    np.testing.assert_equal(vars(after.ret_rms), vars(before.ret_rms))


def test_callbacks_go_on(tmp_path: Path) -> None:
    """As if there had been one training, and evaluations.npz holds each evaluation once."""

    def callbacks() -> list[BaseCallback]:
        evaluation = EvalCallback(
            counting_vec_env(1), eval_freq=10, n_eval_episodes=2, verbose=0, log_path=str(tmp_path)
        )
        return [evaluation, StopWhenSolved(1e6, window=5)]

    checkpoints = tmp_path / "checkpoints"
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
    with pytest.raises(LookupError):
        # An evaluation that a checkpoint does not know
        model.learn(60, [ResumableCheckpoint(checkpoints, 25, exact=True), CallbackList(callbacks()), At(35, fail)])
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [10, 20, 30]

    evaluation, solved = resumed = callbacks()
    go_on(checkpoints, counting_vec_env(1), 28, CallbackList(resumed), save_freq=25, exact=True)
    assert isinstance(evaluation, EvalCallback)
    assert isinstance(solved, StopWhenSolved)
    assert evaluation.n_calls == 28
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [10, 20]
    assert len(solved.returns) == solved.returns.maxlen == 5


@pytest.mark.parametrize("stopped_at", [15, 20])
@pytest.mark.parametrize("seen", [True, False])
def test_callbacks_forget_the_step_that_was_not_stored(stopped_at: int, seen: bool, tmp_path: Path) -> None:
    """Else all evaluations of a resumed run would come a step early. It sees that step again, if it had seen it."""

    def evaluation() -> EvalCallback:
        return EvalCallback(counting_vec_env(1), eval_freq=10, n_eval_episodes=1, verbose=0, log_path=str(tmp_path))

    checkpoints = tmp_path / "checkpoints"
    callbacks = [CallbackList([evaluation()]), At(stopped_at, fail)]
    with pytest.raises(LookupError):
        TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(
            40, [ResumableCheckpoint(checkpoints, 1000), *(callbacks if seen else reversed(callbacks))]
        )
    assert timesteps(checkpoints) == stopped_at - 1
    known = np.load(tmp_path / "evaluations.npz")["timesteps"].tolist()
    assert known == ([10, 20] if seen and stopped_at == 20 else [10])

    go_on(checkpoints, counting_vec_env(1), 40, CallbackList([resumed := evaluation()]))
    assert resumed.n_calls == 40
    results = np.load(tmp_path / "evaluations.npz")
    assert results["timesteps"].tolist() == [10, 20, 30, 40]
    assert len(results["results"]) == len(results["ep_lengths"]) == 4


def test_tensorboard_goes_on(tmp_path: Path) -> None:
    """In the same folder, without gaps or repeats, although another run has been there since."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    checkpoints, tensorboard = tmp_path / "checkpoints", str(tmp_path / "tb")
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny(tensorboard_log=tensorboard))
    with pytest.raises(LookupError):
        model.learn(90, [ResumableCheckpoint(checkpoints, 25, exact=True), At(70, fail)], log_interval=1)
    TD3X("MlpPolicy", counting_vec_env(1), **tiny(tensorboard_log=tensorboard)).learn(10, log_interval=1)
    model = TD3X.resume(checkpoints, counting_vec_env(1), device="cpu")
    model.learn(40, ResumableCheckpoint(checkpoints, 25, exact=True), log_interval=1, reset_num_timesteps=False)

    events = EventAccumulator(f"{tensorboard}/TD3X_1", purge_orphaned_data=False).Reload()
    steps = [event.step for event in events.Scalars("rollout/ep_rew_mean")]
    assert steps == sorted(set(steps))
    assert len(steps) == model._episode_num


def test_only_a_training_that_goes_on_touches_tensorboard(tmp_path: Path) -> None:
    """Nothing is cut for an agent that is only looked at, for a copy of the run, or where a user has set a logger."""
    pytest.importorskip("tensorboard")
    checkpoints, tensorboard = tmp_path / "checkpoints", tmp_path / "tb"
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny(tensorboard_log=str(tensorboard)))
    with pytest.raises(LookupError):
        model.learn(90, [ResumableCheckpoint(checkpoints, 25, exact=True), At(70, fail)], log_interval=1)
    before = {path: path.read_bytes() for path in tensorboard.glob("TD3X_1/*")}
    shutil.copytree(checkpoints, tmp_path / "copy")

    looked_at = TD3X.resume(checkpoints, counting_vec_env(1), device="cpu")
    looked_at.set_logger(configure_logger())
    looked_at.learn(5, ResumableCheckpoint(checkpoints), reset_num_timesteps=False)
    copy = TD3X.resume(tmp_path / "copy", counting_vec_env(1), device="cpu")
    copy.learn(5, ResumableCheckpoint(tmp_path / "copy"), reset_num_timesteps=False)
    # SB3 lets a training that goes on write another file into the newest folder
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoint_that_does_not_say_where_it_was_written(run_folder: Path) -> None:
    """Of an older version."""
    model = TD3X.resume(run_folder, counting_vec_env(1), device="cpu")
    assert model._resumed is not None
    del model._resumed.state["save_path"]
    model.learn(10, ResumableCheckpoint(run_folder), reset_num_timesteps=False)
    assert timesteps(run_folder) == 60


def test_a_lock_is_held_until_the_last_of_its_holders_lets_it_go(tmp_path: Path) -> None:
    """And not by processes that were forked meanwhile, which outlive a killed training."""
    outer, inner = lock_folder(tmp_path), lock_folder(tmp_path)
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    fork.start()
    inner.release()
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    process = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert "is in use by another process" in process.stderr
    outer.release()
    try:
        assert subprocess.run(command, input="", text=True, check=False).returncode == 0
    finally:
        fork.kill()
        fork.join()


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "Disk quota exceeded"), NotImplementedError("no flock")])
def test_a_folder_that_cannot_be_locked_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    lock_folder(tmp_path / "not there").release()
    assert not (tmp_path / "not there").exists()
    monkeypatch.setattr(FileLock, "acquire", fail)
    with pytest.warns(UserWarning, match="cannot be locked against other processes: .*(quota|flock)"):
        lock_folder(tmp_path).release()


def test_two_processes_cannot_write_checkpoints_of_one_run(run_folder: Path) -> None:
    """Each would delete the other's files. When the other is killed, its lock is gone."""
    files = sorted({*run_folder.rglob("*"), run_folder / ".lock"})
    model = TD3X.resume(run_folder, counting_vec_env(1), device="cpu")
    with held_by_another_process(run_folder), pytest.raises(ValueError, match="is in use by another process"):
        model.learn(50, ResumableCheckpoint(run_folder, 5), reset_num_timesteps=False)
    assert sorted(run_folder.rglob("*")) == files
    model.learn(50, ResumableCheckpoint(run_folder, 5), reset_num_timesteps=False)
    assert timesteps(run_folder) == 100


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"save_freq": 0}, "save_freq=0 is not allowed, expected an integer >= 1"),
        ({"keep": 0}, "keep=0 is not allowed, expected an integer >= 1"),
        ({"exact": 1}, "exact=1 is not allowed, expected True or False"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResumableCheckpoint("folder", **kwargs)


class TestRefused:
    def test_no_folder_outside_of_the_zoo(self) -> None:
        with pytest.raises(ValueError, match="save_path=None is not allowed outside of RL Zoo"):
            TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(10, ResumableCheckpoint())

    def test_other_algorithms(self, tmp_path: Path) -> None:
        model = TD3("MlpPolicy", counting_vec_env(1), **tiny())
        with pytest.raises(ValueError, match="is not allowed with ResumableCheckpoint, expected a TD3X"):
            model.learn(10, ResumableCheckpoint(tmp_path))

    def test_folder_of_another_run(self, run_folder: Path) -> None:
        with pytest.raises(ValueError, match="holds checkpoints of another run, expected a folder without any"):
            TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(10, ResumableCheckpoint(run_folder))
        assert timesteps(run_folder) == 50

    @pytest.mark.parametrize("nested", [False, True])
    def test_one_folder_for_two_callbacks(self, tmp_path: Path, nested: bool) -> None:
        """Each would delete what the other writes."""
        first = ResumableCheckpoint(tmp_path / "run")
        second: BaseCallback = ResumableCheckpoint(f"{tmp_path}/../{tmp_path.name}/run")
        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
        with pytest.raises(ValueError, match=r"save_path='.*run' is not allowed for two ResumableCheckpoint"):
            model.learn(20, [first, CallbackList([second])] if nested else [first, second])
        assert list(tmp_path.iterdir()) == []

    def test_two_folders_for_two_callbacks(self, tmp_path: Path) -> None:
        callbacks = [ResumableCheckpoint(tmp_path / name) for name in "ab"]
        TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(20, callbacks)
        assert [timesteps(tmp_path / name) for name in "ab"] == [20, 20]

    def test_unknown_replay_buffer(self, tmp_path: Path) -> None:
        class Prioritized(ReplayBuffer):
            pass

        model = TD3X("MlpPolicy", counting_vec_env(1), **tiny(replay_buffer_class=Prioritized))
        with pytest.raises(ValueError, match="replay_buffer_class=Prioritized is not allowed with ResumableCheckpoint"):
            model.learn(10, ResumableCheckpoint(tmp_path))

    @pytest.mark.parametrize(
        ("make_env", "kwargs", "message"),
        [
            (lambda: counting_vec_env(2), {}, r"'n_envs': 1,.* expected .*'n_envs': 2,"),
            (lambda: VecNormalize(counting_vec_env(1)), {}, "has a VecNormalize, expected none"),
            (lambda: counting_vec_env(1), {"buffer_size": 7}, r"expected .*'buffer_size': 7"),
        ],
    )
    def test_other_envs_or_sizes(
        self, make_env: Callable[[], VecEnv], kwargs: dict[str, Any], message: str, run_folder: Path
    ) -> None:
        with pytest.raises(ValueError, match=message):
            TD3X.resume(run_folder, make_env(), device="cpu", **kwargs)


def test_off_while_tuning(tmp_path: Path) -> None:
    token = tuning.set(True)
    try:
        TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(20, ResumableCheckpoint(tmp_path, 5))
    finally:
        tuning.reset(token)
    assert not any(tmp_path.iterdir())


def test_resuming_makes_the_env_of_an_id(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"learning_starts": 10, "buffer_size": 50, "policy_kwargs": {"net_arch": [8]}}
    TD3X("MlpPolicy", "Pendulum-v1", device="cpu", **kwargs).learn(20, ResumableCheckpoint(tmp_path))
    model = TD3X.resume(tmp_path, "Pendulum-v1", device="cpu")
    model.learn(5, ResumableCheckpoint(tmp_path), reset_num_timesteps=False)
    assert model.num_timesteps == 25


@pytest.mark.parametrize("given", ["class", "file", "smaller file", "SB3's file"])
def test_replay_buffer_that_the_agent_was_given(given: str, tmp_path: Path) -> None:
    kwargs = tiny(**({"replay_buffer_class": ReplayBuffer} if given == "class" else {}))
    model = TD3X("MlpPolicy", counting_vec_env(1), **kwargs)
    if given != "class":
        other_class: Any = TD3 if given == "SB3's file" else TD3X
        own = {"replay_buffer_class": ReplayBuffer} if given == "file" else {}
        size = {"buffer_size": 25} if given == "smaller file" else {}
        other = other_class("MlpPolicy", counting_vec_env(1), **{**kwargs, **own, **size}).learn(20)
        other.save_replay_buffer(tmp_path / "buffer")
        model.load_replay_buffer(tmp_path / "buffer")
    model.learn(20, ResumableCheckpoint(tmp_path / "run", 10, verbose=0))
    resumed = TD3X.resume(tmp_path / "run", counting_vec_env(1), device="cpu")
    assert type(resumed.replay_buffer) is type(model.replay_buffer)
    end_open_episodes(model.replay_buffer)
    np.testing.assert_equal(contents(resumed.replay_buffer), contents(model.replay_buffer))
    resumed.learn(10, ResumableCheckpoint(tmp_path / "run", 10, verbose=0), reset_num_timesteps=False)
    assert timesteps(tmp_path / "run") == 30


def test_returns_may_be_of_another_number_of_steps(tmp_path: Path) -> None:
    """Their parts are stored, not the sums."""
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny(n_steps=3))
    model.learn(20, ResumableCheckpoint(tmp_path, 10, verbose=0))
    resumed = TD3X.resume(tmp_path, counting_vec_env(1), device="cpu", n_steps=5, gamma=0.9)
    assert isinstance(resumed.replay_buffer, NStepReplayBuffer)
    assert (resumed.replay_buffer.n_steps, resumed.replay_buffer.gamma) == (5, 0.9)
    np.testing.assert_array_equal(resumed.replay_buffer.rewards, model.replay_buffer.rewards)


def test_checkpoint_that_says_less_of_its_replay_buffer(run_folder: Path) -> None:
    """As older ones do."""
    checkpoint = newest_whole_checkpoint(run_folder)
    state = read_state(checkpoint)
    assert state["replay_buffer"].keys() > {"class", "buffer_size", "n_envs"}
    saved = {name: state["replay_buffer"][name] for name in ("class", "buffer_size", "n_envs")}
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
    assert _empty_replay_buffer(model, checkpoint, saved, {}) is model.replay_buffer
