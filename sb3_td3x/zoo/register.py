"""
TD3X in RL Zoo: registration, the default hyperparameters' place, and the Optuna search space.

Nothing else in this package knows the zoo. ``_sb3_td3x_autoload`` calls the three functions that take a module of the
zoo, each right after that module was executed; none of them changes anything for other algorithms.
"""

import contextlib
import copy
import functools
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise

from sb3_td3x.callbacks import tuning
from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.policies import MultiInputPolicy
from sb3_td3x.td3x import TD3X

if TYPE_CHECKING:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager

# What the zoo reads from a YAML file, for use and for saving
Hyperparams: TypeAlias = tuple[dict[str, Any], dict[str, Any]]

ALGO = "td3x"

NET_ARCHS = {"small": [64, 64], "medium": [256, 256], "big": [400, 300]}
NOISES: dict[str, type[NormalActionNoise] | type[OrnsteinUhlenbeckActionNoise]] = {
    "normal": NormalActionNoise,
    "ornstein-uhlenbeck": OrnsteinUhlenbeckActionNoise,
}

# The manager that runs the current trial. The zoo hands a sampler neither the manager nor its hyperparameters, and
# with --n-jobs several trials share one manager in as many threads.
_trial_manager: ContextVar["ExperimentManager | None"] = ContextVar("_trial_manager", default=None)


def hyperparams_path(name: str = ALGO) -> Path:
    """
    :param name: file name without its ending
    :return: a YAML file of this package: inside it where installed, else (editable) at the root of the repository
    """
    package = Path(__file__).parents[1]
    folder = package / "hyperparams"
    if not folder.is_dir():
        folder = package.parent / "hyperparams"
    return folder / f"{name}.yml"


def register_algorithm(utils: ModuleType) -> None:
    """
    :param utils: ``rl_zoo3.utils``
    """
    utils.ALGOS[ALGO] = TD3X

    # `rl_zoo3.push_to_hub` 2.9.2 imports a function that huggingface_sb3 3.2 renamed and made to return an object, so
    # that no agent at all could be shared
    hub: Any = sys.modules.get("huggingface_sb3.push_to_hub")
    if hasattr(hub, "_generate_metadata") and not hasattr(hub, "generate_metadata"):
        hub.generate_metadata = lambda *args: hub._generate_metadata(*args).to_dict()


def register_search_space(hyperparams_opt: ModuleType) -> None:
    """
    :param hyperparams_opt: ``rl_zoo3.hyperparams_opt``
    """
    hyperparams_opt.HYPERPARAMS_SAMPLER[ALGO] = sample_td3x_params
    hyperparams_opt.HYPERPARAMS_CONVERTER[ALGO] = convert_td3x_params


def patch_experiment_manager(exp_manager: ModuleType) -> None:
    """
    Teach the zoo's ``ExperimentManager``, for td3x alone, where the default hyperparameters lie, to share a study with
    workers that may be killed, to let a trial see its manager, to rebuild a stored trial exactly, and to tell
    checkpoints their folder.

    :param exp_manager: ``rl_zoo3.exp_manager``
    """
    manager_class = exp_manager.ExperimentManager
    if getattr(manager_class, "knows_td3x", False):
        return
    manager_class.knows_td3x = True
    init = manager_class.__init__
    read_hyperparameters: Callable[[ExperimentManager], Hyperparams] = manager_class.read_hyperparameters
    optimize: Callable[[ExperimentManager], None] = manager_class.hyperparameters_optimization
    objective: Callable[[ExperimentManager, optuna.Trial], float] = manager_class.objective
    create_callbacks: Callable[[ExperimentManager], None] = manager_class.create_callbacks
    signature = inspect.signature(init)

    @functools.wraps(init)
    def td3x_init(self: "ExperimentManager", *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.algo == ALGO and not signature.bind(self, *args, **kwargs).arguments.get("config"):
            self.config = str(hyperparams_path())

    @functools.wraps(read_hyperparameters)
    def td3x_read_hyperparameters(self: "ExperimentManager") -> Hyperparams:
        # The zoo takes --trial-id 0 for "no trial"
        if self.algo != ALGO or self.trial_id is None or not (self.storage and self.study_name):
            return read_hyperparameters(self)

        print("Loading from Optuna study...")
        try:
            tried = self.load_trial(self.storage, self.study_name, self.trial_id)
        except IndexError:
            raise ValueError(f"The study {self.study_name} has no trial {self.trial_id}") from None
        except KeyError as error:
            raise ValueError(
                f"The trial {self.trial_id} of the study {self.study_name} has no {error}: it has not run yet, or is "
                "not one of td3x"
            ) from None

        manager = copy.copy(self)
        manager.trial_id = None
        if "replay_buffer_kwargs" in tried:
            # A trial holds the sampled options of HER alone: the others are those of the YAML file, as they were
            # when the trial ran
            manager.custom_hyperparams = None
            with contextlib.redirect_stdout(io.StringIO()):
                default = read_hyperparameters(manager)[0].get("replay_buffer_kwargs", {})
            if isinstance(default, str):
                default = eval(default, vars(exp_manager))
            tried["replay_buffer_kwargs"] = {**default, **tried["replay_buffer_kwargs"]}

        manager.custom_hyperparams = {**tried, **(self.custom_hyperparams or {})}
        hyperparams, saved_hyperparams = read_hyperparameters(manager)
        self.eval_env_kwargs = manager.eval_env_kwargs
        return hyperparams, saved_hyperparams

    @functools.wraps(optimize)
    def td3x_optimize(self: "ExperimentManager") -> None:
        if self.algo != ALGO or not (self.storage and self.study_name):
            return optimize(self)
        from sb3_td3x.zoo.storage import open_storage

        manager = copy.copy(self)
        # The zoo calls it a string, and asks it for no more than its ending
        manager.storage = open_storage(self.storage, self.study_name)  # type: ignore[assignment]
        return optimize(manager)

    @functools.wraps(objective)
    def td3x_objective(self: "ExperimentManager", trial: "optuna.Trial") -> float:
        if self.algo != ALGO:
            return objective(self, trial)
        # A copy for each trial, because the discount of `VecNormalize` differs from trial to trial
        manager = copy.copy(self)
        manager.normalize_kwargs = dict(self.normalize_kwargs)
        token, tuning_token = _trial_manager.set(manager), tuning.set(True)
        try:
            return objective(manager, trial)
        finally:
            _trial_manager.reset(token)
            tuning.reset(tuning_token)

    @functools.wraps(create_callbacks)
    def td3x_create_callbacks(self: "ExperimentManager") -> None:
        # The zoo turns it into a number of vectorised steps
        save_freq = self.save_freq
        create_callbacks(self)
        if self.algo == ALGO and not self.optimize_hyperparameters:
            place_checkpoints(self, save_freq)

    manager_class.__init__ = td3x_init
    manager_class.read_hyperparameters = td3x_read_hyperparameters
    manager_class.hyperparameters_optimization = td3x_optimize
    manager_class.objective = td3x_objective
    manager_class.create_callbacks = td3x_create_callbacks


class OptionalCheckpoint(ResumableCheckpoint):
    """A checkpoint that nobody asked for by name: where it is not possible, a warning is enough."""

    _is_off = False

    def on_learn_start(self) -> None:
        self._is_off = False
        with self._warning():
            super().on_learn_start()

    def _on_training_start(self) -> None:
        if not self._is_off:
            with self._warning():
                super()._on_training_start()

    def _save(self) -> bool:
        with self._warning():
            return super()._save()
        return False

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn itself off, with a warning, instead of raising a ``ValueError``."""
        try:
            yield
        except ValueError as error:
            warnings.warn(f"This run cannot be resumed: {error}", stacklevel=2)
            self._is_off = True
            self.on_learn_end()


def checkpoint_folder(run_folder: str | Path) -> Path:
    """
    :param run_folder: the folder of a run
    :return: where its checkpoints are
    """
    return Path(run_folder) / "checkpoints"


def place_checkpoints(manager: "ExperimentManager", save_freq: int) -> None:
    """
    Tell checkpoints the folder of the run, and add one where the zoo is asked to save the agent.

    :param manager: the manager, with its callbacks
    :param save_freq: env timesteps between the zoo's own checkpoints; <= 0: none
    """
    checkpoints = [callback for callback in manager.callbacks if isinstance(callback, ResumableCheckpoint)]
    if save_freq > 0 and not checkpoints:
        checkpoints = [OptionalCheckpoint(save_freq=save_freq)]
        manager.callbacks.extend(checkpoints)
    for checkpoint in checkpoints:
        checkpoint.run_folder = Path(manager.save_path)
        if checkpoint.save_path is None:
            checkpoint.save_path = checkpoint_folder(manager.save_path)


def suggest_td3x_params(trial: "optuna.Trial", n_step: bool, her: bool) -> dict[str, Any]:
    """
    The search space. It never samples None, which a stored trial could not turn into hyperparameters again: no noise is
    a deviation of 0, and steps where 0 turns something off let 0 be drawn at all.

    :param trial: the Optuna trial
    :param n_step: sample the number of steps of the returns
    :param her: sample the options of ``HerReplayBuffer``
    :return: the sampled values, the same as ``trial.params``
    """
    params: dict[str, Any] = {
        "one_minus_gamma": trial.suggest_float("one_minus_gamma", 0.0001, 0.03, log=True),
        # From 2**5=32 to 2**11=2048
        "batch_size_pow": trial.suggest_int("batch_size_pow", 5, 11),
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 0.002, log=True),
        "qf_learning_rate": trial.suggest_float("qf_learning_rate", 1e-5, 0.002, log=True),
        "train_freq": trial.suggest_int("train_freq", 1, 10),
        "tau": trial.suggest_float("tau", 0.001, 0.08, log=True),
        "policy_delay": trial.suggest_int("policy_delay", 1, 4),
        "target_policy_noise": trial.suggest_float("target_policy_noise", 0.0, 0.5, step=0.05),
        "noise_type": trial.suggest_categorical("noise_type", list(NOISES)),
        "noise_std": trial.suggest_float("noise_std", 0.0, 0.5, step=0.05),
        "one_minus_action_noise_decay": trial.suggest_float("one_minus_action_noise_decay", 1e-7, 1e-3, log=True),
        "action_noise_min_scale": trial.suggest_float("action_noise_min_scale", 0.0, 0.5, step=0.05),
        "net_arch": trial.suggest_categorical("net_arch", list(NET_ARCHS)),
        "layer_norm": trial.suggest_categorical("layer_norm", [False, True]),
    }
    if n_step:
        params["n_steps"] = trial.suggest_int("n_steps", 1, 5)
    if her:
        params["n_sampled_goal"] = trial.suggest_int("n_sampled_goal", 1, 5)
        params["goal_selection_strategy"] = trial.suggest_categorical(
            "goal_selection_strategy", ["final", "episode", "future"]
        )
    return params


def convert_td3x_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """
    :param sampled_params: what ``suggest_td3x_params`` returned, or the parameters of a stored trial
    :return: hyperparameters as in the zoo's YAML files
    """
    hyperparams = dict(sampled_params)
    hyperparams["gamma"] = 1 - hyperparams.pop("one_minus_gamma")
    hyperparams["batch_size"] = 2 ** hyperparams.pop("batch_size_pow")
    hyperparams["action_noise_decay"] = 1 - hyperparams.pop("one_minus_action_noise_decay")
    # Update to data ratio of 1, for n_envs=1
    hyperparams["gradient_steps"] = hyperparams["train_freq"]
    hyperparams["policy_kwargs"] = {
        "net_arch": NET_ARCHS[hyperparams.pop("net_arch")],
        "layer_norm": hyperparams.pop("layer_norm"),
    }
    her_keys = [key for key in ("n_sampled_goal", "goal_selection_strategy") if key in hyperparams]
    if her_keys:
        hyperparams["replay_buffer_kwargs"] = {key: hyperparams.pop(key) for key in her_keys}
    return hyperparams


def sample_td3x_params(
    trial: "optuna.Trial", n_actions: int, n_envs: int, additional_args: dict[str, Any]
) -> dict[str, Any]:
    """
    Sampler for TD3X hyperparams.

    :param trial: the Optuna trial
    :param n_actions: dimension of the action space, for the action noise
    :param n_envs: not used, the zoo's signature
    :param additional_args: whether HER is used, and the options of its buffer
    :return: arguments for the constructor
    """
    manager = _trial_manager.get()
    her = additional_args["using_her_replay_buffer"]
    n_step = not her and (manager is None or n_step_is_possible(manager._hyperparams))

    hyperparams = convert_td3x_params(suggest_td3x_params(trial, n_step, her))
    hyperparams["action_noise"] = make_action_noise(
        hyperparams.pop("noise_type"), hyperparams.pop("noise_std"), n_actions
    )
    if her:
        hyperparams["replay_buffer_kwargs"] = {**additional_args["her_kwargs"], **hyperparams["replay_buffer_kwargs"]}
    if manager is not None:
        manager.normalize_kwargs["gamma"] = hyperparams["gamma"]

    # Display true values
    trial.set_user_attr("gamma", hyperparams["gamma"])
    trial.set_user_attr("batch_size", hyperparams["batch_size"])
    return hyperparams


def n_step_is_possible(hyperparams: dict[str, Any]) -> bool:
    """
    :param hyperparams: arguments of the constructor that are not sampled
    :return: whether SB3 has a replay buffer for n-step returns that fits them
    """
    policy = hyperparams.get("policy")
    dict_observations = policy == "MultiInputPolicy" or (
        isinstance(policy, type) and issubclass(policy, MultiInputPolicy)
    )
    return not (hyperparams.get("replay_buffer_class") or hyperparams.get("optimize_memory_usage") or dict_observations)


def make_action_noise(noise_type: str, noise_std: float, n_actions: int) -> ActionNoise:
    """
    The same noise as the zoo makes of ``noise_type`` and ``noise_std``.

    :param noise_type: "normal" or "ornstein-uhlenbeck"
    :param noise_std: its standard deviation, in the scaled action space [-1, 1]
    :param n_actions: dimension of the action space
    :return: the noise
    """
    return NOISES[noise_type](mean=np.zeros(n_actions), sigma=noise_std * np.ones(n_actions))
