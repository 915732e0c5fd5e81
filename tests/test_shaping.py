"""The reward shaping hooks, and building them from YAML."""

import functools
import pickle
import re
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_td3x.shaping import (
    ActionCost,
    FallPenalty,
    FunctionShaping,
    PotentialShaping,
    RewardClip,
    RewardOffset,
    RewardScale,
    RewardShaping,
    ShapingBatch,
    ShapingChain,
    make_reward_shaping,
    shape,
)

HERE = __name__


def make_batch(
    rewards: Any,
    terminations: Any = None,
    truncations: Any = None,
    observations: Any = None,
    next_observations: Any = None,
    gamma: float = 0.9,
    num_timesteps: int = 1000,
) -> ShapingBatch:
    n_envs = len(rewards)
    no_flags = [False] * n_envs
    states = np.arange(n_envs, dtype=np.float32)[:, None]
    return ShapingBatch(
        observations=states if observations is None else observations,
        actions=np.zeros((n_envs, 2), dtype=np.float32),
        rewards=np.array(rewards, dtype=np.float32),
        next_observations=states + 1 if next_observations is None else next_observations,
        terminations=np.array(no_flags if terminations is None else terminations, dtype=bool),
        truncations=np.array(no_flags if truncations is None else truncations, dtype=bool),
        infos=[{} for _ in range(n_envs)],
        gamma=gamma,
        num_timesteps=num_timesteps,
    )


# Functions, classes and objects for dotted paths


def first_entry(observations: Any) -> np.ndarray:
    return observations[:, 0]


def weighted_entry(observations: Any, weight: float) -> np.ndarray:
    return weight * observations[:, 0]


def add_bonus(batch: ShapingBatch, bonus: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    return batch.rewards + bonus, batch.terminations


def needs_bonus(batch: ShapingBatch, bonus: float) -> tuple[np.ndarray, np.ndarray]:
    return add_bonus(batch, bonus)


class Square:
    """A callable that is not a RewardShaping."""

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return batch.rewards**2, batch.terminations


class NotAHook:
    pass


class Incomplete(RewardShaping):
    """A hook without ``__call__``."""


class NothingIsTerminal(RewardShaping):
    changes_terminations = True

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return batch.rewards, np.zeros(batch.n_envs, dtype=bool)


a_hook = RewardScale(2.0)


class Recorder(RewardShaping):
    """A hook that keeps its last batch and changes nothing."""

    last: ShapingBatch

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        self.last = batch
        return batch.rewards, batch.terminations


# The built-in hooks

transitions = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([-101.0, -100.0, -99.99, 0.0]), st.floats(-300, 300, width=32)),
        st.sampled_from([(False, False), (True, False), (False, True)]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(transitions)
def test_fall_penalty_equals_the_function_of_document_000(steps: list[tuple[float, tuple[bool, bool]]]) -> None:
    rewards, flags = [reward for reward, _ in steps], [flag for _, flag in steps]
    batch = make_batch(rewards, [termination for termination, _ in flags], [truncation for _, truncation in flags])
    shaped, terminations = shape(FallPenalty(), batch)
    for i, reward in enumerate(rewards):
        expected = (-1.0, True) if reward <= -100.0 else (reward, False)
        assert (shaped[i], terminations[i]) == expected


def test_fall_penalty_with_other_numbers() -> None:
    rewards, terminations = shape(FallPenalty(threshold=-5.0, penalty=-2.0), make_batch([-6.0, -5.0, -4.0]))
    np.testing.assert_array_equal(rewards, [-2.0, -2.0, -4.0])
    np.testing.assert_array_equal(terminations, [True, True, False])


@pytest.mark.parametrize(("num_timesteps", "penalty"), [(1, -1.07), (100, -8.0), (200, -15.0), (1000, -15.0)])
def test_fall_penalty_changes_during_its_warmup(num_timesteps: int, penalty: float) -> None:
    hook = FallPenalty(penalty=-15.0, initial_penalty=-1.0, warmup=200)
    rewards, terminations = shape(hook, make_batch([-100.0, 2.0], num_timesteps=num_timesteps))
    np.testing.assert_allclose(rewards, [penalty, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(terminations, [True, False])


def test_scale_offset_and_clip_keep_terminations() -> None:
    batch = make_batch([-3.0, 0.5, 4.0], [True, False, False], [False, True, False])
    for hook, expected in (
        (RewardScale(0.1), [-0.3, 0.05, 0.4]),
        (RewardOffset(-0.5), [-3.5, 0.0, 3.5]),
        (RewardClip(-1.0, 1.0), [-1.0, 0.5, 1.0]),
    ):
        rewards, terminations = shape(hook, batch)
        np.testing.assert_allclose(rewards, expected, rtol=1e-6)
        np.testing.assert_array_equal(terminations, batch.terminations)
        assert not hook.changes_terminations


@pytest.mark.parametrize("shape_of_actions", [(4,), (2, 2)])
def test_action_cost(shape_of_actions: tuple[int, ...]) -> None:
    actions = np.array([[0.5, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]]).reshape(2, *shape_of_actions)
    batch = replace(make_batch([1.0, -2.0], [False, True]), actions=actions)
    rewards, terminations = shape(ActionCost(0.1), batch)
    np.testing.assert_allclose(rewards, [0.85, -2.2], rtol=1e-6)
    np.testing.assert_array_equal(terminations, batch.terminations)


@pytest.mark.parametrize(("num_timesteps", "price"), [(1, 0.0005), (50, 0.025), (200, 0.1), (1000, 0.1)])
def test_action_cost_rises_during_its_warmup(num_timesteps: int, price: float) -> None:
    batch = replace(make_batch([1.0], num_timesteps=num_timesteps), actions=np.array([[0.5, -2.0]]))
    rewards, _ = shape(ActionCost(0.1, warmup=200), batch)
    np.testing.assert_allclose(rewards, [1.0 - 2.5 * price], rtol=1e-6)


def test_potential_shaping_of_a_step_a_termination_and_a_truncation() -> None:
    batch = make_batch(
        rewards=[1.0, 1.0, 1.0],
        terminations=[False, True, False],
        truncations=[False, False, True],
        observations=np.array([[2.0], [2.0], [2.0]]),
        next_observations=np.array([[5.0], [5.0], [5.0]]),
        gamma=0.5,
    )
    rewards, terminations = shape(PotentialShaping(first_entry), batch)
    np.testing.assert_array_equal(rewards, [1 + 0.5 * 5 - 2, 1 - 2, 1 + 0.5 * 5 - 2])
    np.testing.assert_array_equal(terminations, batch.terminations)


def test_potential_of_a_terminal_state_is_not_used() -> None:
    batch = make_batch([1.0], [True], observations=np.array([[2.0]]), next_observations=np.array([[np.nan]]))
    assert shape(PotentialShaping(first_entry), batch)[0] == [-1.0]


def test_potential_of_dict_observations() -> None:
    observations = {"position": np.array([[1.0], [2.0]]), "image": np.zeros((2, 4, 4))}
    next_observations = {"position": np.array([[3.0], [3.0]]), "image": np.zeros((2, 4, 4))}
    batch = make_batch([0.0, 0.0], observations=observations, next_observations=next_observations, gamma=1.0)
    hook = PotentialShaping(lambda observations: observations["position"][:, 0])
    np.testing.assert_array_equal(shape(hook, batch)[0], [2.0, 1.0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.floats(0.5, 1.0), st.booleans())
def test_potentials_cancel_over_an_episode(states: list[float], gamma: float, terminal: bool) -> None:
    """The return only changes by Φ of the first state, and of the last state if the episode is truncated."""
    hook, total = PotentialShaping(first_entry), 0.0
    n_steps = len(states) - 1
    for t in range(n_steps):
        last = t == n_steps - 1
        batch = make_batch(
            [0.0],
            [last and terminal],
            [last and not terminal],
            np.array([[states[t]]]),
            np.array([[states[t + 1]]]),
            gamma,
        )
        total += gamma**t * float(shape(hook, batch)[0][0])
    expected = -states[0] + (0.0 if terminal else gamma**n_steps * states[-1])
    assert total == pytest.approx(expected, abs=1e-4)


# A small MDP with a known optimal policy: a corridor of 7 cells with terminal ends. The left end has a reward of 1, the
# right end of 10, each step costs 0.1, and one step in ten goes the wrong way. Walking right is optimal everywhere.

N_CELLS, GAMMA, SLIP = 7, 0.9, 0.1
LEFT, RIGHT = 0, 1


def corridor() -> tuple[np.ndarray, ShapingBatch]:
    """Return the probabilities of (inner cell, action, outcome), of shape (5, 2, 2), and the transitions as a batch."""
    cells, actions, outcomes = (
        grid.ravel() for grid in np.meshgrid(range(1, N_CELLS - 1), [0, 1], [0, 1], indexing="ij")
    )
    next_cells = np.where(outcomes == LEFT, cells - 1, cells + 1)
    ends = (next_cells == 0) | (next_cells == N_CELLS - 1)
    rewards = -0.1 + 1.0 * (next_cells == 0) + 10.0 * (next_cells == N_CELLS - 1)
    probabilities = np.where(actions == outcomes, 1 - SLIP, SLIP).reshape(N_CELLS - 2, 2, 2)
    return probabilities, make_batch(rewards, ends, None, cells[:, None], next_cells[:, None], GAMMA)


def optimal_q_values(hook: RewardShaping | None) -> np.ndarray:
    """Return Q after value iteration on the shaped rewards, with the ends of the corridor always terminal."""
    probabilities, batch = corridor()
    rewards = batch.rewards if hook is None else shape(hook, batch)[0]
    next_cells = batch.next_observations[:, 0]
    values = np.zeros(N_CELLS)
    for _ in range(300):
        outcomes = rewards + GAMMA * np.where(batch.terminations, 0.0, values[next_cells])
        q_values = (probabilities * outcomes.reshape(probabilities.shape)).sum(axis=2)
        values[1:-1] = q_values.max(axis=1)
    return q_values


def test_known_optimal_policy_of_the_corridor() -> None:
    q_values = optimal_q_values(None)
    np.testing.assert_array_equal(q_values.argmax(axis=1), [RIGHT] * (N_CELLS - 2))
    assert np.abs(q_values[:, RIGHT] - q_values[:, LEFT]).min() > 0.5  # no near ties


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=N_CELLS, max_size=N_CELLS))
def test_potential_shaping_keeps_the_optimal_policy(potentials: list[float]) -> None:
    table = np.array(potentials)
    shaped = optimal_q_values(PotentialShaping(lambda observations: table[observations[:, 0]]))
    raw = optimal_q_values(None)
    np.testing.assert_array_equal(shaped.argmax(axis=1), raw.argmax(axis=1))
    np.testing.assert_allclose(shaped, raw - table[1:-1, None], atol=1e-3)  # Ng et al.: Q only shifts by Φ(s)


def test_a_bonus_that_is_not_a_potential_changes_the_optimal_policy() -> None:
    def bonus(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        return batch.rewards + 2.0 * (batch.next_observations[:, 0] == 2), batch.terminations

    policy = optimal_q_values(FunctionShaping(bonus)).argmax(axis=1)
    np.testing.assert_array_equal(policy[:3], [RIGHT, RIGHT, LEFT])  # walks back and forth around cell 2


def test_a_potential_of_terminal_states_changes_the_optimal_policy() -> None:
    hook = ShapingChain([NothingIsTerminal(), PotentialShaping(lambda observations: 50.0 * (observations[:, 0] == 0))])
    np.testing.assert_array_equal(optimal_q_values(hook).argmax(axis=1), [LEFT] * (N_CELLS - 2))


# Chains


def test_chain_runs_in_order() -> None:
    batch = make_batch([3.0, -3.0])
    np.testing.assert_array_equal(shape(ShapingChain([RewardScale(2.0), RewardClip(-4, 4)]), batch)[0], [4.0, -4.0])
    np.testing.assert_array_equal(shape(ShapingChain([RewardClip(-4, 4), RewardScale(2.0)]), batch)[0], [6.0, -6.0])


def test_later_hooks_see_shaped_rewards_and_terminations() -> None:
    recorder = Recorder()
    batch = make_batch([-100.0, 7.0], [False, True])
    rewards, terminations = shape(ShapingChain([FallPenalty(), recorder]), batch)
    for seen in ((rewards, terminations), (recorder.last.rewards, recorder.last.terminations)):
        np.testing.assert_array_equal(seen[0], [-1.0, 7.0])
        np.testing.assert_array_equal(seen[1], [True, False])
    assert rewards.dtype == recorder.last.rewards.dtype == np.float32


# A fall in the middle of an episode, at its end, and at the time limit; then a goal, a time limit, and an ordinary step
ENDS = make_batch([-100, -100, -100, 5, 5, 5], [0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0])


def test_truncations_follow_changed_terminations() -> None:
    recorder = Recorder()
    shape(ShapingChain([FallPenalty(), recorder]), ENDS)
    np.testing.assert_array_equal(recorder.last.terminations, [1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(recorder.last.truncations, [0, 0, 0, 1, 1, 0])


@pytest.mark.parametrize("nested", [False, True])
def test_revoked_terminations_are_truncations_if_the_episode_ended(nested: bool) -> None:
    recorder = Recorder()
    later: list[Any] = [NothingIsTerminal(), recorder]
    shape(ShapingChain([FallPenalty(), ShapingChain(later)] if nested else [FallPenalty(), *later]), ENDS)
    np.testing.assert_array_equal(recorder.last.terminations, [0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(recorder.last.truncations, [0, 1, 1, 1, 1, 0])


def test_potential_after_fall_penalty_uses_the_shaped_terminations() -> None:
    chain = ShapingChain([FallPenalty(), PotentialShaping(first_entry)])
    batch = make_batch([-100.0, 5.0], [True, True], gamma=0.5)  # states 0 -> 1 and 1 -> 2
    np.testing.assert_array_equal(shape(chain, batch)[0], [-1.0 - 0.0, 5.0 + 0.5 * 2 - 1])


def test_chain_changes_terminations_if_any_hook_does() -> None:
    assert not ShapingChain([RewardScale(2.0), add_bonus]).changes_terminations
    assert ShapingChain([RewardScale(2.0), [add_bonus, FallPenalty()]]).changes_terminations


def test_chain_names_the_hook_that_fails() -> None:
    chain = ShapingChain(
        [RewardScale(2.0), FunctionShaping(lambda batch: (batch.rewards * np.nan, batch.terminations))]
    )
    with pytest.raises(ValueError, match=r"^FunctionShaping\(.*lambda.* reward nan for env 0"):
        shape(chain, make_batch([1.0]))


# make_reward_shaping


def test_none_and_hooks_are_returned_unchanged() -> None:
    hook = FallPenalty()
    assert make_reward_shaping(None) is None
    assert make_reward_shaping(hook) is hook


FALL_PENALTY = "sb3_td3x.shaping.FallPenalty"
DEFAULT_FALL_PENALTY = "FallPenalty(threshold=-100.0, penalty=-1.0, initial_penalty=-1.0, warmup=0)"
SCALE = "sb3_td3x.shaping.RewardScale"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FALL_PENALTY, DEFAULT_FALL_PENALTY),
        ({FALL_PENALTY: None}, DEFAULT_FALL_PENALTY),
        ({FALL_PENALTY: {}}, DEFAULT_FALL_PENALTY),
        (
            {FALL_PENALTY: {"threshold": -50, "penalty": -5.0, "initial_penalty": 0, "warmup": 1e4}},
            "FallPenalty(threshold=-50.0, penalty=-5.0, initial_penalty=0.0, warmup=10000)",
        ),
        (FallPenalty, DEFAULT_FALL_PENALTY),
        ({RewardScale: {"scale": 2}}, "RewardScale(scale=2.0)"),
        ({"sb3_td3x.shaping.RewardClip": {"low": -1, "high": 1}}, "RewardClip(low=-1.0, high=1.0)"),
        (
            {"sb3_td3x.shaping.PotentialShaping": {"potential": f"{HERE}.first_entry"}},
            f"PotentialShaping(potential={HERE}.first_entry)",
        ),
        (
            {"sb3_td3x.shaping.PotentialShaping": {"potential": {f"{HERE}.weighted_entry": {"weight": 2.0}}}},
            f"PotentialShaping(potential={HERE}.weighted_entry, weight=2.0)",
        ),
        (add_bonus, f"FunctionShaping(function={HERE}.add_bonus)"),
        (f"{HERE}.add_bonus", f"FunctionShaping(function={HERE}.add_bonus)"),
        ({f"{HERE}.needs_bonus": {"bonus": 3.0}}, f"FunctionShaping(function={HERE}.needs_bonus, bonus=3.0)"),
        (f"{HERE}.a_hook", "RewardScale(scale=2.0)"),
        (
            [FALL_PENALTY, {SCALE: {"scale": 5}}],
            f"ShapingChain([{DEFAULT_FALL_PENALTY}, RewardScale(scale=5.0)])",
        ),
        ((RewardScale(1.0), [RewardScale(2.0)]), "ShapingChain([RewardScale(scale=1.0), RewardScale(scale=2.0)])"),
    ],
)
def test_hooks_are_built_from_specifications(spec: Any, expected: str) -> None:
    assert repr(make_reward_shaping(spec)) == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (add_bonus, 4.0),
        ({f"{HERE}.add_bonus": {"bonus": 3.0}}, 6.0),
        (functools.partial(add_bonus, bonus=2.0), 5.0),
        (f"{HERE}.Square", 9.0),
        (Square(), 9.0),
        ([f"{HERE}.Square", {SCALE: {"scale": 2.0}}, f"{HERE}.add_bonus"], 19.0),
    ],
)
def test_hooks_from_specifications_return_rewards_and_terminations(spec: Any, expected: float) -> None:
    hook = make_reward_shaping(spec)
    assert hook is not None
    rewards, terminations = shape(hook, make_batch([3.0], [True]))
    assert (rewards[0], terminations[0]) == (expected, True)


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        # paths that do not exist
        ("sb3_td3x.shaping.FallPenality", ["'sb3_td3x.shaping.FallPenality'", f"did you mean '{FALL_PENALTY}'"]),
        ("sb3_td3x.shapping.FallPenalty", ["No module named", f"did you mean '{FALL_PENALTY}'"]),
        ("FallPenalty", [f"did you mean '{FALL_PENALTY}'"]),
        (".shaping.FallPenalty", [f"did you mean '{FALL_PENALTY}'"]),
        ({"sb3_td3x.wrappers.RewardScaling": {"scale": 1}}, [f"did you mean '{SCALE}'"]),
        (f"{HERE}.add_bonuss", [f"{HERE!r} has no 'add_bonuss'", f"did you mean '{HERE}.add_bonus'"]),
        ("xyzzy", ["'xyzzy'", "expected package.module.name or", FALL_PENALTY, SCALE]),
        ("", ["expected package.module.name"]),
        # arguments
        ({FALL_PENALTY: {"treshold": -1}}, [FALL_PENALTY, "'treshold'", "arguments allowed: threshold, penalty"]),
        ({FALL_PENALTY: {1: 2}}, ["arguments allowed: threshold, penalty"]),
        (SCALE, [SCALE, "missing a required argument: 'scale'", "arguments allowed: scale"]),
        ({SCALE: {"scale": 0}}, [SCALE, "scale=0 is not allowed"]),
        ({SCALE: 2.0}, [SCALE, "must be a dictionary or None"]),
        ({SCALE: ["scale"]}, [SCALE, "must be a dictionary or None"]),
        (f"{HERE}.needs_bonus", ["missing a required argument: 'bonus'", "arguments allowed: bonus"]),
        ({f"{HERE}.add_bonus": {"bonsu": 1.0}}, ["'bonsu'", "arguments allowed: bonus"]),
        ({f"{HERE}.add_bonus": {"batch": 1.0}}, ["'batch'", "arguments allowed: bonus"]),
        ({f"{HERE}.a_hook": {"scale": 1.0}}, ["'scale'", "arguments allowed: none"]),
        # objects that are not hooks
        ({}, ["{}", "one entry"]),
        ({FALL_PENALTY: {}, SCALE: {"scale": 1.0}}, [FALL_PENALTY, "one entry", "as a list"]),
        ([], ["[]", "at least one hook"]),
        ({"sb3_td3x.shaping.ShapingChain": {"hooks": {}}}, ["{}", "at least one hook"]),
        ([FALL_PENALTY, None], ["None", "a callable"]),
        (5, ["5", "a callable", "the dotted path", "{path: keyword arguments}"]),
        ("math.pi", ["'math.pi'", "a callable"]),
        (f"{HERE}.NotAHook", ["NotAHook", "a class of callables"]),
        (NotAHook, ["NotAHook", "a class of callables"]),
        (f"{HERE}.Incomplete", ["Incomplete", "abstract"]),
        ({"sb3_td3x.shaping.FunctionShaping": {"function": "f"}}, ["function='f' is not allowed", "callable"]),
    ],
)
def test_bad_specifications_are_refused(spec: Any, messages: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^reward_shaping=.* is not allowed") as error:
        make_reward_shaping(spec)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        (3.0, ["3.0", "a callable"]),
        ("xyzzy", ["'xyzzy'", "expected package.module.name"]),
        (f"{HERE}.first_entri", [f"did you mean '{HERE}.first_entry'"]),
        (f"{HERE}.weighted_entry", ["missing a required argument: 'weight'"]),
        ({f"{HERE}.weighted_entry": {"wait": 1.0}}, ["'wait'", "arguments allowed: weight"]),
    ],
)
def test_bad_potentials_are_refused(spec: Any, messages: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^potential=.* is not allowed") as error:
        PotentialShaping(spec)
    for message in messages:
        assert message in str(error.value)
    assert FALL_PENALTY not in str(error.value)


NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), "one", None, True, [1.0]]


@pytest.mark.parametrize(
    ("hook_class", "argument", "values"),
    [
        (FallPenalty, "threshold", NO_NUMBERS),
        (FallPenalty, "penalty", NO_NUMBERS),
        (FallPenalty, "initial_penalty", NO_NUMBERS),
        (RewardScale, "scale", [*NO_NUMBERS, 0, -1.0]),
        (RewardOffset, "offset", NO_NUMBERS),
        (ActionCost, "weight", [*NO_NUMBERS, -0.1]),
        (functools.partial(RewardClip, high=1.0), "low", [*NO_NUMBERS, 1.0, 2.0]),
        (functools.partial(RewardClip, low=-1.0), "high", NO_NUMBERS),
    ],
)
def test_bad_numbers_are_refused(hook_class: Any, argument: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{argument}={value!r} is not allowed, expected a number")):
            hook_class(**{argument: value})


@pytest.mark.parametrize("warmup", [-1, 0.5, "long", None, True, float("nan")])
@pytest.mark.parametrize("hook_class", [functools.partial(ActionCost, 0.1), FallPenalty])
def test_bad_warmups_are_refused(hook_class: Any, warmup: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"warmup={warmup!r} is not allowed, expected an integer >= 0")):
        hook_class(warmup=warmup)


# shape


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda batch: batch.rewards, "returned float32 of shape (2,), expected a pair (rewards, terminations)"),
        (lambda batch: None, "returned NoneType None, expected a pair"),
        (lambda batch: (batch.rewards,) * 3, "expected a pair"),
        (lambda batch: (1.0, batch.terminations), "float64 of shape () as rewards, expected numbers of shape (2,)"),
        (lambda batch: (batch.rewards[:1], batch.terminations), "float32 of shape (1,) as rewards"),
        (lambda batch: (batch.rewards[:, None], batch.terminations), "float32 of shape (2, 1) as rewards"),
        (lambda batch: (["a", "b"], batch.terminations), "as rewards, expected numbers"),
        (lambda batch: ([1.0, None], batch.terminations), "object of shape (2,) as rewards, expected numbers"),
        (lambda batch: ([1.0, [2.0]], batch.terminations), "rewards that are not an array"),
        (lambda batch: (batch.rewards * 1j, batch.terminations), "complex64 of shape (2,) as rewards"),
        (lambda batch: (batch.rewards, False), "bool of shape () as terminations, expected bool of shape (2,)"),
        (lambda batch: (batch.rewards, batch.terminations[:, None]), "bool of shape (2, 1) as terminations"),
        (lambda batch: (batch.rewards, np.zeros(2)), "float64 of shape (2,) as terminations, expected bool"),
        (lambda batch: (np.array([1.0, np.nan]), batch.terminations), "reward nan for env 1, expected a finite"),
        (lambda batch: (np.array([np.inf, 1.0]), batch.terminations), "reward inf for env 0, expected a finite"),
        (lambda batch: (np.array([0.0, -1e39]), batch.terminations), "reward -1e+39 for env 1, expected a finite"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_bad_results_are_refused_with_the_name_of_the_hook(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^FunctionShaping\(function=.*lambda.*\) returned ") as error:
        shape(FunctionShaping(result), make_batch([1.0, 2.0]))
    assert message in str(error.value)


@pytest.mark.parametrize("rewards", [[1, 2], [True, False], np.array([1.0, 2.0]), np.array([1, 2], dtype=np.uint8)])
def test_rewards_become_float32(rewards: Any) -> None:
    shaped, terminations = shape(FunctionShaping(lambda batch: [rewards, [True, False]]), make_batch([0.0, 0.0]))
    assert (shaped.dtype, terminations.dtype) == (np.float32, np.bool_)
    np.testing.assert_array_equal(shaped, np.array(rewards, dtype=np.float32))


def test_a_potential_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"PotentialShaping\(.*potential has shape \(2, 1\), expected \(2,\)"):
        shape(PotentialShaping(lambda observations: observations), make_batch([1.0, 2.0]))


def test_a_potential_that_is_not_finite_is_refused() -> None:
    batch = make_batch([1.0, 2.0], observations=np.array([[0.0], [np.nan]]))
    with pytest.raises(ValueError, match=r"PotentialShaping\(.*first_entry\) returned the reward nan for env 1"):
        shape(PotentialShaping(first_entry), batch)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda batch: batch.rewards.fill(7.0),
        lambda batch: batch.terminations.fill(True),
        lambda batch: batch.truncations.fill(True),
        lambda batch: batch.actions.fill(7.0),
        lambda batch: batch.observations["state"].fill(7.0),
        lambda batch: batch.next_observations["state"].fill(7.0),
    ],
)
def test_a_hook_cannot_write_to_its_arrays(corrupt: Any) -> None:
    observations, next_observations = {"state": np.zeros((2, 3))}, {"state": np.ones((2, 3))}
    batch = make_batch([1.0, 2.0], observations=observations, next_observations=next_observations)
    before = pickle.dumps(batch)
    with pytest.raises(ValueError, match="read-only"):
        shape(FunctionShaping(corrupt), batch)
    assert pickle.dumps(batch) == before
    batch.rewards[:] = 3.0  # the caller still can
    observations["state"][:] = 3.0


def test_a_hook_cannot_change_infos_or_later_change_its_result() -> None:
    def careless(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        batch.infos[0]["episode"] = "gone"
        return batch.rewards, batch.terminations

    batch = make_batch([1.0])
    batch.infos[0]["episode"] = {"r": 1.0}
    rewards, terminations = shape(FunctionShaping(careless), batch)
    assert batch.infos == [{"episode": {"r": 1.0}}]
    assert not np.shares_memory(rewards, batch.rewards)
    assert not np.shares_memory(terminations, batch.terminations)
    assert rewards.flags.writeable
    assert terminations.flags.writeable


# Saving

SAVED_HOOKS = [
    FallPenalty(-50.0, -5.0, -2.0, 3000),
    RewardScale(0.5),
    RewardOffset(-0.1),
    ActionCost(0.1, 2000),
    RewardClip(-1.0, 1.0),
    PotentialShaping(first_entry),
    FunctionShaping(add_bonus),
    make_reward_shaping({f"{HERE}.add_bonus": {"bonus": 3.0}}),
    ShapingChain([FallPenalty(), PotentialShaping(f"{HERE}.first_entry"), RewardScale(0.1)]),
]


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("hook", SAVED_HOOKS, ids=repr)
def test_hooks_are_pickled(hook: RewardShaping, pickler: Any) -> None:
    loaded = pickler.loads(pickler.dumps(hook))
    assert repr(loaded) == repr(hook)
    assert loaded.changes_terminations == hook.changes_terminations
    for before, after in zip(shape(hook, ENDS), shape(loaded, ENDS), strict=True):
        np.testing.assert_array_equal(before, after)


def test_lambdas_are_pickled_by_value() -> None:
    hook = FunctionShaping(lambda batch: (batch.rewards + 1.0, batch.terminations))
    loaded = pickle.loads(cloudpickle.dumps(hook))
    np.testing.assert_array_equal(shape(loaded, ENDS)[0], ENDS.rewards + 1.0)
