"""Loading agents: what comes back, and what is given instead."""

import io
import json
import pathlib
import tracemalloc
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest
from agents import assert_same, assert_same_agent, assert_same_predictions, train_on_same_data
from envs import CountingEnv, counting_vec_env, tiny, tiny_agent, zip_of
from noises import normal_noise
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import VectorizedActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.shaping import RewardScale, ShapingBatch


@pytest.fixture(scope="module")
def saved() -> bytes:
    """Return the zip of a tiny agent."""
    return zip_of(tiny_agent(action_noise=normal_noise()).learn(20)).getvalue()


EVERYTHING: dict[str, Any] = {
    "learning_rate": "lin_1e-3",
    "qf_learning_rate": "lin_7e-4",
    "action_noise_decay": 0.99,
    "action_noise_min_scale": 0.1,
    "reward_shaping": {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}},
    "clipped_double_q": False,
    "top_quantiles_to_drop_per_net": 0,
    "policy_delay": 3,
    "n_steps": 3,
    "train_freq": (2, "step"),
}


def test_agent_with_all_of_td3x_s_own_arguments_is_saved_whole(tmp_path: pathlib.Path) -> None:
    model = tiny_agent(action_noise=normal_noise(), **EVERYTHING).learn(31)
    model.save(tmp_path / "agent")
    loaded = TD3X.load(tmp_path / "agent", env=CountingEnv())
    assert_same_agent(model, loaded)
    for name in EVERYTHING:
        assert repr(getattr(loaded, name)) == repr(getattr(model, name)), name
    assert loaded.qf_lr_schedule(0.5) == pytest.approx(3.5e-4)
    assert loaded.lr_schedule(0.5) == pytest.approx(5e-4)
    assert loaded.action_noise_scale == model.action_noise_scale == pytest.approx(0.99**27)
    loaded.learn(10)
    assert loaded.action_noise_scale == pytest.approx(0.99**32)


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(
    "policy_kwargs",
    [{"n_critics": 3}, {"layer_norm": True, "actor_layer_norm": True}, {"n_quantiles": 4}],
    ids=str,
)
def test_training_continues_as_if_it_had_not_been_interrupted(policy_kwargs: dict[str, Any]) -> None:
    """The delay counter and the optimizers continue: 17 updates are no multiple of the delay."""
    model = tiny_agent(policy_kwargs={"net_arch": [8], **policy_kwargs}, policy_delay=5).learn(22)
    assert model._n_updates == 17
    loaded = TD3X.load(zip_of(model), env=model.env)
    train_on_same_data([loaded, model], model, updates=9)
    assert_same(dict(model.policy.state_dict()), dict(loaded.policy.state_dict()))


def test_zip_never_contains_the_replay_buffer() -> None:
    sizes = []
    for buffer_size in (10, 100_000):
        model = tiny_agent(buffer_size=buffer_size).learn(12)
        sizes.append(len(zip_of(model).getvalue()))
        loaded = TD3X.load(zip_of(model), env=model.env)
        assert loaded.replay_buffer.pos == 0
        sizes.append(len(zip_of(loaded.learn(12)).getvalue()))
    assert max(sizes) - min(sizes) < 1000
    with zipfile.ZipFile(zip_of(model)) as archive:
        attributes = json.loads(archive.read("data"))
    assert not {"replay_buffer", "_replay_buffer", "env", "_shaping"} & attributes.keys()


def test_agent_that_only_plays_takes_no_replay_memory() -> None:
    file = zip_of(tiny_agent(buffer_size=1_000_000))
    for env in (None, CountingEnv()):
        file.seek(0)
        tracemalloc.start()
        loaded = TD3X.load(file, env=env)
        loaded.predict(np.zeros(2, np.float32))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert loaded._replay_buffer is None
        assert peak < 5e6
        assert len(zip_of(loaded).getvalue()) == pytest.approx(len(file.getvalue()), abs=500)
        assert loaded._replay_buffer is None
    assert loaded.replay_buffer.buffer_size == 1_000_000
    assert loaded.replay_buffer is loaded._replay_buffer


class RecordingBuffer(ReplayBuffer):
    """A replay buffer that keeps what was sampled from it."""

    samples: list[Any]

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        self.samples = [*getattr(self, "samples", []), super().sample(*args, **kwargs)]
        return self.samples[-1]


@pytest.mark.parametrize("loaded", [False, True])
def test_demonstrations_in_the_replay_buffer_are_used(loaded: bool) -> None:
    """They can be added before the first step, after construction and after loading."""
    model = tiny_agent(learning_starts=0, batch_size=64, replay_buffer_class=RecordingBuffer)
    if loaded:
        model = TD3X.load(zip_of(model), env=CountingEnv(), replay_buffer_class=RecordingBuffer)
    obs = np.full((1, 2), 7, np.float32)
    for _ in range(50):
        model.replay_buffer.add(obs, obs, np.zeros((1, 1)), np.array([100.0]), np.array([True]), [{}])
    model.learn(1)
    assert model.replay_buffer.pos == 51
    assert isinstance(model.replay_buffer, RecordingBuffer)
    assert (model.replay_buffer.samples[0].rewards == 100).sum() > 50


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("algorithm", [TD3X, TD3])
def test_agent_with_noise_changes_its_number_of_envs(algorithm: type[Any], before: int, after: int) -> None:
    model = algorithm("MlpPolicy", counting_vec_env(before), **tiny(action_noise=normal_noise())).learn(24)
    env = counting_vec_env(after)
    loaded = TD3X.load(zip_of(model), env=env)
    loaded.learn(24)
    assert loaded.n_envs == loaded.replay_buffer.n_envs == after
    assert isinstance(loaded.action_noise, VectorizedActionNoise) == (after > 1)
    assert loaded.replay_buffer.pos == 24 // after
    again = TD3X.load(zip_of(loaded), env=counting_vec_env(before)).learn(12)
    assert again.replay_buffer.pos == 12 // before


def add_one(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """Add one to the rewards."""
    return batch.rewards + 1, batch.terminations


def test_zoo_s_enjoy_loads_with_custom_objects() -> None:
    custom_objects = {
        "learning_rate": 0.0,
        "lr_schedule": lambda _: 0.0,
        "clip_range": lambda _: 0.0,
        "observation_space": CountingEnv().observation_space,
        "action_space": CountingEnv().action_space,
    }
    model = tiny_agent(**{**EVERYTHING, "reward_shaping": f"{__name__}.add_one"}, action_noise=normal_noise()).learn(20)
    loaded = TD3X.load(zip_of(model), env=CountingEnv(), custom_objects=custom_objects, device="cpu", buffer_size=1)
    assert_same_predictions(model, loaded)
    assert loaded.learning_rate == loaded.lr_schedule(1.0) == 0
    assert loaded.qf_lr_schedule(1.0) == pytest.approx(7e-4)
    assert loaded.buffer_size == 1
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny())
    assert_same_predictions(sb3, TD3X.load(zip_of(sb3), custom_objects=custom_objects))


def test_zoo_s_continued_training_loads_with_its_hyperparameters(tmp_path: pathlib.Path) -> None:
    model = tiny_agent(action_noise=normal_noise()).learn(20)
    hyperparams: dict[str, Any] = {
        "learning_rate": LinearSchedule(5e-3, 0.0, 1.0),
        "qf_learning_rate": "lin_2e-3",
        "gamma": 0.9,
        "tau": 0.1,
        "buffer_size": 50,
        "learning_starts": 3,
        "batch_size": 8.0,
        "train_freq": 2,
        "gradient_steps": -1,
        "n_steps": 2,
        "action_noise": normal_noise(0.3),
        "action_noise_decay": 0.9,
        "reward_shaping": [{"sb3_td3x.shaping.RewardScale": {"scale": 0.5}}, f"{__name__}.add_one"],
        "policy_delay": 4,
    }
    env = counting_vec_env(2)
    loaded = TD3X.load(
        zip_of(model), env=env, seed=5, verbose=0, tensorboard_log=str(tmp_path), device="cpu", **hyperparams
    )
    loaded.learn(20)
    assert loaded.lr_schedule(1.0) == 5e-3
    assert loaded.qf_lr_schedule(1.0) == 2e-3
    assert loaded.train_freq.frequency == 2  # type: ignore[union-attr]
    assert (loaded.gamma, loaded.batch_size, loaded.policy_delay) == (0.9, 8, 4)
    assert isinstance(loaded.replay_buffer, PackedReplayBuffer)
    assert (loaded.replay_buffer.n_steps, loaded.replay_buffer.gamma) == (2, 0.9)
    np.testing.assert_allclose(loaded.replay_buffer.rewards[:4, 0], 0.5 * np.arange(1, 5) + 1)
    assert isinstance(loaded.action_noise, VectorizedActionNoise)
    assert list(tmp_path.glob("*/events*"))


def test_gamma_of_a_loaded_agent_reaches_its_n_step_buffer() -> None:
    model = tiny_agent(n_steps=3, gamma=0.9)
    loaded = TD3X.load(zip_of(model), gamma=0.5)
    assert isinstance(loaded.replay_buffer, PackedReplayBuffer)
    assert loaded.replay_buffer.gamma == 0.5
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny(n_steps=3, gamma=0.9))
    loaded = TD3X.load(zip_of(sb3), gamma=0.5, n_steps=2)
    assert isinstance(loaded.replay_buffer, PackedReplayBuffer)
    assert (loaded.replay_buffer.gamma, loaded.replay_buffer.n_steps) == (0.5, 2)


@pytest.mark.parametrize("algorithm", [TD3, TD3X])
def test_buffer_class_that_ignores_n_steps_still_does_after_loading(algorithm: type[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = algorithm("MlpPolicy", CountingEnv(), **tiny(n_steps=3, replay_buffer_class=ReplayBuffer))
    with pytest.warns(UserWarning, match="n_steps=3 is not used"):
        loaded = TD3X.load(zip_of(model))
    assert type(loaded.replay_buffer) is ReplayBuffer


def test_env_is_not_needed_for_any_use_but_training(saved: bytes) -> None:
    loaded = TD3X.load(io.BytesIO(saved))
    loaded.predict(np.zeros(2, np.float32))
    zip_of(loaded)
    loaded.get_parameters()
    with pytest.raises((AssertionError, ValueError), match=r"env"):
        loaded.learn(10)
    loaded.set_env(DummyVecEnv([CountingEnv]))
    assert loaded.learn(10).num_timesteps == 10


def test_hook_with_a_lambda_is_saved_by_value() -> None:
    model = tiny_agent(reward_shaping=[lambda batch: (batch.rewards + 10, batch.terminations), RewardScale(2.0)])
    with pytest.raises(ValueError, match=r"reward_shaping.*trusted=True"):
        TD3X.load(zip_of(model), env=CountingEnv())
    loaded = TD3X.load(zip_of(model), env=CountingEnv(), trusted=True).learn(3)
    np.testing.assert_array_equal(loaded.replay_buffer.rewards[:3, 0], [22, 24, 26])


def test_system_info_is_printed(saved: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    TD3X.load(io.BytesIO(saved), print_system_info=True)
    output = capsys.readouterr().out
    assert "CURRENT SYSTEM INFO" in output
    assert "SAVED MODEL SYSTEM INFO" in output


# Attributes that were not saved

NOT_SAVED = ("verbose", "policy_delay", "n_envs", "gamma", "learning_rate", "train_freq", "replay_buffer_kwargs", "tau")


@pytest.mark.parametrize("algorithm", [TD3X, TD3])
@pytest.mark.parametrize("name", NOT_SAVED)
def test_excluded_attribute_has_its_default(algorithm: type[Any], name: str) -> None:
    kwargs: dict[str, Any] = {"policy_delay": 3, "gamma": 0.9, "verbose": 0, "learning_rate": 0.1, "tau": 0.1}
    model = algorithm("MlpPolicy", counting_vec_env(2), **tiny(**kwargs)).learn(20)
    default = getattr(tiny_agent(policy_delay=2), name)
    loaded = TD3X.load(zip_of(model, exclude=[name]))
    assert getattr(loaded, name) == default
    assert_same_predictions(model, loaded)
    loaded = TD3X.load(zip_of(model, exclude=[name]), env=counting_vec_env(3)).learn(20)
    assert loaded.n_envs == 3


@pytest.mark.parametrize("by", ["keyword", "custom_objects"])
def test_excluded_attribute_has_the_given_value(by: str) -> None:
    exclude = ["verbose", "policy_delay", "policy_kwargs"]
    given = {"verbose": 0, "policy_delay": 5, "policy_kwargs": {"net_arch": [8]}}
    model = tiny_agent().learn(20)
    kwargs: dict[str, Any] = given if by == "keyword" else {"custom_objects": given}
    loaded = TD3X.load(zip_of(model, exclude=exclude), **kwargs)
    assert (loaded.verbose, loaded.policy_delay, loaded.policy_kwargs) == (0, 5, {"net_arch": [8]})
    assert_same_predictions(model, loaded)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_space_that_was_not_saved(name: str) -> None:
    model = tiny_agent().learn(20)
    with pytest.raises(ValueError, match=f"is no whole agent, it lacks {name}"):
        TD3X.load(zip_of(model, exclude=[name]))
    loaded = TD3X.load(zip_of(model, exclude=[name]), custom_objects={name: getattr(model, name)})
    assert_same_predictions(model, loaded)
