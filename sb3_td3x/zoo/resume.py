"""Resuming an interrupted run of RL Zoo with the zoo's own training command."""

import argparse
import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import rl_zoo3.exp_manager
import rl_zoo3.train
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import get_callback_list
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import list_checkpoints, newest_whole_checkpoint
from sb3_td3x.checkpoint.logs import continue_monitoring, cut_monitor_files, monitor_start
from sb3_td3x.files.atomic import lock_folder
from sb3_td3x.files.errors import FileRefused
from sb3_td3x.shaping import check_built_in, make_reward_shaping
from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.manager import Hyperparams
from sb3_td3x.zoo.register import ALGO
from sb3_td3x.zoo.run_files import TRUST_HINT, parse_dict
from sb3_td3x.zoo.runs import ZooRun, check_names, checkpoint_folder

# Hyperparameters that the zoo takes for itself, or for `VecNormalize`; the checkpoint has the others
_ZOO_HYPERPARAMS = (
    *("n_timesteps", "n_envs", "env_wrapper", "vec_env_wrapper", "frame_stack", "env_kwargs", "monitor_kwargs"),
    *("normalize", "gamma", "callback"),
)


class UnusableRunError(ValueError):
    """A folder whose run cannot be resumed."""


def resume_run(folder: Path, trusted: bool = False) -> None:
    """
    Resume a run from its newest whole checkpoint, in its own folder, until its number of timesteps.

    :param trusted: whether the run may execute code, see ``ZooRun``
    :raises UnusableRunError: the folder holds no run of td3x, no whole checkpoint, or something that needs to be
        trusted; or another process trains the run
    """
    with contextlib.ExitStack() as lock:
        with _unusable():
            run = ZooRun(folder, trusted)
            if run.algo != ALGO or run.args.get("optimize_hyperparameters"):
                raise UnusableRunError(f"{folder} is not a training of {ALGO}")
            hyperparams = _zoo_hyperparams(run)
            checkpoints = _checkpoints_of(hyperparams, folder)
            lock.callback(lock_folder(checkpoints).release)
            if not list_checkpoints(checkpoints):
                raise UnusableRunError(
                    f"There is no checkpoint in {checkpoints}: a run has some if it is trained with --save-freq, or "
                    "with sb3_td3x.checkpoint.ResumableCheckpoint among the callbacks of its YAML file"
                )
            checkpoint = newest_whole_checkpoint(checkpoints)
        print(f"Resuming from {checkpoint.path}")
        cut_monitor_files(folder, checkpoint.state["monitor_sizes"])
        # The checkpoint has what the run took from another agent
        args = argparse.Namespace(**{**run.args, "trained_agent": ""})
        total = args.n_timesteps if args.n_timesteps > 0 else int(hyperparams["n_timesteps"])
        args.track = args.track and checkpoint.num_timesteps < total
        # The parser gives options that are newer than the run their defaults
        parse_args = functools.partialmethod(argparse.ArgumentParser.parse_args, [], args)
        parser_class = type("SavedArguments", (argparse.ArgumentParser,), {"parse_args": parse_args})
        manager_class = functools.partial(ResumedExperiment, run, hyperparams, checkpoints)
        with (
            mock.patch.object(rl_zoo3.train, "argparse", SimpleNamespace(ArgumentParser=parser_class)),
            mock.patch.object(rl_zoo3.train, "ExperimentManager", manager_class),
            _resumed_tracking(args.wandb_run_id) if args.track else contextlib.nullcontext(),
        ):
            rl_zoo3.train.train()


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """Turn errors of reading a run into an ``UnusableRunError``."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise UnusableRunError(str(error).replace("load with trusted=True", "add --trusted")) from None


def _zoo_hyperparams(run: ZooRun) -> dict[str, Any]:
    """
    Return the hyperparameters that the zoo needs; of a run that is not trusted without what it would evaluate.

    :raises ValueError: the run names a module that needs to be trusted
    """
    hyperparams = {name: run.hyperparams[name] for name in _ZOO_HYPERPARAMS if name in run.hyperparams}
    if run.trusted:
        return hyperparams
    if packages := run.args.get("gym_packages"):
        raise FileRefused(f"{run.args_file} imports {', '.join(map(str, packages))}. {TRUST_HINT}")
    where = str(run.config_file)
    check_names(hyperparams, where)
    for name in ("normalize", "monitor_kwargs"):
        if isinstance(hyperparams.get(name), str):
            hyperparams[name] = parse_dict(hyperparams[name], f"{name} in {where}")
    return hyperparams


def _checkpoints_of(hyperparams: dict[str, Any], folder: Path) -> Path:
    """Return the folder of a run's checkpoints: in that of the run, unless its YAML file named another place."""
    callbacks = [it for it in get_callback_list(hyperparams) if isinstance(it, ResumableCheckpoint)]
    return next((it.save_path for it in callbacks if it.save_path is not None), checkpoint_folder(folder))


@contextlib.contextmanager
def _resumed_tracking(run_id: str) -> Iterator[None]:
    """Let the zoo's ``wandb.init`` resume a W&B run under its own name."""
    wandb: Any = importlib.import_module("wandb")
    init = wandb.init

    def resumed_init(**kwargs: Any) -> Any:
        return init(**{**kwargs, "name": None, "id": run_id, "resume": "allow"})

    with mock.patch.object(wandb, "init", resumed_init):
        yield


class ResumedExperiment(ExperimentManager):
    """The zoo's manager, for a run that is resumed."""

    def __init__(self, run: ZooRun, hyperparams: dict[str, Any], checkpoints: Path, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.run = run
        self.run_hyperparams = hyperparams
        self.checkpoints = checkpoints
        self.save_path = str(run.folder)
        self.params_path = str(run.config_folder)
        # The zoo then asks for an agent instead of making one
        self.continue_training = True

    def read_hyperparameters(self) -> Hyperparams:
        """Return the hyperparameters that the run was started with."""
        print(f"Loading hyperparameters from: {self.params_path}")
        return dict(self.run_hyperparams), self.run.hyperparams

    def create_envs(self, *args: Any, **kwargs: Any) -> VecEnv:
        """Create envs whose Monitors append to the files of the run, and count time from its start."""
        starts = [monitor_start(path) for path in self.run.folder.glob("*monitor.csv")]
        start = min((value for value in starts if value is not None), default=None)

        def make_appending_vec_env(*args: Any, **kwargs: Any) -> VecEnv:
            kwargs["monitor_kwargs"] = {**kwargs["monitor_kwargs"], "override_existing": start is None}
            kwargs["wrapper_class"] = functools.partial(continue_monitoring, start, kwargs["wrapper_class"])
            return make_vec_env(*args, **kwargs)

        with mock.patch.object(rl_zoo3.exp_manager, "make_vec_env", make_appending_vec_env):
            return super().create_envs(*args, **kwargs)

    def _load_pretrained_agent(self, hyperparams: dict[str, Any], env: VecEnv) -> BaseAlgorithm:
        """Load the newest whole checkpoint."""
        with _unusable():
            model = TD3X.resume(self.checkpoints, env, self.device, trusted=self.run.trusted)
            # `learn` would do this as well, but only after callbacks have started
            if not self.run.trusted:
                check_built_in(model.reward_shaping)
            make_reward_shaping(model.reward_shaping)
        model.verbose = self.verbose
        return model

    def _save_config(self, saved_hyperparams: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    def learn(self, model: BaseAlgorithm) -> None:
        """Train what remains of the run, with timesteps counted from its start."""
        self.n_timesteps -= model.num_timesteps
        learn = functools.partialmethod(TD3X.learn, reset_num_timesteps=False)
        with mock.patch.object(TD3X, "learn", learn):
            super().learn(model)
