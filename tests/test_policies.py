"""Policies: SB3's options, the batched critics compared with separate critics, and TD3X's own options."""

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch as th
from comparing import assert_same_tensors, assert_same_weights
from envs import CountingEnv, DictObs, RecordingEnv, counting_vec_env, image_env, saved_and_loaded, tiny_agent
from gymnasium import spaces
from networks import CenteredActivation, LearnedActivation, LinearExtractor
from noises import normal_noise
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.torch_layers import FlattenExtractor, create_mlp
from stable_baselines3.common.utils import configure_logger, set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from sb3_td3x import TD3X, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_td3x.policies import ACTIVATIONS

OBS_SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION_SPACE = spaces.Box(-1, 1, (2,), np.float32)


def make_policy(**policy_kwargs: Any) -> MlpPolicy:
    return MlpPolicy(OBS_SPACE, ACTION_SPACE, lambda _: 1e-3, **{"net_arch": [8, 6], **policy_kwargs})


def trainable_agent(**policy_kwargs: Any) -> TD3X:
    """Make an agent with transitions in its buffer and a logger, ready for ``train``."""
    model = tiny_agent(policy_kwargs={"net_arch": [8], **policy_kwargs}, gradient_steps=0)
    model.learn(40)
    model.set_logger(configure_logger(verbose=0))
    return model


def random_batch() -> tuple[th.Tensor, th.Tensor]:
    """Return 5 observations and actions."""
    rng = np.random.default_rng(0)
    obs, actions = rng.normal(size=(5, 3)), rng.uniform(-1, 1, (5, 2))
    return th.tensor(obs, dtype=th.float32), th.tensor(actions, dtype=th.float32)


def activations_of(network: nn.Module) -> set[type[nn.Module]]:
    return {type(module) for module in network.modules()} & {*ACTIVATIONS.values(), LearnedActivation}


# SB3's options


@pytest.mark.parametrize(
    ("net_arch", "pi", "qf"),
    [
        ([8, 6], [8, 6], [8, 6]),
        ([], [], []),
        ({"pi": [8], "qf": [4, 5, 6]}, [8], [4, 5, 6]),
        ({"pi": [], "qf": [7]}, [], [7]),
        (None, [400, 300], [400, 300]),
    ],
)
def test_net_arch_of_actor_and_critics(net_arch: Any, pi: list[int], qf: list[int]) -> None:
    """The critics' input includes the action, and their output is one value."""
    policy = make_policy(net_arch=net_arch)
    state = policy.state_dict()
    for network in ("actor", "actor_target"):
        widths = [3, *pi, 2]
        for idx in range(len(pi) + 1):
            assert state[f"{network}.mu.{2 * idx}.weight"].shape == (widths[idx + 1], widths[idx])
    for network in ("critic", "critic_target"):
        widths = [3 + 2, *qf, 1]
        for critic in (0, 1):
            for idx in range(len(qf) + 1):
                assert state[f"{network}.qf{critic}.{2 * idx}.weight"].shape == (widths[idx + 1], widths[idx])
    assert len(state) == 2 * (2 * len(pi) + 2) + 2 * 2 * (2 * len(qf) + 2)


SB3_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one critic": {"n_critics": 1},
    "five critics": {"n_critics": 5},
    "tanh": {"activation_fn": nn.Tanh},
    "activation with weights": {"activation_fn": LearnedActivation, "n_critics": 3},
    "activation over features": {"activation_fn": CenteredActivation},
    "extractor": {"features_extractor_class": LinearExtractor, "features_extractor_kwargs": {"features_dim": 7}},
    "shared extractor": {"features_extractor_class": LinearExtractor, "share_features_extractor": True},
    "split": {"net_arch": {"pi": [4], "qf": [5, 6, 7]}},
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", SB3_OPTIONS)
def test_state_dict_has_the_keys_and_values_of_sb3(case: str) -> None:
    """SB3's policy with the same seed has the same weights in the same order. Each policy loads the other's."""
    kwargs: dict[str, Any] = {"net_arch": [8, 6], **SB3_OPTIONS[case]}
    policies: list[Any] = []
    for policy_class in (TD3.policy_aliases["MlpPolicy"], MlpPolicy):
        set_random_seed(0)
        policies.append(policy_class(OBS_SPACE, ACTION_SPACE, lambda _: 1e-3, **kwargs))
    sb3, own = policies
    expected, actual = sb3.state_dict(), own.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert th.equal(actual[key], value), key
    # Load other weights, in both directions
    for source, destination in ((sb3, own), (own, sb3)):
        with th.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        destination.load_state_dict(source.state_dict())
        obs, actions = random_batch()
        np.testing.assert_array_equal(sb3.predict(obs.numpy())[0], own.predict(obs.numpy())[0])
        for name in ("critic", "critic_target"):
            for ours, theirs in zip(getattr(own, name)(obs, actions), getattr(sb3, name)(obs, actions), strict=True):
                th.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_critics", [1, 2, 4])
def test_critics_return_values_as_in_sb3(n_critics: int) -> None:
    """One value per critic, of shape (batch, 1), with independent gradients; ``q1_forward`` returns the first."""
    policy = make_policy(n_critics=n_critics)
    obs, actions = random_batch()
    values = policy.critic(obs, actions)
    assert isinstance(values, tuple)
    assert [tuple(value.shape) for value in values] == [(5, 1)] * n_critics
    th.testing.assert_close(policy.critic.q1_forward(obs, actions), values[0])
    assert len({value.sum().item() for value in values}) == n_critics, "each critic starts with other weights"
    values[-1].sum().backward()
    for idx, network in enumerate(policy.critic.q_networks):
        assert all((parameter.grad is not None) == (idx == n_critics - 1) for parameter in network.parameters())


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("layer_norm", [False, True])
def test_critics_as_networks_of_sb3(layer_norm: bool) -> None:
    """``q_networks`` and ``qf0`` have the structure of SB3's."""
    critic = make_policy(layer_norm=layer_norm, n_critics=2).critic
    assert [critic.qf0, critic.qf1] == critic.q_networks
    obs, actions = random_batch()
    with th.no_grad():
        values = critic(obs, actions)
        for network, value in zip(critic.q_networks, values, strict=True):
            th.testing.assert_close(network(th.cat([obs, actions], dim=1)), value)
    state = critic.qf1.state_dict()
    assert {f"qf1.{name}" for name in state} == {name for name in critic.state_dict() if name.startswith("qf1.")}
    assert not [name for name in critic.state_dict() if "q_networks" in name]
    with pytest.raises(AttributeError, match="qf2"):
        _ = critic.qf2


def test_gradient_through_q1_reaches_actions() -> None:
    """Compare dQ1/da, which the deterministic policy gradient needs, with finite differences."""
    critic = make_policy(activation_fn=nn.Tanh).critic.double()
    obs, actions = (tensor.double() for tensor in random_batch())
    actions.requires_grad_()
    critic.q1_forward(obs, actions).sum().backward()
    for dim in range(2):
        step = th.zeros(2, dtype=th.float64)
        step[dim] = 1e-5
        with th.no_grad():
            difference = (critic.q1_forward(obs, actions + step) - critic.q1_forward(obs, actions - step)) / 2e-5
        assert actions.grad is not None
        th.testing.assert_close(actions.grad[:, dim : dim + 1], difference, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shared", [False, True])
def test_features_extractors(shared: bool) -> None:
    """As in SB3, a shared extractor belongs to the actor, and the critics' loss does not train it."""
    policy_kwargs = {"features_extractor_class": LinearExtractor, "share_features_extractor": shared}
    model = trainable_agent(**policy_kwargs)
    assert (model.critic.features_extractor is model.actor.features_extractor) == shared
    assert (model.critic_target.features_extractor is model.actor_target.features_extractor) == shared
    assert model.actor.features_extractor is not model.actor_target.features_extractor
    assert isinstance(model.actor.features_extractor, LinearExtractor)
    model.policy_delay = 1000
    before = {key: value.clone() for key, value in model.policy.state_dict().items()}
    model.train(gradient_steps=3, batch_size=8)
    after = model.policy.state_dict()
    key = "critic.features_extractor.linear.weight"
    assert th.equal(after[key], before[key]) == shared
    model.policy_delay = 1
    model.train(gradient_steps=1, batch_size=8)
    after = model.policy.state_dict()
    assert not th.equal(
        after["actor.features_extractor.linear.weight"], before["actor.features_extractor.linear.weight"]
    )
    model.learn(20)


@pytest.mark.parametrize("shared", [False, True])
def test_frozen_features_extractor_stays_frozen(shared: bool) -> None:
    """Users freeze pretrained extractors. All other weights are trained."""
    model = trainable_agent(
        features_extractor_class=LinearExtractor,
        features_extractor_kwargs={"frozen": True},
        share_features_extractor=shared,
    )
    before = {key: value.clone() for key, value in model.policy.state_dict().items()}
    model.train(gradient_steps=4, batch_size=8)
    for key, value in model.policy.state_dict().items():
        if not key.startswith(("actor_target", "critic_target")):
            assert th.equal(value, before[key]) == ("features_extractor" in key), key


def test_frozen_layers_of_the_actor_stay_frozen() -> None:
    """Users freeze layers with ``requires_grad_(False)`` after construction or loading."""
    model = trainable_agent()
    first, last = model.actor.mu[0], model.actor.mu[2]
    first.requires_grad_(False)
    before = first.weight.clone(), last.weight.clone()
    model.train(gradient_steps=4, batch_size=8)
    assert th.equal(first.weight, before[0])
    assert not th.equal(last.weight, before[1])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {},
    "amsgrad": {"optimizer_kwargs": {"amsgrad": True}},
    "adamw": {"optimizer_class": th.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.1}},
    "rmsprop": {"optimizer_class": th.optim.RMSprop, "optimizer_kwargs": {"momentum": 0.5, "centered": True}},
    "sgd": {"optimizer_class": th.optim.SGD, "optimizer_kwargs": {"momentum": 0.9, "nesterov": True}},
    "nadam": {"optimizer_class": th.optim.NAdam},
    "adafactor": {"optimizer_class": th.optim.Adafactor},
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_training_continues_from_a_zip_with_any_optimizer(case: str) -> None:
    """The optimizer's state is saved in SB3's layout, one critic after the other."""
    model = trainable_agent(**OPTIMIZERS[case])
    model.train(gradient_steps=3, batch_size=8)
    loaded = saved_and_loaded(model, env=counting_vec_env(1))
    loaded.replay_buffer = model.replay_buffer
    loaded.set_logger(model.logger)
    for each in (model, loaded):
        set_random_seed(0)
        each.train(gradient_steps=4, batch_size=8)
    assert_same_weights(model, loaded)


@pytest.mark.parametrize(
    ("name", "policy_class", "make_env", "kwargs"),
    [
        ("MlpPolicy", MlpPolicy, CountingEnv, {}),
        ("MultiInputPolicy", MultiInputPolicy, lambda: DictObs(CountingEnv()), {}),
        ("CnnPolicy", CnnPolicy, image_env, {"features_extractor_kwargs": {"features_dim": 8}}),
    ],
)
def test_policies_by_name_and_by_class(name: str, policy_class: Any, make_env: Any, kwargs: dict[str, Any]) -> None:
    """Names, TD3X's classes and SB3's classes all give TD3X's policy with its own options."""
    policy_kwargs = {"net_arch": [8], "layer_norm": True, "n_critics": 3, **kwargs}
    predictions = []
    for policy in (name, policy_class, TD3.policy_aliases[name]):
        model = tiny_agent(DummyVecEnv([make_env]), policy, policy_kwargs=dict(policy_kwargs), buffer_size=50)
        assert type(model.policy) is policy_class
        model.observation_space.seed(0)
        predictions.append(model.predict(model.observation_space.sample())[0])
        model.learn(12)
    np.testing.assert_array_equal(predictions[0], predictions[1])
    np.testing.assert_array_equal(predictions[0], predictions[2])


# Activations


def test_critic_activation_fn_replaces_activation_fn_in_the_critics() -> None:
    """As in document 000, with tanh in the actor and ReLU in the critics."""
    policy = make_policy(activation_fn=nn.Tanh)
    assert activations_of(policy.critic) == {nn.Tanh}
    policy = make_policy(activation_fn=nn.Tanh, critic_activation_fn=nn.ReLU)
    for actor, critic in ((policy.actor, policy.critic), (policy.actor_target, policy.critic_target)):
        assert activations_of(actor) == {nn.Tanh}
        assert activations_of(critic) == {nn.ReLU}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_critic_activation_by_name(name: str) -> None:
    """The name gives the same critics as the class, and does not change the actor."""
    set_random_seed(0)
    by_name = make_policy(critic_activation_fn=name)
    set_random_seed(0)
    by_class = make_policy(critic_activation_fn=getattr(nn, type(ACTIVATIONS[name]()).__name__))
    set_random_seed(0)
    default = make_policy()
    obs, actions = random_batch()
    values = by_name.critic(obs, actions)[0]
    assert th.equal(values, by_class.critic(obs, actions)[0])
    assert th.equal(values, default.critic(obs, actions)[0]) == (name == "relu")
    assert th.equal(by_name.actor(obs), default.actor(obs))


@pytest.mark.parametrize("value", ["sigmoids", "ReLU", "", "nn.Tanh"])
def test_unknown_activation_is_refused_with_the_known_ones(value: str) -> None:
    with pytest.raises(ValueError, match=r"critic_activation_fn=.*relu.*tanh"):
        make_policy(critic_activation_fn=value)


# Layer normalization


def separate_critics(policy: MlpPolicy, activation_fn: type[nn.Module], layer_norm: bool) -> list[nn.Sequential]:
    """Return the policy's critics as separate networks, built with SB3's ``create_mlp``."""
    state = policy.state_dict()
    critics = []
    for idx in range(policy.critic.n_critics):
        layers = create_mlp(5, 1, [8, 6], activation_fn, post_linear_modules=[nn.LayerNorm] if layer_norm else None)
        critic = nn.Sequential(*layers)
        prefix = f"critic.qf{idx}."
        critic.load_state_dict({key[len(prefix) :]: state[key] for key in state if key.startswith(prefix)})
        critics.append(critic)
    return critics


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation_fn", [nn.ReLU, nn.Tanh, nn.GELU, LearnedActivation])
@pytest.mark.parametrize("n_critics", [1, 3])
def test_batched_critics_equal_separate_critics(
    n_critics: int, activation_fn: type[nn.Module], layer_norm: bool
) -> None:
    """Compare values, and gradients with respect to weights and actions."""
    policy = make_policy(n_critics=n_critics, activation_fn=activation_fn, layer_norm=layer_norm)
    with th.no_grad():
        for parameter in policy.critic.parameters():
            parameter.add_(0.3 * th.randn_like(parameter))
    critics = separate_critics(policy, activation_fn, layer_norm)
    assert any(isinstance(module, nn.LayerNorm) for module in critics[0]) == layer_norm
    obs, actions = random_batch()
    own_actions = actions.clone().requires_grad_()
    their_actions = actions.clone().requires_grad_()
    own = policy.critic(obs, own_actions)
    theirs = [critic(th.cat([obs, their_actions], dim=1)) for critic in critics]
    for ours, value in zip(own, theirs, strict=True):
        th.testing.assert_close(ours, value)
    th.testing.assert_close(policy.critic.q1_forward(obs, actions), theirs[0])

    weights = th.arange(1.0, n_critics + 1)
    for values in (own, theirs):
        th.stack([weight * (value**2).mean() for weight, value in zip(weights, values, strict=True)]).sum().backward()
    assert own_actions.grad is not None
    assert their_actions.grad is not None
    th.testing.assert_close(own_actions.grad, their_actions.grad)
    # Compare the gradients of the weights by the weights after one step of gradient descent
    th.optim.SGD(policy.critic.parameters(), lr=0.1).step()
    for critic in critics:
        th.optim.SGD(critic.parameters(), lr=0.1).step()
    state = policy.state_dict()
    for idx, critic in enumerate(critics):
        for key, value in critic.state_dict().items():
            th.testing.assert_close(state[f"critic.qf{idx}.{key}"], value, msg=f"qf{idx}.{key}")


@pytest.mark.parametrize("stochastic", [False, True])
def test_actor_layer_norm(stochastic: bool) -> None:
    """Compare with a network from SB3's ``create_mlp`` with the same weights."""
    policy = make_policy(actor_layer_norm=True, stochastic_actor=stochastic)
    with th.no_grad():
        for parameter in policy.actor.parameters():
            parameter.add_(0.3 * th.randn_like(parameter))
    obs, _ = random_batch()
    layers = create_mlp(
        3,
        -1 if stochastic else 2,
        [8, 6],
        nn.ReLU,
        squash_output=not stochastic,
        post_linear_modules=[nn.LayerNorm],
    )
    network = nn.Sequential(*layers)
    assert sum(isinstance(module, nn.LayerNorm) for module in network) == 2
    actor: Any = policy.actor
    network.load_state_dict((actor.latent_pi if stochastic else actor.mu).state_dict())
    expected = th.tanh(actor.mu(network(obs))) if stochastic else network(obs)
    th.testing.assert_close(policy._predict(obs, deterministic=True), expected)
    assert policy.actor_target.state_dict().keys() == policy.actor.state_dict().keys()
    assert not any(isinstance(module, nn.LayerNorm) for module in policy.critic.modules())


def test_layer_norm_of_actor_and_critics_are_separate_options() -> None:
    """Each adds one layer normalization per hidden layer."""
    for layer_norm in (False, True):
        for actor_layer_norm in (False, True):
            state = make_policy(layer_norm=layer_norm, actor_layer_norm=actor_layer_norm).state_dict()
            # Only a LayerNorm has one-dimensional weights
            normalized = [key for key, value in state.items() if key.endswith("weight") and value.dim() == 1]
            assert len([key for key in normalized if key.startswith("actor.")]) == 2 * actor_layer_norm
            assert len([key for key in normalized if key.startswith("actor_target.")]) == 2 * actor_layer_norm
            assert len([key for key in normalized if key.startswith("critic.")]) == 2 * 2 * layer_norm
            assert len([key for key in normalized if key.startswith("critic_target.")]) == 2 * 2 * layer_norm


def test_targets_start_as_copies() -> None:
    policy = make_policy(layer_norm=True, actor_layer_norm=True, activation_fn=LearnedActivation, n_critics=3)
    state = policy.state_dict()
    pairs = [(key, key.replace(".", "_target.", 1)) for key in state if key.startswith(("actor.", "critic."))]
    assert len(pairs) == len(state) / 2
    for key, target_key in pairs:
        assert th.equal(state[key], state[target_key])


ALL_OPTIONS: dict[str, dict[str, Any]] = {
    "deterministic": {
        "net_arch": {"pi": [8], "qf": [6, 4]},
        "n_critics": 3,
        "activation_fn": nn.Tanh,
        "critic_activation_fn": "silu",
        "layer_norm": True,
        "actor_layer_norm": True,
        "n_quantiles": 5,
    },
    "stochastic": {"net_arch": [8], "stochastic_actor": True, "actor_layer_norm": True},
    "weights in activations": {"net_arch": [8, 8], "critic_activation_fn": LearnedActivation},
    "extractor": {"net_arch": [8], "features_extractor_class": LinearExtractor, "share_features_extractor": True},
}


@pytest.mark.parametrize("case", ALL_OPTIONS)
def test_agents_with_all_options_are_trained_saved_and_loaded(case: str) -> None:
    """All networks change in training, before and after loading."""
    model = tiny_agent(policy_kwargs=dict(ALL_OPTIONS[case]))
    before = deepcopy(model.policy.state_dict())
    for _ in range(2):
        model.learn(30)
        after = model.policy.state_dict()
        for network in ("actor.", "actor_target.", "critic.", "critic_target."):
            assert any(not th.equal(after[key], before[key]) for key in after if key.startswith(network))
        before = deepcopy(after)
        loaded = saved_and_loaded(model, env=counting_vec_env(1))
        obs, actions = th.randn(5, 2), th.zeros(5, 1)
        expected, actual = (each.predict(obs.numpy(), deterministic=True)[0] for each in (model, loaded))
        np.testing.assert_array_equal(actual, expected)
        for ours, theirs in zip(model.critic(obs, actions), loaded.critic(obs, actions), strict=True):
            assert th.equal(ours, theirs)
        model = loaded


@pytest.mark.parametrize("case", ALL_OPTIONS)
def test_policies_are_saved_and_pickled_without_their_agent(case: str, tmp_path: Path) -> None:
    model = tiny_agent(policy_kwargs=dict(ALL_OPTIONS[case])).learn(20)
    model.policy.save(str(tmp_path / "policy.pth"))
    saved = MlpPolicy.load(str(tmp_path / "policy.pth"), device="cpu")
    obs = np.ones((4, 2), np.float32)
    expected, _ = model.predict(obs, deterministic=True)
    tensors = th.ones(4, 2), th.zeros(4, 1)
    for policy in (saved, cloudpickle.loads(cloudpickle.dumps(model.policy))):
        assert list(policy.state_dict()) == list(model.policy.state_dict())
        assert_same_tensors(model.policy.state_dict(), policy.state_dict())
        np.testing.assert_array_equal(policy.predict(obs, deterministic=True)[0], expected)
        for ours, theirs in zip(policy.critic(*tensors), model.critic(*tensors), strict=True):
            assert th.equal(ours, theirs)


def test_image_policies_are_saved_without_their_agent(tmp_path: Path) -> None:
    policy_kwargs = {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}, "layer_norm": True}
    model = tiny_agent(image_env(), "CnnPolicy", policy_kwargs=policy_kwargs, buffer_size=1)
    model.policy.save(str(tmp_path / "policy.pth"))
    loaded = CnnPolicy.load(str(tmp_path / "policy.pth"), device="cpu")
    obs = model.observation_space.sample()
    np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
    assert not isinstance(loaded.actor.features_extractor, FlattenExtractor)


# The stochastic actor


def stochastic_agent(env: Any = None, **kwargs: Any) -> TD3X:
    return tiny_agent(env, policy_kwargs={"net_arch": [8], "stochastic_actor": True}, **kwargs)


def test_stochastic_actor_is_sampled_in_rollouts_and_its_mean_is_used_in_evaluations() -> None:
    env = RecordingEnv()
    model = stochastic_agent(env, learning_starts=0, gradient_steps=0)
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
        model.actor.mu.bias.fill_(0.5)
        model.actor.log_std.bias.fill_(-1.0)
    model.learn(600)
    # a = tanh(u), u ~ N(0.5, 1/e)
    unsquashed = np.arctanh(np.clip(env.actions, -0.999999, 0.999999))
    assert np.mean(unsquashed) == pytest.approx(0.5, abs=0.07)
    assert np.std(unsquashed) == pytest.approx(np.exp(-1), rel=0.12)
    obs = np.zeros((3, 2), np.float32)
    np.testing.assert_allclose(model.predict(obs, deterministic=True)[0], np.tanh(0.5), rtol=1e-6)
    assert len(np.unique(model.predict(obs, deterministic=False)[0])) == 3


def test_stochastic_actor_is_sampled_in_the_targets() -> None:
    """Without smoothing, the target y = γ Q'(s', a') with Q'(s, a) = a is still random."""
    model = stochastic_agent(
        learning_rate=0.0, target_policy_noise=0.0, gamma=1.0, policy_delay=1000, learning_starts=0, gradient_steps=0
    )
    model.replay_buffer.add(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    model.set_logger(configure_logger(verbose=0))
    with th.no_grad():
        for parameter in (*model.critic.parameters(), *model.critic_target.parameters()):
            parameter.zero_()
        for parameter in model.actor_target.parameters():
            parameter.zero_()
    state = model.policy.state_dict()
    for idx in (0, 1):
        # relu(10 + a) - 10
        state[f"critic_target.qf{idx}.0.weight"][0, 2] = 1.0
        state[f"critic_target.qf{idx}.0.bias"][0] = 10.0
        state[f"critic_target.qf{idx}.2.weight"][0, 0] = 1.0
        state[f"critic_target.qf{idx}.2.bias"][0] = -10.0
    model.policy.load_state_dict(state)
    losses = set()
    for _ in range(5):
        model.train(gradient_steps=1, batch_size=1)
        losses.add(model.logger.name_to_value["train/critic_loss"])
    assert len(losses) == 5
    # y = tanh(N(0, 1)), so the sum of y² over two critics is at most 2
    assert 0 < max(losses) < 2


def test_gradient_of_the_stochastic_actor_flows_through_its_samples() -> None:
    """
    The gradient of Q1 reaches both the mean and the standard deviation.

    If Q1 increases with the action, the mean increases. If an action in the middle is best, the deviation decreases.
    """
    model = stochastic_agent(learning_rate=0.01, qf_learning_rate=0.0, policy_delay=1, learning_starts=0)
    model.learn(5)
    obs = th.zeros(512, 2)

    def mean_and_std() -> tuple[float, float]:
        with th.no_grad():
            mean, log_std, _ = model.actor.get_action_dist_params(obs)
        return mean.mean().item(), log_std.exp().mean().item()

    def set_critic(weights: list[float], biases: list[float], out: list[float]) -> None:
        """Set Q1 = Σ out_i relu(weight_i a + bias_i)."""
        state = model.policy.state_dict()
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            state[f"critic.qf0.{name}"].zero_()
        state["critic.qf0.0.weight"][: len(weights), 2] = th.tensor(weights)
        state["critic.qf0.0.bias"][: len(biases)] = th.tensor(biases)
        state["critic.qf0.2.weight"][0, : len(out)] = th.tensor(out)
        model.policy.load_state_dict(state)

    model.set_logger(configure_logger(verbose=0))
    set_critic([1.0], [2.0], [1.0])  # Q1 = a + 2
    mean, std = mean_and_std()
    model.train(gradient_steps=30, batch_size=64)
    new_mean, new_std = mean_and_std()
    assert new_mean > mean + 0.1
    set_critic([1.0, -1.0], [-0.2, 0.2], [-1.0, -1.0])  # Q1 = -|a - 0.2|
    mean, std = mean_and_std()
    model.train(gradient_steps=100, batch_size=64)
    new_mean, new_std = mean_and_std()
    assert new_std < 0.7 * std
    assert abs(np.tanh(new_mean) - 0.2) < 0.15


def test_action_noise_is_not_used_with_a_stochastic_actor() -> None:
    """A warning says so."""
    with pytest.warns(UserWarning, match=r"action_noise is not used.*stochastic"):
        noisy = stochastic_agent(action_noise=normal_noise(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = stochastic_agent()
    for model in (noisy, plain):
        model.set_random_seed(1)
        model.learn(30)
    np.testing.assert_array_equal(noisy.replay_buffer.actions, plain.replay_buffer.actions)
    assert_same_weights(plain, noisy)


@pytest.mark.lowest_sb3
def test_stochastic_actor_equals_that_of_sac() -> None:
    """It has the same network and distribution."""
    kwargs: dict[str, Any] = {"net_arch": [8, 6]}
    own = make_policy(stochastic_actor=True, **kwargs)
    sac = SAC.policy_aliases["MlpPolicy"](OBS_SPACE, ACTION_SPACE, lambda _: 1e-3, **kwargs)
    sac.actor.load_state_dict(own.actor.state_dict())
    obs, _ = random_batch()
    for deterministic in (True, False):
        samples = []
        for policy in (own, sac):
            th.manual_seed(0)
            samples.append(policy.predict(obs.numpy(), deterministic=deterministic)[0])
        np.testing.assert_array_equal(samples[0], samples[1])


@pytest.mark.parametrize("value", [5, nn.ReLU(), [nn.ReLU]])
def test_critic_activation_that_is_no_class_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="critic_activation_fn"):
        make_policy(critic_activation_fn=value)
