"""The zoo can train every entry of the YAML files."""

import importlib.util
import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml
from rl_zoo3.exp_manager import ExperimentManager

from sb3_td3x import TD3X

FOLDER = Path(__file__).parents[2] / "hyperparams"
FILES = {path.name: path for path in (FOLDER / "td3x.yml", FOLDER / "documents.yml")}
ENTRIES = [(name, env_id) for name, path in FILES.items() for env_id in yaml.safe_load(path.read_text())]
# Keys that ExperimentManager itself uses
ZOO_KEYS = {"n_timesteps", "n_envs", "normalize", "frame_stack", "env_wrapper", "vec_env_wrapper", "env_kwargs"}
ZOO_KEYS |= {"monitor_kwargs", "callback", "noise_type", "noise_std"}


def load_entry(name: str, env_id: str) -> dict[str, Any]:
    entry = yaml.safe_load(FILES[name].read_text())[env_id]
    assert isinstance(entry, dict)
    return entry


def make_manager(name: str, env_id: str, folder: Path, **kwargs: Any) -> ExperimentManager:
    # CarRacing's replay buffer would take 2.8 GB
    return ExperimentManager(
        Namespace(),
        "td3x",
        env_id,
        str(folder),
        config=str(FILES[name]),
        hyperparams={"buffer_size": 10, **kwargs.pop("hyperparams", {})},
        eval_freq=-1,
        device="cpu",
        **kwargs,
    )


def make_model(name: str, env_id: str, folder: Path) -> TD3X:
    result = make_manager(name, env_id, folder).setup_experiment()
    assert result is not None
    assert isinstance(result[0], TD3X)
    return result[0]


@pytest.mark.parametrize(("name", "env_id"), ENTRIES)
def test_keys(name: str, env_id: str) -> None:
    entry = load_entry(name, env_id)
    assert {"n_timesteps", "policy"} <= set(entry)
    arguments = set(inspect.signature(TD3X.__init__).parameters) - {"self", "env"}
    assert set(entry) <= arguments | ZOO_KEYS
    # YAML 1.1 reads 1e-3 as a string: write !!float 1e-3
    numbers = [key for key, value in entry.items() if isinstance(value, str) and value[0].isdigit()]
    assert numbers == []
    assert ("noise_type" in entry) == ("noise_std" in entry)


@pytest.mark.parametrize(("name", "env_id"), [entry for entry in ENTRIES if entry[1] != "default"])
def test_env_is_known(name: str, env_id: str) -> None:
    if "Bullet" in env_id:
        pytest.importorskip("pybullet_envs_gymnasium")
    gym.spec(env_id)


def is_installed(env_id: str) -> bool:
    # Pusher-v4 needs a MuJoCo older than 3
    if env_id in ("default", "Pusher-v4") or "Bullet" in env_id:
        return False
    needed = {"CarRacing-v3": "cv2"}.get(
        env_id, "mujoco" if "mujoco" in str(gym.spec(env_id).entry_point) else "gymnasium"
    )
    return importlib.util.find_spec(needed) is not None


def test_both_versions_of_mujoco_envs() -> None:
    v5 = [env_id for _, env_id in ENTRIES if env_id.endswith("-v5")]
    assert len(v5) == 11
    for env_id in v5:
        entry = load_entry("td3x.yml", env_id)
        if env_id == "Ant-v5":
            entry["env_kwargs"] = {}
        assert load_entry("td3x.yml", env_id.replace("-v5", "-v4")) == entry


@pytest.mark.parametrize("env_id", ["Ant-v4", "Ant-v5"])
def test_ant_observes_no_contact_forces(env_id: str) -> None:
    pytest.importorskip("mujoco")
    env = gym.make(env_id, **load_entry("td3x.yml", env_id)["env_kwargs"])
    assert env.observation_space.shape == (27,)


@pytest.mark.parametrize(("name", "env_id"), [entry for entry in ENTRIES if is_installed(entry[1])])
def test_zoo_builds_the_model(name: str, env_id: str, tmp_path: Path) -> None:
    model = make_model(name, env_id, tmp_path)
    assert model.env is not None
    obs = model.env.reset()
    model.env.step(model.predict(obs)[0])  # type: ignore[arg-type]
    model.env.close()


def test_default_is_used_for_other_envs(tmp_path: Path) -> None:
    gym.register("Unlisted-v0", entry_point="gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=200)
    try:
        model = make_model("td3x.yml", "Unlisted-v0", tmp_path)
    finally:
        del gym.registry["Unlisted-v0"]
    assert model.action_noise is not None


def test_document_000(tmp_path: Path) -> None:
    model = make_model("documents.yml", "BipedalWalkerHardcore-v3", tmp_path)
    layers = [type(layer).__name__ for layer in model.actor.mu]
    assert layers == ["Linear", "Tanh", "Linear", "Tanh", "Linear", "Tanh"]
    assert "ReLU" in repr(model.critic)
    assert "Tanh" not in repr(model.critic)
    assert (model.lr_schedule(1.0), model.qf_lr_schedule(1.0)) == (1e-4, 3e-4)
    assert model.env is not None
    assert model.env.get_attr("spec")[0].max_episode_steps == 1000


def test_document_004_stops_when_solved(tmp_path: Path) -> None:
    manager = make_manager("documents.yml", "LunarLanderContinuous-v3", tmp_path)
    assert manager.setup_experiment() is not None
    (callback,) = manager.callbacks
    assert (type(callback).__name__, callback.threshold, callback.window) == ("StopWhenSolved", 200.0, 100)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_timesteps", "fall"), [(1, -5.0), (1_000_000, -100.0)])
def test_hardcore_falls_cost_more_and_more(num_timesteps: int, fall: float) -> None:
    """A fall costs 1 at the start and 20 at the end, and all rewards are scaled by five."""
    import numpy as np

    from sb3_td3x.shaping import ShapingBatch, make_reward_shaping, shape

    hook = make_reward_shaping(load_entry("td3x.yml", "BipedalWalkerHardcore-v3")["reward_shaping"])
    assert hook is not None
    flags = np.array([True, False, False])
    batch = ShapingBatch(
        observations=np.zeros((3, 24), np.float32),
        actions=np.zeros((3, 4), np.float32),
        rewards=np.array([-100.0, -0.5, 0.3], np.float32),
        next_observations=np.zeros((3, 24), np.float32),
        terminations=flags,
        truncations=np.zeros(3, bool),
        infos=[{}, {}, {}],
        gamma=0.99,
        num_timesteps=num_timesteps,
    )
    rewards, terminations = shape(hook, batch)
    np.testing.assert_allclose(rewards, [fall, -2.5, 1.5], rtol=1e-4)
    np.testing.assert_array_equal(terminations, flags)
