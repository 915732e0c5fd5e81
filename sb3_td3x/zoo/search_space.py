"""The Optuna search space of td3x: what RL Zoo samples, and how a stored trial becomes hyperparameters again."""

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise

if TYPE_CHECKING:
    import optuna
    from rl_zoo3.exp_manager import ExperimentManager

NET_ARCHS = {"small": [64, 64], "medium": [256, 256], "big": [400, 300]}
NOISES: dict[str, type[NormalActionNoise] | type[OrnsteinUhlenbeckActionNoise]] = {
    "normal": NormalActionNoise,
    "ornstein-uhlenbeck": OrnsteinUhlenbeckActionNoise,
}

# The trial id that stands for the best trial
BEST_TRIAL = -1

# The manager that runs the current trial: the zoo does not hand it to the sampler. With --n-jobs each thread runs
# its own trial.
trial_manager: ContextVar["ExperimentManager | None"] = ContextVar("trial_manager", default=None)


def suggest_td3x_params(trial: "optuna.Trial", n_step: bool, her: bool) -> dict[str, Any]:
    """
    Draw the parameters of a trial.

    None is never drawn, because a stored trial could not be turned into hyperparameters again: no noise is a standard
    deviation of 0. Parameters that 0 turns off are drawn in steps, so that 0 can be drawn.

    :param her: whether to draw the options of ``HerReplayBuffer``
    :return: the drawn values, the same as ``trial.params``
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
    """Turn the parameters of a trial into hyperparameters as in the zoo's YAML files."""
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
    """Draw the arguments of the constructor for a trial. The signature is the zoo's."""
    manager = trial_manager.get()
    her = additional_args["using_her_replay_buffer"]
    # Another replay buffer has its own returns
    n_step = not her and (manager is None or not manager._hyperparams.get("replay_buffer_class"))
    hyperparams = convert_td3x_params(suggest_td3x_params(trial, n_step, her))
    # The noise that the zoo makes of the same hyperparameters
    noise_class, noise_std = NOISES[hyperparams.pop("noise_type")], hyperparams.pop("noise_std")
    hyperparams["action_noise"] = noise_class(mean=np.zeros(n_actions), sigma=noise_std * np.ones(n_actions))
    if her:
        hyperparams["replay_buffer_kwargs"] = {**additional_args["her_kwargs"], **hyperparams["replay_buffer_kwargs"]}
    if manager is not None:
        # The discount of `VecNormalize`
        manager.normalize_kwargs["gamma"] = hyperparams["gamma"]

    # Display true values
    trial.set_user_attr("gamma", hyperparams["gamma"])
    trial.set_user_attr("batch_size", hyperparams["batch_size"])
    return hyperparams
