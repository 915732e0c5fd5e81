"""
CUDA graphs of the updates and of acting.

Without a GPU, the tests replace graphs by functions: they check what is captured, when it is captured again, and that
training continues if a capture fails.
"""

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, DictObs, image_env, tiny_agent, vec_env
from networks import WithStatistics
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from sb3_td3x import TD3X
from sb3_td3x.learner import cuda_graphs
from sb3_td3x.learner.cuda_graphs import ActingGraph, UpdateGraphs

needs_gpu = pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace graphs by functions, and list the names of the captured functions."""
    calls: list[str] = []

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        calls.append(getattr(function, "func", function).__name__)
        return function

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(UpdateGraphs, "is_possible", staticmethod(lambda update, replay_buffer: True))
    return calls


@pytest.fixture
def captured_acting(captured: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace also the graph of acting by a function."""
    is_possible = ActingGraph.is_possible

    def on_the_cpu(networks: Any, obs: Any) -> bool:
        with monkeypatch.context() as context:
            context.setattr(networks.__class__, "device", property(lambda self: th.device("cuda")))
            return is_possible(networks, obs)

    monkeypatch.setattr(ActingGraph, "is_possible", staticmethod(on_the_cpu))
    return captured


def seeded_image_env() -> gym.Env:
    env = image_env(action_dim=1)
    env.observation_space.seed(0)
    return env


# Case: (arguments, function that makes the env)
CASES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "default": ({}, CountingEnv),
    "several updates": ({"gradient_steps": 5, "train_freq": 2}, CountingEnv),
    "options": ({"policy_delay": 3, "tau": 0.1, "clipped_double_q": False}, CountingEnv),
    "n-step": ({"n_steps": 3}, CountingEnv),
    "normalized": ({"n_steps": 2}, lambda: VecNormalize(vec_env(CountingEnv(), CountingEnv()))),
    "layer norm": ({"policy_kwargs": {"net_arch": [8], "layer_norm": True, "actor_layer_norm": True}}, CountingEnv),
    "GELU": ({"policy_kwargs": {"net_arch": [8], "activation_fn": nn.GELU}}, CountingEnv),
    "stochastic": ({"policy_kwargs": {"net_arch": [8], "stochastic_actor": True}}, CountingEnv),
    "separate critics": ({"policy_kwargs": {"net_arch": [8], "critic_activation_fn": nn.PReLU}}, CountingEnv),
    "batch norm, dropout": (
        {"policy_kwargs": {"net_arch": [8], "features_extractor_class": WithStatistics}},
        CountingEnv,
    ),
    "shared extractor": (
        {
            "policy_kwargs": {
                "net_arch": [8],
                "features_extractor_class": WithStatistics,
                "share_features_extractor": True,
                "optimizer_class": th.optim.AdamW,
            }
        },
        CountingEnv,
    ),
    "prioritized": ({"prioritized_replay_alpha": 0.6, "gradient_steps": 3, "train_freq": 2}, CountingEnv),
    "quantiles": ({"policy_kwargs": {"net_arch": [8], "n_quantiles": 5}}, CountingEnv),
    "averaged actor": ({"actor_average_tau": 0.1}, CountingEnv),
    "dict": ({}, lambda: DictObs(CountingEnv())),
    "images": ({"policy_kwargs": {"net_arch": [8]}}, seeded_image_env),
}


def agent(case: str = "default", **kwargs: Any) -> TD3X:
    arguments, make_env = CASES[case]
    policy = {"dict": "MultiInputPolicy", "images": "CnnPolicy"}.get(case, "MlpPolicy")
    return tiny_agent(make_env(), policy, **{"learning_rate": "lin_1e-2", "seed": 0, **arguments, **kwargs})


def state(model: TD3X) -> list[th.Tensor]:
    """Return the weights and optimizer states."""
    optimizers = [network.optimizer.state_dict()["state"] for network in (model.actor, model.critic)]
    entries = [tensor for optimizer in optimizers for entry in optimizer.values() for tensor in entry.values()]
    return [*model.policy.state_dict().values(), *entries]


def assert_same(model: TD3X, other: TD3X) -> None:
    for mine, others in zip(state(model), state(other), strict=True):
        assert th.equal(mine, others)


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_as_without_graphs(case: str, request: pytest.FixtureRequest) -> None:
    """The same batches, noise and learning rates give the same weights and optimizer states, bit for bit."""
    expected = agent(case).learn(40)
    captured = request.getfixturevalue("captured")
    model = agent(case).learn(40)
    assert captured == ["_update_once", "_update_once"]
    assert_same(model, expected)
    assert model._n_updates == expected._n_updates
    for name in ("train/critic_loss", "train/actor_loss", "train/q_mean"):
        assert model.logger.name_to_value[name] == pytest.approx(expected.logger.name_to_value[name], rel=1e-5)


@pytest.mark.parametrize("case", ["default", "GELU"])
def test_updates_are_captured_again_only_after_changes(case: str, captured: list[str]) -> None:
    model = agent(case).learn(20)
    model.learn(5, reset_num_timesteps=False)
    model.lr_schedule = lambda _: 1e-4
    model.train(2, batch_size=4)
    n_captures = len(captured)
    assert n_captures == 2

    def check_captured_again(change: Callable[[], Any]) -> None:
        nonlocal n_captures
        change()
        model.train(2, batch_size=4)
        assert len(captured) == n_captures + 2
        n_captures = len(captured)

    check_captured_again(lambda: setattr(model, "gamma", 0.5))
    check_captured_again(lambda: setattr(model, "target_policy_noise", 0.0))
    check_captured_again(lambda: model.critic.optimizer.param_groups[0].update(weight_decay=0.1))
    check_captured_again(lambda: model.actor.optimizer.zero_grad())
    check_captured_again(lambda: model.actor.mu[0].requires_grad_(False))
    check_captured_again(lambda: model.actor.mu.__setitem__(2, nn.Linear(8, 1)))
    check_captured_again(lambda: setattr(model, "policy", copy.deepcopy(model.policy)))
    model.replay_buffer.rewards = model.replay_buffer.rewards + 1
    model.train(2, batch_size=4)
    assert len(captured) == n_captures
    model.train(2, batch_size=5)
    assert len(captured) == n_captures + 2


def test_updates_are_captured_again_after_changes_of_vec_normalize(captured: list[str]) -> None:
    model = agent("normalized").learn(40)
    assert len(captured) == 2
    vec_normalize = model.get_vec_normalize_env()
    assert vec_normalize is not None
    vec_normalize.clip_obs = 1.0
    model.train(1, batch_size=4)
    assert len(captured) == 4


@pytest.mark.parametrize("case", ["default", "GELU", "batch norm, dropout"])
@pytest.mark.parametrize("failure", ["capture", "result"])
def test_training_continues_without_graphs_after_a_failure(
    failure: str, case: str, captured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one warning, and the training is the same as without graphs."""

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        if failure == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: None

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    with pytest.warns(UserWarning, match="could not be captured as CUDA graphs") as warned:
        model = agent(case).learn(40)
    assert len(warned) == 1
    monkeypatch.setattr(UpdateGraphs, "is_possible", staticmethod(lambda update, replay_buffer: False))
    assert_same(model, agent(case).learn(40))


def test_graphs_are_not_used_on_the_cpu() -> None:
    model = agent().learn(20)
    assert not UpdateGraphs.is_possible(model._current_update(), model.replay_buffer)
    assert not ActingGraph.is_possible(model._current_update().networks, np.zeros((1, 2)))


@pytest.mark.parametrize("optimizer_class", [th.optim.SGD, th.optim.RMSprop])
def test_other_optimizers_are_not_captured(optimizer_class: Any) -> None:
    model = agent(policy_kwargs={"net_arch": [8], "activation_fn": nn.GELU, "optimizer_class": optimizer_class}).learn(
        20
    )
    assert {type(it) for it in model._current_update().optimizers} == {optimizer_class}


def test_captured_acting_equals_predict(captured_acting: list[str]) -> None:
    """It is captured again after changes of the networks or the number of envs."""
    model = agent().learn(20)
    assert captured_acting.count("_act") == 1
    obs = np.random.default_rng(0).normal(size=(3, 2))
    for _ in range(2):
        actions = model._learner.scaled_actions(model._current_update(), obs)
        np.testing.assert_allclose(actions, model.policy.scale_action(model.predict(obs)[0]), rtol=1e-5)
        assert captured_acting.count("_act") == 2
    model.actor.mu[0] = nn.Linear(2, 8)
    actions = model._learner.scaled_actions(model._current_update(), obs)
    np.testing.assert_allclose(actions, model.policy.scale_action(model.predict(obs)[0]), rtol=1e-5)
    assert captured_acting.count("_act") == 3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_graphs_on_a_gpu(case: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are close to those without graphs."""
    kwargs: dict[str, Any] = {"learning_rate": "lin_1e-3", "precision": precision, "device": "cuda"}
    model = agent(case, **kwargs).learn(100)
    assert model._learner.update_graphs is not None
    monkeypatch.setattr(UpdateGraphs, "is_possible", staticmethod(lambda update, replay_buffer: False))
    expected = agent(case, **kwargs).learn(100)
    tolerance = 1e-3 if precision == "float32" else 3e-2
    for mine, others in zip(state(model), state(expected), strict=True):
        th.testing.assert_close(mine, others, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@needs_gpu
def test_a_module_that_synchronizes_is_trained_without_graphs() -> None:
    class Synchronizing(WithStatistics):
        def forward(self, observations: th.Tensor) -> th.Tensor:
            return super().forward(observations) * observations.sum().item()

    policy_kwargs = {"net_arch": [8], "features_extractor_class": Synchronizing}
    with pytest.warns(UserWarning, match="could not be captured as CUDA graphs"):
        model = agent(policy_kwargs=policy_kwargs, device="cuda").learn(40)
    assert model._learner.update_graphs is None


@pytest.mark.gpu
@needs_gpu
def test_acting_on_a_gpu() -> None:
    model = agent(device="cuda").learn(40)
    assert model._learner.acting_graph is not None
    obs = np.random.default_rng(0).normal(size=(1, 2))
    actions = model._learner.scaled_actions(model._current_update(), obs)
    np.testing.assert_allclose(actions, model.policy.scale_action(model.predict(obs)[0]), rtol=1e-4, atol=1e-5)
