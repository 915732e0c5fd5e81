"""
Values and gradients of plain multi-layer perceptrons, with the chain rule written out.

The results equal autograd's up to rounding, without its overhead for each operation.
"""

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import Actor, TD3Policy
from torch import nn

from sb3_td3x.learner.autograd import NETWORK_NAMES, PolicyParts
from sb3_td3x.learner.flat_adam import FlatParameters, is_made_of, make_fast
from sb3_td3x.policies import TD3XPolicy

aten = th.ops.aten


class Activation(NamedTuple):
    """
    An activation φ whose derivative can be computed from its value.

    :param forward: computes φ in place
    :param backward: computes the gradient of the argument from the gradient of the value and the value
    """

    forward: Callable[[th.Tensor], th.Tensor]
    backward: Callable[[th.Tensor, th.Tensor], th.Tensor]


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(th.relu_, lambda grad, value: aten.threshold_backward(grad, value, 0)),
    nn.Tanh: Activation(th.tanh_, aten.tanh_backward),
    nn.Sigmoid: Activation(th.sigmoid_, aten.sigmoid_backward),
    nn.ELU: Activation(nn.functional.elu_, lambda grad, value: aten.elu_backward(grad, 1.0, 1.0, 1.0, True, value)),
    nn.Identity: Activation(lambda x: x, lambda grad, value: grad),
}


class LayerNorm:
    """
    The layer normalization of one network, or of n networks at once (Ba et al. 2016).

    :param weight: factor of the normalized features, (features,) or (n, 1, features)
    :param bias: added to them, of the same shape
    :param weight_grad: memory for the gradient of the weight, (features,) or (n, features); None if it is not learned
    """

    def __init__(
        self,
        weight: th.Tensor,
        bias: th.Tensor,
        eps: float,
        weight_grad: th.Tensor | None = None,
        bias_grad: th.Tensor | None = None,
    ):
        self.weight, self.bias, self.eps = weight, bias, eps
        self.weight_grad, self.bias_grad = weight_grad, bias_grad

    def forward(self, x: th.Tensor) -> th.Tensor:
        """
        Normalize features, and keep what ``backward`` needs.

        :param x: features, (b, features) or (n, b, features)
        :return: normalized features of the same shape
        """
        self._x = x
        self._normalized, self._mean, self._rstd = aten.native_layer_norm(x, x.shape[-1:], None, None, self.eps)
        return th.addcmul(self.bias, self._normalized, self.weight)

    def backward(self, grad: th.Tensor) -> th.Tensor:
        """
        Write the gradients of weight and bias if they are learned, and compute the gradient of the features.

        :param grad: gradient of the result of the last ``forward``
        """
        if self.weight_grad is not None:
            th.sum(grad * self._normalized, dim=-2, out=self.weight_grad)
            th.sum(grad, dim=-2, out=self.bias_grad)
        grads: tuple[th.Tensor, ...] = aten.native_layer_norm_backward(
            grad * self.weight, self._x, grad.shape[-1:], self._mean, self._rstd, None, None, [True, False, False]
        )
        return grads[0]


class Layer(NamedTuple):
    """
    A layer h' = φ(N(h Wᵀ + b)) of one network, or of n networks at once.

    :param weight: W, (out, in) or (n, out, in)
    :param bias: b, (out,) or (n, 1, out)
    :param activation: φ
    :param weight_grad: memory for the gradient of W, of the same shape; None if it is not learned
    :param bias_grad: memory for the gradient of b, (out,) or (n, out); None if it is not learned
    :param norm: N; None for the identity
    """

    weight: th.Tensor
    bias: th.Tensor
    activation: Activation
    weight_grad: th.Tensor | None = None
    bias_grad: th.Tensor | None = None
    norm: LayerNorm | None = None


class Mlp:
    """A multi-layer perceptron, or n of them at once, on tensors that it shares with modules."""

    def __init__(self, layers: list[Layer]):
        self.layers = layers
        self._transposed_weights = [layer.weight.mT for layer in layers]
        stacked = layers[0].weight.dim() == 3
        self._linear = th.baddbmm if stacked else th.addmm
        self._product = th.bmm if stacked else th.mm

    def forward(self, x: th.Tensor) -> list[th.Tensor]:
        """
        Compute the values of all layers.

        :param x: inputs, (b, in) or (n, b, in)
        :return: h_0 = x, h_1, ..., and the output, each (b, features) or (n, b, features)
        """
        values = [x]
        for layer, weight in zip(self.layers, self._transposed_weights, strict=True):
            h = self._linear(layer.bias, values[-1], weight)
            values.append(layer.activation.forward(h if layer.norm is None else layer.norm.forward(h)))
        return values

    def backward(self, values: list[th.Tensor], grad: th.Tensor) -> None:
        """
        Write the gradients of all weights and biases to their memory.

        :param values: the result of ``forward``
        """
        for idx in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[idx]
            grad = layer.activation.backward(grad, values[idx + 1])
            if layer.norm is not None:
                grad = layer.norm.backward(grad)
            self._product(grad.mT, values[idx], out=layer.weight_grad)
            th.sum(grad, dim=-2, out=layer.bias_grad)
            if idx > 0:
                grad = self._product(grad, layer.weight)

    def backward_to_input(self, values: list[th.Tensor], grad: th.Tensor) -> th.Tensor:
        """
        Compute the gradient of the input.

        :param values: the result of ``forward``
        :return: gradient of the input, (b, in) or (n, b, in)
        """
        for idx in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[idx]
            grad = layer.activation.backward(grad, values[idx + 1])
            if layer.norm is not None:
                grad = layer.norm.backward(grad)
            grad = self._product(grad, layer.weight)
        return grad


class MixedPrecisionMlp(Mlp):
    """
    An ``Mlp`` with matrix products in bfloat16, accumulated in float32, which is faster on GPUs. The first and the last
    layer stay in float32: they are small, and eight bits are too few for observations and values.
    """

    def __init__(self, layers: list[Layer]):
        super().__init__(layers)
        self._reduced = [0 < idx < len(layers) - 1 for idx in range(len(layers))]
        self._weights = [layer.weight for layer in layers]

    def forward(self, x: th.Tensor) -> list[th.Tensor]:
        """
        Compute the values of all layers.

        :param x: inputs, (b, in) or (n, b, in)
        :return: the input of each layer in the precision of its product, and the output
        """
        # Every update changes the weights
        self._weights = [self._rounded(layer.weight, idx) for idx, layer in enumerate(self.layers)]
        values = [x]
        for idx, layer in enumerate(self.layers):
            h = self._linear(self._rounded(layer.bias, idx), values[-1], self._weights[idx].mT)
            h = h if layer.norm is None else layer.norm.forward(h.float())
            h = self._rounded(layer.activation.forward(self._rounded(h, idx)), idx)
            values.append(self._rounded(h, min(idx + 1, len(self.layers) - 1)))
        return values

    def backward(self, values: list[th.Tensor], grad: th.Tensor) -> None:
        for idx in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[idx]
            assert layer.weight_grad is not None
            assert layer.bias_grad is not None
            grad = self._backward_to_product(values, grad, idx)
            layer.weight_grad.copy_(self._rounded(self._product(grad.mT, values[idx]), idx))
            th.sum(grad, dim=-2, dtype=layer.bias_grad.dtype, out=layer.bias_grad)
            if idx > 0:
                grad = self._rounded(self._product(grad, self._weights[idx]), idx)

    def backward_to_input(self, values: list[th.Tensor], grad: th.Tensor) -> th.Tensor:
        for idx in range(len(self.layers) - 1, -1, -1):
            grad = self._backward_to_product(values, grad, idx)
            grad = self._rounded(self._product(grad, self._weights[idx]), idx)
        return grad

    def _backward_to_product(self, values: list[th.Tensor], grad: th.Tensor, idx: int) -> th.Tensor:
        """Return the gradient of the result of a layer's product, in the precision of the product."""
        layer = self.layers[idx]
        grad = layer.activation.backward(grad, values[idx + 1])
        # As in ``forward``, round to the precision of the next layer first
        grad = self._rounded(grad, min(idx + 1, len(self.layers) - 1))
        return self._rounded(grad if layer.norm is None else layer.norm.backward(grad.float()), idx)

    def _rounded(self, tensor: th.Tensor, idx: int) -> th.Tensor:
        """Return an operand or a result of a layer's product in the precision of that product."""
        return tensor.bfloat16() if self._reduced[idx] else tensor.to(self.layers[idx].weight.dtype)


class MlpNetworks:
    """
    The networks of a policy of plain multi-layer perceptrons, with the gradients written out. The interface is that of
    ``AutogradNetworks``.

    :param policy: a policy that ``is_possible`` accepts
    :param bfloat16: whether the matrix products of the updates are in bfloat16
    """

    def __init__(self, policy: TD3Policy, bfloat16: bool = False):
        self.policy = policy
        self.n_critics = policy.critic.n_critics
        self._action_shape = policy.action_space.shape or ()
        nets = {name: _nets(getattr(policy, name)) for name in NETWORK_NAMES}
        flat = {}
        for name in NETWORK_NAMES:
            # The same parameter of all critics side by side, so that they can be stacked
            of_nets = zip(*(net.parameters() for net in nets[name]), strict=True)
            flat[name] = FlatParameters(itertools.chain.from_iterable(of_nets), with_grad="target" not in name)
        self._flat = flat
        self.parameters = {name: [parameters.data] for name, parameters in flat.items()}
        self.critic_optimizer = make_fast(policy.critic.optimizer, flat["critic"])
        self.actor_optimizer = make_fast(policy.actor.optimizer, flat["actor"])
        make_mlp = MixedPrecisionMlp if bfloat16 else Mlp
        layers = {name: _layers(nets[name], flat[name]) for name in NETWORK_NAMES}
        self._actor = make_mlp([_first(layer, is_learned=True) for layer in layers["actor"]])
        self._actor_target = make_mlp([_first(layer, is_learned=False) for layer in layers["actor_target"]])
        self._critics, self._critics_target = make_mlp(layers["critic"]), make_mlp(layers["critic_target"])
        self._critic_1 = make_mlp([_first(layer, is_learned=False) for layer in layers["critic"]])
        self._acting = Mlp(self._actor.layers)
        # The gradients are in flat memory in any case
        self.keeps_gradients = True
        self._parts = PolicyParts(policy)
        self._addresses = self.addresses()

    @property
    def device(self) -> th.device:
        """The device of the networks; ``policy.device`` searches all modules"""
        return self.parameters["actor"][0].device

    @staticmethod
    def is_possible(policy: TD3Policy) -> bool:
        """Return whether all networks are such perceptrons on vectors, without frozen parameters and PyTorch hooks."""
        space = policy.observation_space
        return (
            # A subclass may act differently
            type(policy) is TD3XPolicy
            and type(policy.actor) is Actor
            and type(policy.critic) is ContinuousCritic
            and policy.features_extractor_class is FlattenExtractor
            and isinstance(space, spaces.Box)
            and not is_image_space(space)
            and all(_is_perceptron(net) for net in (policy.actor.mu, *_nets(policy.critic)))
            # A user may have replaced a layer
            and len({str(net) for net in (*_nets(policy.critic), *_nets(policy.critic_target))}) == 1
            and len({str(net) for net in (*_nets(policy.actor), *_nets(policy.actor_target))}) == 1
            and all(parameter.requires_grad for parameter in policy.parameters())
            and not PolicyParts(policy).have_hooks()
            and len({(parameter.dtype, parameter.device) for parameter in policy.parameters()}) == 1
        )

    def is_current(self) -> bool:
        """Return whether the policy still has the parts, memory and optimizers that this object was made from."""
        return (
            self._parts.are_current()
            and not self._parts.have_hooks()
            and self._addresses == self.addresses()
            and is_made_of(self.actor_optimizer, self.policy.actor.optimizer, self._flat["actor"])
            and is_made_of(self.critic_optimizer, self.policy.critic.optimizer, self._flat["critic"])
        )

    def addresses(self) -> tuple[Any, ...]:
        return self._parts.addresses()

    def scaled_actions(self, obs: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        actions: np.ndarray = self.actions(th.as_tensor(obs, device=self.device)).cpu().numpy()
        return actions.reshape(-1, *self._action_shape)

    def actions(self, obs: th.Tensor) -> th.Tensor:
        """
        Compute π(s) in float32, as ``predict`` does.

        :return: scaled actions, (b, d)
        """
        return self._acting.forward(_features(obs))[-1]

    def converted(self, batch: ReplayBufferSamples) -> AbstractContextManager[ReplayBufferSamples]:
        return nullcontext(batch)

    def target_actions(self, obs: th.Tensor) -> th.Tensor:
        return self._actor_target.forward(_features(obs))[-1]

    def target_q_values(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        return self._critics_target.forward(self._critic_input(_features(obs), actions))[-1]

    def q_values(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        self._critic_values = self._critics.forward(self._critic_input(_features(obs), actions))
        return self._critic_values[-1]

    def backward_critics(self, q: th.Tensor, grad: th.Tensor) -> None:
        self._critics.backward(self._critic_values, grad)

    def q1_of_policy(self, obs: th.Tensor) -> th.Tensor:
        features = _features(obs)
        self._actor_values = self._actor.forward(features)
        self._critic_1_values = self._critic_1.forward(th.cat([features, self._actor_values[-1]], dim=1))
        return self._critic_1_values[-1]

    def backward_actor(self, q1: th.Tensor, grad: th.Tensor) -> None:
        input_grad = self._critic_1.backward_to_input(self._critic_1_values, grad)
        action_dim = self._actor_values[-1].shape[1]
        self._actor.backward(self._actor_values, input_grad[:, -action_dim:])

    def _critic_input(self, features: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """Return the input of all critics, (n, b, f + d)."""
        return th.cat([features, actions], dim=1).expand(self.n_critics, -1, -1)


def _is_perceptron(modules: Iterable[nn.Module]) -> bool:
    """
    Return whether the modules are linear layers with a bias, each followed by at most one layer normalization and then
    at most one of ``ACTIVATIONS``.
    """
    allowed: tuple[str, ...] = ("linear",)
    for module in modules:
        kind = _kind(module)
        if kind not in allowed:
            return False
        followers = {"linear": ("norm", "activation", "linear"), "norm": ("activation", "linear")}
        allowed = followers.get(kind, ("linear",))
    return True


def _kind(module: nn.Module) -> str | None:
    """Return the kind of a module that the written-out gradients support, None for any other."""
    if type(module) is nn.Linear and module.bias is not None:
        return "linear"
    if type(module) is nn.LayerNorm and module.weight is not None and module.bias is not None:
        return "norm"
    # The derivative of ELU above assumes alpha = 1
    return "activation" if type(module) in ACTIVATIONS and getattr(module, "alpha", 1.0) == 1.0 else None


def _features(obs: th.Tensor) -> th.Tensor:
    """Return observations as SB3's preprocessing and ``FlattenExtractor`` would, (b, f)."""
    return obs.float().flatten(start_dim=1)


def _nets(network: nn.Module) -> list[Any]:
    """Return the perceptron of an actor, or those of all critics."""
    return network.q_networks if isinstance(network, ContinuousCritic) else [network.mu]


def _layers(nets: list[Any], flat: FlatParameters) -> list[Layer]:
    """
    Return networks of the same structure as layers that compute them all at once.

    :param nets: linear layers, layer normalizations and activations, in an order that ``_is_perceptron`` accepts
    :param flat: the memory of their parameters, and of gradients if they are learned
    """
    layers: list[Layer] = []
    for modules in zip(*nets, strict=True):
        if type(modules[0]) in ACTIVATIONS:
            layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(modules[0])])
            continue
        weights, biases = [module.weight for module in modules], [module.bias for module in modules]
        weight, bias = flat.stack(weights, flat.data), flat.stack(biases, flat.data).unsqueeze(1)
        grads = () if flat.grad is None else (flat.stack(weights, flat.grad), flat.stack(biases, flat.grad))
        if isinstance(modules[0], nn.LayerNorm):
            layers[-1] = layers[-1]._replace(norm=LayerNorm(weight.unsqueeze(1), bias, modules[0].eps, *grads))
        else:
            layers.append(Layer(weight, bias, ACTIVATIONS[nn.Identity], *grads))
    return layers


def _first(layer: Layer, is_learned: bool) -> Layer:
    """Return a layer of the first network only, with its memory for gradients if it is learned."""

    def first(grad: th.Tensor | None) -> th.Tensor | None:
        return grad[0] if is_learned and grad is not None else None

    norm = layer.norm
    if norm is not None:
        grads = first(norm.weight_grad), first(norm.bias_grad)
        norm = LayerNorm(norm.weight[0, 0], norm.bias[0, 0], norm.eps, *grads)
    grads = first(layer.weight_grad), first(layer.bias_grad)
    return Layer(layer.weight[0], layer.bias[0, 0], layer.activation, *grads, norm=norm)
