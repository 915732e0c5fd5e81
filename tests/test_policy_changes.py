"""Changes to the policy from outside, as SB3's users make them: acting and updates follow, and pickles stay small."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import counting_vec_env, tiny
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from sb3_td3x import TD3X

KWARGS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "layer_norm": {"layer_norm": True},
    "stochastic": {"stochastic_actor": True},
    "separate": {"critic_activation_fn": nn.PReLU},
}


def make(cls: Any = TD3X, n_envs: int = 1, **kwargs: Any) -> Any:
    return cls("MlpPolicy", counting_vec_env(n_envs), **tiny(**kwargs))


class EveryStep(BaseCallback):
    """
    Change the policy after each step of the rollout, and compare the next action with ``predict``.

    :param change: gets the agent
    """

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.change = change
        self.expected: np.ndarray | None = None
        self.n_compared = 0

    def _on_step(self) -> bool:
        if self.expected is not None:
            np.testing.assert_allclose(self.locals["actions"], self.expected, rtol=1e-5)
            self.n_compared += 1
        # The first 5 actions are random
        if self.num_timesteps >= 5:
            self.change(self.model)
            self.expected, _ = self.model.predict(self.locals["new_obs"])
        return True


def load_vector(model: Any) -> None:
    model.policy.load_from_vector(np.random.default_rng(model.num_timesteps).normal(size=n_parameters(model)))


def n_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.policy.parameters())


def replace_data(model: Any) -> None:
    for parameter in model.actor.parameters():
        parameter.data = parameter.data + 0.1


def write_in_place(model: Any) -> None:
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.add_(0.1)


def replace_layer(model: Any) -> None:
    model.actor.mu[0] = nn.Linear(2, 8)


def replace_policy(model: Any) -> None:
    model.policy = copy.deepcopy(model.policy)
    write_in_place(model)


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("gradient_steps", [0, 1])
@pytest.mark.parametrize("change", [load_vector, replace_data, write_in_place, replace_layer, replace_policy])
def test_rollouts_act_as_predict_does(change: Callable[[Any], None], gradient_steps: int) -> None:
    callback = EveryStep(change)
    # The updates between the callback and the next action must not move the actor
    model = make(gradient_steps=gradient_steps, learning_rate=0.0, tau=1e-12).learn(30, callback)
    assert callback.n_compared == 25
    assert model._n_updates == 25 * gradient_steps


@pytest.mark.parametrize("cls", [TD3, TD3X])
def test_a_replaced_policy_is_trained(cls: Any) -> None:
    model = make(cls).learn(20)
    old = model.policy
    before = copy.deepcopy(old.state_dict())
    model.policy = copy.deepcopy(old)
    model._create_aliases()
    for name in ("actor", "actor_target", "critic", "critic_target"):
        assert getattr(model, name) is getattr(model.policy, name)
    model.learn(20, reset_num_timesteps=False)
    assert not any(th.equal(value, before[key]) for key, value in model.policy.state_dict().items())
    for key, value in old.state_dict().items():
        assert th.equal(value, before[key]), key


def test_a_policy_that_is_replaced_is_followed_without_aliases() -> None:
    expected, model = make(), make()
    model.policy, policy = copy.deepcopy(model.policy), model.policy
    for agent in (expected, model):
        agent.set_random_seed(0)
        agent.learn(30)
    assert model.policy is not policy
    for key, value in expected.policy.state_dict().items():
        assert th.equal(model.policy.state_dict()[key], value), key


def test_a_network_can_be_set() -> None:
    model = make()
    actor = copy.deepcopy(model.actor)
    model.actor = actor
    assert model.policy.actor is model.actor is actor


@pytest.mark.parametrize("cls", [TD3, TD3X])
def test_one_schedule_is_read_at_each_update(cls: Any) -> None:
    """Also where a callback replaces it."""

    class Halve(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 20:
                self.model.lr_schedule = LinearSchedule(5e-4, 5e-4, 1.0)
            return True

    model = make(cls, learning_rate=1e-3)
    model.lr_schedule = LinearSchedule(2e-3, 2e-3, 1.0)
    rates = []
    for callback in (None, Halve()):
        model.learn(15, callback, reset_num_timesteps=False)
        rates.append([net.optimizer.param_groups[0]["lr"] for net in (model.actor, model.critic)])
    assert rates == [[2e-3, 2e-3], [5e-4, 5e-4]]


def test_own_schedule_of_the_critics_stays() -> None:
    model = make(learning_rate=1e-3, qf_learning_rate=3e-4)
    model.lr_schedule = LinearSchedule(2e-3, 2e-3, 1.0)
    model.learn(15)
    assert [net.optimizer.param_groups[0]["lr"] for net in (model.actor, model.critic)] == [2e-3, 3e-4]


@pytest.mark.parametrize("what", ["state_dict", "parameters", "policy", "model"])
@pytest.mark.parametrize("n_critics", [2, 5])
def test_pickles_are_as_small_as_sb3_s(what: str, n_critics: int) -> None:
    sizes = []
    for cls in (TD3, TD3X):
        model = make(cls, policy_kwargs={"net_arch": [64, 64], "n_critics": n_critics}, buffer_size=10).learn(20)
        parts = {
            "state_dict": model.policy.state_dict(),
            "parameters": model.get_parameters(),
            "policy": model.policy,
            "model": model,
        }
        sizes.append(len(pickle.dumps(parts[what])))
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize("policy_kwargs", list(KWARGS.values()), ids=list(KWARGS))
def test_copies_are_independent_and_views_are_not(policy_kwargs: dict[str, Any]) -> None:
    model = make(policy_kwargs={"net_arch": [8], **policy_kwargs}).learn(20)
    state = model.policy.state_dict()
    copies = copy.deepcopy(state), pickle.loads(pickle.dumps(state)), copy.deepcopy(model.policy).state_dict()
    write_in_place(model)
    now = model.policy.state_dict()
    for key, value in state.items():
        # As in SB3, a state dictionary shares the parameters' memory
        assert th.equal(now[key], value), key
        if key.startswith("actor."):
            assert not any(th.equal(now[key], other[key]) for other in copies), key


def test_shared_extractors_stay_shared_in_copies() -> None:
    model = make(policy_kwargs={"net_arch": [8], "share_features_extractor": True})
    for policy in (copy.deepcopy(model.policy), pickle.loads(pickle.dumps(model.policy))):
        assert policy.critic.features_extractor is policy.actor.features_extractor
