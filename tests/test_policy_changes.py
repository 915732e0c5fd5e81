"""Changes that users of SB3 make to an agent's policy and schedules: acting and training follow them."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from comparing import assert_same_tensors, assert_same_weights
from envs import tiny_agent
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from sb3_td3x import TD3X


class EveryStep(BaseCallback):
    """
    Change the policy after each step of the rollout, and compare the next action with ``predict``.

    :param change: Function that changes the agent
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
    n_parameters = sum(parameter.numel() for parameter in model.policy.parameters())
    model.policy.load_from_vector(np.random.default_rng(model.num_timesteps).normal(size=n_parameters))


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
    # The updates between the callback and the next action must not change the actor
    model = tiny_agent(gradient_steps=gradient_steps, learning_rate=0.0, tau=1e-12).learn(30, callback)
    assert callback.n_compared == 25
    assert model._n_updates == 25 * gradient_steps


@pytest.mark.parametrize("cls", [TD3, TD3X])
def test_a_replaced_policy_is_trained(cls: Any) -> None:
    model = tiny_agent(cls=cls).learn(20)
    old = model.policy
    before = copy.deepcopy(old.state_dict())
    model.policy = copy.deepcopy(old)
    model._create_aliases()
    for name in ("actor", "actor_target", "critic", "critic_target"):
        assert getattr(model, name) is getattr(model.policy, name)
    model.learn(20, reset_num_timesteps=False)
    assert not any(th.equal(value, before[key]) for key, value in model.policy.state_dict().items())
    assert_same_tensors(before, old.state_dict())


def test_a_replaced_policy_is_trained_without_new_aliases() -> None:
    expected, model = tiny_agent(), tiny_agent()
    model.policy, policy = copy.deepcopy(model.policy), model.policy
    for agent in (expected, model):
        agent.set_random_seed(0)
        agent.learn(30)
    assert model.policy is not policy
    assert_same_weights(expected, model)


def test_networks_can_be_set() -> None:
    model = tiny_agent()
    actor = copy.deepcopy(model.actor)
    model.actor = actor
    assert model.policy.actor is model.actor is actor


@pytest.mark.parametrize("cls", [TD3, TD3X])
def test_a_replaced_schedule_is_used_for_all_networks(cls: Any) -> None:
    """Replaced between two trainings, and by a callback."""

    class Halve(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 20:
                self.model.lr_schedule = LinearSchedule(5e-4, 5e-4, 1.0)
            return True

    model = tiny_agent(cls=cls, learning_rate=1e-3)
    model.lr_schedule = LinearSchedule(2e-3, 2e-3, 1.0)
    rates = []
    for callback in (None, Halve()):
        model.learn(15, callback, reset_num_timesteps=False)
        rates.append([net.optimizer.param_groups[0]["lr"] for net in (model.actor, model.critic)])
    assert rates == [[2e-3, 2e-3], [5e-4, 5e-4]]


def test_a_replaced_schedule_leaves_a_separate_schedule_of_the_critics() -> None:
    model = tiny_agent(learning_rate=1e-3, qf_learning_rate=3e-4)
    model.lr_schedule = LinearSchedule(2e-3, 2e-3, 1.0)
    model.learn(15)
    assert [net.optimizer.param_groups[0]["lr"] for net in (model.actor, model.critic)] == [2e-3, 3e-4]
