"""
The folder of a run of RL Zoo: its settings, its env and its agents.

A stranger's folder can hold code: YAML and pickles may name any Python object, and settings may name any module.
Without ``trusted=True`` nothing of that is run or imported.
"""

import importlib
import re
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
from rl_zoo3.utils import get_wrapper_class
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecFrameStack

import _sb3_td3x_autoload as autoload
from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.shaping import RewardShaping, check_built_in, make_reward_shaping
from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.run_files import TRUST_HINT, load_vec_normalize, parse_dict, read_zoo_yaml

# Modules whose wrappers a run that is not trusted may name
WRAPPER_MODULES = (
    "gymnasium.wrappers",
    "rl_zoo3.wrappers",
    "sb3_contrib.common.wrappers",
    "stable_baselines3.common.atari_wrappers",
    "stable_baselines3.common.vec_env",
)
# Modules whose callbacks it may name
CALLBACK_MODULES = (
    *("sb3_td3x.callbacks", "sb3_td3x.checkpoint", "sb3_td3x.checkpoint.callback"),
    *("stable_baselines3.common.callbacks", "rl_zoo3.callbacks"),
)
# These write files to a folder that the settings name
_WRITING_WRAPPERS = ("RecordVideo", "VecMonitor", "VecVideoRecorder")

# Wrappers that repeat each action, and their argument for the number of repetitions
_REPEATING_WRAPPERS = {
    "rl_zoo3.wrappers.FrameSkip": "skip",
    "stable_baselines3.common.atari_wrappers.MaxAndSkipEnv": "skip",
    "stable_baselines3.common.atari_wrappers.AtariWrapper": "frame_skip",
}
_DEFAULT_REPETITIONS = 4

# Algorithms whose agents `TD3X.load` reads without running their pickles
_SAFE_ALGORITHMS = ("td3x", "td3", "ddpg")
_SAVED_AGENT = re.compile(r"rl_model_(\d+)_steps\.zip")

_MAX_FRAMES = 1000


class ZooRun:
    """
    The folder of a run of RL Zoo, such as ``logs/td3x/Pendulum-v1_1``.

    :param trusted: whether the run may execute code: any object in its YAML and in its agents' files, any module that
        its settings name. Without it, classes are limited to those that an agent's file may name
        (``files/records.py``), and wrappers to those of ``WRAPPER_MODULES``.
    :raises ValueError: it is not the folder of a run, or a file of its settings is damaged or needs to be trusted
    """

    def __init__(self, folder: Path, trusted: bool = False):
        configs = sorted(folder.glob("*/config.yml"))
        if len(configs) != 1:
            raise ValueError(
                f"{folder} is not the folder of a run of RL Zoo: {len(configs)} of its subfolders have a config.yml, "
                "expected one"
            )
        self.folder = folder
        self.trusted = trusted
        self.config_file = configs[0]
        # Named after the env
        self.config_folder = self.config_file.parent
        self.args_file = self.config_folder / "args.yml"
        self.hyperparams = read_zoo_yaml(self.config_file, trusted)
        self.args = read_zoo_yaml(self.args_file, trusted)
        self.algo = self._name_in_args("algo")
        self.env_id = self._name_in_args("env")
        # Env steps for each timestep that the zoo counted, which was one decision of the agent
        with refusing(f"env_wrapper in {self.config_file}"):
            self.action_repeat = action_repeat(self.hyperparams)

    def _name_in_args(self, key: str) -> str:
        value = self.args.get(key)
        if not isinstance(value, str):
            raise FileRefused(f"{self.args_file} has {key}={reprlib.repr(value)}, expected a name")
        return value

    def act_at_every_step(self) -> None:
        """Play without repeating actions, though the training did."""
        self.hyperparams["env_wrapper"] = [
            {path: {**(kwargs or {}), **({_REPEATING_WRAPPERS[path]: 1} if path in _REPEATING_WRAPPERS else {})}}
            for path, kwargs in named_in(self.hyperparams.get("env_wrapper"))
        ]

    @property
    def normalize_kwargs(self) -> dict[str, Any] | None:
        """Arguments of ``VecNormalize`` while training; None: nothing was normalized."""
        value = self.hyperparams.get("normalize")
        if not value:
            return None
        return {} if value is True else parse_dict(value, f"normalize in {self.config_file}")

    @property
    def last_agent(self) -> Path:
        """The agent at the end of the training."""
        return self.folder / f"{self.config_folder.name}.zip"

    @property
    def best_agent(self) -> Path:
        """The best agent of the evaluations while training, if there were any."""
        return self.folder / "best_model.zip"

    def saved_agents(self) -> dict[int, Path]:
        """
        List the agents that the zoo saved while training (``--save-freq``).

        :return: their files by env steps, in ascending order
        """
        matches = ((_SAVED_AGENT.fullmatch(path.name), path) for path in self.folder.glob("rl_model_*.zip"))
        return dict(sorted((int(match[1]) * self.action_repeat, path) for match, path in matches if match))

    def make_env(self, n_envs: int = 1, seed: int | None = None, render: bool = False) -> VecEnv:
        """
        Make the env as the zoo's ``enjoy`` does: with the wrappers, frame stack and ``VecNormalize`` statistics of the
        training. The statistics are not updated, and rewards are not normalized.

        :param seed: seed of the first copy; copy i gets ``seed + i``
        :param render: whether to show the env on the screen; it can render pictures in any case
        :raises ValueError: a file is damaged, or the settings name something that needs to be trusted
        """
        # Gymnasium imports the module that stands before a colon in an id that is not registered
        if self.env_id not in gym.registry:
            raise FileRefused(
                f"{self.args_file} has env={self.env_id!r:.100}, which is not the id of a registered env: name the "
                "package that registers it by --gym-packages"
            )
        env_kwargs = self.args.get("env_kwargs") or self.hyperparams.get("env_kwargs") or {}
        frame_stack = self.hyperparams.get("frame_stack") or 0
        if not isinstance(env_kwargs, dict) or type(frame_stack) is not int or not 0 <= frame_stack <= _MAX_FRAMES:
            raise FileRefused(
                f"{self.config_file} has bad env_kwargs or frame_stack, expected a dictionary and an integer up to "
                f"{_MAX_FRAMES}"
            )
        if render:
            env_kwargs = {"render_mode": "human", **env_kwargs}
        if not self.trusted:
            _check_wrappers(self.hyperparams, str(self.config_file))
        wrap, wrap_all = self._wrapper("env_wrapper"), self._wrapper("vec_env_wrapper")
        env = wrap_all(make_vec_env(self.env_id, n_envs, seed=seed, env_kwargs=env_kwargs, wrapper_class=wrap))
        if self.hyperparams.get("normalize"):
            env = load_vec_normalize(self.config_folder / "vecnormalize.pkl", env)
        return VecFrameStack(env, frame_stack) if frame_stack > 0 else env

    def _wrapper(self, key: str) -> Callable[[Any], Any]:
        """Return a function that wraps an env by the wrappers that the settings name, if any."""
        name = f"{key} in {self.config_file}"
        with refusing(name):
            wrap = get_wrapper_class(self.hyperparams, key)

        def refusing_wrap(env: Any) -> Any:
            with refusing(name):
                return env if wrap is None else wrap(env)

        return refusing_wrap

    def make_shaping(self) -> RewardShaping | None:
        """
        Build the reward shaping hook that the run learned from.

        :return: the hook; None: there was none
        :raises ValueError: it cannot be built, or is not one of ours and the run is not trusted
        """
        spec = self.hyperparams.get("reward_shaping")
        if not self.trusted:
            _check_shaping(spec, str(self.config_file))
        return make_reward_shaping(spec)

    def load_agent(self, path: Path, env: VecEnv | None = None) -> BaseAlgorithm:
        """
        Load an agent for playing: on the CPU, without replay memory, learning rate and reward shaping.

        :param env: the env that it will play in; SB3's own algorithms need it with ``HerReplayBuffer``
        :return: the agent; those of td3 and ddpg as ``TD3X`` as well
        :raises ValueError: the file is damaged, or needs to be trusted, as those of all other algorithms do
        """
        if self.algo in _SAFE_ALGORITHMS:
            unneeded: dict[str, Any] = {"learning_rate": 0.0, "qf_learning_rate": None, "reward_shaping": None}
            return TD3X.load(path, device="cpu", trusted=self.trusted, buffer_size=1, action_noise=None, **unneeded)
        if not self.trusted:
            raise FileRefused(f"{path} is an agent of {self.algo}, which is pickled and can run any code. {TRUST_HINT}")
        # As in `enjoy`: schedules may be of classes that cannot be imported here
        kwargs: dict[str, Any] = {
            "custom_objects": {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0},
            "buffer_size": 1,
        }
        if self.hyperparams.get("optimize_memory_usage"):
            kwargs["optimize_memory_usage"] = False
        if "HerReplayBuffer" in str(self.hyperparams.get("replay_buffer_class")):
            kwargs["env"] = env
        return zoo_algorithms()[self.algo].load(path, device="cpu", **kwargs)


def zoo_algorithms() -> dict[str, type[BaseAlgorithm]]:
    """Return the zoo's algorithms by name, td3x among them."""
    autoload.install(force=True)
    from rl_zoo3 import ALGOS

    return dict(ALGOS)


def checkpoint_folder(run_folder: str | Path) -> Path:
    """Return where the checkpoints of a run are, unless its settings name another place."""
    return Path(run_folder) / "checkpoints"


def action_repeat(hyperparams: dict[str, Any]) -> int:
    """Return the number of env steps for each timestep of an entry of the zoo's YAML files."""
    repeat = 1
    for path, kwargs in named_in(hyperparams.get("env_wrapper")):
        if path in _REPEATING_WRAPPERS:
            repeat *= int((kwargs or {}).get(_REPEATING_WRAPPERS[path], _DEFAULT_REPETITIONS))
    return repeat


def named_in(spec: Any) -> Iterator[tuple[Any, Any]]:
    """Yield path and arguments of what the zoo's notation for wrappers and callbacks names."""
    for entry in spec if isinstance(spec, list) else [] if spec is None else [spec]:
        yield next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, None)


def check_names(hyperparams: dict[str, Any], where: str) -> None:
    """
    Check that settings name no code of the user's own: the wrappers, callbacks and shaping hooks of a run.

    :raises FileRefused: they do, and need to be trusted
    """
    _check_wrappers(hyperparams, where)
    for path, _ in named_in(hyperparams.get("callback")):
        if not isinstance(path, str) or path.rpartition(".")[0] not in CALLBACK_MODULES:
            raise FileRefused(
                f"{where} asks for the callback {path!r:.120}, expected one of {', '.join(CALLBACK_MODULES)}. "
                f"{TRUST_HINT}"
            )
    _check_shaping(hyperparams.get("reward_shaping"), where)


def _check_wrappers(hyperparams: dict[str, Any], where: str) -> None:
    """Check that the wrappers are of known modules and write nothing."""
    for key, kind in (("env_wrapper", gym.Wrapper), ("vec_env_wrapper", VecEnvWrapper)):
        for path, _ in named_in(hyperparams.get(key)):
            module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
            if module == getattr(getattr(gym.wrappers, name, None), "__module__", None):
                # The module in which Gymnasium defines the wrapper
                module = gym.wrappers.__name__
            if module not in WRAPPER_MODULES or name in _WRITING_WRAPPERS:
                raise FileRefused(
                    f"{where} asks for the wrapper {path!r:.120}, expected one of {', '.join(WRAPPER_MODULES)} that "
                    f"writes nothing. {TRUST_HINT}"
                )
            cls = getattr(importlib.import_module(module), name, None)
            if not (isinstance(cls, type) and issubclass(cls, kind)):
                raise FileRefused(f"{where} asks for {path!r:.80}, which is not a {kind.__name__}")


def _check_shaping(spec: Any, where: str) -> None:
    try:
        check_built_in(spec)
    except ValueError:
        raise FileRefused(
            f"{where} has reward_shaping={reprlib.repr(spec)}, which can run any code. {TRUST_HINT}"
        ) from None
