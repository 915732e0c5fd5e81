"""What a run consists of beside its agent and its replay buffer, as JSON's types and back."""

import base64
import random
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    EvalCallback,
    EventCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
)
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.callbacks import StopWhenSolved

if TYPE_CHECKING:
    from sb3_td3x.td3x import TD3X

State = dict[str, Any]

_COUNTERS = (
    "_total_timesteps",
    "_num_timesteps_at_start",
    "_n_updates",
    "_exploration_timesteps",
    "_episode_num",
    "_current_progress_remaining",
)

# What callbacks of SB3 and TD3X know of the run so far
_CALLBACK_STATE: tuple[tuple[type[BaseCallback], tuple[str, ...]], ...] = (
    (BaseCallback, ("n_calls",)),
    (
        EvalCallback,
        (
            "best_mean_reward",
            "last_mean_reward",
            "evaluations_timesteps",
            "evaluations_results",
            "evaluations_length",
            "evaluations_successes",
        ),
    ),
    (EveryNTimesteps, ("last_time_trigger",)),
    (StopTrainingOnMaxEpisodes, ("n_episodes",)),
    (StopTrainingOnNoModelImprovement, ("last_best_mean_reward", "no_improvement_evals")),
    (StopWhenSolved, ("returns",)),
)


def counters(model: "TD3X") -> State:
    """
    :param model: the agent
    :return: its counters, and the statistics of its last episodes
    """
    return {
        **{name: plain(getattr(model, name)) for name in _COUNTERS},
        "ep_info_buffer": plain(model.ep_info_buffer),
        "ep_success_buffer": plain(model.ep_success_buffer),
    }


def restore_counters(model: "TD3X", state: State) -> None:
    """
    :param model: the agent
    :param state: what ``counters`` returned
    """
    for name in _COUNTERS:
        setattr(model, name, state[name])
    model.ep_info_buffer = deque(state["ep_info_buffer"], maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(state["ep_success_buffer"], maxlen=model._stats_window_size)


def generators(model: "TD3X") -> State:
    """
    :param model: the agent
    :return: the states of all random generators: Python's, NumPy's and PyTorch's own, and that of the action space
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    state = {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": _to_text(th.get_rng_state()),
        "action_space": model.action_space.np_random.bit_generator.state,
    }
    if th.cuda.is_available():
        state["cuda"] = [_to_text(device) for device in th.cuda.get_rng_state_all()]
    return state


def restore_generators(model: "TD3X", state: State) -> None:
    """
    :param model: the agent
    :param state: what ``generators`` returned
    """
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    np.random.set_state(state["numpy"])
    th.set_rng_state(_from_text(state["torch"]))
    assert model.env is not None
    action_spaces: list[spaces.Space] = [model.action_space, model.env.action_space]
    for space in action_spaces:
        # A copy where the agent was loaded, the same object where it was not
        space.np_random.bit_generator.state = state["action_space"]
    if th.cuda.is_available() and len(state.get("cuda", ())) == th.cuda.device_count():
        th.cuda.set_rng_state_all([_from_text(device) for device in state["cuda"]])


def normalization(vec_normalize: VecNormalize | None) -> State | None:
    """
    :param vec_normalize: the wrapper, if the env has one
    :return: its statistics
    """
    if vec_normalize is None:
        return None
    state = {"ret_rms": _moments(vec_normalize.ret_rms), "returns": vec_normalize.returns.tolist()}
    if vec_normalize.norm_obs:
        obs_rms = vec_normalize.obs_rms
        state["obs_rms"] = (
            {key: _moments(rms) for key, rms in obs_rms.items()} if isinstance(obs_rms, dict) else _moments(obs_rms)
        )
    return state


def restore_normalization(vec_normalize: VecNormalize | None, state: State | None) -> None:
    """
    :param vec_normalize: the wrapper, if the env has one
    :param state: what ``normalization`` returned
    :raises ValueError: the env is normalised otherwise than that of the checkpoint
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
    _restore_moments(vec_normalize.ret_rms, state["ret_rms"])
    vec_normalize.returns = np.array(state["returns"])
    if vec_normalize.norm_obs and isinstance(vec_normalize.obs_rms, dict):
        for key, rms in vec_normalize.obs_rms.items():
            _restore_moments(rms, state["obs_rms"][key])
    elif vec_normalize.norm_obs:
        _restore_moments(vec_normalize.obs_rms, state["obs_rms"])


def callback_states(callback: BaseCallback, timesteps: int) -> State:
    """
    :param callback: the callback of the training, maybe of several
    :param timesteps: number of env timesteps whose transitions are stored; a callback may have seen one env step more
    :return: by class and order, what the callbacks know of the run so far
    """
    return {name: _callback_state(child, timesteps) for name, child in _named_callbacks(callback)}


def _callback_state(callback: BaseCallback, timesteps: int) -> State:
    """
    :param callback: a callback
    :param timesteps: as of ``callback_states``
    :return: what it knows of the run so far, without the env step that a resumed run takes again
    """
    state = {attribute: plain(getattr(callback, attribute)) for attribute in _state_attributes(callback)}
    if callback.num_timesteps > timesteps:
        state["n_calls"] -= 1
        known = sum(timestep <= timesteps for timestep in state.get("evaluations_timesteps", ()))
        for attribute in state:
            if attribute.startswith("evaluations_"):
                state[attribute] = state[attribute][:known]
    return state


def restore_callback_states(callback: BaseCallback, state: State) -> None:
    """
    :param callback: the callback of the training; those that were not there before start anew
    :param state: what ``callback_states`` returned
    """
    for name, child in _named_callbacks(callback):
        for attribute, value in state.get(name, {}).items():
            if attribute in _state_attributes(child):
                current = getattr(child, attribute)
                setattr(child, attribute, deque(value, current.maxlen) if isinstance(current, deque) else value)


def all_callbacks(callback: BaseCallback) -> Iterator[BaseCallback]:
    """
    :param callback: a callback, maybe of several
    :return: it and all in it
    """
    yield callback
    children: list[BaseCallback | None] = []
    if isinstance(callback, CallbackList):
        children.extend(callback.callbacks)
    if isinstance(callback, EventCallback):
        children.append(callback.callback)
    if isinstance(callback, EvalCallback):
        children.append(callback.callback_on_new_best)
    for child in children:
        if child is not None:
            yield from all_callbacks(child)


def evaluation_envs(callback: BaseCallback) -> list[VecEnv]:
    """
    :param callback: a callback, maybe of several
    :return: the envs that agents are evaluated in
    """
    children = all_callbacks(callback)
    envs = [child.eval_env for child in children if isinstance(child, (EvalCallback, StopWhenSolved))]
    return [env for env in envs if isinstance(env, VecEnv)]


def pending_logs(logger: Logger) -> State:
    """
    :param logger: the logger
    :return: what was recorded and is not written yet
    """
    return {
        "values": {key: value for key, value in plain(logger.name_to_value).items() if isinstance(value, (int, float))},
        "counts": plain(logger.name_to_count),
        "excluded": plain(logger.name_to_excluded),
    }


def restore_pending_logs(logger: Logger, state: State) -> None:
    """
    :param logger: the logger
    :param state: what ``pending_logs`` returned
    """
    for key, value in state["values"].items():
        logger.record(key, value, exclude=tuple(state["excluded"][key]))
        if key in state["counts"]:
            logger.name_to_count[key] = state["counts"][key]


def plain(value: Any) -> Any:
    """
    :param value: numbers, text, and containers of such
    :return: the same of JSON's types; of anything else its text
    """
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _state_attributes(callback: BaseCallback) -> list[str]:
    """
    :param callback: a callback
    :return: names of its attributes that belong to the run
    """
    return [name for cls, names in _CALLBACK_STATE if isinstance(callback, cls) for name in names]


def _named_callbacks(callback: BaseCallback) -> Iterator[tuple[str, BaseCallback]]:
    """
    :param callback: a callback, maybe of several
    :return: it and all in it, with names that do not depend on what else is in it
    """
    counts: dict[str, int] = {}
    for child in all_callbacks(callback):
        name = f"{type(child).__module__}.{type(child).__qualname__}"
        counts[name] = counts.get(name, 0) + 1
        yield f"{name} {counts[name]}", child


def _moments(rms: RunningMeanStd) -> State:
    """
    :param rms: running statistics
    :return: their numbers
    """
    return {"mean": np.asarray(rms.mean).tolist(), "var": np.asarray(rms.var).tolist(), "count": float(rms.count)}


def _restore_moments(rms: RunningMeanStd, state: State) -> None:
    """
    :param rms: running statistics
    :param state: what ``_moments`` returned
    """
    rms.mean, rms.var = (np.array(state[name], dtype=np.float64) for name in ("mean", "var"))
    rms.count = state["count"]


def _to_text(generator_state: th.Tensor) -> str:
    """
    :param generator_state: bytes
    :return: the same as text
    """
    return base64.b64encode(generator_state.numpy().tobytes()).decode()


def _from_text(text: str) -> th.Tensor:
    """
    :param text: what ``_to_text`` returned
    :return: the bytes
    """
    return th.frombuffer(bytearray(base64.b64decode(text)), dtype=th.uint8)
