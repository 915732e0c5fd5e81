"""The floor of an update's time: the matrix products of TD3's updates, and nothing else."""

from collections.abc import Callable, Sequence

import torch as th
from torch.utils.flop_counter import FlopCounterMode


class Products:
    """
    Matrix products of a multi-layer perceptron, or of n of them side by side, into memory that is already allocated.

    :param sizes: features of the input, of the hidden layers and of the output
    :param n_networks: number of networks side by side; None: one
    :param weights: weights to share; None: own weights
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        dtype: th.dtype,
        n_networks: int | None = None,
        weights: list[th.Tensor] | None = None,
    ):
        self._product: Callable[..., th.Tensor] = th.mm if n_networks is None else th.bmm
        lead = () if n_networks is None else (n_networks,)
        shapes = list(zip(sizes[1:], sizes[:-1], strict=True))
        self.weights = weights or [(th.randn(*lead, *shape) / shape[1] ** 0.5).to(dtype) for shape in shapes]
        inputs = th.randn(batch_size, sizes[0]).to(dtype)
        # All critics read the same input
        self._values = [inputs.expand(*lead, -1, -1)]
        self._values += [th.empty(*lead, batch_size, size, dtype=dtype) for size in sizes[1:]]
        self._value_grads = [th.empty(*lead, batch_size, size, dtype=dtype) for size in sizes[:-1]]
        self._value_grads.append(th.randn(*lead, batch_size, sizes[-1]).to(dtype))
        self._weight_grads = [th.empty_like(weight) for weight in self.weights]

    def forward(self) -> None:
        """Compute the outputs of the layers."""
        for idx, weight in enumerate(self.weights):
            self._product(self._values[idx], weight.mT, out=self._values[idx + 1])

    def backward(self) -> None:
        """Compute the gradients of all weights, which do not need those of the input."""
        for idx in reversed(range(len(self.weights))):
            self._product(self._value_grads[idx + 1].mT, self._values[idx], out=self._weight_grads[idx])
            if idx > 0:
                self._backward_layer(idx)

    def backward_to_input(self) -> None:
        """Compute the gradients of the input only."""
        for idx in reversed(range(len(self.weights))):
            self._backward_layer(idx)

    def _backward_layer(self, idx: int) -> None:
        """Compute the gradients of a layer's input."""
        self._product(self._value_grads[idx + 1], self.weights[idx], out=self._value_grads[idx])


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
        self._actor, self._actor_target = (Products(actor_sizes, batch_size, dtype) for _ in range(2))
        self._critics, self._critics_target = (Products(critic_sizes, batch_size, dtype, 2) for _ in range(2))
        weights = [weight[0] for weight in self._critics.weights]
        self._critic_1 = Products(critic_sizes, batch_size, dtype, weights=weights)
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
            self._actor_target.forward()
            self._critics_target.forward()
            self._critics.forward()
            self._critics.backward()
            if self._n_updates % self._policy_delay == 0:
                self._actor.forward()
                self._critic_1.forward()
                self._critic_1.backward_to_input()
                self._actor.backward()


def count_flops(function: Callable[[], object]) -> int:
    """Count the floating-point operations of the matrix products in a function."""
    with FlopCounterMode(display=False) as counter:
        function()
    flops: int = counter.get_total_flops()
    return flops
