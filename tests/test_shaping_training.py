"""Reward shaping in training: what a hook receives, what the replay buffer stores, and what stays raw."""

import json
import pathlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from envs import CountingEnv, DictObs, Episode, counting_vec_env, readable, saved_and_loaded, tiny_agent, vec_env
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.shaping import FallPenalty, PotentialShaping, RewardScale, RewardShaping, ShapingBatch

FALL = -100.0
# A fall, a goal, a time-out, and a fall at the time limit
EPISODES = (Episode(4, True, FALL), Episode(3, True), Episode(5, False), Episode(3, False, FALL - 20))


def shaped_agent(hook: Any, n_envs: int = 1, **kwargs: Any) -> TD3X:
    """Make an agent that only collects transitions."""
    return tiny_agent(counting_vec_env(n_envs, EPISODES), reward_shaping=hook, **{"gradient_steps": 0, **kwargs})


class Steps:
    """
    The transitions of an env of ``counting_vec_env``.

    :param n_steps: Number of steps
    :param env_idx: Index of the env
    :param episodes: Its episodes
    """

    def __init__(self, n_steps: int, env_idx: int = 0, episodes: Sequence[Episode] = EPISODES) -> None:
        env = CountingEnv(episodes, 100 * env_idx)
        obs, _ = env.reset()
        steps = []
        for _ in range(n_steps):
            next_obs, reward, terminated, truncated, _ = env.step(np.zeros(1))
            steps.append((obs, next_obs, reward, terminated, truncated))
            obs = env.reset()[0] if terminated or truncated else next_obs
        self.observations, self.next_observations, self.rewards, self.terminations, self.truncations = (
            np.array(column) for column in zip(*steps, strict=True)
        )
        self.ends = self.terminations | self.truncations


def assert_stored(model: TD3X, env_idx: int, steps: Steps, rewards: np.ndarray, terminations: np.ndarray) -> None:
    """Assert that the replay buffer contains the transitions of one env with shaped rewards and terminations."""
    buffer = model.replay_buffer
    number = len(rewards)
    assert buffer.pos == number
    np.testing.assert_array_equal(buffer.observations[:number, env_idx], steps.observations)
    np.testing.assert_array_equal(buffer.next_observations[:number, env_idx], steps.next_observations)
    np.testing.assert_allclose(buffer.rewards[:number, env_idx], rewards, rtol=1e-5)
    np.testing.assert_array_equal(buffer.dones[:number, env_idx], steps.ends | terminations)
    np.testing.assert_array_equal(buffer.timeouts[:number, env_idx], steps.ends & ~terminations)


class Recorder(RewardShaping):
    """A hook that doubles the rewards and records its batches."""

    def __init__(self) -> None:
        self.batches: list[ShapingBatch] = []

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        self.batches.append(deepcopy(batch))
        return 2 * batch.rewards, batch.terminations

    def seen(self, name: str, env_idx: int) -> np.ndarray:
        """Return one quantity of one env, for all steps."""
        return np.array([getattr(batch, name)[env_idx] for batch in self.batches])


# What a hook receives, and what is stored


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_hook_receives_every_step(n_envs: int) -> None:
    hook = Recorder()
    model = shaped_agent(hook, n_envs, gamma=0.7).learn(40 * n_envs)
    assert len(hook.batches) == 40
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        for name in ("observations", "next_observations", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(hook.seen(name, env_idx), getattr(steps, name), err_msg=name)
        stored = model.replay_buffer.actions[:40, env_idx]
        np.testing.assert_allclose(hook.seen("actions", env_idx), stored, rtol=0, atol=1e-6)
        assert_stored(model, env_idx, steps, 2 * steps.rewards, steps.terminations)
    assert [batch.num_timesteps for batch in hook.batches] == [n_envs * (step + 1) for step in range(40)]
    for batch in hook.batches:
        assert (batch.n_envs, batch.gamma, len(batch.infos)) == (n_envs, 0.7, n_envs)
        assert batch.rewards.dtype == np.float32
        assert batch.terminations.dtype == batch.truncations.dtype == np.bool_
        assert batch.infos[0]["step"] == batch.next_observations[0, 1]


@pytest.mark.parametrize("n_envs", [1, 3])
def test_stored_transitions_without_a_hook(n_envs: int) -> None:
    model = shaped_agent(None, n_envs).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        assert_stored(model, env_idx, steps, steps.rewards, steps.terminations)


def test_a_hook_receives_unscaled_actions() -> None:
    hook = Recorder()
    space = spaces.Box(np.array([-3, 10], np.float32), np.array([1, 30], np.float32))
    model = tiny_agent(CountingEnv(action_space=space), reward_shaping=hook, gradient_steps=0).learn(20)
    actions = hook.seen("actions", 0)
    assert all(space.contains(action) for action in actions.astype(np.float32))
    stored = model.replay_buffer.actions[:20, 0]
    np.testing.assert_allclose(actions, space.low + (stored + 1) / 2 * (space.high - space.low), rtol=1e-5, atol=1e-5)
    assert np.ptp(stored) > 0.1


def test_a_hook_receives_dict_observations() -> None:
    hook = Recorder()
    env = vec_env(*(DictObs(CountingEnv(EPISODES, 100 * idx)) for idx in range(2)))
    model = tiny_agent(env, "MultiInputPolicy", reward_shaping=hook, gradient_steps=0).learn(40)
    for env_idx in range(2):
        steps = Steps(20, env_idx)
        for name in ("observations", "next_observations"):
            seen = [getattr(batch, name) for batch in hook.batches]
            np.testing.assert_array_equal([batch["count"][env_idx] for batch in seen], getattr(steps, name))
            np.testing.assert_array_equal([batch["minus"][env_idx] for batch in seen], -getattr(steps, name))
            stored: Any = getattr(model.replay_buffer, name)
            np.testing.assert_array_equal(stored["count"][:20, env_idx], getattr(steps, name))


# Changed terminations


def after_falls(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards and terminations of document 000, as ``FallPenalty`` does."""
    falls = steps.rewards <= FALL
    return np.where(falls, -1.0, steps.rewards), falls


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("hook", [FallPenalty(), {"sb3_td3x.shaping.FallPenalty": None}], ids=readable)
def test_falls_are_terminal_and_all_other_ends_are_time_outs(n_envs: int, hook: Any) -> None:
    model = shaped_agent(hook, n_envs).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        rewards, falls = after_falls(steps)
        assert 0 < falls.sum() < steps.ends.sum()
        assert_stored(model, env_idx, steps, rewards, falls)
    # Targets bootstrap from a goal, which is stored as a time-out, but not from a fall
    terminal = model.replay_buffer.dones * (1 - model.replay_buffer.timeouts)
    np.testing.assert_array_equal(terminal[:40, 0], after_falls(Steps(40))[1])


def n_step_returns(steps: Steps, rewards: np.ndarray, terminal: np.ndarray, n: int, gamma: float) -> list[tuple]:
    """Return (n-step return, next observation, whether it is terminal, its discount) for each step."""
    ends = steps.ends | terminal
    ends[-1] = True  # the newest step
    returns = []
    for first in range(len(rewards)):
        total, last = 0.0, first
        for last in range(first, first + n):
            total += gamma ** (last - first) * rewards[last]
            if ends[last]:
                break
        returns.append((total, steps.next_observations[last], terminal[last], gamma ** (last - first + 1)))
    return returns


def ends_at_two(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """Make only the second step of each episode terminal."""
    return batch.rewards + 0.5, batch.next_observations[:, 1] == 2


def after_two(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards and terminations of ``ends_at_two``."""
    return steps.rewards + 0.5, steps.next_observations[:, 1] == 2


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(("hook", "shaped"), [(FallPenalty(), after_falls), (ends_at_two, after_two)])
def test_n_step_returns_do_not_cross_a_reset(
    n_envs: int, hook: Any, shaped: Callable[[Steps], tuple[np.ndarray, np.ndarray]]
) -> None:
    n, gamma, number = 3, 0.9, 30
    model = shaped_agent(hook, n_envs, n_steps=n, gamma=gamma).learn(number * n_envs)
    buffer = model.replay_buffer
    assert isinstance(buffer, PackedReplayBuffer)
    expected = {}
    for env_idx in range(n_envs):
        steps = Steps(number, env_idx)
        for obs, answer in zip(steps.observations, n_step_returns(steps, *shaped(steps), n, gamma), strict=True):
            expected[tuple(obs)] = answer
    # The buffer samples a random env; the observation identifies the step
    sample = buffer._get_samples(np.tile(np.arange(number), 20))
    seen = set()
    for idx, obs in enumerate(sample.observations.numpy()):
        total, next_obs, terminal, discount = expected[tuple(obs)]
        assert sample.rewards[idx].item() == pytest.approx(total, rel=1e-5)
        np.testing.assert_array_equal(sample.next_observations[idx].numpy(), next_obs)
        assert sample.dones[idx].item() == terminal
        assert sample.discounts is not None
        assert sample.discounts[idx].item() == pytest.approx(discount)
        seen.add(tuple(obs))
    assert len(seen) > 0.9 * number * n_envs


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_termination_in_the_middle_of_an_episode(n_envs: int) -> None:
    """The stored transition is terminal, but the env's episode continues."""
    model = shaped_agent(ends_at_two, n_envs).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        assert (after_two(steps)[1] & ~steps.ends).any()
        assert_stored(model, env_idx, steps, *after_two(steps))
        lengths = np.diff(np.flatnonzero(steps.ends), prepend=-1)
        assert model.ep_info_buffer is not None
        assert [info["l"] for info in model.ep_info_buffer][env_idx::n_envs] == list(lengths)


def test_critics_learn_the_shaped_rewards() -> None:
    """With γ = 0 and a constant reward, Q is that reward."""
    model = shaped_agent(
        lambda batch: (np.full(1, 3.0), batch.terminations), gamma=0, gradient_steps=2, learning_rate="lin_1e-2"
    )
    model.learn(600)
    obs, actions = model.replay_buffer.sample(50).observations, model.replay_buffer.sample(50).actions
    assert model.critic.q1_forward(obs, actions).mean().item() == pytest.approx(3, abs=0.3)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_potentials_use_the_true_last_observation(n_envs: int) -> None:
    def potential(observations: Any) -> np.ndarray:
        potentials: np.ndarray = observations[:, 0] + 10 * np.square(observations[:, 1], dtype=np.float64)
        return potentials

    model = shaped_agent(PotentialShaping(potential), n_envs, gamma=0.9).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        assert steps.truncations.any()
        after = np.where(steps.terminations, 0, potential(steps.next_observations))
        rewards = steps.rewards + 0.9 * after - potential(steps.observations)
        assert_stored(model, env_idx, steps, rewards, steps.terminations)


def second_entry(observations: Any) -> np.ndarray:
    entry: np.ndarray = observations[:, 1]
    return entry


def test_a_chain_in_training() -> None:
    """Φ is 0 after a fall, even at the time limit, but not after a goal, which ``FallPenalty`` made non-terminal."""
    hooks = [FallPenalty(), PotentialShaping(second_entry), {"sb3_td3x.shaping.RewardScale": {"scale": 5.0}}]
    model = shaped_agent(hooks, gamma=0.9).learn(40)
    steps = Steps(40)
    rewards, falls = after_falls(steps)
    after = np.where(falls, 0, steps.next_observations[:, 1])
    assert_stored(model, 0, steps, 5 * (rewards + 0.9 * after - steps.observations[:, 1]), falls)


# What stays raw


def returns(n_episodes: int) -> list[float]:
    """Return the raw returns of the first episodes."""
    steps = Steps(60)
    of_episodes = np.split(steps.rewards, np.flatnonzero(steps.ends) + 1)
    return [float(rewards.sum()) for rewards in of_episodes[:n_episodes]]


@pytest.mark.lowest_sb3
def test_statistics_and_evaluations_are_raw(tmp_path: pathlib.Path) -> None:
    model = shaped_agent([FallPenalty(), RewardScale(0.001)])
    model.set_logger(configure(str(tmp_path), ["json"]))
    evaluation = EvalCallback(counting_vec_env(1, EPISODES), n_eval_episodes=4, eval_freq=10, verbose=0)
    model.learn(15, evaluation, log_interval=1)
    assert model.ep_info_buffer is not None
    assert [info["r"] for info in model.ep_info_buffer] == returns(4)
    assert evaluation.last_mean_reward == evaluation.best_mean_reward == pytest.approx(np.mean(returns(4)))
    mean, _ = evaluate_policy(model, counting_vec_env(1, EPISODES), n_eval_episodes=4)
    assert mean == pytest.approx(np.mean(returns(4)))
    logged = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    means = [entry["rollout/ep_rew_mean"] for entry in logged if "rollout/ep_rew_mean" in entry]
    assert means == pytest.approx([np.mean(returns(number)) for number in (1, 2, 3, 4)])


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
def test_mean_of_shaped_rewards_is_logged(tmp_path: pathlib.Path, n_envs: int) -> None:
    model = tiny_agent(counting_vec_env(n_envs, [Episode(4, True)]), reward_shaping=RewardScale(10.0))
    model.set_logger(configure(str(tmp_path), ["json"]))
    model.learn(8 * n_envs, log_interval=n_envs)
    logged = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    assert [entry["rollout/shaped_reward_mean"] for entry in logged] == [25, 25]
    assert [entry["rollout/ep_rew_mean"] for entry in logged] == [10, 10]


class Infos(BaseCallback):
    """A callback that records the infos of every step and copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[dict[str, Any]] = []
        self.copies: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.infos += self.locals["infos"]
        self.copies += deepcopy(self.locals["infos"])
        return True


def writes_into_infos(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    for info in batch.infos:
        info["TimeLimit.truncated"] = "changed"
        info.pop("step")
    return batch.rewards, batch.terminations


def writes_deep_into_infos(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    for info in batch.infos:
        if "episode" in info:
            info["episode"]["r"] = 0.0
            info["terminal_observation"][:] = 0
    return batch.rewards, batch.terminations


@pytest.mark.parametrize("hook", [FallPenalty(), ends_at_two, writes_into_infos, writes_deep_into_infos], ids=readable)
def test_callbacks_receive_the_infos_of_the_env(hook: Any) -> None:
    infos = Infos()
    shaped_agent(hook, 2).learn(80, infos)
    assert len(infos.infos) == 80
    for kept, copy in zip(infos.infos, infos.copies, strict=True):
        assert kept.keys() == copy.keys()
        for key, value in copy.items():
            np.testing.assert_array_equal(kept[key], value, err_msg=key)


def test_callbacks_receive_the_rewards_and_dones_of_the_env() -> None:

    class Rewards(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.rewards: list[np.ndarray] = []
            self.dones: list[np.ndarray] = []

        def _on_step(self) -> bool:
            self.rewards.append(self.locals["rewards"])
            self.dones.append(self.locals["dones"])
            return True

    callback = Rewards()
    shaped_agent([ends_at_two, RewardScale(3.0)]).learn(20, callback)
    np.testing.assert_array_equal(np.concatenate(callback.rewards), Steps(20).rewards)
    np.testing.assert_array_equal(np.concatenate(callback.dones), Steps(20).ends)


# VecNormalize


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
def test_vec_normalize(n_envs: int) -> None:
    """Hooks receive raw observations and rewards, and the statistics are those of raw rewards."""
    hook = Recorder()
    models = []
    for reward_shaping in (hook, None):
        env = VecNormalize(counting_vec_env(n_envs, EPISODES), clip_obs=1e6, gamma=0.9)
        models.append(tiny_agent(env, reward_shaping=reward_shaping, gamma=0.9, gradient_steps=0).learn(40 * n_envs))
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        for name in ("observations", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(hook.seen(name, env_idx), getattr(steps, name), err_msg=name)
        # The last observation of an episode is normalized, so it is converted back
        np.testing.assert_allclose(
            hook.seen("next_observations", env_idx), steps.next_observations, rtol=1e-4, atol=1e-4
        )
        np.testing.assert_array_equal(models[0].replay_buffer.rewards[:40, env_idx], 2 * steps.rewards)
        np.testing.assert_array_equal(models[0].replay_buffer.observations[:40, env_idx], steps.observations)
    shaped, raw = (model.get_vec_normalize_env() for model in models)
    assert shaped is not None
    assert raw is not None
    for name in ("mean", "var", "count"):
        np.testing.assert_array_equal(getattr(shaped.ret_rms, name), getattr(raw.ret_rms, name))
        np.testing.assert_array_equal(getattr(shaped.obs_rms, name), getattr(raw.obs_rms, name))
    sample = models[0].replay_buffer.sample(200, env=shaped)
    deviation = np.sqrt(shaped.ret_rms.var + shaped.epsilon)
    possible = np.unique(np.clip(2 * Steps(40).rewards / deviation, -shaped.clip_reward, shaped.clip_reward))
    np.testing.assert_allclose(np.unique(sample.rewards.numpy().round(4)), possible.round(4), atol=2e-4)


def test_vec_normalize_with_changed_terminations_and_n_steps() -> None:
    env: VecEnv = VecNormalize(counting_vec_env(2, EPISODES), clip_obs=1e6, norm_reward=False)
    model = tiny_agent(env, reward_shaping=FallPenalty(), n_steps=3).learn(80)
    for env_idx in range(2):
        rewards, falls = after_falls(Steps(40, env_idx))
        np.testing.assert_array_equal(model.replay_buffer.rewards[:40, env_idx], rewards)
        np.testing.assert_array_equal(model.replay_buffer.timeouts[:40, env_idx], Steps(40, env_idx).ends & ~falls)


# Bad hooks


def bad_shape(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    return batch.rewards[:, None], batch.terminations


def no_pair(batch: ShapingBatch) -> Any:
    return batch.rewards


def bad_flags(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    return batch.rewards, batch.rewards


def gives_nan(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    return np.where(batch.rewards == 3, np.nan, batch.rewards), batch.terminations


def gives_infinity(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    return np.where(batch.rewards == 3, np.float64(1e300), batch.rewards), batch.terminations


@pytest.mark.parametrize(
    ("hook", "stored"), [(bad_shape, 0), (no_pair, 0), (bad_flags, 0), (gives_nan, 2), (gives_infinity, 2)]
)
@pytest.mark.parametrize("chained", [False, True])
def test_bad_results_stop_training_with_the_name_of_the_hook(hook: Any, stored: int, chained: bool) -> None:
    model = shaped_agent([RewardScale(1.0), hook] if chained else hook, 2)
    with pytest.raises(ValueError, match=rf"^FunctionShaping\(.*{hook.__name__}\) returned"):
        model.learn(20)
    assert model.replay_buffer.pos == stored


class OwnError(Exception):
    """A user's error."""


def raising(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    if batch.rewards[0] == 3:
        raise OwnError("three")
    return batch.rewards, batch.terminations


def test_an_error_in_a_hook_stops_training() -> None:
    model = shaped_agent(raising)
    with pytest.raises(OwnError, match="three") as error:
        model.learn(20)
    assert error.traceback[-1].name == "raising"
    assert model.replay_buffer.pos == 2


def test_a_hook_can_return_the_same_array_each_time() -> None:
    kept = np.zeros(1)

    def hook(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        kept[:] = batch.rewards
        return kept, batch.terminations

    np.testing.assert_array_equal(shaped_agent(hook).learn(4).replay_buffer.rewards[:4, 0], [1, 2, 3, FALL])


# Saving


def tenfold(batch: ShapingBatch, factor: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
    return batch.rewards * factor, batch.terminations


SAVED_HOOKS: dict[str, Any] = {
    "object": RewardScale(10.0),
    "class and arguments": {RewardScale: {"scale": 10.0}},
    "function": tenfold,
    "lambda": lambda batch: (batch.rewards * 10, batch.terminations),
    "path": f"{__name__}.tenfold",
    "path and arguments": {f"{__name__}.tenfold": {"factor": 10.0}},
    "YAML": {"sb3_td3x.shaping.RewardScale": {"scale": 10.0}},
    "YAML list": [{"sb3_td3x.shaping.RewardScale": {"scale": 5.0}}, {"sb3_td3x.shaping.RewardScale": {"scale": 2}}],
}


@pytest.mark.parametrize("case", SAVED_HOOKS)
def test_hooks_are_saved_and_loaded(case: str) -> None:
    model = shaped_agent(SAVED_HOOKS[case]).learn(5)
    loaded = saved_and_loaded(model, env=counting_vec_env(3, EPISODES))
    loaded.learn(60)
    for env_idx in range(3):
        steps = Steps(20, env_idx)
        assert_stored(loaded, env_idx, steps, 10 * steps.rewards, steps.terminations)
    if case not in ("function", "lambda", "class and arguments"):
        assert repr(loaded.reward_shaping) == repr(SAVED_HOOKS[case])


def test_hooks_can_be_replaced_and_removed_between_trainings() -> None:
    model = shaped_agent(RewardScale(10.0)).learn(2)
    model.reward_shaping = {"sb3_td3x.shaping.RewardScale": {"scale": 3.0}}
    model.learn(2)
    model.reward_shaping = None
    model.learn(2)
    np.testing.assert_array_equal(model.replay_buffer.rewards[:6, 0], [10, 20, 3, 6, 1, 2])


def test_a_hook_that_was_refused_is_refused_again() -> None:
    model = shaped_agent(None, optimize_memory_usage=True, replay_buffer_kwargs={"handle_timeout_termination": False})
    model.reward_shaping = FallPenalty(threshold=-100.0, penalty=-1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="changes terminations"):
            model.learn(3)


def test_hooks_can_be_replaced_and_removed_at_loading() -> None:
    model = shaped_agent(RewardScale(10.0))
    for hook, factor in ((RewardScale(3.0), 3), (None, 1), ("sb3_td3x.shaping.FallPenalty", 1)):
        loaded = saved_and_loaded(model, env=counting_vec_env(1, EPISODES), reward_shaping=hook).learn(3)
        np.testing.assert_array_equal(loaded.replay_buffer.rewards[:3, 0], factor * np.array([1, 2, 3]))
