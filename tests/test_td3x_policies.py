"""Agents with SB3's and TD3X's policy options and users' policy classes: training, saving, loading and pickling."""

import copy
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch as th
from comparing import assert_same_weights
from envs import CountingEnv, saved_and_loaded, tiny_agent
from gymnasium import spaces
from networks import LinearExtractor
from stable_baselines3 import TD3
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.td3 import policies as sb3_policies
from torch import nn

from sb3_td3x import TD3X, CnnPolicy, MlpPolicy, MultiInputPolicy


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(
    "policy_kwargs",
    [
        {"features_extractor_class": LinearExtractor, "features_extractor_kwargs": {"features_dim": 5}},
        {"features_extractor_class": LinearExtractor, "share_features_extractor": True},
        {"net_arch": {"pi": [6], "qf": [8, 7]}, "n_critics": 3},
        {"net_arch": []},
        {"activation_fn": nn.Tanh},
        {"activation_fn": nn.Tanh, "critic_activation_fn": "relu"},
        {"optimizer_class": th.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}},
        {"optimizer_class": th.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.1, "foreach": True}},
        {"layer_norm": True, "actor_layer_norm": True},
        {"stochastic_actor": True},
        {"n_critics": 1},
    ],
    ids=str,
)
def test_policy_kwargs(policy_kwargs: dict[str, Any]) -> None:
    model = tiny_agent(policy_kwargs={"net_arch": [8], **policy_kwargs}).learn(20)
    loaded = saved_and_loaded(model, env=model.env)
    assert_same_weights(model, loaded)
    assert loaded.learn(20)._n_updates == 30


class OwnPolicy(MlpPolicy):
    """A user's policy, derived from TD3X's."""


class OwnSB3Policy(sb3_policies.TD3Policy):
    """A user's policy, derived from SB3's."""


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("policy_class", [MlpPolicy, OwnPolicy, sb3_policies.MlpPolicy, OwnSB3Policy])
@pytest.mark.parametrize("n_critics", [1, 2, 3])
def test_policy_classes(policy_class: type[Any], n_critics: int) -> None:
    """All of them learn the same as SB3's TD3, are saved and loaded, and convert to SB3 if SB3 knows the class."""
    policy_kwargs = {"net_arch": [8], "n_critics": n_critics}
    model = tiny_agent(policy=policy_class, policy_kwargs=policy_kwargs).learn(20)
    assert type(model.critic) is ContinuousCritic
    sb3 = tiny_agent(policy=sb3_policies.MlpPolicy, cls=TD3, policy_kwargs=policy_kwargs).learn(20)
    for key, value in sb3.policy.state_dict().items():
        np.testing.assert_allclose(model.policy.state_dict()[key].numpy(), value.numpy(), rtol=1e-5, atol=2e-6)
    loaded = saved_and_loaded(model, env=CountingEnv())
    assert_same_weights(model, loaded)
    assert type(loaded.policy) is type(model.policy)
    loaded.learn(20)
    if policy_class is OwnPolicy:
        with pytest.raises(ValueError, match="OwnPolicy"):
            model.to_sb3()
        return
    converted = model.to_sb3()
    obs = np.ones((3, 2), np.float32)
    np.testing.assert_allclose(converted.predict(obs)[0], model.predict(obs)[0], atol=1e-6)
    converted.learn(10, reset_num_timesteps=False)


def test_policy_aliases() -> None:
    assert TD3X.policy_aliases == {"MlpPolicy": MlpPolicy, "CnnPolicy": CnnPolicy, "MultiInputPolicy": MultiInputPolicy}
    with pytest.raises(ValueError, match="Policy LstmPolicy unknown"):
        TD3X("LstmPolicy", CountingEnv())


# Pickling and copying


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize(
    "kwargs", [{}, {"precision": "bfloat16"}, {"policy_kwargs": {"net_arch": [8], "layer_norm": True}}], ids=str
)
def test_agents_are_pickled(kwargs: dict[str, Any], dump: Any) -> None:
    """As Ray, joblib and multiprocessing do."""
    model = tiny_agent(**kwargs).learn(20)
    pickled = pickle.loads(dump(model))
    assert pickled.actor is pickled.policy.actor
    assert pickled.critic_target is pickled.policy.critic_target
    assert_same_weights(model, pickled)
    # Both draw from the same global random generators
    for agent in (model, pickled):
        agent.set_random_seed(1)
        agent.learn(10)
    assert_same_weights(model, pickled)


def test_agent_without_networks_is_copied() -> None:
    model = tiny_agent(_init_setup_model=False)
    assert copy.deepcopy(model).learning_rate == model.learning_rate


class CachingExtractor(FlattenExtractor):
    """A features extractor that keeps its last output, which cannot be copied because it has a gradient history."""

    def __init__(self, observation_space: spaces.Space) -> None:
        super().__init__(observation_space)
        self.scale = nn.Parameter(th.ones(1))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        self.last = super().forward(observations) * self.scale
        return self.last


def test_agent_with_an_attribute_that_cannot_be_copied_is_pickled() -> None:
    model = tiny_agent(policy_kwargs={"net_arch": [8], "features_extractor_class": CachingExtractor}).learn(20)
    assert_same_weights(model, pickle.loads(pickle.dumps(model)))


@pytest.mark.parametrize("part", ["state_dict", "parameters", "policy", "model"])
@pytest.mark.parametrize("n_critics", [2, 5])
def test_pickles_are_as_small_as_those_of_sb3(part: str, n_critics: int) -> None:
    sizes = []
    for cls in (TD3, TD3X):
        policy_kwargs = {"net_arch": [64, 64], "n_critics": n_critics}
        model = tiny_agent(cls=cls, policy_kwargs=policy_kwargs, buffer_size=10).learn(20)
        parts = {
            "state_dict": model.policy.state_dict(),
            "parameters": model.get_parameters(),
            "policy": model.policy,
            "model": model,
        }
        sizes.append(len(pickle.dumps(parts[part])))
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize(
    "policy_kwargs",
    [{}, {"layer_norm": True}, {"stochastic_actor": True}, {"critic_activation_fn": nn.PReLU}],
    ids=["mlp", "layer_norm", "stochastic", "separate"],
)
def test_copies_are_independent_and_state_dicts_are_views(policy_kwargs: dict[str, Any]) -> None:
    model = tiny_agent(policy_kwargs={"net_arch": [8], **policy_kwargs}).learn(20)
    state = model.policy.state_dict()
    copies = copy.deepcopy(state), pickle.loads(pickle.dumps(state)), copy.deepcopy(model.policy).state_dict()
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.add_(0.1)
    now = model.policy.state_dict()
    for key, value in state.items():
        # As in SB3, a state dictionary shares the memory of the parameters
        assert th.equal(now[key], value), key
        if key.startswith("actor."):
            assert not any(th.equal(now[key], other[key]) for other in copies), key


def test_shared_extractors_stay_shared_in_copies() -> None:
    model = tiny_agent(policy_kwargs={"net_arch": [8], "share_features_extractor": True})
    for policy in (copy.deepcopy(model.policy), pickle.loads(pickle.dumps(model.policy))):
        assert policy.critic.features_extractor is policy.actor.features_extractor
