"""The floor of an update's time: the matrix products of TD3's updates, and nothing else."""

from collections.abc import Sequence
from itertools import pairwise

import torch as th

# Factors and result, in memory that is already allocated
Product = tuple[th.Tensor, th.Tensor, th.Tensor]


class Network:
    """
    Matrix products of a multi-layer perceptron, or of several of them side by side.

    :param sizes: features of the input, of the hidden layers and of the output
    :param n_networks: number of networks side by side, which read the same input; None: one
    """

    def __init__(self, sizes: Sequence[int], batch_size: int, dtype: th.dtype, n_networks: int | None = None):
        lead = () if n_networks is None else (n_networks,)
        values = th.randn(batch_size, sizes[0]).to(dtype).expand(*lead, -1, -1)
        self.forward: list[Product] = []
        self.weight_gradients: list[Product] = []
        self.input_gradients: list[Product] = []
        for n_inputs, n_outputs in pairwise(sizes):
            weight = (th.randn(*lead, n_outputs, n_inputs) / n_inputs**0.5).to(dtype)
            outputs = th.empty(*lead, batch_size, n_outputs, dtype=dtype)
            gradients = th.randn(*lead, batch_size, n_outputs).to(dtype)
            self.forward.append((values, weight.mT, outputs))
            self.weight_gradients.append((gradients.mT, values, th.empty_like(weight)))
            self.input_gradients.append((gradients, weight, th.empty(*lead, batch_size, n_inputs, dtype=dtype)))
            values = outputs
        # The gradients of the weights do not need those of the input
        self.backward = [*self.weight_gradients, *self.input_gradients[1:]]


class UpdateProducts:
    """Matrix products of TD3's updates with two critics."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        net_arch: Sequence[int],
        batch_size: int,
        dtype: th.dtype = th.float32,
        policy_delay: int = 2,
    ):
        actor_sizes, critic_sizes = (obs_dim, *net_arch, action_dim), (obs_dim + action_dim, *net_arch, 1)
        actor, actor_target = (Network(actor_sizes, batch_size, dtype) for _ in range(2))
        critics, critics_target = (Network(critic_sizes, batch_size, dtype, 2) for _ in range(2))
        critic_1 = Network(critic_sizes, batch_size, dtype)
        self._critics = [*actor_target.forward, *critics_target.forward, *critics.forward, *critics.backward]
        self._actor = [*actor.forward, *critic_1.forward, *critic_1.input_gradients, *actor.backward]
        self._policy_delay = policy_delay
        self._n_updates = 0

    def run(self, n_updates: int) -> None:
        """
        Compute the products of some updates.

        :param n_updates: number of updates; the last of each ``policy_delay`` has the actor's products, counted from
            call to call
        """
        for _ in range(n_updates):
            self._n_updates += 1
            has_actor = self._n_updates % self._policy_delay == 0
            for left, right, result in self._critics + self._actor if has_actor else self._critics:
                th.matmul(left, right, out=result)
