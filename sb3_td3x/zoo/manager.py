"""
What td3x does differently in RL Zoo's ``ExperimentManager``.

Each function in ``METHODS`` is called instead of the method of its name. Its arguments are the zoo's method, the
manager, and the method's arguments.
"""

import contextlib
import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from pprint import pprint
from typing import TYPE_CHECKING, Any, TypeAlias

from stable_baselines3.common.callbacks import ProgressBarCallback
from tqdm import tqdm  # type: ignore[import-untyped]

from sb3_td3x.callbacks import tuning
from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.run_files import read_zoo_yaml
from sb3_td3x.zoo.runs import checkpoint_folder
from sb3_td3x.zoo.search_space import convert_td3x_params, trial_manager

if TYPE_CHECKING:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager

ZooMethod: TypeAlias = Callable[..., Any]
# The zoo's hyperparameters, for use and for saving
Hyperparams: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


def read_hyperparameters(zoo_method: Callable[..., Hyperparams], manager: "ExperimentManager") -> Hyperparams:
    """
    Read hyperparameters; those of a stored trial, if ``--trial-id`` asks for one, exactly as they were when it ran.

    :raises ValueError: the trial cannot be read, or is not one of td3x
    """
    if manager.trial_id is None:
        return zoo_method(manager)
    if not (manager.storage and manager.study_name):
        raise ValueError("--trial-id needs --storage and --study-name")
    from sb3_td3x.zoo.storage import read_trial

    number, params = read_trial(manager.storage, manager.study_name, manager.trial_id)
    print(f"Loading the trial {number} of the Optuna study {manager.study_name}")
    try:
        tried = convert_td3x_params(params)
    except KeyError as error:
        raise ValueError(
            f"The trial {number} of the study {manager.study_name} is not one of td3x: it has no {error}"
        ) from None
    # The zoo's own method treats trial 0 as no trial
    manager.trial_id = None
    her_options = tried.pop("replay_buffer_kwargs", {})
    given = manager.custom_hyperparams or {}
    manager.custom_hyperparams = {**tried, **given}
    hyperparams, saved_hyperparams = zoo_method(manager)
    if her_options and "replay_buffer_kwargs" not in given:
        # Only some options of HER are sampled; the others are those of the YAML file
        default = hyperparams.get("replay_buffer_kwargs", {})
        if isinstance(default, str):
            default = eval(default, vars(sys.modules["rl_zoo3.exp_manager"]))
        for each in (hyperparams, saved_hyperparams):
            each["replay_buffer_kwargs"] = {**default, **her_options}
    return hyperparams, saved_hyperparams


def hyperparameters_optimization(zoo_method: ZooMethod, manager: "ExperimentManager") -> None:
    """Tune with a storage that outlives killed workers."""
    if manager.storage and manager.study_name:
        from sb3_td3x.zoo.storage import open_storage

        manager = copy.copy(manager)
        # Annotated as ``str``, but the zoo only looks at its ending
        manager.storage = open_storage(manager.storage, manager.study_name)  # type: ignore[assignment, arg-type]
    zoo_method(manager)


def objective(zoo_method: ZooMethod, manager: "ExperimentManager", trial: "optuna.Trial") -> float:
    """Run a trial with its own manager, because the discount of ``VecNormalize`` differs from trial to trial."""
    manager = copy.copy(manager)
    manager.normalize_kwargs = dict(manager.normalize_kwargs)
    manager_token, tuning_token = trial_manager.set(manager), tuning.set(True)
    try:
        return float(zoo_method(manager, trial))
    finally:
        trial_manager.reset(manager_token)
        tuning.reset(tuning_token)


def create_callbacks(zoo_method: ZooMethod, manager: "ExperimentManager") -> None:
    """Set the folder of checkpoint callbacks, and add one if ``--save-freq`` asks the zoo to save the agent."""
    # The zoo evaluates without the env_kwargs of a YAML file
    manager.eval_env_kwargs = manager.eval_env_kwargs or manager.env_kwargs
    # The zoo turns it into a number of vectorized steps
    save_freq = manager.save_freq
    zoo_method(manager)
    for callback in manager.callbacks:
        if isinstance(callback, ProgressBarCallback):
            # The zoo ends its first callback also if an error came before its start, which would hide the error
            callback.pbar = tqdm(disable=True)
    if manager.optimize_hyperparameters:
        return
    checkpoints = [callback for callback in manager.callbacks if isinstance(callback, ResumableCheckpoint)]
    if save_freq > 0 and not checkpoints:
        checkpoints = [OptionalCheckpoint(save_freq=save_freq)]
        manager.callbacks.extend(checkpoints)
    for checkpoint in checkpoints:
        checkpoint.run_folder = Path(manager.save_path)
        if checkpoint.save_path is None:
            checkpoint.save_path = checkpoint_folder(manager.save_path)


class OptionalCheckpoint(ResumableCheckpoint):
    """A checkpoint callback that the user did not list. If it cannot save, it warns and turns itself off."""

    def _on_training_start(self) -> None:
        with self._warning():
            super()._on_training_start()

    def _save(self) -> bool:
        with self._warning():
            return super()._save()
        return False

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn off with a warning instead of raising a ``ValueError``."""
        try:
            yield
        except ValueError as error:
            warnings.warn(f"This run cannot be resumed: {error}", stacklevel=2)
            self.on_learn_end()


def _save_config(zoo_method: ZooMethod, manager: "ExperimentManager", saved_hyperparams: dict[str, Any]) -> None:
    """Save the settings of the run, with those of the agent of ``-i``, and the id of the W&B run."""
    if manager.continue_training:
        _add_kept(manager, saved_hyperparams)
    if getattr(manager.args, "track", False):
        # For `resume`
        manager.args.wandb_run_id = sys.modules["wandb"].run.id
    zoo_method(manager, saved_hyperparams)


def _add_kept(manager: "ExperimentManager", saved_hyperparams: dict[str, Any]) -> None:
    """Add what a pretrained agent keeps from its run, if the run's folder is there: the zoo does not set it anew."""
    config = Path(manager.trained_agent).parent / manager.env_name / "config.yml"
    if not config.is_file():
        return
    try:
        before = read_zoo_yaml(config)
    except ValueError as error:
        warnings.warn(f"The hyperparameters that the pretrained agent keeps are not saved: {error}", stacklevel=2)
        return
    # These two are the agent's in any case
    saved_hyperparams.pop("policy_kwargs", None)
    given = saved_hyperparams.keys() - {"policy"}
    names = {*inspect.signature(TD3X.__init__).parameters, "noise_type", "noise_std"} - given
    kept = {name: value for name, value in before.items() if name in names}
    saved_hyperparams.update(kept)
    print("Hyperparameters of the pretrained agent, which stay as they are:")
    pprint(kept)


METHODS: dict[str, ZooMethod] = {
    method.__name__: method
    for method in (*(read_hyperparameters, hyperparameters_optimization, objective, create_callbacks, _save_config),)
}
