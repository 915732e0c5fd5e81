"""The state of a training besides its agent and replay buffer, as records and back."""

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
)
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.callbacks import StopWhenSolved
from sb3_td3x.files.records import Number

State = dict[str, Any]

# Attributes of callbacks that belong to the training
_CALLBACK_STATE: dict[type, tuple[str, ...]] = {
    BaseCallback: ("n_calls",),
    EvalCallback: (
        *("best_mean_reward", "last_mean_reward", "evaluations_timesteps"),
        *("evaluations_results", "evaluations_length", "evaluations_successes"),
    ),
    EveryNTimesteps: ("last_time_trigger",),
    StopTrainingOnMaxEpisodes: ("n_episodes",),
    StopTrainingOnNoModelImprovement: ("last_best_mean_reward", "no_improvement_evals"),
    StopWhenSolved: ("returns",),
}


def generators(model: OffPolicyAlgorithm) -> State:
    """Return the states of all random generators: those of Python, NumPy and PyTorch, and that of the action space."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": th.get_rng_state().numpy(),
        "action_space": model.action_space.np_random.bit_generator.state,
    }
    if th.cuda.is_available():
        state["cuda"] = [device.numpy() for device in th.cuda.get_rng_state_all()]
    return state


def restore_generators(model: OffPolicyAlgorithm, state: State) -> None:
    """Set the states of all random generators."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    th.set_rng_state(th.from_numpy(state["torch"]))
    assert model.env is not None
    # The agent has a copy of the env's space if it was loaded
    for space in (model.action_space, model.env.action_space):
        space.np_random.bit_generator.state = state["action_space"]
    if th.cuda.is_available() and len(state.get("cuda", ())) == th.cuda.device_count():
        th.cuda.set_rng_state_all([th.from_numpy(device) for device in state["cuda"]])


def normalization(vec_normalize: VecNormalize | None) -> State | None:
    """Return the statistics of ``VecNormalize``, if the env has it."""
    if vec_normalize is None:
        return None
    names = ("ret_rms", "returns", "obs_rms") if vec_normalize.norm_obs else ("ret_rms", "returns")
    return {name: getattr(vec_normalize, name) for name in names}


def restore_normalization(vec_normalize: VecNormalize | None, state: State | None) -> None:
    """
    Set the statistics of ``VecNormalize``.

    :raises ValueError: the env of the checkpoint was normalized differently
    """
    if vec_normalize is None or state is None:
        if vec_normalize is not None or state is not None:
            has, had = ("no", "one") if vec_normalize is None else ("a", "none")
            raise ValueError(f"env={vec_normalize} has {has} VecNormalize, expected {had} as in the checkpoint")
        return
    if vec_normalize.norm_obs != ("obs_rms" in state):
        raise ValueError(
            f"norm_obs={vec_normalize.norm_obs} of the env's VecNormalize is not allowed, "
            f"expected {'obs_rms' in state} as in the checkpoint"
        )
    vars(vec_normalize).update(state)


def pending_logs(logger: Logger) -> State:
    """Return the numbers that were recorded since the last dump, with the logger's notes on them."""
    numbers = {key: value for key, value in logger.name_to_value.items() if isinstance(value, Number)}
    return {
        "name_to_value": numbers,
        "name_to_count": dict(logger.name_to_count),
        "name_to_excluded": {key: logger.name_to_excluded[key] for key in numbers},
    }


def restore_pending_logs(logger: Logger, state: State) -> None:
    """Record numbers again."""
    for name, values in state.items():
        getattr(logger, name).update(values)


def callback_states(callback: BaseCallback, timesteps: int) -> State:
    """
    Return the states of callbacks.

    :param timesteps: number of env timesteps whose transitions are stored; a callback may have seen one env step more
    :return: attributes of each callback, by its class and its order among those of the class
    """
    return {name: _callback_state(child, timesteps) for name, child in _named_callbacks(callback)}


def _callback_state(callback: BaseCallback, timesteps: int) -> State:
    """Return the state of a callback without the env step that a resumed training takes again."""
    names = [name for cls, names in _CALLBACK_STATE.items() if isinstance(callback, cls) for name in names]
    state = {name: getattr(callback, name) for name in names}
    if callback.num_timesteps > timesteps:
        state["n_calls"] -= 1
        known = sum(timestep <= timesteps for timestep in state.get("evaluations_timesteps", ()))
        state.update((name, state[name][:known]) for name in state if name.startswith("evaluations_"))
    return state


def restore_callback_states(callback: BaseCallback, state: State) -> None:
    """Set the states of callbacks. Callbacks that the training did not have before keep their own."""
    for name, child in _named_callbacks(callback):
        for attribute, value in state.get(name, {}).items():
            # The window of `StopWhenSolved` may have another length now
            is_deque = isinstance(value, deque)
            setattr(child, attribute, deque(value, getattr(child, attribute).maxlen) if is_deque else value)


def all_callbacks(callback: BaseCallback) -> Iterator[BaseCallback]:
    """Yield a callback and all callbacks in it."""
    yield callback
    children = list(callback.callbacks) if isinstance(callback, CallbackList) else []
    for name in ("callback", "callback_on_new_best"):
        child = getattr(callback, name, None)
        if isinstance(child, BaseCallback):
            children.append(child)
    for child in children:
        yield from all_callbacks(child)


def _named_callbacks(callback: BaseCallback) -> Iterator[tuple[str, BaseCallback]]:
    """Yield a callback and all callbacks in it, with names that do not depend on other classes of callbacks."""
    counts: Counter[str] = Counter()
    for child in all_callbacks(callback):
        name = f"{type(child).__module__}.{type(child).__qualname__}"
        counts[name] += 1
        yield f"{name} {counts[name]}", child


def evaluation_envs(callback: BaseCallback) -> list[VecEnv]:
    """Return the envs in which callbacks evaluate the agent."""
    envs = [getattr(child, "eval_env", None) for child in all_callbacks(callback)]
    return [env for env in envs if isinstance(env, VecEnv)]
