"""Recorded episodes and their animations."""

import io
import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import CountingEnv, tiny_agent
from PIL import Image
from rl_zoo3.wrappers import FrameSkip
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.animation import Recording, record_episode

PENDULUM = "Pendulum-v1"


def rendering_env(env_id: str = PENDULUM) -> gym.Env:
    return gym.make(env_id, render_mode="rgb_array")


@pytest.fixture(scope="module")
def model() -> TD3X:
    return tiny_agent(PENDULUM)


@pytest.fixture(scope="module")
def recording(model: TD3X) -> Recording:
    return record_episode(model, rendering_env(), seed=7)


def artificial_recording(n_steps: int, fps: float = 30.0, n_actions: int = 1) -> Recording:
    """Make a recording whose frames show a moving square."""
    frames = np.full((n_steps, 60, 90, 3), 255, np.uint8)
    for step in range(n_steps):
        frames[step, 20:40, step % 70 : step % 70 + 20] = (0, 0, 200)
    return Recording(frames, np.zeros((n_steps, n_actions)), np.arange(n_steps, dtype=float), fps)


def durations(image: Image.Image) -> list[int]:
    times = []
    for index in range(image.n_frames):
        image.seek(index)
        times.append(round(image.info["duration"]))
    return times


def last_frame(image: Image.Image) -> np.ndarray:
    image.seek(image.n_frames - 1)
    return np.asarray(image.convert("RGB")).astype(int)


def test_recording_has_the_return_of_an_evaluation(model: TD3X, recording: Recording) -> None:
    assert recording.frames.shape == (200, 320, 320, 3)
    assert recording.frames.dtype == np.uint8
    assert recording.actions.shape == (200, 1)
    assert len(recording) == len(recording.rewards) == 200
    assert recording.fps == 30
    # The pendulum moves
    assert (recording.frames[0] != recording.frames[50]).any()
    env = make_vec_env(PENDULUM)
    env.seed(7)
    mean, _ = evaluate_policy(model, env, 1)
    assert recording.episode_return == pytest.approx(mean, abs=1e-4)
    assert repr(recording) == f"Recording(200 steps, return {mean:.2f})"


def test_frames_show_the_env_before_each_action(model: TD3X) -> None:
    recording = record_episode(model, rendering_env(), seed=3, max_steps=3, width=None)
    env = rendering_env()
    obs, _ = env.reset(seed=3)
    for step in range(3):
        np.testing.assert_array_equal(recording.frames[step], env.render())
        action, _ = model.predict(obs, deterministic=True)
        np.testing.assert_allclose(recording.actions[step], action, rtol=1e-5)
        obs, reward, *_ = env.step(action)
        assert recording.rewards[step] == pytest.approx(float(reward), abs=1e-4)


def test_rewards_are_raw_with_normalization_and_wrappers() -> None:
    """As in the zoo, with the wrappers of the YAML file around the ``Monitor``, and ``VecNormalize`` around them."""

    def scaled(env: gym.Env) -> gym.Env:
        return gym.wrappers.TransformReward(env, lambda reward: 100 * float(reward))

    def wrapped(seed: int) -> VecNormalize:
        kwargs = {"render_mode": "rgb_array"}
        venv = make_vec_env(PENDULUM, env_kwargs=kwargs, wrapper_class=scaled, seed=seed)
        return VecNormalize(venv)

    model = tiny_agent(wrapped(0)).learn(30)
    env = wrapped(1)
    count = env.obs_rms.count
    recording = record_episode(model, env, seed=5)
    (episode_return,) = env.get_attr("episode_returns")[0]
    assert recording.episode_return == pytest.approx(episode_return, abs=1e-5)
    assert -17 < recording.rewards.min() < recording.rewards.max() <= 0
    # No reward jumps, not even the last one
    assert np.abs(np.diff(recording.rewards)).max() < 3
    # The statistics did not change
    assert env.obs_rms.count == count
    assert env.training
    with pytest.raises(ValueError, match="no VecNormalize, but the env of the model has"):
        record_episode(model, rendering_env())


def test_repeated_actions_are_played_at_the_envs_speed(tmp_path: pathlib.Path) -> None:
    """As in the zoo, where the ``Monitor`` is inside the wrapper that repeats actions, and counts env steps."""
    venv = make_vec_env(PENDULUM, env_kwargs={"render_mode": "rgb_array"}, wrapper_class=FrameSkip)
    model = tiny_agent(PENDULUM)
    whole = record_episode(model, venv)
    assert (len(whole), whole.fps) == (50, 7.5)
    part = record_episode(model, venv, max_steps=10)
    assert (len(part), part.fps) == (10, 7.5)
    part.save_gif(tmp_path / "part.gif")
    assert sum(durations(Image.open(tmp_path / "part.gif"))) == 9 * 4 * 1000 // 30 + 1500


def test_repeated_actions_are_counted_by_the_time_limit() -> None:
    """As in a notebook, where the ``Monitor`` is outside the wrapper that repeats actions, or missing."""
    model = tiny_agent(PENDULUM)

    def skipping() -> gym.Env:
        return FrameSkip(rendering_env(), skip=3)

    for env in (skipping(), Monitor(skipping()), DummyVecEnv([skipping])):
        whole = record_episode(model, env)
        # 200 env steps are 66 agent steps of three env steps and one of two
        assert (len(whole), whole.fps) == (67, 10)
    # max_steps counts agent steps
    part = record_episode(model, skipping(), max_steps=10)
    assert (len(part), part.fps) == (10, 10)
    # The speed cannot be measured with one frame
    assert record_episode(model, skipping(), max_steps=1).fps == 30


def test_speed_of_an_env_without_monitor_and_time_limit() -> None:
    class Black(CountingEnv):
        render_mode = "rgb_array"

        def render(self) -> Any:
            return np.zeros((8, 8, 3), np.uint8)

    assert record_episode(tiny_agent(Black()), DummyVecEnv([Black])).fps == 30


def test_rewards_without_a_monitor_come_from_vec_normalize() -> None:
    venv = VecNormalize(DummyVecEnv([rendering_env]))
    assert not venv.env_is_wrapped(Monitor)[0]
    recording = record_episode(tiny_agent(PENDULUM), venv, seed=2, max_steps=40)
    plain = record_episode(tiny_agent(PENDULUM), rendering_env(), seed=2, max_steps=1)
    assert len(recording) == 40
    assert recording.rewards[0] == pytest.approx(plain.rewards[0], abs=1e-5)


def test_bipedal_walker(tmp_path: pathlib.Path) -> None:
    env = rendering_env("BipedalWalker-v3")
    recording = record_episode(tiny_agent(env), env, seed=0, max_steps=60)
    assert recording.frames.shape == (60, 213, 320, 3)
    assert recording.actions.shape == (60, 4)
    assert recording.fps == 50
    recording.save_gif(tmp_path / "walk.gif", width=200)
    image = Image.open(tmp_path / "walk.gif")
    assert image.width == 200
    # 50 frames a second, and a longer last frame
    assert durations(image) == [20] * 59 + [1500]


def cursor_columns(plots: np.ndarray) -> set[int]:
    """Return the columns of the red cursor."""
    red = (plots[..., 0] > 150) & (plots[..., 1:] < 100).all(axis=-1)
    return set(np.flatnonzero(red.any(axis=0)))


def test_gif(recording: Recording, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pendulum.gif"
    recording.save_gif(path)
    assert path.stat().st_size < 1_000_000
    image = Image.open(path)
    assert image.format == "GIF"
    assert image.info["loop"] == 0
    times = durations(image)
    # Steps 0, 2, ..., 198 and 199, the last one
    assert len(times) == 101
    assert sum(times[:-1]) == pytest.approx(199 / 30 * 1000, abs=10)
    picture = last_frame(image)
    frame, plots = picture[:320], picture[320:]
    assert np.abs(frame - recording.frames[-1]).mean() < 0.5
    # The plots extend from 50 pixels after the left edge to 10 pixels before the right edge
    assert cursor_columns(plots) == {310}
    image.seek(0)
    assert cursor_columns(np.asarray(image.convert("RGB"))[320:].astype(int)) == {50}


@pytest.mark.parametrize("every", [1, 4, 100])
def test_every(every: int, tmp_path: pathlib.Path) -> None:
    artificial_recording(30).save_gif(tmp_path / "a.gif", every=every, width=120)
    image = Image.open(tmp_path / "a.gif")
    assert len(durations(image)) == len({*range(0, 29, every), 29})
    assert image.size[0] == 120


def test_long_episodes_and_fast_envs(tmp_path: pathlib.Path) -> None:
    artificial_recording(1600, fps=50).save_gif(tmp_path / "long.gif", width=200)
    times = durations(Image.open(tmp_path / "long.gif"))
    assert len(times) <= 125
    assert sum(times[:-1]) == pytest.approx(1599 / 50 * 1000, abs=10)
    artificial_recording(10, fps=1000).save_gif(tmp_path / "fast.gif", width=200)
    assert min(durations(Image.open(tmp_path / "fast.gif"))) >= 20


@pytest.mark.parametrize(("n_actions", "has_labels"), [(1, False), (2, True), (7, False)])
def test_labels_of_the_actions(n_actions: int, has_labels: bool, tmp_path: pathlib.Path) -> None:
    """All actions are the same flat line, so only the labels have other colors than the last line."""
    artificial_recording(2, n_actions=n_actions).save_gif(tmp_path / "episode.gif", width=200)
    pixels = last_frame(Image.open(tmp_path / "episode.gif"))[140:210].reshape(-1, 3)
    first_color = np.array([31, 119, 180])  # of the first line, which others cover
    assert (np.abs(pixels - first_color).max(axis=1) < 60).any() == (has_labels or n_actions == 1)


def test_gif_of_one_step(tmp_path: pathlib.Path) -> None:
    artificial_recording(1).save_gif(tmp_path / "one.gif", width=120)
    assert durations(Image.open(tmp_path / "one.gif"))


def test_notebooks_show_an_animated_png(recording: Recording) -> None:
    image = Image.open(io.BytesIO(recording._repr_png_()))
    assert image.format == "PNG"
    assert len(durations(image)) == 101
    assert np.abs(last_frame(image)[:320] - recording.frames[-1]).mean() < 0.5


def test_bad_arguments_are_refused(model: TD3X, recording: Recording, tmp_path: pathlib.Path) -> None:
    def refused(env: Any, match: str, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=match):
            record_episode(model, env, **kwargs)

    refused(gym.make(PENDULUM), 'render_mode=None, expected an env made with .*render_mode="rgb_array"')
    refused(make_vec_env(PENDULUM, env_kwargs={"render_mode": None}), 'render_mode="rgb_array"')
    refused(make_vec_env(PENDULUM, 2, env_kwargs={"render_mode": "rgb_array"}), "num_envs=2, expected a VecEnv of one")
    refused(PENDULUM, "env='Pendulum-v1' is not allowed")
    refused(rendering_env(), "max_steps=0 is not allowed", max_steps=0)
    refused(rendering_env(), "seed=-1 is not allowed", seed=-1)
    refused(rendering_env(), "width=10 is not allowed", width=10)
    with pytest.raises(ValueError, match="every=0 is not allowed"):
        recording.save_gif(tmp_path / "a.gif", every=0)
    with pytest.raises(ValueError, match="width=5 is not allowed"):
        recording.save_gif(tmp_path / "a.gif", width=5)
    assert not (tmp_path / "a.gif").exists()


def test_frames_that_are_not_arrays_are_refused() -> None:
    class Text(CountingEnv):
        render_mode = "rgb_array"

        def render(self) -> Any:
            return "picture"

    with pytest.raises(ValueError, match="env rendered str"):
        record_episode(tiny_agent(Text()), Text())
