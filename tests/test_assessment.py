"""Policy checkpoints: when a policy becomes the checkpoint, and where the checkpoint is used."""

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch as th
from agents import sample_obs
from envs import CountingEnv, DictObs, Episode, counting_vec_env, saved_and_loaded, tiny_agent, vec_env
from stable_baselines3 import TD3
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.assessment import Assessment
from sb3_td3x.export import export_actor


def decisions(returns: list[float], n_episodes: int) -> list[bool | None]:
    """Return for each episode of one env whether its policy is the best, and None if it is not decided."""
    assessment = Assessment()
    found: list[bool | None] = []
    for value in returns:
        assessment.add(np.array([value]), np.array([True]), np.array([True]))
        is_best, n_updates = assessment.decide(1, n_episodes)
        found.append(is_best if n_updates else None)
    return found


@pytest.mark.parametrize(
    ("n_episodes", "returns", "expected"),
    [
        (1, [1, 3, 2, 3, 4], [True, True, False, True, True]),
        (2, [5, 3, 4, 9, 3.5, 3, 8, 9], [None, True, None, True, False, False, None, True]),
        (3, [-9, -8, -7, -10, -8, -8, -8], [None, None, True, False, None, None, True]),
    ],
)
def test_the_highest_of_the_lowest_returns_is_kept(
    n_episodes: int, returns: list[float], expected: list[bool | None]
) -> None:
    assert decisions(returns, n_episodes) == expected


def test_another_number_of_episodes_begins_a_new_comparison() -> None:
    assessment = Assessment(best_return=100.0, n_episodes=1, n_waiting_updates=7, episode_returns=[3.0, 5.0])
    assert assessment.decide(1, n_episodes=2) == (True, 8)
    assert assessment.best_return == 3


def test_only_whole_episodes_of_a_policy_count() -> None:
    assessment = Assessment()
    ones, both, no = np.ones(2), np.array([True, True]), np.array([False, False])
    first, second = np.array([True, False]), np.array([False, True])
    assessment.add(ones, both, no)
    assessment.add(ones, no, first)
    assert assessment.episode_returns == [2]
    assert assessment.decide(1, 1) == (True, 1)
    # The first env begins an episode, the second one's began with the policy before
    assessment.add(ones, first, second)
    assert assessment.episode_returns == []
    assessment.add(ones, second, both)
    assert assessment.episode_returns == [2, 1]


class Recorder(TD3X):
    """Records timestep, number of updates and the checkpoint's return after each call of ``train``."""

    def train(self, *args: Any, **kwargs: Any) -> None:
        super().train(*args, **kwargs)
        records = vars(self).setdefault("records", [])
        records.append((self.num_timesteps, self._n_updates, self._assessment.best_return))


def test_updates_wait_for_the_end_of_the_episodes() -> None:
    """One episode decides, and two in the last quarter of the training."""
    env = CountingEnv([Episode(2, True, value) for value in (10, 5, 20, 20, 2, 7, 3, 2)])
    model = tiny_agent(env, cls=Recorder, learning_starts=0, policy_checkpoint_episodes=2).learn(16)
    every_second = [record for record in model.records if record[0] % 2 == 0]
    assert every_second == [
        *((2, 2, 11), (4, 4, 11), (6, 6, 21), (8, 8, 21), (10, 10, 21)),
        # Two episodes from here on
        *((12, 10, -np.inf), (14, 14, 4), (16, 16, 4)),
    ]
    assert [record[1] for record in model.records[::2]] == [0, 2, 4, 6, 8, 10, 10, 14]


def test_episodes_of_the_warm_up_do_not_count() -> None:
    env = CountingEnv([Episode(4, True, value) for value in (100, 90, 1)])
    model = tiny_agent(env, learning_starts=6, policy_checkpoint_episodes=1).learn(12)
    assert model._assessment.best_return == 1 + 2 + 3 + 1


def test_the_policy_is_the_same_during_an_episode() -> None:
    """All updates of an episode follow its end, and change the actor but not the checkpoint."""
    env = counting_vec_env(3, [Episode(6, False)])
    model = tiny_agent(env, policy_checkpoint_episodes=1, learning_starts=18, gradient_steps=-1, learning_rate=0.1)
    seen: list[np.ndarray] = []

    def look(local_variables: dict[str, Any], _: Any) -> bool:
        seen.append(model.actor.mu[0].weight.detach().clone().numpy())
        return True

    model.learn(18 * 4, callback=look)
    policies = np.array([np.array_equal(one, other) for one, other in itertools.pairwise(seen)])
    # Episodes begin at the steps 7, 13 and 19 of each env
    assert [*np.flatnonzero(~policies) + 2] == [13, 19]
    obs = sample_obs(model)
    assert not np.allclose(model.predict(obs)[0], model.policy.predict(obs, deterministic=False)[0])
    np.testing.assert_array_equal(model.predict(obs)[0], model.policy.predict(obs, deterministic=True)[0])


def trained(env: Any = None, **kwargs: Any) -> TD3X:
    """Return an agent whose checkpoint differs from its actor."""
    env = CountingEnv([Episode(5, True, 10), Episode(5, True, 1)]) if env is None else env
    model: TD3X = tiny_agent(env, learning_rate=0.1, policy_checkpoint_episodes=1, **kwargs).learn(30)
    assert model.policy.checkpoint_actor is not None
    return model


def actions(model: Any, obs: Any) -> np.ndarray:
    result: np.ndarray = model.predict(obs, deterministic=True)[0]
    return result


@pytest.mark.parametrize("copy_of", [saved_and_loaded, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_play_and_train_the_same(copy_of: Any) -> None:
    model = trained()
    model.replay_buffer.pos = 30
    loaded = copy_of(model)
    obs = sample_obs(model)
    np.testing.assert_array_equal(actions(loaded, obs), actions(model, obs))
    for name, value in model.policy.state_dict().items():
        assert th.equal(loaded.policy.state_dict()[name], value), name
    assert vars(loaded._assessment)["best_return"] == model._assessment.best_return


def test_the_checkpoint_is_what_other_formats_get(tmp_path: Any) -> None:
    model = trained()
    obs = sample_obs(model)
    np.testing.assert_allclose(actions(model.to_sb3(), obs), actions(model, obs), atol=1e-6)
    pytest.importorskip("onnxruntime")
    # It compares the actions itself
    export_actor(model, tmp_path / "actor.onnx")


def test_agents_without_and_with_a_checkpoint_load_as_the_other() -> None:
    model = trained()
    obs = sample_obs(model)
    newest = model.policy.predict(obs, deterministic=False)[0]
    without = saved_and_loaded(model, policy_checkpoint_episodes=0)
    np.testing.assert_array_equal(actions(without, obs), newest)
    assert not any(name.startswith("checkpoint") for name in without.policy.state_dict())
    again = saved_and_loaded(without, policy_checkpoint_episodes=20)
    np.testing.assert_array_equal(actions(again, obs), newest)
    sb3 = tiny_agent(cls=TD3).learn(20)
    np.testing.assert_allclose(actions(saved_and_loaded(sb3, policy_checkpoint_episodes=1), obs), actions(sb3, obs))


@pytest.mark.parametrize("env", [DictObs(CountingEnv()), CountingEnv()])
@pytest.mark.parametrize("policy_kwargs", [{}, {"activation_fn": th.nn.GELU}, {"stochastic_actor": True}])
def test_all_kinds_of_networks(env: Any, policy_kwargs: dict[str, Any]) -> None:
    policy = "MultiInputPolicy" if isinstance(env, DictObs) else "MlpPolicy"
    model = trained(vec_env(env), policy=policy, policy_kwargs={"net_arch": [8], **policy_kwargs})
    assert np.isfinite(model._assessment.best_return)
    assert np.isfinite(evaluate_policy(model, model.get_env(), 2)[0])


def test_it_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match="overlap_updates=True is not allowed with policy_checkpoint_episodes=1"):
        tiny_agent(policy_checkpoint_episodes=1, overlap_updates=True)


@pytest.mark.parametrize("policy_kwargs", [{}, {"actor_layer_norm": True}, {"stochastic_actor": True}])
def test_the_checkpoint_acts_the_same_while_the_normalization_changes(policy_kwargs: dict[str, Any]) -> None:
    raw = np.random.default_rng(0).uniform(0, 5, (10, 2)).astype(np.float32)
    seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    class Looking(TD3X):
        def train(self, *args: Any, **kwargs: Any) -> None:
            super().train(*args, **kwargs)
            obs = env.normalize_obs(raw)
            seen[self.num_timesteps] = obs, actions(self, obs)

    env = VecNormalize(vec_env(CountingEnv([Episode(5, True, value) for value in (1, 100, 1, 1, 1, 1)])))
    kwargs = {"policy_checkpoint_episodes": 1, "policy_kwargs": {"net_arch": [8], **policy_kwargs}}
    model = tiny_agent(env, cls=Looking, **kwargs).learn(30)
    # The policy of the second episode, which ends at the tenth step
    assert model._assessment.best_return == 1 + 2 + 3 + 4 + 100
    assert np.abs(seen[30][0] - seen[10][0]).max() > 0.5
    np.testing.assert_allclose(seen[30][1], seen[10][1], atol=1e-6)
    # In a copy as well
    np.testing.assert_array_equal(actions(saved_and_loaded(model), seen[30][0]), seen[30][1])


def test_normalization_of_observations_is_refused_where_the_checkpoint_cannot_follow() -> None:
    env = vec_env(DictObs(CountingEnv()))
    kwargs = {"policy": "MultiInputPolicy", "policy_checkpoint_episodes": 1}
    with pytest.raises(ValueError, match=r"norm_obs=True of VecNormalize .*=CombinedExtractor, expected Flatten"):
        tiny_agent(VecNormalize(env), **kwargs).learn(1)
    tiny_agent(VecNormalize(env, norm_obs=False), **kwargs).learn(12)
