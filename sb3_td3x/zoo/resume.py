"""Going on with an interrupted run of RL Zoo, by the zoo's own training command."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gymnasium as gym
import rl_zoo3.train
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import get_callback_list
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import Checkpoint, newest_whole_checkpoint
from sb3_td3x.checkpoint.logs import continue_monitoring, cut_monitor_files, monitor_start
from sb3_td3x.files.atomic import lock_folder
from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.register import ALGO, Hyperparams, checkpoint_folder


class UnusableRunError(ValueError):
    """A folder without a run that could go on."""


def resume_run(folder: Path) -> None:
    """
    Go on with a run from its newest whole checkpoint, in its own folder, until its number of timesteps.

    :param folder: the folder of the run
    :raises UnusableRunError: it holds no run of td3x, or no checkpoint that is whole, or another process trains it
    """
    config_folder = _config_folder(folder)
    # The zoo's own way to read what it wrote
    args = argparse.Namespace(**yaml.load((config_folder / "args.yml").read_text(), Loader=yaml.UnsafeLoader))
    if args.algo != ALGO or args.optimize_hyperparameters:
        raise UnusableRunError(f"{folder} is no training of {ALGO}")
    with _locked(_checkpoints_of(folder)) as checkpoint:
        # The checkpoint has what the run took from another agent
        args.trained_agent = ""
        print(f"Going on from {checkpoint.path}")
        cut_monitor_files(folder, checkpoint.state["monitor_sizes"])
        with (
            mock.patch.object(rl_zoo3.train, "argparse", SimpleNamespace(ArgumentParser=_saved_arguments(args))),
            mock.patch.object(rl_zoo3.train, "ExperimentManager", functools.partial(ResumedExperiment, folder)),
        ):
            rl_zoo3.train.train()


@contextlib.contextmanager
def _locked(checkpoints: Path) -> Iterator[Checkpoint]:
    """
    :param checkpoints: where a run's checkpoints are; other processes are kept from it
    :return: the newest one that is whole
    :raises UnusableRunError: there is none, or another process trains the run
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(lock_folder(checkpoints).release)
            checkpoint = newest_whole_checkpoint(checkpoints)
        except ValueError as error:
            raise UnusableRunError(str(error)) from None
        yield checkpoint


class ResumedExperiment(ExperimentManager):
    """
    The zoo's manager of a run that goes on.

    :param folder: the folder of the run
    :param args: as of the zoo's manager
    :param kwargs: as of the zoo's manager
    """

    def __init__(self, folder: Path, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.save_path = str(folder)
        self.params_path = str(_config_folder(folder))
        # Lets the zoo ask for an agent instead of making one
        self.continue_training = True

    def read_hyperparameters(self) -> Hyperparams:
        """
        :return: those that the run was started with, twice
        """
        print(f"Loading hyperparameters from: {self.params_path}")
        hyperparams = _saved_hyperparams(Path(self.params_path))
        return dict(hyperparams), dict(hyperparams)

    def _preprocess_hyperparams(
        self, hyperparams: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable[[gym.Env], gym.Env], list[BaseCallback], Callable[[VecEnv], VecEnv] | None]:
        """
        As in the zoo; the Monitors of the envs go on writing their files.

        :param hyperparams: as read
        :return: arguments of the constructor, wrapper of each env, callbacks, and wrapper of all envs
        """
        hyperparams, env_wrapper, callbacks, vec_env_wrapper = super()._preprocess_hyperparams(hyperparams)
        # As `create_envs` would, instead of what is set here
        env_id = self.env_name.gym_id
        if ExperimentManager.is_robotics_env(env_id) or ("parking-v0" in env_id and not self.monitor_kwargs):
            self.monitor_kwargs = {"info_keywords": ("is_success",)}
        starts = [monitor_start(path) for path in Path(self.save_path).glob("*monitor.csv")]
        start = min((value for value in starts if value is not None), default=None)
        self.monitor_kwargs = {**self.monitor_kwargs, "override_existing": start is None}
        return hyperparams, functools.partial(continue_monitoring, start, env_wrapper), callbacks, vec_env_wrapper

    @staticmethod
    def is_robotics_env(env_id: str) -> bool:
        """
        :param env_id: id of an env
        :return: no: what the zoo asks it for was done
        """
        return False

    def _load_pretrained_agent(self, hyperparams: dict[str, Any], env: VecEnv) -> BaseAlgorithm:
        """
        :param hyperparams: not used, the agent has them
        :param env: the envs of the training
        :return: the agent of the newest whole checkpoint
        """
        # The settings beside it, which were read before, can run code as well
        model = TD3X.resume(_checkpoints_of(Path(self.save_path)), env, self.device, trusted=True)
        model.verbose = self.verbose
        return model

    def _save_config(self, saved_hyperparams: dict[str, Any]) -> None:
        """
        The files of the run stay as they are.

        :param saved_hyperparams: not used
        """

    def learn(self, model: BaseAlgorithm) -> None:
        """
        :param model: the agent, which learns what remains of the run
        """
        super().learn(_Remaining(model))  # type: ignore[arg-type]


class _Remaining:
    """
    What the zoo's ``learn`` needs of an agent, with the timesteps of a run counted from its start.

    :param model: the agent
    """

    def __init__(self, model: BaseAlgorithm):
        self.model = model
        self.env = model.env

    def learn(self, total_timesteps: int, **kwargs: Any) -> None:
        """
        :param total_timesteps: of the whole run
        :param kwargs: further arguments
        """
        self.model.learn(total_timesteps - self.model.num_timesteps, reset_num_timesteps=False, **kwargs)


def _saved_arguments(args: argparse.Namespace) -> type[argparse.ArgumentParser]:
    """
    :param args: the arguments of the run
    :return: a parser that returns them, with defaults for options that the zoo did not know then
    """

    class SavedArguments(argparse.ArgumentParser):
        def parse_args(self, *_: Any, **__: Any) -> argparse.Namespace:  # type: ignore[override]
            return super().parse_args([], args)

    return SavedArguments


def _config_folder(folder: Path) -> Path:
    """
    :param folder: the folder of a run
    :return: where the zoo wrote its configuration
    :raises UnusableRunError: there is none
    """
    found = [path.parent for path in folder.glob("*/args.yml")]
    if len(found) != 1:
        raise UnusableRunError(f"{folder} is no folder of a run of RL Zoo: it has {len(found)} args.yml, expected one")
    return found[0]


def _saved_hyperparams(config_folder: Path) -> dict[str, Any]:
    """
    :param config_folder: where the zoo wrote a run's configuration
    :return: the run's hyperparameters; none if they were not written
    """
    path = config_folder / "config.yml"
    return dict(yaml.load(path.read_text(), Loader=yaml.UnsafeLoader)) if path.exists() else {}


def _checkpoints_of(folder: Path) -> Path:
    """
    :param folder: the folder of a run
    :return: where its checkpoints are: in it, unless its YAML file said another place
    """
    callbacks = get_callback_list(_saved_hyperparams(_config_folder(folder)))
    named = [it.save_path for it in callbacks if isinstance(it, ResumableCheckpoint) and it.save_path is not None]
    return named[0] if named else checkpoint_folder(folder)
