"""Recorded episodes in the replay buffer: as if the env had just played them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, DictObs, counting_vec_env, tiny, vec_env
from envs import Episode as Script
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize
from zoo_helpers import GoalEnv, ImageEnv

from sb3_td3x import TD3X
from sb3_td3x.datasets import Episode, fill_replay_buffer
from sb3_td3x.shaping import FallPenalty, PotentialShaping, RewardScale

SCRIPT = (Script(5, True), Script(3, False), Script(4, True, -100.0))
BOUNDS = spaces.Box(np.array([-3, 0], np.float32), np.array([1, 5], np.float32))


class Recorder(gym.Wrapper):
    """Records complete episodes."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.episodes: list[Episode] = []

    def reset(self, **kwargs: Any) -> Any:
        result = self.env.reset(**kwargs)
        self.observations, self.steps = [result[0]], []
        return result

    def step(self, action: np.ndarray) -> Any:
        result = self.env.step(action)
        observation, reward, terminated, truncated, _ = result
        self.observations.append(observation)
        self.steps.append((action.copy(), reward, terminated, truncated))
        if terminated or truncated:
            columns = (np.array(column) for column in zip(*self.steps, strict=True))
            self.episodes.append(Episode(stacked(self.observations), *columns))
        return result


def stacked(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: np.stack([entry[key] for entry in observations]) for key in observations[0]}
    return np.stack(observations)


def episode(length: int = 4, env: gym.Env | None = None) -> Episode:
    """An episode of ``CountingEnv``, or of the given env, with random actions."""
    recorder = Recorder(gym.wrappers.TimeLimit(env or CountingEnv([Script(length, True)]), length))
    recorder.action_space.seed(0)
    recorder.reset(seed=0)
    while not recorder.episodes:
        recorder.step(recorder.action_space.sample())
    return recorder.episodes[0]


def columns(model: TD3X, n: int) -> Iterator[tuple[str, np.ndarray]]:
    """The first rows of all arrays of the replay buffer."""
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        array = getattr(model.replay_buffer, name)
        for key, part in array.items() if isinstance(array, dict) else [("", array)]:
            yield f"{name} {key}", part[:n]


@pytest.mark.parametrize("wrap", [lambda env: env, DictObs], ids=["box", "dict"])
@pytest.mark.parametrize("hook", [None, RewardScale(0.1), PotentialShaping(lambda obs: np.ones(1)), FallPenalty()])
@pytest.mark.parametrize("normalized", [False, True])
def test_same_as_a_rollout(wrap: Any, hook: Any, normalized: bool) -> None:
    """Twelve steps of three episodes, one of which ends by a time-out."""
    options = tiny(learning_starts=100, reward_shaping=hook, n_steps=3)
    policy = "MultiInputPolicy" if wrap is DictObs else "MlpPolicy"
    recorder = Recorder(wrap(CountingEnv(SCRIPT, action_space=BOUNDS)))
    env: Any = vec_env(recorder)
    played = TD3X(policy, VecNormalize(env) if normalized else env, **options).learn(12)
    filled = TD3X(policy, played.get_env(), **options)

    assert fill_replay_buffer(filled, recorder.episodes) == 12
    for (name, actual), (_, expected) in zip(columns(filled, 12), columns(played, 12), strict=True):
        # VecNormalize rounds the last observations of its env's episodes
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    batches = []
    for model in (filled, played):
        np.random.seed(0)  # noqa: NPY002
        batches.append(model.replay_buffer.sample(64, env=model.get_vec_normalize_env()))
    th.testing.assert_close(tuple(batches[0]), tuple(batches[1]))


def test_training_continues_after_the_episodes() -> None:
    """An open episode of the training before them ends as a time-out, and so do recordings that were cut."""
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny(learning_starts=0)).learn(7)
    cut = episode()._replace(terminations=np.zeros(4, bool), truncations=np.zeros(4, bool))
    fill_replay_buffer(model, [cut, cut])
    model.learn(3, reset_num_timesteps=False)
    np.testing.assert_array_equal(model.replay_buffer.dones[:18, 0], [0] * 4 + [1, 0, 1] + [0, 0, 0, 1] * 2 + [1, 0, 0])
    np.testing.assert_array_equal(model.replay_buffer.timeouts[:18, 0], [0] * 6 + [1] + [0, 0, 0, 1] * 2 + [1, 0, 0])
    assert model.num_timesteps == 10


def test_several_envs_share_the_steps() -> None:
    model = TD3X("MlpPolicy", counting_vec_env(3), **tiny())
    recorder = Recorder(CountingEnv(SCRIPT[:2]))
    TD3X("MlpPolicy", vec_env(recorder), **tiny()).learn(8)
    assert fill_replay_buffer(model, recorder.episodes) == 8
    assert model.replay_buffer.pos == 3
    # Episode and step of each observation; the first share begins with the first episode, the last one ends the second
    expected = [[[0, 0], [0, 2], [1, 0]], [[0, 1], [0, 3], [1, 1]], [[0, 2], [0, 4], [1, 2]]]
    np.testing.assert_array_equal(model.replay_buffer.observations[:3], expected)
    np.testing.assert_array_equal(model.replay_buffer.dones[:3], [[0, 0, 0], [0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(model.replay_buffer.timeouts[:3], [[0, 0, 0], [0, 0, 0], [1, 0, 1]])


def test_images_may_have_their_channels_last() -> None:
    model = TD3X("CnnPolicy", vec_env(ImageEnv()), **tiny(buffer_size=10))
    recorded = episode(env=ImageEnv())
    fill_replay_buffer(model, [recorded])
    assert recorded.observations.shape == (5, 36, 36, 1)
    np.testing.assert_array_equal(model.replay_buffer.observations[0, 0, 0], recorded.observations[0, :, :, 0])


def test_hindsight_replay_of_demonstrations() -> None:
    env = vec_env(GoalEnv())
    model = TD3X("MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, **tiny(learning_starts=0))
    fill_replay_buffer(model, [episode(env=GoalEnv())])
    assert model.replay_buffer.sample(8).rewards.shape == (8, 1)


def test_gradient_steps_without_an_env_step() -> None:
    """Offline updates, as the guide on demonstrations has them."""
    model = TD3X("MlpPolicy", "Pendulum-v1", **tiny())
    fill_replay_buffer(model, [episode(10, gym.make("Pendulum-v1"))])
    before = model.policy.state_dict()["actor.mu.0.weight"].clone()
    model.learn(0).train(gradient_steps=4, batch_size=8)
    assert not th.equal(model.policy.state_dict()["actor.mu.0.weight"], before)


GOOD = episode()
BAD: dict[str, tuple[list[Episode], str]] = {
    "no episodes": ([], "There are no episodes"),
    "observation shape": (
        [GOOD, GOOD._replace(observations=np.zeros((5, 3)))],
        r"Episode 1 has observations of shape \(5, 3\) and type float64, expected \(5, 2\) and float32",
    ),
    "last observation is missing": ([GOOD._replace(observations=np.zeros((4, 2)))], r"expected \(5, 2\)"),
    "observation type": ([GOOD._replace(observations=np.full((5, 2), "a"))], "and type <U1, expected"),
    "dictionary": ([GOOD._replace(observations={"a": np.zeros((5, 2))})], r"Episode 0 has observations of shape \(\)"),
    "action shape": ([GOOD._replace(actions=np.zeros(4))], r"actions of shape \(4,\)"),
    "action bounds": ([GOOD._replace(actions=np.full((4, 1), 1.1))], "outside of Box.*: clip them if the env does"),
    "reward shape": ([GOOD._replace(rewards=np.zeros((4, 1)))], r"rewards of shape \(4, 1\)"),
    "reward": ([GOOD._replace(rewards=np.array([0, 0, np.nan, 0]))], "Episode 0 has rewards with NaN or infinity"),
    "observation": ([GOOD._replace(observations=np.full((5, 2), 1e39))], "observations with NaN or infinity"),
    "terminations": ([GOOD._replace(terminations=np.zeros(4))], "terminations of shape .* expected .* and bool"),
    "several episodes": (
        [GOOD._replace(truncations=np.array([False, True, False, False]))],
        "Episode 0 has 4 steps but ends at step 2: split it into episodes",
    ),
    "too many steps": ([GOOD] * 251, "buffer_size=1000 is not enough for the 1004 steps of the episodes"),
}


@pytest.mark.parametrize(("episodes", "message"), BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore:overflow")
def test_bad_episodes_are_refused(episodes: list[Episode], message: str) -> None:
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny())
    with pytest.raises(ValueError, match=message):
        fill_replay_buffer(model, episodes)
    assert model.replay_buffer.size() == 0


def test_keys_of_dictionaries_are_compared() -> None:
    model = TD3X("MultiInputPolicy", vec_env(DictObs(CountingEnv())), **tiny())
    with pytest.raises(ValueError, match=r"expected a dictionary of \['count', 'minus'\]"):
        fill_replay_buffer(model, [GOOD])


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_minari_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    recorded = episode(10, gym.make("Pendulum-v1"))
    buffers = [EpisodeBuffer(id=idx, **recorded._asdict()) for idx in range(2)]
    minari.create_dataset_from_buffers("td3x/pendulum-v0", buffers, env="Pendulum-v1", data_format="hdf5")
    dataset = minari.load_dataset("td3x/pendulum-v0")

    model = TD3X("MlpPolicy", "Pendulum-v1", **tiny())
    assert fill_replay_buffer(model, dataset) == 20
    np.testing.assert_allclose(model.replay_buffer.actions[:10, 0] * 2, recorded.actions, rtol=1e-6)
    np.testing.assert_array_equal(model.replay_buffer.timeouts[:20, 0], ([0] * 9 + [1]) * 2)
    other = TD3X("MlpPolicy", gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), -1, 1), **tiny())
    with pytest.raises(ValueError, match=r"have actions of Box\(-2.0, 2.0.*, expected Box\(-1.0, 1.0"):
        fill_replay_buffer(other, dataset)
