"""Policies of TD3X: SB3's TD3 policies, with more options."""

from copy import deepcopy
from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy, ContinuousCritic
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.sac.policies import Actor as SACActor
from stable_baselines3.td3.policies import Actor, TD3Policy
from torch import nn

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

# Options that choose an optimizer's kernel: they depend on the machine, not on the agent
OPTIMIZER_KERNEL_OPTIONS = ("capturable", "foreach", "fused")


@register_class
class TD3XPolicy(TD3Policy):
    """
    Policy class (with both actor and critics) for TD3X: SB3's ``TD3Policy`` with more options.

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
    :param stochastic_actor: Whether the policy is a squashed Gaussian instead of deterministic, for studies: SAC's
        actor, trained by reparameterization without an entropy term
    :param n_quantiles: Number of quantiles of the return that each critic estimates, as in TQC (Kuznetsov et al. 2020,
        with 25), at least 1; 1: the value itself
    """

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
        n_quantiles: int = 1,
    ):
        n_critics = check_integer("n_critics", n_critics, low=1)
        # The parent's constructor builds the networks
        self.n_quantiles = check_integer("n_quantiles", n_quantiles, low=1)
        self.layer_norm = check_bool("layer_norm", layer_norm)
        self.actor_layer_norm = check_bool("actor_layer_norm", actor_layer_norm)
        self.critic_activation_fn = _activation("critic_activation_fn", critic_activation_fn)
        if isinstance(activation_fn, str):
            raise ValueError(f"activation_fn={activation_fn!r} is not allowed, expected a class of PyTorch modules")
        self.stochastic_actor = check_bool("stochastic_actor", stochastic_actor)
        # The actor that plays, if it is not the newest: the policy checkpoint or the average
        self.checkpoint_actor: Actor | None = None
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
        actor_class: Any = SACActor if self.stochastic_actor else Actor
        actor: Actor = actor_class(**actor_kwargs)
        if self.actor_layer_norm:
            network = getattr(actor, "latent_pi" if self.stochastic_actor else "mu")
            _add_layer_norm(network, has_output=not self.stochastic_actor)
        return actor.to(self.device)

    def make_critic(self, features_extractor: BaseFeaturesExtractor | None = None) -> ContinuousCritic:
        critic_kwargs = self._update_features_extractor(self.critic_kwargs, features_extractor)
        if self.critic_activation_fn is not None:
            critic_kwargs["activation_fn"] = self.critic_activation_fn
        critic = ContinuousCritic(**critic_kwargs)
        networks: list[Any] = critic.q_networks
        for network in networks:
            if self.n_quantiles > 1:
                network[-1] = nn.Linear(network[-1].in_features, self.n_quantiles)
            if self.layer_norm:
                _add_layer_norm(network, has_output=True)
        return critic.to(self.device)

    def set_training_mode(self, mode: bool) -> None:
        """
        Put the policy in either training or evaluation mode, as SB3 does before each rollout and each training.

        :param mode: if true, set to training mode, else set to evaluation mode
        """
        _set_training_mode(self.actor, mode)
        _set_training_mode(self.critic, mode)
        self.training = mode

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # The training explores with the newest policy
        actor = self.playing_actor if deterministic else self.actor
        return actor._predict(observation, deterministic)

    @property
    def playing_actor(self) -> Actor:
        """The actor of deterministic actions: the policy checkpoint or the average if there is one"""
        return self.actor if self.checkpoint_actor is None else self.checkpoint_actor

    def keep_actor(self) -> None:
        """Let the actor as it is now play, also after later updates."""
        if self.checkpoint_actor is None:
            # The actor itself comes with its optimizer
            self.checkpoint_actor = deepcopy(self.actor_target).eval()
        self.checkpoint_actor.load_state_dict(self.actor.state_dict())

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
            "n_quantiles": self.n_quantiles,
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


def _add_layer_norm(network: Any, has_output: bool) -> None:
    """
    Normalize the hidden layers of a perceptron before their activation (Ba et al. 2016).

    :param has_output: whether the last linear layer is the output
    """
    linear = [idx for idx, layer in enumerate(network) if isinstance(layer, nn.Linear)]
    for idx in reversed(linear[:-1] if has_output else linear):
        network.insert(idx + 1, nn.LayerNorm(network[idx].out_features))


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
