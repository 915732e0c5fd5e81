"""The floor of an update's time: the matrix products of TD3's updates, replayed without anything else."""

from collections.abc import Callable, Sequence

import torch as th
from torch.utils.flop_counter import FlopCounterMode


class Products:
    """
    The products of a multi-layer perceptron, or of n of them side by side, into memory that is there already.

    :param sizes: features of the input, of the hidden layers and of the output
    :param batch_size: number of inputs
    :param dtype: of all numbers
    :param n_networks: how many side by side
    :param weights: those of another one to share; by default its own
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
        # All critics see the same input, once in memory
        self._values = [inputs.expand(*lead, -1, -1)]
        self._values += [th.empty(*lead, batch_size, size, dtype=dtype) for size in sizes[1:]]
        self._value_grads = [th.empty(*lead, batch_size, size, dtype=dtype) for size in sizes[:-1]]
        self._value_grads.append(th.randn(*lead, batch_size, sizes[-1]).to(dtype))
        self._weight_grads = [th.empty_like(weight) for weight in self.weights]

    def forward(self) -> None:
        """The layers' outputs."""
        for idx, weight in enumerate(self.weights):
            self._product(self._values[idx], weight.mT, out=self._values[idx + 1])

    def backward(self) -> None:
        """Gradients of all weights, for which those of the input are not needed."""
        for idx in reversed(range(len(self.weights))):
            self._product(self._value_grads[idx + 1].mT, self._values[idx], out=self._weight_grads[idx])
            if idx > 0:
                self._backward_layer(idx)

    def backward_to_input(self) -> None:
        """Gradients of the input alone."""
        for idx in reversed(range(len(self.weights))):
            self._backward_layer(idx)

    def _backward_layer(self, idx: int) -> None:
        """
        :param idx: the layer whose input's gradient is computed
        """
        self._product(self._value_grads[idx + 1], self.weights[idx], out=self._value_grads[idx])


class UpdateProducts:
    """
    The products of TD3's updates with two critics.

    :param obs_dim: features of an observation
    :param action_dim: dimension of the action
    :param net_arch: hidden units of the actor and of each critic
    :param batch_size: transitions in an update
    :param dtype: of all numbers
    :param policy_delay: the actor is updated once in so many updates
    """

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
        :param n_updates: of how many updates; the actor's products come with the last of each ``policy_delay``, counted
            from call to call
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
    """
    :param function: a function
    :return: floating-point operations of the matrix products that PyTorch carries out in it
    """
    with FlopCounterMode(display=False) as counter:
        function()
    flops: int = counter.get_total_flops()
    return flops
