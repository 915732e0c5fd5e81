"""
Updates as CUDA graphs. Without a GPU, the same code with functions in the place of graphs: what is captured, when it is
captured anew, and that nothing is lost where it fails.
"""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import pytest
import torch as th
from envs import CountingEnv, tiny

from sb3_td3x import TD3X
from sb3_td3x.learner import cuda_graphs
from sb3_td3x.learner.cuda_graphs import UpdateGraphs

needs_gpu = pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Functions instead of graphs, on the CPU; lists what was captured."""
    calls: list[bool] = []

    def capture(update: Callable[[bool], None], with_actor: bool) -> Callable[[], None]:
        calls.append(with_actor)
        return lambda: update(with_actor)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(UpdateGraphs, "is_possible", staticmethod(lambda update, replay_buffer: True))
    return calls


def make(**kwargs: Any) -> TD3X:
    return TD3X("MlpPolicy", CountingEnv(), **tiny(**{"learning_rate": "lin_1e-2", "seed": 0, **kwargs}))


def state(model: TD3X) -> list[th.Tensor]:
    optimizers = [network.optimizer.state_dict()["state"] for network in (model.actor, model.critic)]
    entries = [tensor for optimizer in optimizers for entry in optimizer.values() for tensor in entry.values()]
    return [*model.policy.state_dict().values(), *entries]


def assert_same(model: TD3X, other: TD3X) -> None:
    for mine, others in zip(state(model), state(other), strict=True):
        assert th.equal(mine, others)


@pytest.mark.parametrize(
    "kwargs", [{}, {"gradient_steps": 5, "train_freq": 2}, {"policy_delay": 3, "tau": 0.1, "clipped_double_q": False}]
)
def test_same_training_as_without(kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """Parameters, optimizers, counters and logs, bit for bit: the same batches, noise and learning rates."""
    expected = make(**kwargs).learn(40)
    captured = request.getfixturevalue("captured")
    model = make(**kwargs).learn(40)
    assert captured == [False, True]
    assert_same(model, expected)
    assert model._n_updates == expected._n_updates
    for name in ("train/critic_loss", "train/actor_loss", "train/q_mean"):
        assert model.logger.name_to_value[name] == pytest.approx(expected.logger.name_to_value[name], rel=1e-5)


def test_captured_anew_only_where_needed(captured: list[bool]) -> None:
    model = make().learn(20)
    model.learn(5, reset_num_timesteps=False)
    model.lr_schedule = lambda _: 1e-4
    model.train(2, batch_size=4)
    n_captures = len(captured)

    def check_captured_anew() -> None:
        nonlocal n_captures
        model.train(2, batch_size=4)
        assert len(captured) == n_captures + 2
        n_captures = len(captured)

    model.gamma = 0.5
    check_captured_anew()
    model.target_policy_noise = 0.0
    check_captured_anew()
    model.critic.optimizer.param_groups[0]["weight_decay"] = 0.1
    check_captured_anew()
    model.actor.optimizer.zero_grad()
    check_captured_anew()
    model.replay_buffer.rewards = model.replay_buffer.rewards + 1
    model.train(2, batch_size=4)
    assert len(captured) == n_captures
    model.train(2, batch_size=5)
    assert len(captured) == n_captures + 2


@pytest.mark.parametrize("failure", ["capture", "result"])
def test_failure_leaves_everything_as_it_was(
    failure: str, captured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, and the same training as without graphs, random numbers included."""

    def capture(update: Callable[[bool], None], with_actor: bool) -> Callable[[], None]:
        if failure == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: None

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    with pytest.warns(UserWarning, match="could not be captured as CUDA graphs") as warned:
        model = make().learn(40)
    assert len(warned) == 1
    monkeypatch.setattr(UpdateGraphs, "is_possible", staticmethod(lambda update, replay_buffer: False))
    assert_same(model, make().learn(40))


def test_not_on_the_cpu() -> None:
    model = make().learn(20)
    assert not UpdateGraphs.is_possible(model._current_update(), model.replay_buffer)


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_graphs_on_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near what is computed without graphs; the learning rate follows its schedule."""
    kwargs: dict[str, Any] = {"learning_starts": 50, "learning_rate": "lin_1e-3", "seed": 0, "precision": precision}
    kwargs |= {"policy_kwargs": {"net_arch": [64, 64]}, "device": "cuda", "buffer_size": 1000}
    model = TD3X("MlpPolicy", gym.make("Pendulum-v1"), **kwargs).learn(100)
    assert model._graphs._graphs is not None
    monkeypatch.setattr(UpdateGraphs, "is_possible", staticmethod(lambda update, replay_buffer: False))
    expected = TD3X("MlpPolicy", gym.make("Pendulum-v1"), **kwargs).learn(100)
    tolerance = 1e-4 if precision == "float32" else 1e-2
    for mine, others in zip(state(model), state(expected), strict=True):
        th.testing.assert_close(mine, others, rtol=tolerance, atol=tolerance)


@needs_gpu
def test_other_policies_train_on_a_gpu() -> None:
    kwargs: dict[str, Any] = {"learning_starts": 50, "device": "cuda", "buffer_size": 1000}
    model = TD3X("MlpPolicy", "Pendulum-v1", policy_kwargs={"layer_norm": True}, **kwargs).learn(100)
    assert model._graphs._graphs is None
