"""The moving average of the actor: how it moves, and where it plays."""

from typing import Any

import numpy as np
import pytest
from agents import assert_same, assert_same_predictions, optimizer_states, sample_obs
from envs import CountingEnv, DictObs, saved_and_loaded, tiny_agent
from networks import WithStatistics
from stable_baselines3.td3.policies import TD3Policy
from torch import nn

from sb3_td3x import TD3X
from sb3_td3x.export import export_actor


class Recorder(TD3X):
    """Records after each call of ``train`` the number of its updates, and the actor's state."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        n_updates = self._n_updates
        super().train(gradient_steps, batch_size)
        actor = {name: value.clone() for name, value in self.actor.state_dict().items()}
        vars(self).setdefault("records", []).append((self._n_updates - n_updates, actor))


CASES: dict[str, dict[str, Any]] = {
    "MLP": {},
    "several updates": {"gradient_steps": 3, "policy_delay": 1},
    "overlapping updates": {"overlap_updates": True},
    "autograd": {"policy_kwargs": {"net_arch": [8], "activation_fn": nn.GELU}},
    "batch norm": {"policy_kwargs": {"net_arch": [8], "features_extractor_class": WithStatistics}},
    "shared extractor": {
        "policy_kwargs": {
            "net_arch": [8],
            "features_extractor_class": WithStatistics,
            "share_features_extractor": True,
        }
    },
    "stochastic": {"policy_kwargs": {"net_arch": [8], "stochastic_actor": True}},
    "dictionaries": {"policy": "MultiInputPolicy"},
}


def agent(case: str = "MLP", **kwargs: Any) -> Any:
    env = DictObs(CountingEnv()) if case == "dictionaries" else CountingEnv()
    return tiny_agent(env, **{"learning_rate": 0.01, "seed": 0, "actor_average_tau": 0.1, **CASES[case], **kwargs})


@pytest.mark.parametrize("case", CASES)
def test_the_average_moves_by_tau_at_each_update(case: str) -> None:
    """The statistics of batch normalization are copied."""
    model = agent(case, cls=Recorder)
    average = {name: value.clone() for name, value in model.actor.state_dict().items()}
    parameters = {name for name, _ in model.actor.named_parameters()}
    model.learn(30)
    for n_updates, actor in model.records:
        for name, value in actor.items():
            weight = 0.9**n_updates if name in parameters else 0
            average[name] = (weight * average[name] + (1 - weight) * value).to(value.dtype)
    assert_same(average, model.policy.playing_actor.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_training_is_the_same_as_without(case: str) -> None:
    model, expected = agent(case).learn(30), agent(case, actor_average_tau=0).learn(30)
    state = model.policy.state_dict()
    assert_same(expected.policy.state_dict(), {name: state[name] for name in expected.policy.state_dict()})
    assert_same(optimizer_states(expected), optimizer_states(model))


@pytest.mark.parametrize("case", CASES)
def test_the_average_plays(case: str) -> None:
    model, newest = agent(case).learn(30), agent(case, actor_average_tau=0).learn(30)
    obs = sample_obs(model)
    assert not np.allclose(model.predict(obs, deterministic=True)[0], newest.predict(obs, deterministic=True)[0])
    assert_same_predictions(model, saved_and_loaded(model))
    assert_same_predictions(newest, agent(case, actor_average_tau=1).learn(30))


def test_the_average_is_what_other_formats_get(tmp_path: Any) -> None:
    model = agent().learn(30)
    with pytest.warns(UserWarning, match=r"actor_average_tau=0\.1 is left behind"):
        assert_same_predictions(model, model.to_sb3())
    pytest.importorskip("onnxruntime")
    # It compares the actions itself
    export_actor(model, tmp_path / "actor.onnx")


def test_an_average_begins_at_the_actor_of_an_agent_without() -> None:
    model = agent(actor_average_tau=0).learn(30)
    loaded = saved_and_loaded(model, actor_average_tau=0.1)
    assert_same_predictions(model, loaded)
    assert saved_and_loaded(loaded, actor_average_tau=0).policy.checkpoint_actor is None


def test_it_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"actor_average_tau=0\.1 is not allowed with policy_checkpoint_episodes=1"):
        agent(policy_checkpoint_episodes=1)

    class OwnPolicy(TD3Policy):
        """A user's own policy."""

    with pytest.raises(ValueError, match=r"actor_average_tau=0\.1 is not allowed with policy=OwnPolicy"):
        agent(policy=OwnPolicy)
