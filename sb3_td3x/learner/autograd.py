"""Values and gradients of any networks, by autograd."""

import itertools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy
from torch import nn

from sb3_td3x.learner.flat_adam import is_made_of, make_fast

NETWORK_NAMES = ("actor", "actor_target", "critic", "critic_target")

# SB3's features extractors for images
_CONVOLUTIONS = (NatureCNN, CombinedExtractor)

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = (operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks"))


class PolicyParts:
    """The modules and parameters of a policy, to notice when a user replaces one."""

    def __init__(self, policy: TD3Policy):
        self._tables: list[dict[str, Any]] = [
            table for module in policy.modules() for table in (module._modules, module._parameters) if table
        ]
        self._parts = self._current_parts()
        self._module_hooks = [getattr(module, hooks) for module in policy.modules() for hooks in _MODULE_HOOKS]
        self._parameters = list(policy.parameters())
        self._learned = [*policy.actor.parameters(), *policy.critic.parameters()]

    def have_hooks(self) -> bool:
        """Return whether a user has registered PyTorch hooks on a module or a learned parameter."""
        return any(self._module_hooks) or any(any(map(hooks, self._learned)) for hooks in _PARAMETER_HOOKS)

    def are_current(self) -> bool:
        """Return whether the policy still consists of these parts."""
        parts = self._current_parts()
        return len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))

    def _current_parts(self) -> list[Any]:
        # Without a loop in Python, since every step asks
        return [*itertools.chain.from_iterable(map(dict.values, self._tables))]

    def addresses(self) -> tuple[Any, ...]:
        """Return the addresses of all numbers and gradients, and which parameters are learned."""
        return [*map(th.Tensor.data_ptr, self._parameters)], [(id(it.grad), it.requires_grad) for it in self._learned]


class AutogradNetworks:
    """
    The networks of any policy, with autograd's gradients.

    :param bfloat16: whether matrix products are in bfloat16 where PyTorch's automatic mixed precision allows it
    """

    def __init__(self, policy: TD3Policy, bfloat16: bool = False):
        self.policy = policy
        # Without the cache, since a CUDA graph must cast the weights as they are
        self._autocast = th.autocast(policy.device.type, th.bfloat16, enabled=bfloat16, cache_enabled=False)
        self._parts = PolicyParts(policy)
        # Not for a user's own extractor, which may rely on the order of numbers in memory
        self._converts_images = policy.device.type == "cpu" and policy.features_extractor_class in _CONVOLUTIONS
        self.parameters: dict[str, list[th.Tensor]] = {
            name: list(getattr(policy, name).parameters()) for name in NETWORK_NAMES
        }
        # Whether gradients keep their memory, which CUDA graphs need
        self.keeps_gradients = False
        actor_parameters = list(policy.actor.parameters())
        # The critics do not learn a features extractor that they share with the actor
        critic_parameters = [it for it in policy.critic.parameters() if it not in set(actor_parameters)]
        self._learned = {"actor": actor_parameters, "critic": critic_parameters}
        self.critic_optimizer = make_fast(policy.critic.optimizer, critic_parameters)
        self.actor_optimizer = make_fast(policy.actor.optimizer, actor_parameters)

    @property
    def device(self) -> th.device:
        """The device of the networks; ``policy.device`` searches all modules"""
        return self.parameters["actor"][0].device

    def is_current(self) -> bool:
        """Return whether the policy still has the parts and optimizers that this object was made from."""
        return (
            self._parts.are_current()
            and is_made_of(self.critic_optimizer, self.policy.critic.optimizer, self._learned["critic"])
            and is_made_of(self.actor_optimizer, self.policy.actor.optimizer, self._learned["actor"])
        )

    def addresses(self) -> tuple[Any, ...]:
        """Return where the numbers and gradients of the parameters are."""
        return self._parts.addresses()

    def scaled_actions(self, obs: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        """
        Return the policy's actions for the rollout; a stochastic policy samples them.

        :param obs: observations of the envs, (n_envs, ...)
        :return: actions scaled to [-1, 1], (n_envs, *action_shape)
        """
        actions, _ = self.policy.predict(obs, deterministic=False)
        return self.policy.scale_action(actions)

    @contextmanager
    def converted(self, batch: ReplayBufferSamples) -> Iterator[ReplayBufferSamples]:
        """
        Preprocess images once for all networks of an update: floats in [0, 1] with the channels last in memory, which
        is faster for convolutions on a CPU.

        :return: the same transitions with such images, for the duration of the ``with`` block
        """
        if not self._converts_images:
            yield batch
            return
        networks = [getattr(self.policy, name) for name in NETWORK_NAMES]
        normalize = self.policy.normalize_images
        space = self.policy.observation_space
        batch = batch._replace(
            observations=_convert_images(batch.observations, space, normalize),
            next_observations=_convert_images(batch.next_observations, space, normalize),
        )
        try:
            for network in networks:
                network.normalize_images = False
            yield batch
        finally:
            for network in networks:
                network.normalize_images = normalize

    def target_actions(self, obs: th.Tensor) -> th.Tensor:
        """
        Compute π'(s).

        :return: scaled actions, (b, d)
        """
        with th.no_grad(), self._autocast:
            actions: th.Tensor = self.policy.actor_target(obs)
        return actions.float()

    def target_q_values(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        Compute Q'_i(s, a).

        :param actions: scaled actions, (b, d)
        :return: values, (n, b, 1), or quantiles, (n, b, k)
        """
        with th.no_grad():
            return self._q_values(self.policy.critic_target, obs, actions)

    def q_values(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        Compute Q_i(s, a), for ``backward_critics``.

        :param actions: scaled actions, (b, d)
        :return: values, (n, b, 1), or quantiles, (n, b, k)
        """
        return self._q_values(self.policy.critic, obs, actions)

    def backward_critics(self, q: th.Tensor, grad: th.Tensor) -> None:
        """
        Set the gradients of the critics' parameters.

        :param q: the result of ``q_values``
        """
        self._zero_gradients("critic", self.policy.critic.optimizer)
        q.backward(grad)

    def q1_of_policy(self, obs: th.Tensor) -> th.Tensor:
        """
        Compute Q_1(s, π(s)), for ``backward_actor``.

        :return: values, (b, 1), or quantiles, (b, k)
        """
        with self._autocast:
            return self.policy.critic.q1_forward(obs, self.policy.actor(obs)).float()

    def backward_actor(self, q1: th.Tensor, grad: th.Tensor) -> None:
        """
        Set the gradients of the actor's parameters.

        :param q1: the result of ``q1_of_policy``
        """
        self._zero_gradients("actor", self.policy.actor.optimizer)
        # With the inputs named, the critics' gradients are not computed
        inputs = [parameter for parameter in self.policy.actor.parameters() if parameter.requires_grad]
        if inputs:
            q1.backward(grad, inputs=inputs)

    def _zero_gradients(self, name: str, optimizer: th.optim.Optimizer) -> None:
        """Delete the gradients of a network, or set them to zero if they keep their memory."""
        if not self.keeps_gradients:
            optimizer.zero_grad()
            return
        grads = [it.grad for it in self._learned[name] if it.grad is not None]
        if grads:
            th._foreach_zero_(grads)

    def _q_values(self, critic: nn.Module, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """Return the values of all critics, (n, b, 1), or their quantiles, (n, b, k)."""
        with self._autocast:
            return th.stack(critic(obs, actions)).float()


def _convert_images(obs: Any, space: spaces.Space, normalize: bool) -> Any:
    """
    Convert images to floats with the channels last in memory; leave other observations as they are.

    :param obs: observations, (b, ...), or a dictionary of them
    :param normalize: whether to divide images by 255
    :return: observations of the same shape
    """
    if isinstance(space, spaces.Dict):
        return {key: _convert_images(value, space[key], normalize) for key, value in obs.items()}
    if obs.dim() != 4 or not isinstance(space, spaces.Box):
        return obs
    return preprocess_obs(obs.contiguous(memory_format=th.channels_last), space, normalize)
