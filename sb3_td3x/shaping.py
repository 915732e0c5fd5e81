"""
Reward shaping: what to learn from, where that differs from what the environment says.

A hook is called once per vectorized step, before the transition enters the replay buffer, with a ``ShapingBatch``; it
returns the rewards and the terminations to store. Episode statistics and evaluations stay raw.

With ``VecNormalize`` a hook sees unnormalized observations and rewards. The reward statistics come from the raw
rewards, so shaped rewards are divided by the deviation of the *raw* returns; and the last observation of an episode
may be one that ``VecNormalize`` has already clipped.
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
    One step of all environments, as the environments gave it. The arrays that a hook receives are read-only.

    :param observations: Observations that the actions were chosen for, of shape (n_envs, ...);
        a dictionary of such arrays for Dict spaces
    :param actions: Actions as sent to the environment, in its own action space (not scaled to [-1, 1]),
        of shape (n_envs, *action_shape)
    :param rewards: Rewards of the environment, float32 of shape (n_envs,)
    :param next_observations: Observations after the step; at the end of an episode its true last one,
        not the first of the next episode
    :param terminations: Whether a terminal state was reached, bool of shape (n_envs,)
    :param truncations: Whether the episode was cut off in a state that is not terminal (a time limit, say),
        bool of shape (n_envs,); never True together with the termination
    :param infos: The info dictionary of every environment
    :param gamma: Discount factor of the algorithm
    :param num_timesteps: Env timesteps of the training so far, of all environments, with this step; as
        ``model.num_timesteps``
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
        """Number of parallel environments"""
        return len(self.rewards)


ShapingFunction = Callable[[ShapingBatch], tuple[np.ndarray, np.ndarray]]
Potential = Callable[[Observations], np.ndarray]


class RewardShaping(ABC):
    """
    Base class of the hooks. One that returns other terminations than it was given sets ``changes_terminations``,
    so that it is refused at construction by algorithms whose replay buffer cannot store them.
    """

    changes_terminations: bool = False

    @abstractmethod
    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        """
        :param batch: One step of all environments
        :return: The rewards (numbers, finite in float32) and terminations (bool) to learn from, of shape (n_envs,).
            An end of an episode that is returned as not terminal is stored as a truncation.
        """

    def __repr__(self) -> str:
        """The class with its public attributes: error messages name the hook by it"""
        arguments = (f"{name}={_describe(value)}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(arguments)})"


@register_object("threshold", "penalty", "initial_penalty", "warmup")
class FallPenalty(RewardShaping):
    """
    A low reward marks a fall: it is replaced by a milder one and is terminal; all else is not terminal.
    Made for BipedalWalker, where -100 for a fall dwarfs the reward of a step. Source: ``reward_func`` in the
    training script that document 000 links to.

    An agent that has to pay for falls from the start may find that the safest is to stand still; one that pays too
    little stays careless, since a discounted fall costs less than the return that is lost with it: let the price rise.

    :param threshold: Rewards at or below it are falls, in the unit of the environment's reward
    :param penalty: Reward of a fall
    :param initial_penalty: Reward of a fall at the start, where there is a warmup
    :param warmup: Timesteps, as ``model.num_timesteps`` counts them (decisions, where a wrapper repeats actions), in
        which the reward of a fall moves from ``initial_penalty`` to ``penalty``, linearly; 0: it is ``penalty`` from
        the start. What is stored keeps the price of its time
    :raises ValueError: if a reward is not finite, or the warmup no integer >= 0
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

    :param scale: The constant, above 0: with 0 there is nothing to learn, and a negative one trains for the lowest
        raw return, while evaluations and the best model go by the highest
    :raises ValueError: if the scale is not finite or not above 0
    """

    def __init__(self, scale: float) -> None:
        self.scale = check_number("scale", scale, low=0.0, low_open=True)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return batch.rewards * self.scale, batch.terminations


@register_object("offset")
class RewardOffset(RewardShaping):
    """
    Add a constant to the rewards. A negative one is a price of time, for agents that dawdle until the time limit. It
    changes which policy is optimal (Ng, Harada and Russell 1999), so keep it small beside what there is to win.

    :param offset: The constant, in the unit of the environment's reward
    :raises ValueError: if it is not finite
    """

    def __init__(self, offset: float) -> None:
        self.offset = check_number("offset", offset)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return batch.rewards + self.offset, batch.terminations


@register_object("weight", "warmup")
class ActionCost(RewardShaping):
    """
    Take a price of each action off the rewards: r - w Σ_i |a_i|, for agents that spend more on their actions than the
    undiscounted return is worth, such as BipedalWalker's torque: a discount rewards haste. An agent that still has to
    learn what its actions are good for may find that the cheapest is to end the episode: let the price rise slowly.

    :param weight: w, >= 0, in the unit of the environment's reward for each unit of the action space
    :param warmup: Timesteps, as ``model.num_timesteps`` counts them (decisions, where a wrapper repeats actions), in
        which w rises from 0 to ``weight``, linearly; 0: it is ``weight`` from the start. What is stored keeps the price
        of its time
    :raises ValueError: if the weight is not finite or below 0, or the warmup no integer >= 0
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
    Clip the rewards.

    :param low: Lowest reward
    :param high: Highest reward, above ``low`` (equal bounds would leave nothing to learn)
    :raises ValueError: if one of them is not finite, or ``low`` is not below ``high``
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
    Add the discounted difference of a potential, r + γΦ(s') - Φ(s), which leaves the optimal policy as it is.
    Φ is 0 in terminal states (else they would pay out Φ); an episode that was cut off ends with Φ of its last
    observation, like every other step. Source: Ng, Harada and Russell, "Policy invariance under reward
    transformations", ICML 1999.

    :param potential: Φ: maps a batch of observations to an array of shape (n_envs,). A function or other callable,
        its dotted path, or ``{dotted path: keyword arguments}``
    :raises ValueError: if the potential is none of these
    """

    def __init__(self, potential: Potential | str | dict[str, Any]) -> None:
        self.potential: Potential = _resolve("potential", potential)

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        before = self._evaluate(batch.observations, batch.n_envs)
        after = np.where(batch.terminations, 0.0, self._evaluate(batch.next_observations, batch.n_envs))
        return batch.rewards + batch.gamma * after - before, batch.terminations

    def _evaluate(self, observations: Observations, n_envs: int) -> np.ndarray:
        # In float64: two large potentials may differ by little. The shape is checked here because one such as
        # (n_envs, 1) would broadcast with the rewards to (n_envs, n_envs).
        potentials = np.asarray(self.potential(observations), dtype=np.float64)
        if potentials.shape != (n_envs,):
            raise ValueError(f"{self!r}: the potential has shape {potentials.shape}, expected ({n_envs},)")
        return potentials


class FunctionShaping(RewardShaping):
    """
    Adapter for a plain function. Whether it changes terminations shows only when it runs, so
    ``changes_terminations`` is False and says nothing here: compare what it returns with what it was given.

    :param function: Maps a ``ShapingBatch`` to (rewards, terminations)
    :raises ValueError: if it is not callable
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
    Several hooks in order: each sees the rewards and terminations of the one before. An end of an episode that has
    been declared not terminal is a truncation for the hooks that follow, one declared terminal is none.

    :param hooks: The hooks, each in any form that ``make_reward_shaping`` takes; at least one
    :raises ValueError: if there are none, or one of them is not valid
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        if not isinstance(hooks, list | tuple) or not hooks:
            raise ValueError(f"reward_shaping={hooks!r} is not allowed, expected a list of at least one hook")
        self.hooks: list[RewardShaping] = []
        for spec in hooks:
            hook = _make_hook(spec)
            # A chain within a chain is unrolled: it could not tell an end of an episode from a termination in the
            # middle of one that an earlier hook has declared.
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
    """
    :param batch: One step of all environments
    :param warmup: Length of a warmup in env timesteps
    :return: How much of it is over, from 0 to 1; 1 if there is none
    """
    return min(1.0, batch.num_timesteps / warmup) if warmup else 1.0


def make_reward_shaping(spec: Any) -> RewardShaping | None:
    """
    Build the hook that the ``reward_shaping`` argument describes. From YAML in the zoo's notation for wrappers::

        reward_shaping:
          - sb3_td3x.shaping.FallPenalty: {threshold: -100.0, penalty: -1.0}
          - sb3_td3x.shaping.RewardScale: {scale: 5.0}

    :param spec: None, a hook, a function of a ``ShapingBatch`` or other callable, a dotted path to one or to a class
        of them, ``{path: keyword arguments or None}``, or a list of these, composed in order
    :return: The hook, None if there is none
    :raises ValueError: if it is none of these, a path leads nowhere or arguments do not fit
    """
    return None if spec is None else _make_hook(spec)


def check_built_in(spec: Any) -> None:
    """
    Refuse a specification from a stranger's file that could import or call anything.

    :param spec: as for ``make_reward_shaping``
    :raises ValueError: it names something other than a hook of this module whose arguments are numbers
    """
    if isinstance(spec, list | tuple):
        for hook in spec:
            check_built_in(hook)
        return
    name, kwargs = next(iter(spec.items())) if isinstance(spec, dict) and len(spec) == 1 else (spec, None)
    plain = {f"{__name__}.{hook.__name__}" for hook in _built_in() if is_made_of_numbers(hook)}
    numbers = (kwargs or {}).values() if isinstance(kwargs, dict | None) else [kwargs]
    if spec is None or isinstance(spec, RewardShaping):
        return
    if not (isinstance(name, str) and name in plain and all(isinstance(number, int | float) for number in numbers)):
        raise ValueError(
            f"reward_shaping={_describe(spec)} is named by the agent's file, and may run any code. If it is what you "
            "want, give it to load() by reward_shaping=..., or load with trusted=True"
        )


def shape(hook: RewardShaping, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """
    Call a hook and check what it returns.

    :param hook: The hook; it gets read-only views of the arrays and copies of the info dictionaries,
        so that it cannot change what the environment gave
    :param batch: One step of all environments
    :return: Rewards (float32) and terminations (bool) as new arrays of shape (n_envs,)
    :raises ValueError: if the hook returns other shapes or types, or a reward that is not finite in float32
    """
    result = hook(
        replace(
            batch,
            observations=_read_only(batch.observations),
            actions=_read_only(batch.actions),
            rewards=_read_only(batch.rewards),
            next_observations=_read_only(batch.next_observations),
            terminations=_read_only(batch.terminations),
            truncations=_read_only(batch.truncations),
            infos=deepcopy(list(batch.infos)),
        )
    )
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"{hook!r} returned {_summary(result)}, expected a pair (rewards, terminations)")
    # Integers and booleans make rewards too; only a bool says without doubt what is terminal
    raw_rewards = _checked_array(hook, "rewards", result[0], "biuf", "numbers", batch.n_envs)
    terminations = _checked_array(hook, "terminations", result[1], "b", "bool", batch.n_envs)
    with np.errstate(over="ignore"):  # too large for float32: reported below
        rewards = raw_rewards.astype(np.float32)
    finite = np.isfinite(rewards)
    if not finite.all():
        env_index = np.argmin(finite)
        reward = raw_rewards[env_index]
        raise ValueError(f"{hook!r} returned the reward {reward} for env {env_index}, expected a finite float32")
    return rewards, terminations.copy()


def _read_only(array: Any) -> Any:
    """A view that cannot be written to, of an array or of each array of a dictionary"""
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
        raise ValueError(f"{hook!r} returned {quantity} that are no array: {error}") from error
    if array.dtype.kind not in kinds or array.shape != (n_envs,):
        raise ValueError(f"{hook!r} returned {_summary(array)} as {quantity}, expected {expected} of shape ({n_envs},)")
    return array


def _summary(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _describe(value: Any) -> str:
    """Like repr, but a function is named by its path instead of its address"""
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
    The callable that a specification stands for: a class is instantiated, a function gets its keyword arguments.

    :param argument: Name of the argument that the specification was given for, for error messages
    :param spec: A callable, its dotted path, or a dictionary of one of them with keyword arguments (or None)
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
    # dir() of a class leaves out the metaclass, which makes every class callable
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
    """Import what a dotted path names; if there is no such thing, say what comes closest"""
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
    except (ImportError, TypeError, ValueError) as error:  # the last two: no module in the path, or a relative one
        reason = str(error)
    closest = difflib.get_close_matches(name, candidates, n=1)
    hint = f"did you mean {candidates[closest[0]]!r}?" if closest else f"expected {' or '.join(allowed)}"
    raise ValueError(f"{argument}={path!r} is not allowed ({reason}), {hint}")


def _check_arguments(argument: str, spec: Any, target: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Refuse keyword arguments that a class does not take, or a function after its first argument (the batch)"""
    try:
        signature = inspect.signature(target)
    except ValueError:  # some callables written in C have none
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
