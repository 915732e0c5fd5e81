"""Playing the folder of a zoo's run without running what strangers may have put there, unlike the zoo itself."""

import importlib
import io
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import yaml
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecFrameStack, VecNormalize

from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.inspect import one_line
from sb3_td3x.files.pickles import Pickled, allowed_in_pickles, from_pickle, read_pickle
from sb3_td3x.files.records import path_of
from sb3_td3x.td3x import TD3X

# Modules whose wrappers a run's folder may ask for
WRAPPER_MODULES = (
    "gymnasium.wrappers",
    "rl_zoo3.wrappers",
    "sb3_contrib.common.wrappers",
    "stable_baselines3.common.atari_wrappers",
    "stable_baselines3.common.vec_env",
)
# They write where they are told to
_WRITING_WRAPPERS = ("RecordVideo", "VecMonitor", "VecVideoRecorder")

_VEC_NORMALIZE = path_of(VecNormalize)
_MAX_YAML_SIZE = 2**17
_MAX_YAML_VALUES = 20_000
_MAX_STATISTICS_SIZE = 64 * 2**20
_MAX_FRAMES = 1000


class _ZooLoader(yaml.SafeLoader):
    """
    Reads the two Python objects that the zoo writes as what they hold.

    :param content: YAML
    :param name: how to name the file in an error
    """

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name
        self._values = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """
        :param parent: what the next node is part of
        :param index: where in it
        :return: the node
        :raises FileRefused: there are too many, counting what an alias stands for each time that it is named
        """
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._values
        node = super().compose_node(parent, index)
        assert node is not None
        # A node that is not finished holds its own alias, without an end
        self._values += self._sizes.get(node, _MAX_YAML_VALUES) if is_alias else 1
        if self._values > _MAX_YAML_VALUES:
            raise FileRefused(f"{self.name} is too large: more than {_MAX_YAML_VALUES} values")
        if not is_alias:
            self._sizes[node] = self._values - before
        return node


def _read_pairs(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    (pairs,) = loader.construct_sequence(node, deep=True)  # type: ignore[arg-type]
    return dict(pairs)


_PYTHON = "tag:yaml.org,2002:python/"
_ZooLoader.add_constructor(f"{_PYTHON}object/apply:collections.OrderedDict", _read_pairs)
_ZooLoader.add_constructor(
    f"{_PYTHON}tuple",
    lambda loader, node: tuple(loader.construct_sequence(node, deep=True)),  # type: ignore[arg-type]
)


def read_zoo_yaml(path: Path) -> dict[str, Any]:
    """
    :param path: a ``config.yml`` or ``args.yml`` that the zoo wrote
    :return: what it holds, all of it plain data
    :raises ValueError: it is damaged, or holds other Python objects
    """
    with refusing(str(path)):
        try:
            content = _ZooLoader(_read(path, _MAX_YAML_SIZE), str(path)).get_single_data()
        except yaml.constructor.ConstructorError as error:
            raise FileRefused(f"{path} holds a Python object, and these can run code: {error.problem}") from None
        if not isinstance(content, dict):
            raise FileRefused(f"{path} holds {type(content).__name__}, expected names and values")
        return content


def _read(path: Path, max_size: int) -> bytes:
    """
    :param path: a file
    :param max_size: the most that it may have, in bytes
    :return: its content
    :raises FileRefused: it is larger, or a device or a pipe, which may have no end
    """
    if path.exists() and not path.is_file():
        raise FileRefused(f"{path} is no file")
    with path.open("rb") as file:
        content = file.read(max_size + 1)
    if len(content) > max_size:
        raise FileRefused(f"{path} is too large: more than {max_size} bytes")
    return content


def load_vec_normalize(path: Path, venv: VecEnv) -> VecNormalize:
    """
    Read statistics that SB3's ``VecNormalize.save`` pickled, without running the pickle.

    :param path: the file
    :param venv: the envs to normalize
    :return: the envs with these statistics, which are not updated; rewards stay as they are
    :raises ValueError: the file is damaged, holds something else, or statistics of other observations
    """
    name = str(path)
    with refusing(name):
        content = _read(path, _MAX_STATISTICS_SIZE)
        pickled = read_pickle(io.BytesIO(content), name, {*allowed_in_pickles(), _VEC_NORMALIZE})
        if not (isinstance(pickled, Pickled) and pickled.path == _VEC_NORMALIZE and isinstance(pickled.state, dict)):
            raise FileRefused(f"{name} holds no VecNormalize")
        names = ("norm_obs", "norm_obs_keys", "clip_obs", "clip_reward", "gamma", "epsilon", "obs_rms", "ret_rms")
        state = {key: from_pickle(pickled.state[key], len(content)) for key in names if key in pickled.state}
        obs_rms, ret_rms = state.pop("obs_rms", None), state.pop("ret_rms")
        env = VecNormalize(venv, training=False, norm_reward=False, **state)
        _check_statistics(ret_rms, env.ret_rms, name)
        env.ret_rms = ret_rms
        if env.norm_obs:
            _check_statistics(obs_rms, env.obs_rms, name)
            env.obs_rms = obs_rms
        return env


def _check_statistics(loaded: Any, expected: Any, name: str) -> None:
    """
    :param loaded: statistics, or a dictionary of them
    :param expected: others of the shape that they should have
    :param name: how to name the file in an error
    """
    if isinstance(expected, dict):
        if not isinstance(loaded, dict) or loaded.keys() != expected.keys():
            raise FileRefused(f"{name} holds statistics of other observations than the env's")
        for key in expected:
            _check_statistics(loaded[key], expected[key], name)
    elif not isinstance(loaded, RunningMeanStd) or loaded.mean.shape != expected.mean.shape:
        raise FileRefused(f"{name} holds statistics of other observations than the env's")


def _wrapper(spec: Any, kind: type, where: str) -> Callable[[Any], Any]:
    """
    :param spec: a wrapper in the zoo's notation: a dotted path, or ``{path: keyword arguments}``, or a list of these
    :param kind: what wrappers of such envs are
    :param where: how to name the file in an error
    :return: what wraps an env
    :raises FileRefused: it is not from one of the modules that are allowed
    """
    wrappers: list[tuple[str, Any, dict[str, Any]]] = []
    for entry in spec if isinstance(spec, list) else [spec]:
        path, kwargs = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, {})
        module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
        if module == getattr(getattr(gym.wrappers, name, None), "__module__", None):
            # The zoo names some by where Gymnasium defines them
            module = gym.wrappers.__name__
        if module not in WRAPPER_MODULES or name in _WRITING_WRAPPERS:
            raise FileRefused(
                f"{where} asks for the wrapper {path!r:.120}, expected one of {', '.join(WRAPPER_MODULES)} that writes "
                "nothing"
            )
        cls = getattr(importlib.import_module(module), name, None)
        if not (isinstance(cls, type) and issubclass(cls, kind)):
            raise FileRefused(f"{where} asks for {path!r:.80}, which is no {kind.__name__}")
        if not isinstance(kwargs, dict | None):
            raise FileRefused(f"{where} asks for {path} with arguments that are no dictionary")
        wrappers.append((path, cls, kwargs or {}))

    def wrap(env: Any) -> Any:
        for path, cls, kwargs in wrappers:
            try:
                env = cls(env, **kwargs)
            except Exception as error:  # whatever wrong arguments make of a wrapper
                reason = one_line(f"{type(error).__name__}: {error}")
                raise FileRefused(
                    f"{where} asks for {path} with {reprlib.repr(kwargs)}, which cannot be made ({reason})"
                ) from None
        return env

    return wrap


def make_env(folder: Path, render: bool = False, seed: int | None = None, n_envs: int = 1) -> VecEnv:
    """
    The env of a zoo's run, with the wrappers and statistics that it was trained with.

    :param folder: the folder with ``config.yml`` and ``args.yml``
    :param render: whether to show it on the screen
    :param seed: Seed for the pseudo random generators; env i gets ``seed + i``
    :param n_envs: how many copies of it
    :return: the copies, as one vectorised env
    :raises ValueError: a file is damaged, or asks for something that is not safe
    """
    config_path, args_path = folder / "config.yml", folder / "args.yml"
    config, args = read_zoo_yaml(config_path), read_zoo_yaml(args_path)
    env_id = args.get("env")
    # Of an id that it does not know, Gymnasium would import what stands before a colon
    if not isinstance(env_id, str) or env_id not in gym.registry:
        raise FileRefused(
            f"{args_path} has env={reprlib.repr(env_id)}, which is no id of a registered env: name its package, "
            "--gym-packages"
        )
    env_kwargs = args.get("env_kwargs") or config.get("env_kwargs") or {}
    frame_stack = config.get("frame_stack") or 0
    if not isinstance(env_kwargs, dict) or type(frame_stack) is not int or not 0 <= frame_stack <= _MAX_FRAMES:
        raise FileRefused(
            f"{config_path} has bad env_kwargs or frame_stack, expected a dictionary and an integer up to {_MAX_FRAMES}"
        )
    where = str(config_path)
    wrap = _wrapper(config["env_wrapper"], gym.Wrapper, where) if config.get("env_wrapper") else None
    wrap_all = _wrapper(config["vec_env_wrapper"], VecEnvWrapper, where) if config.get("vec_env_wrapper") else None
    if render:
        env_kwargs = {"render_mode": "human", **env_kwargs}
    env = make_vec_env(env_id, n_envs, seed=seed, env_kwargs=env_kwargs, wrapper_class=wrap)
    if wrap_all is not None:
        env = wrap_all(env)
    if config.get("normalize"):
        env = load_vec_normalize(folder / "vecnormalize.pkl", env)
    return VecFrameStack(env, frame_stack) if frame_stack > 0 else env


def config_folder(folder: Path) -> Path:
    """
    :param folder: folder of a zoo's run
    :return: its subfolder with ``config.yml`` and ``args.yml``, which is named after the env
    :raises ValueError: it is no such folder
    """
    configs = sorted(folder.glob("*/config.yml"))
    if len(configs) != 1:
        raise FileRefused(f"{folder} is no folder of a run: it has {len(configs)} subfolders with a config.yml")
    return configs[0].parent


def load_player(path: Path) -> TD3X:
    """
    :param path: an agent's zip file
    :return: the agent, on the CPU, without what only a training needs: memory, a hook, schedules
    :raises ValueError: the file is damaged, or needs to be trusted
    """
    unneeded: dict[str, Any] = {
        "buffer_size": 1,
        "reward_shaping": None,
        "learning_rate": 0.0,
        "qf_learning_rate": None,
    }
    return TD3X.load(path, device="cpu", **unneeded)


def play(
    folder: Path,
    timesteps: int = 1000,
    render: bool = False,
    seed: int = 0,
    deterministic: bool = True,
    best: bool = False,
) -> list[float]:
    """
    Play the agent of a zoo's run, and print what it reaches.

    :param folder: the run's folder, such as ``logs/td3x/Pendulum-v1_1``
    :param timesteps: how many env timesteps
    :param render: whether to show it on the screen
    :param seed: Seed for the pseudo random generators
    :param deterministic: whether a stochastic policy takes its mean
    :param best: whether to take the best agent of the evaluations instead of the last one
    :return: the returns of the finished episodes
    :raises ValueError: this is no run's folder, a file in it is damaged, or asks for something that is not safe
    """
    env_folder = config_folder(folder)
    path = folder / ("best_model.zip" if best else f"{env_folder.name}.zip")
    env = make_env(env_folder, render, seed)
    model = load_player(path)
    returns, total = [], 0.0
    obs: Any = env.reset()
    for _ in range(timesteps):
        action, _ = model.predict(obs, deterministic=deterministic)
        obs, rewards, dones, _ = env.step(action)
        if render:
            env.render("human")
        total += float(rewards[0])
        if dones[0]:
            returns.append(total)
            print(f"Episode {len(returns)}: {total:.2f}")
            total = 0.0
    env.close()
    if returns:
        print(f"{len(returns)} episodes, mean return {np.mean(returns):.2f} +/- {np.std(returns):.2f}")
    else:
        print(f"No episode ended; return so far {total:.2f}")
    return returns
