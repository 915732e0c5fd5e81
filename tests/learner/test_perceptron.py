"""The written-out gradients compared with autograd, bfloat16, and following changes of the networks."""

import io
import warnings
from copy import deepcopy
from functools import partial
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch as th
from comparing import assert_same_weights
from envs import saved_and_loaded, tiny_agent
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import TD3
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

from sb3_td3x import TD3X, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_td3x.learner.autograd import AutogradNetworks
from sb3_td3x.learner.perceptron import ACTIVATIONS, Layer, LayerNorm, Mlp, MlpNetworks
from sb3_td3x.learner.update import make_networks

NETS = st.lists(st.integers(1, 24), max_size=3)


def make_policy(**kwargs: Any) -> MlpPolicy:
    th.manual_seed(0)
    return MlpPolicy(spaces.Box(-5, 5, (3, 2)), spaces.Box(-2, 1, (2,)), lambda _: 1e-3, **kwargs)


@given(
    net=NETS,
    n=st.integers(0, 4),
    batch=st.integers(1, 9),
    name=st.sampled_from(sorted(ACTIVATIONS, key=str)),
    layer_norm=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_chain_rule_in_double_precision(
    net: list[int], n: int, batch: int, name: type[nn.Module], layer_norm: bool
) -> None:
    """
    Compare gradients of parameters and input with autograd to 1e-12, with layer normalization to 1e-9.

    Any widths and activation, for one network (n = 0) or n stacked networks.
    """
    th.manual_seed(batch)
    ensemble = (n,) if n else ()
    sizes = [4, *net, 2]
    weights = [th.randn(*ensemble, out, in_, dtype=th.double) for in_, out in pairwise(sizes)]
    biases = [th.randn(*ensemble, *([1] if n else []), out, dtype=th.double) for out in sizes[1:]]
    bias_grads = [th.zeros(*ensemble, out, dtype=th.double) for out in sizes[1:]]
    activation = ACTIVATIONS[name]
    # Layer normalization before each activation
    factors = [th.randn_like(bias) for bias in biases]
    shifts = [th.randn_like(bias) for bias in biases]
    norms = [
        LayerNorm(factor, shift, 1e-5, th.zeros_like(grad), th.zeros_like(grad)) if layer_norm else None
        for factor, shift, grad in zip(factors, shifts, bias_grads, strict=True)
    ]
    mlp = Mlp(
        [
            Layer(w, b, activation, th.zeros_like(w), g, norm)
            for w, b, g, norm in zip(weights, biases, bias_grads, norms, strict=True)
        ]
    )
    x, grad = th.randn(*ensemble, batch, 4, dtype=th.double), th.randn(*ensemble, batch, 2, dtype=th.double)

    parameters = [weights, biases, *([factors, shifts] if layer_norm else [])]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *chain(*parameters))]
    value, module = leaves[0], name()
    for idx in range(len(weights)):
        weight, bias, *norm = leaves[1 + idx :: len(weights)]
        value = value @ weight.mT + bias
        if norm:
            value = nn.functional.layer_norm(value, value.shape[-1:]) * norm[0] + norm[1]
        value = module(value)
    value.backward(grad)

    values = mlp.forward(x)
    mlp.backward(values, grad)
    actual = [mlp.backward_to_input(values, grad), *(layer.weight_grad for layer in mlp.layers), *bias_grads]
    if layer_norm:
        actual += [norm.weight_grad for norm in norms if norm] + [norm.bias_grad for norm in norms if norm]
    th.testing.assert_close(values[-1], value.detach(), rtol=0, atol=1e-12)
    for mine, leaf in zip(actual, leaves, strict=True):
        assert mine is not None
        assert leaf.grad is not None
        # The inverse of the variance is large if two features are nearly equal
        tolerance = 1e-9 * max(1.0, leaf.grad.abs().max().item()) if layer_norm else 1e-12
        th.testing.assert_close(mine.reshape(leaf.grad.shape), leaf.grad, rtol=1e-12, atol=tolerance)


def values_and_gradients(networks: AutogradNetworks | MlpNetworks, batch: int) -> list[th.Tensor]:
    """Return all values and gradients that an update needs, for random inputs."""
    policy = networks.policy
    generator = th.Generator().manual_seed(batch)
    obs, actions = th.randn(batch, 3, 2, generator=generator), th.rand(batch, 2, generator=generator) * 2 - 1
    q = networks.q_values(obs, actions)
    networks.backward_critics(q, th.randn(q.shape, generator=generator))
    q1 = networks.q1_of_policy(obs)
    networks.backward_actor(q1, th.randn(q1.shape, generator=generator))
    grads = [parameter.grad for net in (policy.critic, policy.actor) for parameter in net.parameters()]
    values = [networks.target_actions(obs), networks.target_q_values(obs, actions), q, q1, *grads]
    return [value.detach().clone() for value in values if value is not None]


@given(
    pi=NETS,
    qf=NETS,
    n_critics=st.integers(1, 4),
    activation=st.sampled_from(sorted(ACTIVATIONS, key=str)),
    critic_activation=st.sampled_from(["relu", "tanh", "elu"]),
    batch=st.integers(1, 9),
    layer_norm=st.booleans(),
    actor_layer_norm=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_values_and_gradients_of_a_policy_equal_autograd(
    pi: list[int],
    qf: list[int],
    n_critics: int,
    activation: type[nn.Module],
    critic_activation: str,
    batch: int,
    layer_norm: bool,
    actor_layer_norm: bool,
) -> None:
    """To 1e-6 of the largest gradient, with layer normalization to 1e-5."""
    if layer_norm or actor_layer_norm:
        # It magnifies rounding errors where few features are nearly equal: left to the test in double precision
        pi, qf = [width + 8 for width in pi], [width + 8 for width in qf]
    policy = make_policy(
        net_arch={"pi": pi, "qf": qf},
        n_critics=n_critics,
        activation_fn=activation,
        critic_activation_fn=critic_activation,
        layer_norm=layer_norm,
        actor_layer_norm=actor_layer_norm,
    )
    tolerance = 1e-5 if layer_norm or actor_layer_norm else 1e-6
    expected = values_and_gradients(AutogradNetworks(policy), batch)
    for mine, theirs in zip(values_and_gradients(MlpNetworks(policy), batch), expected, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        np.testing.assert_allclose(mine.numpy() / scale, theirs.numpy() / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("cls", [MlpNetworks, AutogradNetworks])
def test_bfloat16_is_near_float32(cls: type[MlpNetworks] | type[AutogradNetworks]) -> None:
    """Values and gradients have two to three correct digits, and are stored in float32."""
    policy = make_policy(net_arch=[32, 32, 32], activation_fn=nn.Tanh)
    expected = values_and_gradients(cls(policy), 64)
    actual = values_and_gradients(cls(policy, bfloat16=True), 64)
    assert {value.dtype for value in actual} == {th.float32}
    errors = [((low - full).norm() / full.norm()).item() for low, full in zip(actual, expected, strict=True)]
    assert 1e-4 < max(errors) < 0.02


def test_bfloat16_is_not_used_on_a_cpu() -> None:
    """The first update warns. The argument is saved, so that it is used on a GPU later."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny_agent(precision="bfloat16")
    with pytest.warns(UserWarning, match=r"precision='bfloat16' is not used on this device \(cpu\)"):
        model.learn(20)
    assert_same_weights(tiny_agent().learn(20), model)
    assert saved_and_loaded(model).precision == "bfloat16"


@pytest.mark.parametrize("net_arch", [[], [16]])
def test_first_and_last_layer_are_computed_in_float32(net_arch: list[int]) -> None:
    policy = make_policy(net_arch=net_arch)
    expected = values_and_gradients(MlpNetworks(policy), 8)
    for low, full in zip(values_and_gradients(MlpNetworks(policy, bfloat16=True), 8), expected, strict=True):
        th.testing.assert_close(low, full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"stochastic_actor": True},
        {"activation_fn": nn.GELU},
        {"critic_activation_fn": "silu"},
        {"activation_fn": nn.PReLU},
        # The written-out derivative assumes alpha = 1
        {"activation_fn": partial(nn.ELU, alpha=0.2), "critic_activation_fn": "relu"},
    ],
)
def test_other_networks_use_autograd(kwargs: dict[str, Any]) -> None:
    assert isinstance(make_networks(make_policy(net_arch=[4], **kwargs)), AutogradNetworks)
    assert isinstance(make_networks(make_policy(net_arch=[4])), MlpNetworks)


@pytest.mark.parametrize("layer", [nn.Linear(3, 5), nn.Linear(2, 4), nn.Sequential(nn.Linear(3, 4))])
@pytest.mark.parametrize("network", ["critic", "critic_target"])
def test_critics_that_differ_use_autograd(network: str, layer: nn.Module) -> None:
    """They cannot be computed as one."""
    policy = make_policy(net_arch=[4])
    getattr(policy, network).qf1[0] = layer
    assert isinstance(make_networks(policy), AutogradNetworks)


class OwnCnn(NatureCNN):
    """A user's extractor, which may need contiguous memory, as ``view`` does."""


@pytest.mark.parametrize(
    ("policy_class", "kwargs", "converts"),
    [
        (CnnPolicy, {}, True),
        (CnnPolicy, {"features_extractor_class": OwnCnn}, False),
        (MultiInputPolicy, {}, True),
    ],
)
def test_images_are_converted_once_per_update(policy_class: Any, kwargs: Any, converts: bool) -> None:
    """They become floats with the channels last in memory, unless a user's extractor reads them."""
    image = spaces.Box(0, 255, (3, 36, 40), np.uint8)
    in_dict = policy_class is MultiInputPolicy
    space = spaces.Dict({"image": image, "vector": spaces.Box(-1, 1, (2,))}) if in_dict else image
    policy = policy_class(space, spaces.Box(-2, 1, (2,)), lambda _: 1e-3, net_arch=[4], **kwargs)
    networks = [policy.actor, policy.actor_target, policy.critic, policy.critic_target]
    images, vectors = th.randint(256, (5, 3, 36, 40), dtype=th.uint8), th.rand(5, 2)
    obs: Any = {"image": images, "vector": vectors} if in_dict else images
    actions, rewards = th.rand(5, 2), th.rand(5, 1)
    autograd = make_networks(policy)

    def values(obs: Any) -> list[th.Tensor]:
        return [
            autograd.target_actions(obs),
            autograd.target_q_values(obs, actions),
            autograd.q_values(obs, actions),
            autograd.q1_of_policy(obs),
        ]

    expected = values(obs)
    with autograd.converted(ReplayBufferSamples(obs, actions, obs, rewards, rewards)) as batch:
        for result in (batch.observations, batch.next_observations):
            result_images = result["image"] if isinstance(result, dict) else result
            assert result_images.is_contiguous(memory_format=th.channels_last) is converts
            assert result_images.dtype == (th.float32 if converts else th.uint8)
            assert not isinstance(result, dict) or result["vector"] is vectors
            th.testing.assert_close(values(result), expected, rtol=1e-5, atol=1e-5)
        assert batch.rewards is rewards
    assert all(network.normalize_images for network in networks)
    th.testing.assert_close(values(obs), expected, rtol=0, atol=0)


def test_networks_normalize_images_again_after_an_update_that_failed() -> None:
    """Otherwise the agent would act on images that are not divided by 255."""
    space = spaces.Box(0, 255, (3, 36, 40), np.uint8)
    policy = CnnPolicy(space, spaces.Box(-2, 1, (2,)), lambda _: 1e-3, net_arch=[4])
    obs, rewards = th.zeros(5, 3, 36, 40, dtype=th.uint8), th.rand(5, 1)

    def fail() -> None:
        with make_networks(policy).converted(ReplayBufferSamples(obs, th.rand(5, 2), obs, rewards, rewards)):
            assert not policy.actor.normalize_images
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert policy.actor.normalize_images


class StillPolicy(MlpPolicy):
    """A user's policy that overrides how it acts."""

    def _predict(self, observation: Any, deterministic: bool = False) -> th.Tensor:
        return th.zeros(len(observation), 1)


class StillAgent(TD3X):
    """A user's agent that overrides how it acts."""

    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> tuple[np.ndarray, None]:
        return np.zeros((len(observation), 1)), None


@pytest.mark.parametrize(("cls", "policy"), [(TD3X, StillPolicy), (StillAgent, MlpPolicy)])
def test_rollouts_use_overridden_methods(cls: Any, policy: Any) -> None:
    model = tiny_agent(policy=policy, cls=cls, learning_starts=0, gradient_steps=0).learn(5)
    np.testing.assert_array_equal(model.replay_buffer.actions[:5], 0)


REPLACEMENTS = (
    lambda policy: setattr(policy.actor.mu[0], "bias", nn.Parameter(th.ones(4))),
    lambda policy: policy.actor.mu.__setitem__(2, nn.Linear(4, policy.actor.mu[2].out_features)),
    lambda policy: policy.actor.mu.append(nn.Identity()),
    lambda policy: policy.actor.mu.__setitem__(0, nn.Linear(policy.actor.mu[0].in_features, 4, bias=False)),
)


def test_changes_of_networks_are_detected() -> None:
    """New tensors, frozen parameters and removed gradients must not be trained as before."""
    for change in (
        lambda policy: policy.critic.optimizer.zero_grad(),
        lambda policy: policy.actor.mu[0].requires_grad_(False),
        lambda policy: setattr(policy.actor.mu[0].weight, "data", policy.actor.mu[0].weight.data.clone()),
        *REPLACEMENTS,
    ):
        policy = make_policy(net_arch=[4])
        networks = make_networks(policy)
        assert networks.is_current()
        change(policy)
        assert not networks.is_current()


def zeros(grad: th.Tensor) -> th.Tensor:
    return th.zeros_like(grad)


def set_to_zero(parameter: th.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


HOOKS = {
    "gradients": lambda actor: [parameter.register_hook(zeros) for parameter in actor.parameters()],
    "accumulated gradients": lambda actor: [
        parameter.register_post_accumulate_grad_hook(set_to_zero) for parameter in actor.parameters()
    ],
    "gradients of a module": lambda actor: [
        actor.mu[-2].register_full_backward_pre_hook(lambda _, grads: tuple(map(zeros, grads)))
    ],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_called_as_in_sb3(hook: str) -> None:
    """The tested hook sets the actor's gradients to 0. Another one counts the forward calls of a layer."""
    calls: dict[type, int] = {}
    for algorithm in (TD3, TD3X):
        model: Any = tiny_agent(cls=algorithm).learn(10)
        handles = HOOKS[hook](model.actor)
        handles.append(model.actor.mu[0].register_forward_hook(lambda *_, cls=algorithm: count(calls, cls)))
        # Adam would continue with its momentum
        model.actor.optimizer.state.clear()
        before = deepcopy(model.actor.state_dict())
        model.learn(20, reset_num_timesteps=False)
        assert all(th.equal(value, before[name]) for name, value in model.actor.state_dict().items())
        for handle in handles:
            handle.remove()
        model.learn(20, reset_num_timesteps=False)
        assert not all(th.equal(value, before[name]) for name, value in model.actor.state_dict().items())
    assert calls[TD3X] == calls[TD3]


def count(calls: dict[type, int], cls: type) -> None:
    calls[cls] = calls.get(cls, 0) + 1


def test_spectral_norm_trains() -> None:
    model = tiny_agent()
    for actor in (model.actor, model.actor_target):
        nn.utils.spectral_norm(actor.mu[0])
    model.learn(20)
    assert model._n_updates == 15


@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_replaced_layers_act_but_are_not_trained(replace: Any, layer_norm: bool) -> None:
    """As in SB3, the optimizer keeps its parameters, and the targets follow the current network."""
    model = tiny_agent(policy_kwargs={"net_arch": [4], "layer_norm": layer_norm}, tau=0.5).learn(10)
    for policy in (model.actor, model.actor_target):
        replace(SimpleNamespace(actor=policy))
    new = [it for it in model.actor.parameters() if not any(it is own for own in trained_by(model.actor))]
    before = [parameter.detach().clone() for parameter in new]
    model.learn(20, reset_num_timesteps=False)
    assert all(th.equal(parameter, old) for parameter, old in zip(new, before, strict=True))
    obs = np.ones((1, 2), dtype=np.float32)
    np.testing.assert_allclose(model.predict(obs)[0], model._current_update().networks.scaled_actions(obs), rtol=1e-5)
    for parameter, target in zip(model.actor.parameters(), model.actor_target.parameters(), strict=True):
        th.testing.assert_close(target, parameter, rtol=0, atol=0.1)
    model.save(io.BytesIO())


def trained_by(network: Any) -> list[nn.Parameter]:
    return [parameter for group in network.optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("layer_norm", [False, True])
def test_critics_are_trained_with_a_frozen_actor(layer_norm: bool) -> None:
    model = tiny_agent(policy_kwargs={"net_arch": [4], "layer_norm": layer_norm})
    model.actor.requires_grad_(False)
    actor, critic = deepcopy(model.actor.state_dict()), deepcopy(model.critic.state_dict())
    model.learn(20)
    assert all(th.equal(value, actor[name]) for name, value in model.actor.state_dict().items())
    assert not any(th.equal(value, critic[name]) for name, value in model.critic.state_dict().items())
