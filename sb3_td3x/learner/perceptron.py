"""
Values and gradients of TD3's networks.

``AutogradNetworks`` is for any networks. ``MlpNetworks`` is the chain rule written out for plain multi-layer
perceptrons: the same numbers up to rounding, without autograd's overhead for each operation.
"""

import operator
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, preprocess_obs
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import Actor as TD3Actor
from stable_baselines3.td3.policies import TD3Policy
from torch import nn

from sb3_td3x.learner.flat_adam import FlatAdam, FlatParameters
from sb3_td3x.policies import Actor, CriticEnsemble, Elementwise, SeparateCritics, StackedLinear, TD3XPolicy

aten = th.ops.aten

Optimizer = th.optim.Optimizer | FlatAdam

# Of the matrix products in the updates; parameters, their optimizers and all the rest are float32
PRECISIONS = ("float32", "bfloat16")

# SB3's features extractors for images
_CONVOLUTIONS = (NatureCNN, CombinedExtractor)
_NETWORK_NAMES = ("actor", "actor_target", "critic", "critic_target")


class Activation(NamedTuple):
    """
    An activation φ whose derivative follows from its value.

    :param forward: φ, in place
    :param backward: from the gradient of the value and the value itself, the gradient of the argument
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


class Layer(NamedTuple):
    """
    h' = φ(h Wᵀ + b), of one network, or of n at once.

    :param weight: W, (out, in) or (n, out, in)
    :param bias: b, (out,) or (n, 1, out)
    :param activation: φ
    :param weight_grad: where the gradient of W goes, of the same shape; None: no gradient is wanted
    :param bias_grad: where the gradient of b goes, (out,) or (n, out)
    """

    weight: th.Tensor
    bias: th.Tensor
    activation: Activation
    weight_grad: th.Tensor | None = None
    bias_grad: th.Tensor | None = None


class Mlp:
    """
    A multi-layer perceptron, or n of them side by side, on tensors that it shares with modules.

    :param layers: its layers
    """

    def __init__(self, layers: list[Layer]):
        self.layers = layers
        self._transposed_weights = [layer.weight.mT for layer in layers]
        stacked = layers[0].weight.dim() == 3
        self._linear = th.baddbmm if stacked else th.addmm
        self._product = th.bmm if stacked else th.mm

    def forward(self, x: th.Tensor) -> list[th.Tensor]:
        """
        :param x: inputs, (b, in), or (n, b, in)
        :return: h_0 = x, h_1, ... and the output, each (b, features), or (n, b, features)
        """
        values = [x]
        for layer, weight in zip(self.layers, self._transposed_weights, strict=True):
            values.append(layer.activation.forward(self._linear(layer.bias, values[-1], weight)))
        return values

    def backward(self, values: list[th.Tensor], grad: th.Tensor) -> None:
        """
        Write the gradients of all weights and biases.

        :param values: what ``forward`` returned
        :param grad: gradient of the output
        """
        for idx in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[idx]
            grad = layer.activation.backward(grad, values[idx + 1])
            self._product(grad.mT, values[idx], out=layer.weight_grad)
            th.sum(grad, dim=-2, out=layer.bias_grad)
            if idx > 0:
                grad = self._product(grad, layer.weight)

    def backward_to_input(self, values: list[th.Tensor], grad: th.Tensor) -> th.Tensor:
        """
        :param values: what ``forward`` returned
        :param grad: gradient of the output
        :return: gradient of the input
        """
        for idx in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[idx]
            grad = self._product(layer.activation.backward(grad, values[idx + 1]), layer.weight)
        return grad


class MixedPrecisionMlp(Mlp):
    """
    The same with products in bfloat16, accumulated in float32, and everything else in float32. The first and the last
    layer stay in float32: they are small, and eight bits are too few for observations and values.

    :param layers: its layers
    :param emulated: whether numbers are rounded to bfloat16 and multiplied in float32, which gives the same products:
        the way of processors without instructions for bfloat16, where PyTorch's own products are far slower
    """

    def __init__(self, layers: list[Layer], emulated: bool):
        super().__init__(layers)
        self._emulated = emulated
        self._reduced = [0 < idx < len(layers) - 1 for idx in range(len(layers))]
        self._weights = [layer.weight for layer in layers]

    def forward(self, x: th.Tensor) -> list[th.Tensor]:
        """
        :param x: inputs, (b, in), or (n, b, in)
        :return: what each layer was given, in the precision of its product, and the output
        """
        # Anew each time, since every update changes them
        self._weights = [self._rounded(layer.weight, idx) for idx, layer in enumerate(self.layers)]
        values = [x]
        for idx, layer in enumerate(self.layers):
            h = self._linear(self._rounded(layer.bias, idx), values[-1], self._weights[idx].mT)
            h = self._rounded(layer.activation.forward(self._rounded(h, idx)), idx)
            values.append(self._rounded(h, min(idx + 1, len(self.layers) - 1)))
        return values

    def backward(self, values: list[th.Tensor], grad: th.Tensor) -> None:
        for idx in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[idx]
            assert layer.weight_grad is not None
            assert layer.bias_grad is not None
            grad = self._backward_through_activation(values, grad, idx)
            layer.weight_grad.copy_(self._rounded(self._product(grad.mT, values[idx]), idx))
            th.sum(grad, dim=-2, dtype=layer.bias_grad.dtype, out=layer.bias_grad)
            if idx > 0:
                grad = self._rounded(self._product(grad, self._weights[idx]), idx)

    def backward_to_input(self, values: list[th.Tensor], grad: th.Tensor) -> th.Tensor:
        for idx in range(len(self.layers) - 1, -1, -1):
            grad = self._backward_through_activation(values, grad, idx)
            grad = self._rounded(self._product(grad, self._weights[idx]), idx)
        return grad

    def _backward_through_activation(self, values: list[th.Tensor], grad: th.Tensor, idx: int) -> th.Tensor:
        """
        :param values: what ``forward`` returned
        :param grad: gradient of the value of a layer
        :param idx: number of the layer
        :return: gradient of the argument of its activation, in the precision of the layer's product
        """
        grad = self.layers[idx].activation.backward(grad, values[idx + 1])
        # First in the precision of what came in, the next layer's, as in ``forward``
        return self._rounded(self._rounded(grad, min(idx + 1, len(self.layers) - 1)), idx)

    def _rounded(self, tensor: th.Tensor, idx: int) -> th.Tensor:
        """
        :param tensor: an operand or a result of the product of a layer
        :param idx: number of the layer
        :return: the same in the precision of that product
        """
        if not self._reduced[idx]:
            return tensor.to(self.layers[idx].weight.dtype)
        rounded = tensor.bfloat16()
        return rounded.to(self.layers[idx].weight.dtype) if self._emulated else rounded


class AutogradNetworks:
    """
    The networks of any policy, with autograd's gradients.

    :param policy: the policy
    :param bfloat16: whether products are in bfloat16 where PyTorch's automatic mixed precision thinks it is safe
    """

    def __init__(self, policy: TD3Policy, bfloat16: bool = False):
        self.policy = policy
        self._autocast = th.autocast(policy.device.type, th.bfloat16, enabled=bfloat16)
        self._parts = _Parts(policy)
        # A user's own extractor may rely on the order of numbers in memory
        self._converts_images = policy.device.type == "cpu" and policy.features_extractor_class in _CONVOLUTIONS
        self.parameters: dict[str, list[th.Tensor]] = {
            name: list(getattr(policy, name).parameters()) for name in _NETWORK_NAMES
        }
        self.critic_optimizer: Optimizer = policy.critic.optimizer
        self.actor_optimizer: Optimizer = policy.actor.optimizer

    def is_current(self) -> bool:
        """
        :return: whether the networks' parts and their optimizers still are what this was made from
        """
        return (
            self._parts.are_current()
            and self.critic_optimizer is self.policy.critic.optimizer
            and self.actor_optimizer is self.policy.actor.optimizer
        )

    def scaled_actions(self, obs: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        """
        :param obs: observations of vectorised envs
        :return: the policy's actions, not deterministic if it is stochastic, scaled to [-1, 1], (n_envs, *action_shape)
        """
        actions, _ = self.policy.predict(obs, deterministic=False)
        return self.policy.scale_action(actions)

    @contextmanager
    def converted(self, batch: ReplayBufferSamples) -> Iterator[ReplayBufferSamples]:
        """
        For the duration of an update the networks take images as SB3's preprocessing makes them, floats in [0, 1], with
        the channels last in memory, which convolutions on a CPU are faster with: converted once, not by each network.

        :param batch: transitions
        :return: the same with such images
        """
        if not self._converts_images:
            yield batch
            return
        networks = [getattr(self.policy, name) for name in _NETWORK_NAMES]
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
        :param obs: observations
        :return: π'(s), (b, d)
        """
        with th.no_grad(), self._autocast:
            actions: th.Tensor = self.policy.actor_target(obs)
        return actions.float()

    def target_q_values(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        :param obs: observations
        :param actions: scaled actions, (b, d)
        :return: Q'_i(s, a), (n, b, 1)
        """
        with th.no_grad():
            return self._q_values(self.policy.critic_target, obs, actions)

    def q_values(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        :param obs: observations
        :param actions: scaled actions, (b, d)
        :return: Q_i(s, a), (n, b, 1), for ``backward_critics``
        """
        return self._q_values(self.policy.critic, obs, actions)

    def backward_critics(self, q: th.Tensor, grad: th.Tensor) -> None:
        """
        Set the gradients of the critics' parameters.

        :param q: what ``q_values`` returned
        :param grad: gradient of the loss with respect to it
        """
        self.policy.critic.optimizer.zero_grad()
        q.backward(grad)

    def q1_of_policy(self, obs: th.Tensor) -> th.Tensor:
        """
        :param obs: observations
        :return: Q_1(s, π(s)), (b, 1), for ``backward_actor``
        """
        with self._autocast:
            return self.policy.critic.q1_forward(obs, self.policy.actor(obs)).float()

    def backward_actor(self, q1: th.Tensor, grad: th.Tensor) -> None:
        """
        Set the gradients of the actor's parameters.

        :param q1: what ``q1_of_policy`` returned
        :param grad: gradient of the loss with respect to it
        """
        self.policy.actor.optimizer.zero_grad()
        # The critics' own gradients are not needed
        inputs = [parameter for parameter in self.policy.actor.parameters() if parameter.requires_grad]
        if inputs:
            q1.backward(grad, inputs=inputs)

    def _q_values(self, critic: nn.Module, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        :param critic: the critics; a user's own policy class may have SB3's
        :param obs: observations
        :param actions: scaled actions, (b, d)
        :return: the values of all critics, (n, b, 1)
        """
        with self._autocast:
            if isinstance(critic, (CriticEnsemble, SeparateCritics)):
                return critic.q_values(obs, actions).float()
            separate: tuple[th.Tensor, ...] = critic(obs, actions)
            return th.stack(separate).float()


_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = (operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks"))


class _Parts:
    """
    The modules and parameters that a policy consists of, to notice when one of them is replaced.

    :param policy: the policy
    """

    def __init__(self, policy: TD3Policy):
        self._tables: list[dict[str, Any]] = [
            table for module in policy.modules() for table in (module._modules, module._parameters) if table
        ]
        self._entries = [(table, name, part) for table in self._tables for name, part in table.items()]
        self._module_hooks = [getattr(module, hooks) for module in policy.modules() for hooks in _MODULE_HOOKS]
        self._learned = [*policy.actor.parameters(), *policy.critic.parameters()]

    def have_hooks(self) -> bool:
        """
        :return: whether a user's functions are to be called when they compute values or gradients
        """
        return any(self._module_hooks) or any(any(map(hooks, self._learned)) for hooks in _PARAMETER_HOOKS)

    def are_current(self) -> bool:
        """
        :return: whether it still consists of these
        """
        return sum(map(len, self._tables)) == len(self._entries) and all(
            table.get(name) is part for table, name, part in self._entries
        )


class MlpNetworks:
    """
    The networks of a policy of plain multi-layer perceptrons, with the gradients written out. Same interface as
    ``AutogradNetworks``; only for what ``is_possible`` accepts.

    :param policy: the policy
    :param bfloat16: whether the products of the updates are in bfloat16
    """

    def __init__(self, policy: TD3Policy, bfloat16: bool = False):
        assert isinstance(policy.critic, CriticEnsemble)
        assert isinstance(policy.critic_target, CriticEnsemble)
        self.policy = policy
        self.n_critics = policy.critic.n_critics
        self._action_shape = policy.action_space.shape or ()
        flat = {
            name: FlatParameters(getattr(policy, name).parameters(), with_grad=name in ("actor", "critic"))
            for name in _NETWORK_NAMES
        }
        self._flat = flat
        self.parameters = {name: [parameters.data] for name, parameters in flat.items()}
        self.critic_optimizer = _make_optimizer(policy.critic.optimizer, flat["critic"])
        self.actor_optimizer = _make_optimizer(policy.actor.optimizer, flat["actor"])
        emulated = not has_bfloat16_instructions(policy.device)

        def make_mlp(layers: list[Layer]) -> Mlp:
            return MixedPrecisionMlp(layers, emulated) if bfloat16 else Mlp(layers)

        self._actor = make_mlp(_actor_layers(policy.actor, with_grad=True))
        self._actor_target = make_mlp(_actor_layers(policy.actor_target, with_grad=False))
        self._critics = make_mlp(_critic_layers(policy.critic, with_grad=True))
        self._critics_target = make_mlp(_critic_layers(policy.critic_target, with_grad=False))
        self._critic_1 = make_mlp(
            [layer._replace(weight=layer.weight[0], bias=layer.bias[0, 0]) for layer in self._critics.layers]
        )
        # Acts as `predict` does
        self._acting = Mlp(self._actor.layers)
        self._parts = _Parts(policy)
        self._policy_parameters = [*policy.parameters()]
        self._addresses = self._current_addresses()

    @staticmethod
    def is_possible(policy: TD3Policy) -> bool:
        """
        :param policy: a policy
        :return: whether all its networks are such perceptrons, on plain observations, with no parameter frozen, and
            without hooks, which only autograd calls
        """
        space = policy.observation_space
        return (
            # A subclass may act in another way
            type(policy) is TD3XPolicy
            and type(policy.actor) is Actor
            and type(policy.critic) is CriticEnsemble
            and policy.features_extractor_class is FlattenExtractor
            and isinstance(space, spaces.Box)
            and not is_image_space(space)
            and _is_perceptron(policy.actor.mu)
            and _is_perceptron(_without_wrappers(policy.critic.layers))
            and all(parameter.requires_grad for parameter in policy.parameters())
            and not _Parts(policy).have_hooks()
            and len({(parameter.dtype, parameter.device) for parameter in policy.parameters()}) == 1
        )

    def is_current(self) -> bool:
        """
        :return: whether the networks, where their gradients go and their optimizers still are what this was made from
        """
        return (
            self._parts.are_current()
            and not self._parts.have_hooks()
            and self._addresses == self._current_addresses()
            and _is_made_from(self.actor_optimizer, self.policy.actor.optimizer, self._flat["actor"])
            and _is_made_from(self.critic_optimizer, self.policy.critic.optimizer, self._flat["critic"])
        )

    def _current_addresses(self) -> list[tuple[int, int, bool]]:
        """
        :return: for each parameter where its numbers and its gradient are, and whether it is learned
        """
        return [(p.data_ptr(), id(p.grad), p.requires_grad) for p in self._policy_parameters]

    def scaled_actions(self, obs: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        tensor = th.as_tensor(obs, device=self._acting.layers[0].weight.device)
        actions: np.ndarray = self._acting.forward(_features(tensor))[-1].cpu().numpy()
        return actions.reshape(-1, *self._action_shape)

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
        """
        :param features: flat observations, (b, f)
        :param actions: scaled actions, (b, d)
        :return: the same input for each critic, (n, b, f + d)
        """
        return th.cat([features, actions], dim=1).expand(self.n_critics, -1, -1)


def make_networks(policy: TD3Policy, precision: str = "float32") -> AutogradNetworks | MlpNetworks:
    """
    :param policy: the policy
    :param precision: of the matrix products in the updates, one of ``PRECISIONS``
    :return: its networks, with the fastest gradients that are possible
    """
    make = MlpNetworks if MlpNetworks.is_possible(policy) else AutogradNetworks
    return make(policy, bfloat16=precision == "bfloat16")


def has_bfloat16_instructions(device: th.device) -> bool:
    """
    :param device: where the networks are
    :return: whether products in bfloat16 are faster there than in float32; True where it is not known
    """
    if device.type == "cuda":
        return bool(th.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    if platform.machine() in ("x86_64", "AMD64"):
        if hasattr(th.cpu, "get_capabilities"):
            capabilities = th.cpu.get_capabilities()
            return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
        return bool(th.cpu._is_avx512_bf16_supported())
    return True


def _is_perceptron(modules: Iterable[nn.Module]) -> bool:
    """
    :param modules: parts of a network
    :return: whether they are linear layers with a bias, each with one of ``ACTIVATIONS`` behind it at most
    """
    after_linear = False
    for module in modules:
        is_linear = type(module) in (nn.Linear, StackedLinear) and module.bias is not None
        # That of ELU is built into its derivative
        is_known = type(module) in ACTIVATIONS and getattr(module, "alpha", 1.0) == 1.0
        if not (is_linear or (is_known and after_linear)):
            return False
        after_linear = is_linear
    return True


def _without_wrappers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """
    :param modules: parts of critics
    :return: the same, activations as themselves
    """
    return [module.activation if isinstance(module, Elementwise) else module for module in modules]


def _make_optimizer(optimizer: th.optim.Optimizer, parameters: FlatParameters) -> Optimizer:
    """
    :param optimizer: the optimizer of a network
    :param parameters: its parameters
    :return: what does its steps
    """
    return FlatAdam(optimizer, parameters) if FlatAdam.is_possible(optimizer, parameters) else optimizer


def _is_made_from(own: Optimizer, optimizer: th.optim.Optimizer, parameters: FlatParameters) -> bool:
    """
    :param own: what ``_make_optimizer`` returned
    :param optimizer: the optimizer of the network now
    :param parameters: the network's parameters
    :return: whether it would return the same
    """
    if FlatAdam.is_possible(optimizer, parameters):
        return isinstance(own, FlatAdam) and own.optimizer is optimizer
    return own is optimizer


def _convert_images(obs: Any, space: spaces.Space, normalize: bool) -> Any:
    """
    :param obs: observations, (b, ...), or a dictionary of them
    :param space: their space
    :param normalize: whether images are divided by 255
    :return: the same, images (b, channels, height, width) as floats with the channels last in memory
    """
    if isinstance(space, spaces.Dict):
        return {key: _convert_images(value, space[key], normalize) for key, value in obs.items()}
    if obs.dim() != 4 or not isinstance(space, spaces.Box):
        return obs
    return preprocess_obs(obs.contiguous(memory_format=th.channels_last), space, normalize)


def _features(obs: th.Tensor) -> th.Tensor:
    """
    :param obs: observations, (b, ...)
    :return: what SB3's preprocessing and ``FlattenExtractor`` make of them, (b, f)
    """
    return obs.float().flatten(start_dim=1)


def _actor_layers(actor: TD3Actor, with_grad: bool) -> list[Layer]:
    """
    :param actor: an actor
    :param with_grad: whether gradients are wanted
    :return: its layers
    """
    return _layers(list(actor.mu), with_grad, lambda bias: bias)


def _critic_layers(critic: CriticEnsemble, with_grad: bool) -> list[Layer]:
    """
    :param critic: critics
    :param with_grad: whether gradients are wanted
    :return: their layers
    """
    return _layers(_without_wrappers(critic.layers), with_grad, lambda bias: bias.unsqueeze(1))


def _layers(modules: list[nn.Module], with_grad: bool, broadcast: Callable[[th.Tensor], th.Tensor]) -> list[Layer]:
    """
    :param modules: linear layers and activations in turn, the last activation may be missing
    :param with_grad: whether gradients are wanted
    :param broadcast: from a bias to what is added to (n, b, out)
    :return: the same as layers
    """
    layers: list[Layer] = []
    for module in modules:
        if type(module) in ACTIVATIONS:
            layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(module)])
            continue
        weight, bias = module.weight, module.bias
        assert isinstance(weight, nn.Parameter)
        assert isinstance(bias, nn.Parameter)
        layers.append(
            Layer(
                weight.detach(),
                broadcast(bias.detach()),
                ACTIVATIONS[nn.Identity],
                weight.grad if with_grad else None,
                bias.grad if with_grad else None,
            )
        )
    return layers
