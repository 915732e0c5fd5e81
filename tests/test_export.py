"""Exported actors act as their agents do."""

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import CountingEnv, DictObs, tiny, vec_env
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from zoo_helpers import ImageEnv

from sb3_td3x import TD3X
from sb3_td3x.cli import main
from sb3_td3x.export import export_actor

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:copyreg")]

BOUNDS = spaces.Box(np.array([-3, 0], np.float32), np.array([1, 5], np.float32))


class Float64Env(CountingEnv):
    """Observations as MuJoCo's."""

    def __init__(self) -> None:
        super().__init__(action_space=BOUNDS)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)


class DiscreteEnv(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(20)

    def _obs(self) -> Any:
        return np.int64(self.steps)


def run(path: Path, obs: Any) -> np.ndarray:
    inputs = obs if isinstance(obs, dict) else {"observation": obs}
    return onnxruntime.InferenceSession(path).run(["action"], inputs)[0]


def played(model: TD3X, env: VecEnv, n: int) -> tuple[Any, np.ndarray]:
    """Observations of the envs below ``VecNormalize``, and the agent's actions."""
    obs, original, actions = env.reset(), [], []
    for _ in range(n):
        original.append(env.get_original_obs() if isinstance(env, VecNormalize) else obs)
        actions.append(model.predict(obs, deterministic=True)[0])
        obs = env.step(actions[-1])[0]
    if isinstance(original[0], dict):
        return {key: np.concatenate([entry[key] for entry in original]) for key in original[0]}, np.concatenate(actions)
    return np.concatenate(original), np.concatenate(actions)


AGENTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "bounds": ("MlpPolicy", lambda: CountingEnv(action_space=BOUNDS), {}),
    "float64": ("MlpPolicy", Float64Env, {}),
    "discrete": ("MlpPolicy", DiscreteEnv, {}),
    "stochastic": ("MlpPolicy", Float64Env, {"stochastic_actor": True}),
    "layer norm": ("MlpPolicy", Float64Env, {"actor_layer_norm": True}),
    "images": ("CnnPolicy", ImageEnv, {}),
    "dictionary": ("MultiInputPolicy", lambda: DictObs(Float64Env()), {}),
    "dictionary with images": (
        "MultiInputPolicy",
        lambda: gym.wrappers.TransformObservation(
            ImageEnv(),
            lambda obs: {"image": obs, "number": np.ones(1, np.float32)},
            spaces.Dict({"image": ImageEnv().observation_space, "number": spaces.Box(-1, 1, (1,))}),
        ),
        {},
    ),
}


@pytest.mark.parametrize(("policy", "make_env", "policy_kwargs"), AGENTS.values(), ids=AGENTS)
def test_same_actions_as_the_agent(
    policy: str, make_env: Any, policy_kwargs: dict[str, Any], tmp_path: Path, capfd: Any
) -> None:
    model = TD3X(policy, vec_env(make_env()), **tiny(policy_kwargs={"net_arch": [8], **policy_kwargs}))
    export_actor(model, tmp_path / "actor.onnx")
    assert capfd.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["actor.onnx"]
    obs, actions = played(model, model.get_env(), 10)
    np.testing.assert_allclose(run(tmp_path / "actor.onnx", obs), actions, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("make_env", [Float64Env, lambda: DictObs(Float64Env())], ids=["box", "dictionary"])
def test_normalization_is_part_of_the_file(make_env: Any, norm_obs: bool, tmp_path: Path) -> None:
    keys = ["count"] if make_env is not Float64Env and norm_obs else None
    env = VecNormalize(vec_env(make_env()), norm_obs=norm_obs, norm_obs_keys=keys, clip_obs=1.0)
    model = TD3X("MlpPolicy" if make_env is Float64Env else "MultiInputPolicy", env, **tiny()).learn(20)
    env.training = False
    obs, actions = played(model, env, 10)
    export_actor(model, tmp_path / "own.onnx")
    np.testing.assert_allclose(run(tmp_path / "own.onnx", obs), actions, rtol=1e-4, atol=1e-4)
    if norm_obs:
        model.save(tmp_path / "agent.zip")
        loaded = TD3X.load(tmp_path / "agent.zip", device="cpu")
        export_actor(loaded, tmp_path / "given.onnx", env)
        np.testing.assert_allclose(run(tmp_path / "given.onnx", obs), actions, rtol=1e-4, atol=1e-4)
        export_actor(loaded, tmp_path / "without.onnx")
        assert not np.allclose(run(tmp_path / "without.onnx", obs), actions, atol=1e-4)


def test_agent_is_left_alone(tmp_path: Path) -> None:
    """Exporting within a training changes nothing."""
    weights, observations = [], []
    for exported in (False, True):
        model = TD3X("MlpPolicy", "Pendulum-v1", **tiny()).learn(20)
        model.observation_space.seed(0)
        if exported:
            export_actor(model, tmp_path / "actor.onnx")
        weights.append(model.learn(20, reset_num_timesteps=False).policy.state_dict())
        observations.append(model.observation_space.sample().tolist())
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name])
    assert observations[0] == observations[1]


def test_file_that_acts_otherwise_is_not_written(tmp_path: Path) -> None:
    class Inverted(TD3X):
        def predict(self, *args: Any, **kwargs: Any) -> Any:
            actions, state = super().predict(*args, **kwargs)
            return -actions, state

    model = Inverted("MlpPolicy", vec_env(Float64Env()), **tiny())
    with pytest.raises(ValueError, match=r"The exported actor differs from the agent by .* of an action's range"):
        export_actor(model, tmp_path / "actor.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnxruntime", "onnxscript"])
def test_missing_package(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"Exporting needs ONNX: pip install .*\[onnx\]"):
        export_actor(TD3X("MlpPolicy", "Pendulum-v1", **tiny()), tmp_path / "actor.onnx")


class TestCommand:
    def test_agent_of_sb3(self, tmp_path: Path, capsys: Any) -> None:
        model = TD3("MlpPolicy", vec_env(Float64Env()), **tiny())
        model.save(tmp_path / "agent.zip")
        assert main(["export", str(tmp_path / "agent.zip"), str(tmp_path / "actor.onnx")]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'actor.onnx'}\n"
        obs, actions = played(model, model.get_env(), 10)
        np.testing.assert_allclose(run(tmp_path / "actor.onnx", obs), actions, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("given", [True, False])
    def test_statistics_of_a_run_folder(self, given: bool, tmp_path: Path, capsys: Any) -> None:
        env = VecNormalize(vec_env(Float64Env()))
        model = TD3X("MlpPolicy", env, **tiny()).learn(20)
        env.training = False
        (tmp_path / "Env").mkdir()
        model.save(tmp_path / "agent.zip")
        statistics = tmp_path / ("elsewhere.pkl" if given else "Env/vecnormalize.pkl")
        env.save(statistics)
        options = ["--vec-normalize", str(statistics)] if given else []
        assert main(["export", str(tmp_path / "agent.zip"), str(tmp_path / "actor.onnx"), *options]) == 0
        assert f"normalizes observations by {statistics}" in capsys.readouterr().out
        obs, actions = played(model, env, 10)
        np.testing.assert_allclose(run(tmp_path / "actor.onnx", obs), actions, rtol=1e-4, atol=1e-4)

    def test_bad_files(self, tmp_path: Path, capsys: Any) -> None:
        agent, statistics = tmp_path / "agent.zip", tmp_path / "statistics.pkl"
        assert main(["export", str(agent), str(tmp_path / "actor.onnx")]) == 1
        assert "No such file" in capsys.readouterr().err
        TD3X("MlpPolicy", "Pendulum-v1", **tiny()).save(agent)
        VecNormalize(vec_env(Float64Env())).save(statistics)
        assert main(["export", str(agent), str(tmp_path / "actor.onnx"), "--vec-normalize", str(statistics)]) == 1
        assert "statistics.pkl" in capsys.readouterr().err
