"""One update of TD3: critics, actor and target networks, for any networks."""

import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch as th
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.utils import get_parameters_by_name
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x.learner.autograd import NETWORK_NAMES, AutogradNetworks
from sb3_td3x.learner.equations import (
    actor_loss,
    critic_loss,
    huber_loss,
    next_values,
    quantile_huber_loss,
    smooth_target_actions,
    soft_update,
    td_target,
)
from sb3_td3x.learner.flat_adam import Optimizer
from sb3_td3x.learner.perceptron import MlpNetworks

# What the losses are called in logs
METRICS = ("critic_loss", "q_mean", "actor_loss")


class Hyperparameters(NamedTuple):
    """The arguments of ``TD3X`` that an update uses, by their names there."""

    gamma: float
    tau: float
    target_policy_noise: float
    target_noise_clip: float
    clipped_double_q: bool
    top_quantiles_to_drop_per_net: int


class Update:
    """
    The update of TD3 (Fujimoto et al. 2018, algorithm 1) on the networks of a policy.

    :param precision: precision of the matrix products: ``"float32"`` or ``"bfloat16"``
    """

    hyperparameters: Hyperparameters
    # Takes the TD errors of each batch, (b,), if its transitions were drawn by priority; then the loss is Huber's
    set_priorities: Callable[[th.Tensor], None] | None = None

    def __init__(self, policy: TD3Policy, precision: str):
        self.networks = make_networks(policy, precision)
        # BatchNorm running statistics
        self._running_stats = {
            name: get_parameters_by_name(getattr(policy, name), ["running_"]) for name in NETWORK_NAMES
        }

    @property
    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        """The objects that do the optimizer steps of critics and actor"""
        return self.networks.critic_optimizer, self.networks.actor_optimizer

    def is_current(self, policy: TD3Policy) -> bool:
        """Return whether this object still updates the policy, which a user may have replaced or changed."""
        return self.networks.policy is policy and self.networks.is_current()

    def __call__(self, batch: ReplayBufferSamples, with_actor: bool) -> list[th.Tensor]:
        """
        Do one update.

        :return: the critics' loss, the mean of their values, and the actor's loss if it was updated
        """
        with self.networks.converted(batch) as batch:
            metrics = [*self._update_critics(batch)]
            if with_actor:
                metrics.append(self._update_actor(batch.observations))
                self._update_targets()
        return metrics

    def run(self, sample: Callable[[], ReplayBufferSamples], with_actor: Iterable[bool]) -> dict[str, th.Tensor]:
        """
        Do several updates.

        :param sample: draws a batch of transitions
        :param with_actor: for each update whether to update the actor and the target networks, too
        :return: means over the updates, by the names in ``METRICS``; left on the device
        """
        metrics: dict[str, list[th.Tensor]] = {name: [] for name in METRICS}
        for is_due in with_actor:
            for values, value in zip(metrics.values(), self(sample(), is_due), strict=False):
                values.append(value)
        return {
            name: th.stack(values).mean() if len(values) > 1 else values[0]
            for name, values in metrics.items()
            if values
        }

    def _update_critics(self, batch: ReplayBufferSamples) -> tuple[th.Tensor, th.Tensor]:
        """Update all critics; return their loss and the mean of their values."""
        gamma, _, noise, noise_clip, clipped_double_q, n_to_drop = self.hyperparameters
        next_actions = smooth_target_actions(self.networks.target_actions(batch.next_observations), noise, noise_clip)
        next_q = self.networks.target_q_values(batch.next_observations, next_actions)
        # Only n-step replay buffers return discounts
        discounts = gamma if batch.discounts is None else batch.discounts
        next_q = next_values(next_q, clipped_double_q, n_to_drop)
        target = td_target(batch.rewards, batch.dones, discounts, next_q)

        output = self.networks.q_values(batch.observations, batch.actions)
        q = output.detach()
        compute_loss = critic_loss
        if self.set_priorities is not None:
            compute_loss = huber_loss
            self.set_priorities((q.mean(dim=2) - target.mean(dim=1)).abs().amax(dim=0))
        if q.shape[2] > 1:
            compute_loss = quantile_huber_loss
        loss, grad = compute_loss(q, target)
        self.networks.backward_critics(output, grad)
        self.networks.critic_optimizer.step()
        return loss, q.mean()

    def _update_actor(self, observations: th.Tensor) -> th.Tensor:
        """Update the actor; return its loss."""
        q1 = self.networks.q1_of_policy(observations)
        loss, grad = actor_loss(q1.detach())
        self.networks.backward_actor(q1, grad)
        self.networks.actor_optimizer.step()
        return loss

    def _update_targets(self) -> None:
        """Move the target networks towards the networks, and copy running statistics (SB3 issue 996)."""
        parameters, tau = self.networks.parameters, self.hyperparameters.tau
        for network in ("critic", "actor"):
            soft_update(parameters[network], parameters[f"{network}_target"], tau)
            soft_update(self._running_stats[network], self._running_stats[f"{network}_target"], 1.0)


def make_networks(policy: TD3Policy, precision: str = "float32") -> AutogradNetworks | MlpNetworks:
    """
    Return the networks of a policy with the fastest gradients that are possible.

    :param precision: precision of the matrix products in the updates
    """
    bfloat16 = precision == "bfloat16"
    if bfloat16 and not (policy.device.type == "cuda" and th.cuda.is_bf16_supported(including_emulation=False)):
        warnings.warn(
            f"precision='bfloat16' is not used on this device ({policy.device}), the updates are in float32: "
            "it is faster on GPUs with instructions for it only",
            stacklevel=2,
        )
        bfloat16 = False
    make = MlpNetworks if MlpNetworks.is_possible(policy) else AutogradNetworks
    return make(policy, bfloat16)
