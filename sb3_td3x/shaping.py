"""
Reward shaping: hooks that change the rewards and terminations that an agent learns from.

A hook is called once per vectorized step, before the transition enters the replay buffer. It receives a
``ShapingBatch`` and returns the rewards and terminations to store. Episode statistics and evaluations use the
environment's own rewards.

With ``VecNormalize``, hooks see unnormalized observations and rewards. Its reward statistics come from the raw rewards,
so shaped rewards are divided by the standard deviation of the *raw* returns. The last observation of an episode may
already have been clipped by ``VecNormalize``.
"""

import difflib
import functools
import importlib
import inspect
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sb3_td3x.files.records import check_type, is_made_of_numbers, register_object
from sb3_td3x.validation import check_integer, check_number

Observations = np.ndarray | dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class ShapingBatch:
    """
    One step of all environments. The arrays that a hook receives are read-only.

    :param observations: Observations that the actions were chosen for, of shape (n_envs, ...);
        a dictionary of such arrays for Dict spaces
    :param actions: Actions as sent to the environment, in its own action space (not scaled to [-1, 1]),
        of shape ``(n_envs, *action_shape)``
    :param rewards: Rewards of the environment, float32 of shape (n_envs,)
    :param next_observations: Observations after the step. At the end of an episode this is the true last observation,
        not the first one of the next episode
    :param terminations: Whether a terminal state was reached, bool of shape (n_envs,)
    :param truncations: Whether the episode was cut off in a non-terminal state, such as by a time limit,
        bool of shape (n_envs,). Never True where ``terminations`` is
    :param infos: The info dictionary of each environment
    :param gamma: Discount factor of the algorithm
    :param num_timesteps: Training timesteps of all environments so far, including this step
        (``model.num_timesteps``)
    """

    observations: Observations
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: Observations
    terminations: np.ndarray
    truncations: np.ndarray
    infos: Sequence[dict[str, Any]]
    gamma: float
    num_timesteps: int

    @property
    def n_envs(self) -> int:
        """Number of parallel environments."""
        return len(self.rewards)


ShapingFunction = Callable[[ShapingBatch], tuple[np.ndarray, np.ndarray]]
Potential = Callable[[Observations], np.ndarray]


class RewardShaping(ABC):
    """
    Base class of reward shaping hooks.

    Set ``changes_terminations`` in a hook that returns other terminations than it receives. The algorithm then refuses
    it at construction if the replay buffer cannot store changed terminations.
    """

    changes_terminations: bool = False

    @abstractmethod
    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        """
        Return the rewards and terminations to learn from.

        :param batch: One step of all environments
        :return: Rewards (numbers, finite in float32) and terminations (bool), both of shape (n_envs,). If an episode
            ends and its termination is returned as False, the end is stored as a truncation
        """

    def __repr__(self) -> str:
        """Return the class name and public attributes, which error messages use to name the hook."""
        arguments = (f"{name}={_describe(value)}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(arguments)})"


@register_object("threshold", "penalty", "initial_penalty", "warmup")
class FallPenalty(RewardShaping):
    """
    Treat every reward at or below a threshold as a fall, and replace it by a milder penalty.

    Falls are terminal; every other end of an episode is stored as a truncation. Made for BipedalWalker, where the
    -100 for a fall is far larger than the reward of a step. Source: ``reward_func`` in the training script of document
    000.

    A high penalty from the start can teach the agent to stand still. A low one leaves it careless, because the
    discounted cost of a fall is smaller than the return it loses. A penalty that rises during a warmup avoids both.

    :param threshold: Rewards at or below it are falls, in the unit of the environment's reward
    :param penalty: Reward of a fall after the warmup
    :param initial_penalty: Reward of a fall at the start of the warmup
    :param warmup: Timesteps (``model.num_timesteps``) during which the reward of a fall changes linearly from
        ``initial_penalty`` to ``penalty``; 0 uses ``penalty`` from the start. Stored transitions keep their reward
    :raises ValueError: If a reward is not finite, or ``warmup`` is not an integer >= 0
    """

    changes_terminations = True

    def __init__(
        self, threshold: float = -100.0, penalty: float = -1.0, initial_penalty: float = -1.0, warmup: int = 0
    ) -> None:
        self.threshold = check_number("threshold", threshold)
        self.penalty = check_number("penalty", penalty)
        self.initial_penalty = check_number("initial_penalty", initial_penalty)
        self.warmup = check_integer("warmup", warmup, low=0)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        fell = batch.rewards <= self.threshold
        share = _warmed_up(batch, self.warmup)
        penalty = (1 - share) * self.initial_penalty + share * self.penalty
        return np.where(fell, penalty, batch.rewards), fell


@register_object("scale")
class RewardScale(RewardShaping):
    """
    Multiply the rewards by a constant.

    :param scale: Factor, > 0. A negative factor would train the agent to minimize the return that evaluations maximize
    :raises ValueError: If the factor is not finite or not above 0
    """

    def __init__(self, scale: float) -> None:
        self.scale = check_number("scale", scale, low=0.0, low_open=True)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return batch.rewards * self.scale, batch.terminations


@register_object("offset")
class RewardOffset(RewardShaping):
    """
    Add a constant to the rewards.

    A negative constant makes time costly, for agents that wait for the time limit. It can change which policy is
    optimal (Ng, Harada and Russell 1999), so keep it small compared with the rewards of the task.

    :param offset: Constant, in the unit of the environment's reward
    :raises ValueError: If the constant is not finite
    """

    def __init__(self, offset: float) -> None:
        self.offset = check_number("offset", offset)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return batch.rewards + self.offset, batch.terminations


@register_object("weight", "warmup")
class ActionCost(RewardShaping):
    """
    Subtract a cost of each action from the rewards: ``r - w Σ_i |a_i|``.

    Use it where an agent's actions cost more return than they gain, such as torque in BipedalWalker: discounting favors
    speed over economy. A cost from the start can teach the agent to end episodes early; a warmup avoids that.

    :param weight: w, >= 0, in units of reward per unit of the action space
    :param warmup: Timesteps (``model.num_timesteps``) during which w rises linearly from 0 to ``weight``; 0 uses
        ``weight`` from the start. Stored transitions keep their reward
    :raises ValueError: If the weight is not finite or is negative, or ``warmup`` is not an integer >= 0
    """

    def __init__(self, weight: float, warmup: int = 0) -> None:
        self.weight = check_number("weight", weight, low=0.0)
        self.warmup = check_integer("warmup", warmup, low=0)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        weight = self.weight * _warmed_up(batch, self.warmup)
        sizes = np.abs(batch.actions).reshape(batch.n_envs, -1).sum(axis=1)
        return batch.rewards - weight * sizes, batch.terminations


@register_object("low", "high")
class RewardClip(RewardShaping):
    """
    Clip the rewards to an interval.

    :param low: Lower bound
    :param high: Upper bound, above ``low``
    :raises ValueError: If a bound is not finite, or ``low`` is not below ``high``
    """

    def __init__(self, low: float, high: float) -> None:
        self.low = check_number("low", low)
        self.high = check_number("high", high)
        if self.low >= self.high:
            raise ValueError(f"low={low!r} is not allowed, expected a number below high={high!r}")

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return np.clip(batch.rewards, self.low, self.high), batch.terminations


class PotentialShaping(RewardShaping):
    """
    Add the discounted difference of a potential, r + γΦ(s') - Φ(s), which keeps the optimal policy the same.

    Φ counts as 0 in terminal states, but not where an episode is truncated. Source: Ng, Harada and Russell, "Policy
    invariance under reward transformations", ICML 1999.

    :param potential: Φ, which maps a batch of observations to an array of shape (n_envs,). A callable, its dotted path,
        or ``{dotted path: keyword arguments}``
    :raises ValueError: If the potential is none of these
    """

    def __init__(self, potential: Potential | str | dict[str, Any]) -> None:
        self.potential: Potential = _resolve("potential", potential)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        before = self._evaluate(batch.observations, batch.n_envs)
        after = np.where(batch.terminations, 0.0, self._evaluate(batch.next_observations, batch.n_envs))
        return batch.rewards + batch.gamma * after - before, batch.terminations

    def _evaluate(self, observations: Observations, n_envs: int) -> np.ndarray:
        # float64, because the difference of two large potentials may be small. A shape such as (n_envs, 1) would
        # silently broadcast with the rewards to (n_envs, n_envs), so check it.
        potentials = np.asarray(self.potential(observations), dtype=np.float64)
        if potentials.shape != (n_envs,):
            raise ValueError(f"{self!r}: the potential has shape {potentials.shape}, expected ({n_envs},)")
        return potentials


class FunctionShaping(RewardShaping):
    """
    Use a plain function as a hook.

    ``changes_terminations`` is False, although the function may change terminations: that is known only when it runs,
    and is checked then.

    :param function: Maps a ``ShapingBatch`` to (rewards, terminations)
    :raises ValueError: If it is not callable
    """

    def __init__(self, function: ShapingFunction) -> None:
        if not callable(function):
            raise ValueError(f"function={function!r} is not allowed, expected a callable")
        self.function = function

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return self.function(batch)


@register_object(
    "hooks",
    "changes_terminations",
    build=lambda state: ShapingChain([check_type(hook, RewardShaping) for hook in state["hooks"]]),
)
class ShapingChain(RewardShaping):
    """
    Apply several hooks in order, each to the rewards and terminations that the previous one returned.

    If a hook changes a termination at the end of an episode, the following hooks see the truncation changed to match.

    :param hooks: At least one hook, each in any form that ``make_reward_shaping`` accepts
    :raises ValueError: If there is no hook, or one of them is not valid
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        if not isinstance(hooks, list | tuple) or not hooks:
            raise ValueError(f"reward_shaping={hooks!r} is not allowed, expected a list of at least one hook")
        self.hooks: list[RewardShaping] = []
        for spec in hooks:
            hook = _make_hook(spec)
            # Unroll nested chains: they could not tell the end of an episode from a termination that an earlier hook
            # declared in the middle of one.
            self.hooks.extend(hook.hooks if isinstance(hook, ShapingChain) else [hook])
        self.changes_terminations = any(hook.changes_terminations for hook in self.hooks)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        episode_ends = batch.terminations | batch.truncations
        for hook in self.hooks:
            rewards, terminations = shape(hook, batch)
            truncations = episode_ends & ~terminations
            batch = replace(batch, rewards=rewards, terminations=terminations, truncations=truncations)
        return batch.rewards, batch.terminations

    def __repr__(self) -> str:
        return f"ShapingChain({self.hooks!r})"


def _warmed_up(batch: ShapingBatch, warmup: int) -> float:
    """Return the completed fraction of a warmup, in [0, 1]; 1 without a warmup."""
    return min(1.0, batch.num_timesteps / warmup) if warmup else 1.0


def make_reward_shaping(spec: Any) -> RewardShaping | None:
    """
    Build the hook that the ``reward_shaping`` argument describes.

    In YAML, hooks are written as the zoo's wrappers are::

        reward_shaping:
          - sb3_td3x.shaping.FallPenalty: {threshold: -100.0, penalty: -1.0}
          - sb3_td3x.shaping.RewardScale: {scale: 5.0}

    :param spec: None, a hook, a function of a ``ShapingBatch`` or other callable, the dotted path of a callable or of a
        class of callables, ``{path: keyword arguments or None}``, or a list of these, applied in order
    :return: The hook, or None for None
    :raises ValueError: If ``spec`` is none of these, a path does not exist, or keyword arguments do not fit
    """
    return None if spec is None else _make_hook(spec)


def check_built_in(spec: Any) -> None:
    """
    Check that a ``reward_shaping`` read from an untrusted file cannot import or call anything.

    :param spec: As for ``make_reward_shaping``
    :raises ValueError: If it names anything but a built-in hook whose arguments are numbers
    """
    if spec is None or isinstance(spec, RewardShaping):
        return
    if isinstance(spec, list | tuple):
        for hook in spec:
            check_built_in(hook)
        return
    name, kwargs = next(iter(spec.items())) if isinstance(spec, dict) and len(spec) == 1 else (spec, None)
    # ``make_reward_shaping`` refuses keyword arguments that are not a dictionary before it imports anything
    values = kwargs.values() if isinstance(kwargs, dict) else ()
    allowed = {f"{__name__}.{hook.__name__}" for hook in _built_in() if is_made_of_numbers(hook)}
    if not (isinstance(name, str) and name in allowed and all(isinstance(value, int | float) for value in values)):
        raise ValueError(
            f"reward_shaping={_describe(spec)} comes from the agent's file and could run any code. If you want it, "
            "pass it to load() as reward_shaping=..., or load with trusted=True"
        )


def shape(hook: RewardShaping, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """
    Call a hook and check what it returns.

    :param hook: The hook. It receives read-only views of the arrays and copies of the info dictionaries, so it cannot
        change the originals
    :param batch: One step of all environments
    :return: Rewards (float32) and terminations (bool) as new arrays of shape (n_envs,)
    :raises ValueError: If the hook returns other shapes or types, or a reward that is not finite in float32
    """
    arrays = ("observations", "actions", "rewards", "next_observations", "terminations", "truncations")
    views = {name: _read_only(getattr(batch, name)) for name in arrays}
    result = hook(replace(batch, infos=deepcopy(list(batch.infos)), **views))
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"{hook!r} returned {_summary(result)}, expected a pair (rewards, terminations)")
    # Rewards may be any real numbers; terminations must be booleans, because a float flag may be a misplaced reward
    raw_rewards = _checked_array(hook, "rewards", result[0], "biuf", "numbers", batch.n_envs)
    terminations = _checked_array(hook, "terminations", result[1], "b", "bool", batch.n_envs)
    with np.errstate(over="ignore"):  # overflow is reported below
        rewards = raw_rewards.astype(np.float32)
    finite = np.isfinite(rewards)
    if not finite.all():
        env_index = np.argmin(finite)
        reward = raw_rewards[env_index]
        raise ValueError(f"{hook!r} returned the reward {reward} for env {env_index}, expected a finite float32")
    return rewards, terminations.copy()


def _read_only(array: Any) -> Any:
    """Return a read-only view of an array, or of each array in a dictionary."""
    if isinstance(array, dict):
        return {key: _read_only(value) for key, value in array.items()}
    view = array.view()
    view.flags.writeable = False
    return view


def _checked_array(
    hook: RewardShaping, quantity: str, value: Any, kinds: str, expected: str, n_envs: int
) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # a ragged list
        raise ValueError(f"{hook!r} returned {quantity} that are not an array: {error}") from error
    if array.dtype.kind not in kinds or array.shape != (n_envs,):
        raise ValueError(f"{hook!r} returned {_summary(array)} as {quantity}, expected {expected} of shape ({n_envs},)")
    return array


def _summary(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _describe(value: Any) -> str:
    """Return the value's ``repr``, but the dotted path of a function or class."""
    if isinstance(value, functools.partial):
        keywords = (f", {name}={_describe(keyword)}" for name, keyword in value.keywords.items())
        return _describe(value.func) + "".join(keywords)
    if isinstance(value, type) or inspect.isfunction(value) or inspect.ismethod(value):
        return f"{value.__module__}.{value.__qualname__}"
    return reprlib.repr(value)


def _make_hook(spec: Any) -> RewardShaping:
    if isinstance(spec, list | tuple):
        return ShapingChain(spec)
    hook = _resolve("reward_shaping", spec)
    return hook if isinstance(hook, RewardShaping) else FunctionShaping(hook)


def _resolve(argument: str, spec: Any) -> Callable[..., Any]:
    """
    Return the callable that a specification describes.

    A class is instantiated with the keyword arguments; a function is bound to them.

    :param argument: Name of the argument that has the specification, for error messages
    :param spec: A callable, its dotted path, or ``{callable or path: keyword arguments or None}``
    """
    target, kwargs = spec, None
    if isinstance(spec, dict):
        if len(spec) != 1:
            raise ValueError(
                f"{argument}={spec!r} is not allowed, a dictionary must have one entry, "
                "{dotted path: keyword arguments}; check the indentation, and write several as a list"
            )
        ((target, kwargs),) = spec.items()
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(f"{argument}={spec!r} is not allowed, the keyword arguments must be a dictionary or None")
    kwargs = dict(kwargs or {})
    if isinstance(target, str):
        target = _load(argument, target)
    # callable() is True for every class; dir() shows whether its instances have __call__
    if not ("__call__" in dir(target) if isinstance(target, type) else callable(target)):
        raise ValueError(
            f"{argument}={spec!r} is not allowed, expected a callable, a class of callables, "
            "the dotted path of one, or {path: keyword arguments}"
        )
    _check_arguments(argument, spec, target, kwargs)
    if isinstance(target, type):
        try:
            return target(**kwargs)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{argument}={spec!r} is not allowed: {error}") from error
    return functools.partial(target, **kwargs) if kwargs else target


def _load(argument: str, path: str) -> Any:
    """Return the object at a dotted path, or raise an error that suggests the closest match."""
    module_name, _, name = path.rpartition(".")
    built_in = _built_in() if argument == "reward_shaping" else []
    candidates = {hook.__name__: f"{__name__}.{hook.__name__}" for hook in built_in}
    allowed = ["package.module.name", *candidates.values()]
    try:
        module = importlib.import_module(module_name)
        if hasattr(module, name):
            return getattr(module, name)
        reason = f"{module_name!r} has no {name!r}"
        callables = (key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        candidates.update({key: f"{module_name}.{key}" for key in callables})
    except (ImportError, TypeError, ValueError) as error:  # the last two: a relative path, or a path without a module
        reason = str(error)
    closest = difflib.get_close_matches(name, candidates, n=1)
    hint = f"did you mean {candidates[closest[0]]!r}?" if closest else f"expected {' or '.join(allowed)}"
    raise ValueError(f"{argument}={path!r} is not allowed ({reason}), {hint}")


def _check_arguments(argument: str, spec: Any, target: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Check keyword arguments against the signature of a class, or of a function after its first argument."""
    try:
        signature = inspect.signature(target)
    except ValueError:  # some built-in callables have no signature
        return
    n_positional = 0 if isinstance(target, type) else 1
    try:
        signature.bind(*[None] * n_positional, **kwargs)
    except TypeError as error:
        allowed = ", ".join(list(signature.parameters)[n_positional:]) or "none"
        raise ValueError(
            f"{argument}={spec!r} is not allowed: {error}; keyword arguments allowed: {allowed}"
        ) from error


def _built_in() -> list[type[RewardShaping]]:
    """Return the hooks of this module that a dotted path and keyword arguments can make."""
    hooks = [value for value in globals().values() if isinstance(value, type) and issubclass(value, RewardShaping)]
    return [hook for hook in hooks if hook not in (RewardShaping, FunctionShaping, ShapingChain)]
