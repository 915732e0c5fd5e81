"""Policies of TD3X: SB3's TD3 policies, with all critics computed as one batched network."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BaseModel, BasePolicy, ContinuousCritic
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.sac.policies import Actor as SACActor
from stable_baselines3.td3.policies import Actor as TD3Actor
from stable_baselines3.td3.policies import TD3Policy
from torch import nn
from torch.utils.dlpack import from_dlpack

from sb3_td3x.files.records import register_class
from sb3_td3x.validation import check_bool, check_integer

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}

# Critics can be computed at once if activations and optimizers act on each number separately
_ELEMENTWISE_ACTIVATIONS = {*ACTIVATIONS.values(), nn.CELU, nn.Hardtanh, nn.Identity, nn.SELU, nn.Sigmoid, nn.Softplus}
_ELEMENTWISE_OPTIMIZERS = {
    th.optim.Adadelta,
    th.optim.Adagrad,
    th.optim.Adam,
    th.optim.Adamax,
    th.optim.AdamW,
    th.optim.NAdam,
    th.optim.RAdam,
    th.optim.RMSprop,
    th.optim.SGD,
    RMSpropTFLike,
}

# Options that choose an optimizer's kernel: they depend on the machine, not on the agent
OPTIMIZER_KERNEL_OPTIONS = ("capturable", "foreach", "fused")


def own_storage(view: th.Tensor) -> th.Tensor:
    """
    Return a tensor on the same memory whose storage holds nothing else, because a pickle of a tensor contains its
    whole storage.

    :param view: a contiguous part of a tensor, without gradient
    :return: the same numbers at the same address; ``view`` itself on devices other than CPUs and CUDA's
    """
    if view.device.type not in ("cpu", "cuda"):
        return view
    alone: th.Tensor = from_dlpack(view)
    return alone


class Stacked(nn.Module):
    """
    The same layer of each critic, with their weights stacked.

    ``forward`` computes all critics, (n_critics, batch, features), and ``first`` the first one, (batch, features).

    :param layers: this layer of each critic, in the critics' order
    """

    def __init__(self, layers: Sequence[nn.Linear | nn.LayerNorm]):
        super().__init__()
        self.weight = nn.Parameter(th.stack([layer.weight.detach() for layer in layers]))
        self.bias = nn.Parameter(th.stack([layer.bias.detach() for layer in layers]))


class StackedLinear(Stacked):
    """One linear layer of each critic, computed as one batched matrix product."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return th.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)

    def first(self, x: th.Tensor) -> th.Tensor:
        return nn.functional.linear(x, self.weight[0], self.bias[0])


class StackedLayerNorm(Stacked):
    """One layer normalization of each critic, with separate weights for each."""

    def __init__(self, layers: Sequence[nn.LayerNorm]):
        super().__init__(layers)
        self.eps = layers[0].eps

    def forward(self, x: th.Tensor) -> th.Tensor:
        normalized = nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)
        return th.addcmul(self.bias.unsqueeze(1), normalized, self.weight.unsqueeze(1))

    def first(self, x: th.Tensor) -> th.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight[0], self.bias[0], self.eps)


class Elementwise(nn.Module):
    """An activation without parameters, shared by all critics."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.activation = activation

    def forward(self, x: th.Tensor) -> th.Tensor:
        activated: th.Tensor = self.activation(x)
        return activated

    first = forward


def _normalized_mlp(
    input_dim: int, output_dim: int, net_arch: list[int], activation_fn: type[nn.Module]
) -> list[nn.Module]:
    """Return the layers of SB3's MLP, with layer normalization before each activation."""
    return create_mlp(input_dim, output_dim, net_arch, activation_fn, post_linear_modules=[nn.LayerNorm])


def _stack(layers: list[Any]) -> StackedLinear | StackedLayerNorm | Elementwise:
    """Return the same layer of each critic as one module."""
    if isinstance(layers[0], nn.Linear):
        return StackedLinear(layers)
    if isinstance(layers[0], nn.LayerNorm):
        return StackedLayerNorm(layers)
    return Elementwise(layers[0])


def _view(layer: nn.Module, critic: int) -> nn.Module:
    """Return the layer of one critic, with the same memory."""
    if isinstance(layer, Elementwise):
        return layer.activation
    assert isinstance(layer, StackedLinear | StackedLayerNorm)
    view: nn.Linear | nn.LayerNorm
    if isinstance(layer, StackedLinear):
        view = nn.utils.skip_init(nn.Linear, layer.weight.shape[2], layer.weight.shape[1])
    else:
        view = nn.LayerNorm(layer.weight.shape[1:], eps=layer.eps)
    view.weight = nn.Parameter(layer.weight.detach()[critic], requires_grad=False)
    view.bias = nn.Parameter(layer.bias.detach()[critic], requires_grad=False)
    return view


class CriticEnsemble(BaseModel):
    """
    The critics Q_1 ... Q_n of TD3 (Fujimoto et al. 2018, algorithm 1), all computed at once.

    A drop-in replacement for SB3's ``ContinuousCritic``: a seed gives the same initial weights, and the state
    dictionary has the same keys and shapes, so weights can be exchanged. ``q_networks`` and ``qf0``, ``qf1``, ... are
    the critics as networks of SB3, to read: they share the weights, and take no gradients. The arguments are those of
    ``ContinuousCritic``, and:

    :param layer_norm: Whether to normalize each hidden layer before its activation (Ba et al. 2016)
    """

    features_extractor: BaseFeaturesExtractor

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        activation_fn: type[nn.Module] = nn.ReLU,
        normalize_images: bool = True,
        n_critics: int = 2,
        share_features_extractor: bool = True,
        layer_norm: bool = False,
    ):
        super().__init__(
            observation_space,
            action_space,
            features_extractor=features_extractor,
            normalize_images=normalize_images,
        )
        self.share_features_extractor = share_features_extractor
        self.n_critics = n_critics
        input_dim = features_dim + get_action_dim(action_space)
        # Build one critic after the other, as SB3 does, so that a seed gives the same initial weights
        make_layers = _normalized_mlp if layer_norm else create_mlp
        critics = [make_layers(input_dim, 1, net_arch, activation_fn) for _ in range(n_critics)]
        self.layers = nn.ModuleList(_stack(list(layers)) for layers in zip(*critics, strict=True))
        self.register_state_dict_post_hook(_split_into_critics)
        self.register_load_state_dict_pre_hook(_join_critics)

    def q_values(self, obs: PyTorchObs, actions: th.Tensor) -> th.Tensor:
        """
        Compute the values of all critics.

        :param obs: observations of a batch
        :param actions: scaled actions, (batch, action_dim)
        :return: values, (n_critics, batch, 1)
        """
        # A shared features extractor learns from the actor's loss only
        with th.set_grad_enabled(th.is_grad_enabled() and not self.share_features_extractor):
            features = self.extract_features(obs, self.features_extractor)
        x = th.cat([features, actions], dim=1).expand(self.n_critics, -1, -1)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, obs: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, ...]:
        """Compute the values of each critic, (batch, 1), as SB3's critics do."""
        return self.q_values(obs, actions).unbind()

    def q1_forward(self, obs: PyTorchObs, actions: th.Tensor) -> th.Tensor:
        """
        Compute the values of the first critic only.

        :param obs: observations of a batch
        :param actions: scaled actions, (batch, action_dim)
        :return: values, (batch, 1)
        """
        # The actor's loss has a gradient through the actions only
        with th.no_grad():
            features = self.extract_features(obs, self.features_extractor)
        x = th.cat([features, actions], dim=1)
        for layer in self.layers:
            x = layer.first(x)  # type: ignore[operator]
        return x

    def __getattr__(self, name: str) -> Any:
        # SB3's names of its critics: `q_networks` is a list of them, `qf0` the first
        index = name.removeprefix("qf")
        if name == "q_networks" or (index != name and index.isdecimal() and int(index) < self.n_critics):
            networks = [nn.Sequential(*(_view(layer, idx) for layer in self.layers)) for idx in range(self.n_critics)]
            return networks if name == "q_networks" else networks[int(index)]
        return super().__getattr__(name)

    def sb3_parameters(self) -> list[tuple[nn.Parameter, int | None]]:
        """
        List the parameters in the order of SB3's ``ContinuousCritic`` and of its optimizer's state.

        :return: for each of SB3's parameters the parameter here that contains it, and the index of its critic in that
            parameter, or None if all critics share it
        """
        order: list[tuple[nn.Parameter, int | None]] = [
            (parameter, None) for parameter in self.features_extractor.parameters()
        ]
        for critic in range(self.n_critics):
            order += [(parameter, critic) for parameter in self.layers.parameters()]
        return order


def _split_into_critics(module: nn.Module, state_dict: dict[str, th.Tensor], prefix: str, local_metadata: Any) -> None:
    """Name the parameters critic by critic as SB3 does, ``qf0.0.weight``. A hook of ``state_dict()``."""
    assert isinstance(module, CriticEnsemble)
    stacked = {name: state_dict.pop(f"{prefix}layers.{name}") for name, _ in module.layers.named_parameters()}
    for critic in range(module.n_critics):
        for name, tensor in stacked.items():
            part = tensor[critic]
            # With `keep_vars=True` the tensors are part of autograd's graph
            state_dict[f"{prefix}qf{critic}.{name}"] = part if part.requires_grad else own_storage(part)


def _join_critics(
    module: nn.Module,
    state_dict: dict[str, th.Tensor],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    """Undo ``_split_into_critics``. A hook of ``load_state_dict()``. Critics that are missing keep their weights."""
    assert isinstance(module, CriticEnsemble)
    for name, parameter in module.layers.named_parameters():
        keys = [f"{prefix}qf{critic}.{name}" for critic in range(module.n_critics)]
        given = {key: state_dict.pop(key) for key in keys if key in state_dict}
        if given:
            missing_keys += [key for key in keys if key not in given]
            device = next(iter(given.values())).device
            of_all = [given[key] if key in given else own.to(device) for key, own in zip(keys, parameter, strict=True)]
            state_dict[f"{prefix}layers.{name}"] = th.stack(of_all).detach()


class SeparateCritics(ContinuousCritic):
    """
    SB3's critics, one network each, for activations and optimizers that ``CriticEnsemble`` does not support.

    :param layer_norm: Whether to normalize each hidden layer before its activation
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        activation_fn: type[nn.Module] = nn.ReLU,
        layer_norm: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            observation_space, action_space, net_arch, features_extractor, features_dim, activation_fn, **kwargs
        )
        if layer_norm:
            input_dim = features_dim + get_action_dim(action_space)
            for idx in range(self.n_critics):
                self.q_networks[idx] = nn.Sequential(*_normalized_mlp(input_dim, 1, net_arch, activation_fn))
                self.add_module(f"qf{idx}", self.q_networks[idx])

    def q_values(self, obs: PyTorchObs, actions: th.Tensor) -> th.Tensor:
        """Compute the values of all critics, as ``CriticEnsemble.q_values`` does."""
        return th.stack(self(obs, actions))


class Actor(TD3Actor):
    """
    SB3's deterministic actor, with optional layer normalization.

    :param layer_norm: Whether to normalize each hidden layer before its activation
    """

    def __init__(self, *args: Any, layer_norm: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.layer_norm = layer_norm
        if layer_norm:
            output_dim = get_action_dim(self.action_space)
            layers = _normalized_mlp(self.features_dim, output_dim, self.net_arch, self.activation_fn)
            self.mu = nn.Sequential(*layers, nn.Tanh())

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "layer_norm": self.layer_norm}


class StochasticActor(SACActor):
    """
    A squashed Gaussian actor, for studies without TD3's deterministic policy: SAC's actor, trained by
    reparameterization without an entropy term.

    :param layer_norm: Whether to normalize each hidden layer before its activation
    """

    def __init__(self, *args: Any, layer_norm: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.layer_norm = layer_norm
        if layer_norm:
            layers = _normalized_mlp(self.features_dim, -1, self.net_arch, self.activation_fn)
            self.latent_pi = nn.Sequential(*layers)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "layer_norm": self.layer_norm}


@register_class
class TD3XPolicy(TD3Policy):
    """
    Policy class (with both actor and critics) for TD3X: SB3's ``TD3Policy`` with batched critics and more options.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule (could be constant)
    :param net_arch: Number of units of each hidden layer, ``[400, 300]`` or ``dict(pi=[400, 300], qf=[400, 300])``
    :param activation_fn: Activation function
    :param features_extractor_class: Features extractor to use; None: ``FlattenExtractor``, for ``CnnPolicy``
        ``NatureCNN``, for ``MultiInputPolicy`` ``CombinedExtractor``
    :param features_extractor_kwargs: Keyword arguments to pass to the features extractor.
    :param normalize_images: Whether to normalize images or not, dividing by 255.0 (True by default)
    :param optimizer_class: The optimizer to use, ``th.optim.Adam`` by default
    :param optimizer_kwargs: Additional keyword arguments, excluding the learning rate, to pass to the optimizer
    :param n_critics: Number of critics, at least 1
    :param share_features_extractor: Whether to share or not the features extractor between the actor and the critics
    :param layer_norm: Whether to normalize the critics' hidden layers before their activation (Ba et al. 2016)
    :param actor_layer_norm: The same for the actor
    :param critic_activation_fn: Activation function of the critics: a class or a name such as ``"tanh"``, see
        ``ACTIVATIONS``; None: ``activation_fn``
    :param stochastic_actor: Whether the policy is a squashed Gaussian instead of deterministic
    """

    critic: CriticEnsemble | SeparateCritics  # type: ignore[assignment]
    critic_target: CriticEnsemble | SeparateCritics  # type: ignore[assignment]
    default_features_extractor_class: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.ReLU,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        n_critics: int = 2,
        share_features_extractor: bool = False,
        layer_norm: bool = False,
        actor_layer_norm: bool = False,
        critic_activation_fn: type[nn.Module] | str | None = None,
        stochastic_actor: bool = False,
    ):
        n_critics = check_integer("n_critics", n_critics, low=1)
        # The parent's constructor builds the networks
        self.layer_norm = check_bool("layer_norm", layer_norm)
        self.actor_layer_norm = check_bool("actor_layer_norm", actor_layer_norm)
        self.critic_activation_fn = _activation("critic_activation_fn", critic_activation_fn)
        if isinstance(activation_fn, str):
            raise ValueError(f"activation_fn={activation_fn!r} is not allowed, expected a class of PyTorch modules")
        self.stochastic_actor = check_bool("stochastic_actor", stochastic_actor)
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch,
            activation_fn,
            features_extractor_class or self.default_features_extractor_class,
            features_extractor_kwargs,
            normalize_images,
            optimizer_class,
            _with_fused_kernel(optimizer_class, optimizer_kwargs),
            n_critics,
            share_features_extractor,
        )

    def make_actor(self, features_extractor: BaseFeaturesExtractor | None = None) -> Actor:
        actor_kwargs = self._update_features_extractor(self.actor_kwargs, features_extractor)
        actor_class = StochasticActor if self.stochastic_actor else Actor
        return actor_class(**actor_kwargs, layer_norm=self.actor_layer_norm).to(self.device)  # type: ignore[return-value]

    def make_critic(  # type: ignore[override]
        self, features_extractor: BaseFeaturesExtractor | None = None
    ) -> CriticEnsemble | SeparateCritics:
        critic_kwargs = self._update_features_extractor(self.critic_kwargs, features_extractor)
        if self.critic_activation_fn is not None:
            critic_kwargs["activation_fn"] = self.critic_activation_fn
        batched = (
            critic_kwargs["activation_fn"] in _ELEMENTWISE_ACTIVATIONS
            and self.optimizer_class in _ELEMENTWISE_OPTIMIZERS
        )
        critic_class = CriticEnsemble if batched else SeparateCritics
        return critic_class(**critic_kwargs, layer_norm=self.layer_norm).to(self.device)

    def set_training_mode(self, mode: bool) -> None:
        """
        Put the policy in either training or evaluation mode, as SB3 does before each rollout and each training.

        :param mode: if true, set to training mode, else set to evaluation mode
        """
        _set_training_mode(self.actor, mode)
        _set_training_mode(self.critic, mode)
        self.training = mode

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # `deterministic` matters for the stochastic actor only
        return self.actor._predict(observation, deterministic)

    def unscale_action(self, scaled_action: Any) -> Any:
        """
        Rescale actions from [-1, 1] to the action space. Rounding never exceeds its bounds.

        :param scaled_action: actions in [-1, 1]
        :return: actions in the action space
        """
        assert isinstance(self.action_space, spaces.Box)
        actions = super().unscale_action(scaled_action).clip(self.action_space.low, self.action_space.high)
        # Noise may have another precision
        return actions.astype(self.action_space.dtype, copy=False)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            **super()._get_constructor_parameters(),
            "layer_norm": self.layer_norm,
            "actor_layer_norm": self.actor_layer_norm,
            "critic_activation_fn": self.critic_activation_fn,
            "stochastic_actor": self.stochastic_actor,
        }


MlpPolicy = TD3XPolicy


@register_class
class CnnPolicy(TD3XPolicy):
    """Policy class for image observations: ``TD3XPolicy`` with ``NatureCNN`` as the default features extractor."""

    default_features_extractor_class = NatureCNN


@register_class
class MultiInputPolicy(TD3XPolicy):
    """Policy class for Dict observations: ``TD3XPolicy`` with ``CombinedExtractor`` as the default."""

    default_features_extractor_class = CombinedExtractor


def _set_training_mode(module: nn.Module, mode: bool) -> None:
    """Do ``module.train(mode)`` ten times as fast, which saves a tenth of a step of small networks."""
    if type(module).train is not nn.Module.train:
        module.train(mode)
        return
    vars(module)["training"] = mode
    for child in module._modules.values():
        if child is not None:
            _set_training_mode(child, mode)


def _activation(name: str, value: type[nn.Module] | str | None) -> type[nn.Module] | None:
    """Return the activation class that an argument names."""
    if isinstance(value, str) and value in ACTIVATIONS:
        return ACTIVATIONS[value]
    if value is None or (isinstance(value, type) and issubclass(value, nn.Module)):
        return value
    raise ValueError(
        f"{name}={value!r} is not allowed, expected a class of PyTorch modules or one of {sorted(ACTIVATIONS)}"
    )


def _with_fused_kernel(
    optimizer_class: type[th.optim.Optimizer], optimizer_kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """Add Adam's fused kernel, one pass over memory, to the user's arguments unless they choose a kernel."""
    kwargs = dict(optimizer_kwargs or {})
    if optimizer_class in (th.optim.Adam, th.optim.AdamW) and not kwargs.keys() & set(OPTIMIZER_KERNEL_OPTIONS):
        kwargs["fused"] = True
    return kwargs


def is_stochastic(policy: BasePolicy) -> bool:
    """Return whether a policy, maybe of a user's own class, samples its actions and so needs no exploration noise."""
    return bool(getattr(policy, "stochastic_actor", False))


class PolicyNetwork:
    """An attribute of an agent that is the network with the same name in the agent's policy."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else getattr(model.policy, self._name)

    def __set__(self, model: Any, network: nn.Module) -> None:
        setattr(model.policy, self._name, network)
