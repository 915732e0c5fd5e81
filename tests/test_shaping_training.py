"""The reward shaping hook in training: what it sees, what enters the replay buffer, and what stays raw."""

import io
import json
import pathlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from envs import CountingEnv, DictObs, Episode, counting_vec_env, readable, tiny_agent, vec_env
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.shaping import FallPenalty, PotentialShaping, RewardScale, RewardShaping, ShapingBatch

FALL = -100.0
# A fall, a goal, a time-out, a fall at the time limit
EPISODES = (Episode(4, True, FALL), Episode(3, True), Episode(5, False), Episode(3, False, FALL - 20))


def make(env: Any = None, hook: Any = None, **kwargs: Any) -> TD3X:
    """A tiny agent that does not learn unless asked to."""
    env = counting_vec_env(1, EPISODES) if env is None else env
    return tiny_agent(env, reward_shaping=hook, **{"gradient_steps": 0, **kwargs})


class Steps:
    """
    What ``CountingEnv`` does, played without an agent.

    :param n_steps: number of steps
    :param env_idx: index of the env in ``counting_vec_env``
    :param episodes: its episodes
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
    """Compare what one env has in the replay buffer with its steps and the shaped rewards and terminations."""
    buffer = model.replay_buffer
    number = len(rewards)
    assert buffer.pos == number
    np.testing.assert_array_equal(buffer.observations[:number, env_idx], steps.observations)
    np.testing.assert_array_equal(buffer.next_observations[:number, env_idx], steps.next_observations)
    np.testing.assert_allclose(buffer.rewards[:number, env_idx], rewards, rtol=1e-5)
    np.testing.assert_array_equal(buffer.dones[:number, env_idx], steps.ends | terminations)
    np.testing.assert_array_equal(buffer.timeouts[:number, env_idx], steps.ends & ~terminations)


class Recorder(RewardShaping):
    """Doubles the rewards, and keeps what it was given."""

    def __init__(self) -> None:
        self._batches: list[ShapingBatch] = []

    def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        self._batches.append(deepcopy(batch))
        return 2 * batch.rewards, batch.terminations

    def seen(self, name: str, env_idx: int) -> np.ndarray:
        """One quantity of one env, over all steps."""
        return np.array([getattr(batch, name)[env_idx] for batch in self._batches])

    @property
    def batches(self) -> list[ShapingBatch]:
        return self._batches


# What it sees and what is stored


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
def test_hook_sees_every_step_as_it_was(n_envs: int) -> None:
    hook = Recorder()
    model = make(counting_vec_env(n_envs, EPISODES), hook, gamma=0.7).learn(40 * n_envs)
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
        assert batch.infos[0]["step"] == batch.next_observations[0, 1]  # type: ignore[index]


@pytest.mark.parametrize("n_envs", [1, 3])
def test_stored_without_a_hook(n_envs: int) -> None:
    model = make(counting_vec_env(n_envs, EPISODES)).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        assert_stored(model, env_idx, steps, steps.rewards, steps.terminations)


def test_hook_sees_actions_in_the_env_s_own_space() -> None:
    hook = Recorder()
    space = spaces.Box(np.array([-3, 10], np.float32), np.array([1, 30], np.float32))
    model = make(CountingEnv(action_space=space), hook).learn(20)
    actions = hook.seen("actions", 0)
    assert all(space.contains(action) for action in actions.astype(np.float32))
    stored = model.replay_buffer.actions[:20, 0]
    np.testing.assert_allclose(actions, space.low + (stored + 1) / 2 * (space.high - space.low), rtol=1e-5, atol=1e-5)
    assert np.ptp(stored) > 0.1


def test_hook_sees_dict_observations() -> None:
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


# FallPenalty of document 000


def after_falls(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Document 000's rewards and terminations."""
    falls = steps.rewards <= FALL
    return np.where(falls, -1.0, steps.rewards), falls


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("hook", [FallPenalty(), {"sb3_td3x.shaping.FallPenalty": None}], ids=readable)
def test_fall_is_terminal_and_every_other_end_a_time_out(n_envs: int, hook: Any) -> None:
    model = make(counting_vec_env(n_envs, EPISODES), hook).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        rewards, falls = after_falls(steps)
        assert 0 < falls.sum() < steps.ends.sum()
        assert_stored(model, env_idx, steps, rewards, falls)
    # A goal, stored as a time-out, bootstraps; a fall does not
    terminal = model.replay_buffer.dones * (1 - model.replay_buffer.timeouts)
    np.testing.assert_array_equal(terminal[:40, 0], after_falls(Steps(40))[1])


def n_step_returns(steps: Steps, rewards: np.ndarray, terminal: np.ndarray, n: int, gamma: float) -> list[tuple]:
    """By the definition: the sum up to an end, what follows it, and what that is multiplied with."""
    ends = steps.ends | terminal
    ends[-1] = True  # nothing is known beyond the newest step
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
    """The second step of each episode is terminal for the agent, whatever the env says; nothing else is."""
    assert isinstance(batch.next_observations, np.ndarray)
    return batch.rewards + 0.5, batch.next_observations[:, 1] == 2


def after_two(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    return steps.rewards + 0.5, steps.next_observations[:, 1] == 2


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(("hook", "shaped"), [(FallPenalty(), after_falls), (ends_at_two, after_two)])
def test_n_step_sums_never_cross_a_reset(
    n_envs: int, hook: Any, shaped: Callable[[Steps], tuple[np.ndarray, np.ndarray]]
) -> None:
    n, gamma, number = 3, 0.9, 30
    model = make(counting_vec_env(n_envs, EPISODES), hook, n_steps=n, gamma=gamma).learn(number * n_envs)
    buffer = model.replay_buffer
    assert isinstance(buffer, PackedReplayBuffer)
    expected = {}
    for env_idx in range(n_envs):
        steps = Steps(number, env_idx)
        for obs, answer in zip(steps.observations, n_step_returns(steps, *shaped(steps), n, gamma), strict=True):
            expected[tuple(obs)] = answer
    # A sample takes an env at random: its observation tells which step it is
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
def test_termination_in_the_middle_of_an_episode(n_envs: int) -> None:
    """The transition is terminal; the env, which knows nothing of it, plays on."""
    model = make(counting_vec_env(n_envs, EPISODES), ends_at_two).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        assert (after_two(steps)[1] & ~steps.ends).any()
        assert_stored(model, env_idx, steps, *after_two(steps))
        lengths = np.diff(np.flatnonzero(steps.ends), prepend=-1)
        assert model.ep_info_buffer is not None
        assert [info["l"] for info in model.ep_info_buffer][env_idx::n_envs] == list(lengths)


def test_learning_uses_shaped_rewards_and_terminations() -> None:
    """With γ = 0 and one reward everywhere, the critics come to give that reward."""
    model = make(
        hook=lambda batch: (np.full(1, 3.0), batch.terminations), gamma=0, gradient_steps=2, learning_rate="lin_1e-2"
    )
    model.learn(600)
    obs, actions = model.replay_buffer.sample(50).observations, model.replay_buffer.sample(50).actions
    assert model.critic.q1_forward(obs, actions).mean().item() == pytest.approx(3, abs=0.3)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_potential_of_the_true_last_observation(n_envs: int) -> None:
    def potential(observations: Any) -> np.ndarray:
        potentials: np.ndarray = observations[:, 0] + 10 * np.square(observations[:, 1], dtype=np.float64)
        return potentials

    model = make(counting_vec_env(n_envs, EPISODES), PotentialShaping(potential), gamma=0.9).learn(40 * n_envs)
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        assert steps.truncations.any()
        after = np.where(steps.terminations, 0, potential(steps.next_observations))
        rewards = steps.rewards + 0.9 * after - potential(steps.observations)
        assert_stored(model, env_idx, steps, rewards, steps.terminations)


def second_entry(observations: Any) -> np.ndarray:
    entry: np.ndarray = observations[:, 1]
    return entry


def test_chain_in_training() -> None:
    """The potential is 0 after a fall, also at the time limit, and not after a goal."""
    hooks = [FallPenalty(), PotentialShaping(second_entry), {"sb3_td3x.shaping.RewardScale": {"scale": 5.0}}]
    model = make(hook=hooks, gamma=0.9).learn(40)
    steps = Steps(40)
    rewards, falls = after_falls(steps)
    after = np.where(falls, 0, steps.next_observations[:, 1])
    assert_stored(model, 0, steps, 5 * (rewards + 0.9 * after - steps.observations[:, 1]), falls)


# What stays raw


def returns(n_episodes: int) -> list[float]:
    """Raw returns of the first episodes."""
    steps = Steps(60)
    of_episodes = np.split(steps.rewards, np.flatnonzero(steps.ends) + 1)
    return [float(rewards.sum()) for rewards in of_episodes[:n_episodes]]


@pytest.mark.lowest_sb3
def test_statistics_and_evaluations_stay_raw(tmp_path: pathlib.Path) -> None:
    model = make(hook=[FallPenalty(), RewardScale(0.001)])
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
    model = make(counting_vec_env(n_envs, [Episode(4, True)]), RewardScale(10.0))
    model.set_logger(configure(str(tmp_path), ["json"]))
    model.learn(8 * n_envs, log_interval=n_envs)
    logged = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    assert [entry["rollout/shaped_reward_mean"] for entry in logged] == [25, 25]
    assert [entry["rollout/ep_rew_mean"] for entry in logged] == [10, 10]


class Infos(BaseCallback):
    """Keeps the infos of every step, and what was in them at that moment."""

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
def test_infos_of_other_code_are_not_changed(hook: Any) -> None:
    infos = Infos()
    make(counting_vec_env(2, EPISODES), hook).learn(80, infos)
    assert len(infos.infos) == 80
    for kept, copy in zip(infos.infos, infos.copies, strict=True):
        assert kept.keys() == copy.keys()
        for key, value in copy.items():
            np.testing.assert_array_equal(kept[key], value, err_msg=key)


def test_arrays_of_other_code_are_not_changed() -> None:
    """What a callback holds is the env's own, also where the hook changes rewards and terminations."""

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
    make(hook=[ends_at_two, RewardScale(3.0)]).learn(20, callback)
    np.testing.assert_array_equal(np.concatenate(callback.rewards), Steps(20).rewards)
    np.testing.assert_array_equal(np.concatenate(callback.dones), Steps(20).ends)


# VecNormalize


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 3])
def test_vec_normalize(n_envs: int) -> None:
    """The hook sees raw observations and rewards; the statistics come from raw rewards."""
    hook = Recorder()
    models = []
    for reward_shaping in (hook, None):
        env = VecNormalize(counting_vec_env(n_envs, EPISODES), clip_obs=1e6, gamma=0.9)
        models.append(make(env, reward_shaping, gamma=0.9).learn(40 * n_envs))
    for env_idx in range(n_envs):
        steps = Steps(40, env_idx)
        for name in ("observations", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(hook.seen(name, env_idx), getattr(steps, name), err_msg=name)
        # The last observation of an episode comes normalised from the env, and is converted back
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
    model = make(env, FallPenalty(), n_steps=3, gradient_steps=1).learn(80)
    for env_idx in range(2):
        rewards, falls = after_falls(Steps(40, env_idx))
        np.testing.assert_array_equal(model.replay_buffer.rewards[:40, env_idx], rewards)
        np.testing.assert_array_equal(model.replay_buffer.timeouts[:40, env_idx], Steps(40, env_idx).ends & ~falls)


# Hooks that misbehave


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
def test_bad_result_stops_training_with_the_hook_s_name(hook: Any, stored: int, chained: bool) -> None:
    model = make(counting_vec_env(2, EPISODES), [RewardScale(1.0), hook] if chained else hook)
    with pytest.raises(ValueError, match=rf"^FunctionShaping\(.*{hook.__name__}\) returned"):
        model.learn(20)
    assert model.replay_buffer.pos == stored


class MustNotHappenError(Exception):
    """A user's own error."""


def raising(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    if batch.rewards[0] == 3:
        raise MustNotHappenError("three")
    return batch.rewards, batch.terminations


def test_error_of_a_hook_stops_training() -> None:
    model = make(hook=raising)
    with pytest.raises(MustNotHappenError, match="three") as error:
        model.learn(20)
    assert error.traceback[-1].name == "raising"
    assert model.replay_buffer.pos == 2


WRITERS: dict[str, Callable[[ShapingBatch], None]] = {
    "observations": lambda batch: batch.observations.fill(0),  # type: ignore[union-attr]
    "next_observations": lambda batch: batch.next_observations.fill(0),  # type: ignore[union-attr]
    "actions": lambda batch: batch.actions.fill(0),
    "rewards": lambda batch: batch.rewards.fill(0),
    "terminations": lambda batch: batch.terminations.fill(True),
    "truncations": lambda batch: batch.truncations.fill(True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_hook_that_writes_into_its_arrays_is_stopped(name: str) -> None:
    def hook(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        WRITERS[name](batch)
        return batch.rewards, batch.terminations

    model = make(hook=hook)
    with pytest.raises(ValueError, match="read-only"):
        model.learn(5)
    assert model.replay_buffer.pos == 0


def test_hook_may_keep_and_return_arrays_of_its_own() -> None:
    """One array for every step: what is stored does not change with it."""
    kept = np.zeros(1)

    def hook(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
        kept[:] = batch.rewards
        return kept, batch.terminations

    np.testing.assert_array_equal(make(hook=hook).learn(4).replay_buffer.rewards[:4, 0], [1, 2, 3, FALL])


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
def test_hook_is_saved_and_loaded(case: str) -> None:
    zip_file = io.BytesIO()
    make(hook=SAVED_HOOKS[case]).learn(5).save(zip_file)
    zip_file.seek(0)
    loaded = TD3X.load(zip_file, env=counting_vec_env(3, EPISODES), trusted=True)
    loaded.learn(60)
    for env_idx in range(3):
        steps = Steps(20, env_idx)
        assert_stored(loaded, env_idx, steps, 10 * steps.rewards, steps.terminations)
    assert case in ("function", "lambda", "class and arguments") or repr(loaded.reward_shaping) == repr(
        SAVED_HOOKS[case]
    )


def test_hook_is_changed_and_removed_between_trainings() -> None:
    model = make(hook=RewardScale(10.0)).learn(2)
    model.reward_shaping = {"sb3_td3x.shaping.RewardScale": {"scale": 3.0}}
    model.learn(2)
    model.reward_shaping = None
    model.learn(2)
    np.testing.assert_array_equal(model.replay_buffer.rewards[:6, 0], [10, 20, 3, 6, 1, 2])


def test_hook_that_was_refused_stays_refused() -> None:
    model = make(optimize_memory_usage=True, replay_buffer_kwargs={"handle_timeout_termination": False})
    model.reward_shaping = FallPenalty(threshold=-100.0, penalty=-1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="changes terminations"):
            model.learn(3)


def test_hook_is_changed_and_removed_at_loading() -> None:
    zip_file = io.BytesIO()
    make(hook=RewardScale(10.0)).save(zip_file)
    for hook, factor in ((RewardScale(3.0), 3), (None, 1), ("sb3_td3x.shaping.FallPenalty", 1)):
        zip_file.seek(0)
        loaded = TD3X.load(zip_file, env=counting_vec_env(1, EPISODES), reward_shaping=hook).learn(3)
        np.testing.assert_array_equal(loaded.replay_buffer.rewards[:3, 0], factor * np.array([1, 2, 3]))
