"""Flat parameters and their Adam compared with PyTorch's optimizers."""

from copy import deepcopy
from typing import Any

import pytest
import torch as th
from envs import tiny_agent
from torch import nn

from sb3_td3x.learner.flat_adam import FlatAdam, FlatParameters, FusedAdam, make_fast

OPTIMIZERS: list[tuple[type[th.optim.Optimizer], dict[str, Any]]] = [
    (th.optim.Adam, {}),
    (th.optim.Adam, {"weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}),
    (th.optim.AdamW, {"weight_decay": 0.1}),
    (th.optim.Adam, {"maximize": True}),
]


def make_net() -> nn.Sequential:
    th.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def set_grads(net: nn.Module, seed: int) -> None:
    """Write random gradients into the parameters' gradient tensors."""
    generator = th.Generator().manual_seed(seed)
    for parameter in net.parameters():
        grad = th.randn(parameter.shape, generator=generator)
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.copy_(grad)


def assert_close(net: nn.Module, expected: nn.Module) -> None:
    for parameter, other in zip(net.parameters(), expected.parameters(), strict=True):
        th.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("cls", "kwargs"), OPTIMIZERS)
def test_steps_equal_those_of_pytorch(cls: type[th.optim.Optimizer], kwargs: dict[str, Any]) -> None:
    """Also after the learning rate changed, the state was loaded, or PyTorch's optimizer itself made a step."""
    expected, net = make_net(), make_net()
    expected_optimizer = cls(expected.parameters(), lr=0.01, **kwargs)
    optimizer = cls(net.parameters(), lr=0.01, fused=True, **kwargs)
    flat = FlatAdam(optimizer, FlatParameters(net.parameters(), with_grad=True))
    for step in range(12):
        for each, each_optimizer in ((expected, expected_optimizer), (net, optimizer)):
            set_grads(each, step)
            each_optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        expected_optimizer.step()
        if step == 4:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        if step == 8:
            optimizer.step()
        else:
            flat.step()
        assert_close(net, expected)
    for entry, other in zip(
        optimizer.state_dict()["state"].values(), expected_optimizer.state_dict()["state"].values(), strict=True
    ):
        for key, value in other.items():
            th.testing.assert_close(entry[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_layer_that_was_frozen_keeps_its_own_step_count(frozen: int) -> None:
    expected, net = make_net(), make_net()
    expected_optimizer = th.optim.Adam(expected.parameters(), lr=0.01)
    for step in range(5):
        set_grads(expected, step)
        for parameter in expected[frozen].parameters():
            parameter.grad = None
        expected_optimizer.step()
    net.load_state_dict(expected.state_dict())
    optimizer = th.optim.Adam(net.parameters(), lr=0.01, fused=True)
    flat = FlatAdam(optimizer, FlatParameters(net.parameters(), with_grad=True))
    state = {**expected_optimizer.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(deepcopy(state))
    assert not flat.has_equal_steps()
    for step in range(5, 15):
        set_grads(expected, step)
        set_grads(net, step)
        expected_optimizer.step()
        flat.step()
        assert_close(net, expected)
    steps = [optimizer.state[parameter]["step"].item() for parameter in net.parameters()]
    assert steps == [10, 10, 15, 15] if frozen == 0 else [15, 15, 10, 10]


def test_state_is_empty_before_the_first_step() -> None:
    net = make_net()
    optimizer = th.optim.Adam(net.parameters(), fused=True)
    FlatAdam(optimizer, FlatParameters(net.parameters(), with_grad=True))
    assert optimizer.state_dict()["state"] == {}


def test_a_new_flat_adam_continues_with_the_optimizers_state() -> None:
    """As after a user changed the networks."""
    expected, net = make_net(), make_net()
    expected_optimizer = th.optim.Adam(expected.parameters(), lr=0.01)
    optimizer = th.optim.Adam(net.parameters(), lr=0.01, fused=True)
    for step in range(6):
        if step % 2 == 0:
            flat = FlatAdam(optimizer, FlatParameters(net.parameters(), with_grad=True))
        set_grads(expected, step)
        set_grads(net, step)
        expected_optimizer.step()
        flat.step()
    assert_close(net, expected)


@pytest.mark.parametrize("is_flat", [True, False])
def test_averages_of_gradients_that_became_zero_slow_nothing_down(is_flat: bool) -> None:
    """As in ReLUs that no longer fire: CPUs are slow with numbers below 1e-38. The parameters are PyTorch's."""
    expected, net = make_net(), make_net()
    expected_optimizer = th.optim.Adam(expected.parameters(), lr=0.01, fused=True)
    optimizer = th.optim.Adam(net.parameters(), lr=0.01, fused=True)
    parameters = FlatParameters(net.parameters(), with_grad=True) if is_flat else list(net.parameters())
    fast = make_fast(optimizer, parameters)
    assert isinstance(fast, FlatAdam if is_flat else FusedAdam)
    for step in range(1200):
        for each, each_optimizer in ((expected, expected_optimizer), (net, fast)):
            set_grads(each, step)
            if step >= 10:
                for parameter in each[0].parameters():
                    parameter.grad.zero_()
            each_optimizer.step()

    def are_slow(adam: th.optim.Optimizer) -> bool:
        averages = th.cat([adam.state[it]["exp_avg"].flatten() for it in adam.param_groups[0]["params"]]).abs()
        return bool(((averages > 0) & (averages < th.finfo(th.float32).tiny)).any())

    assert are_slow(expected_optimizer)
    assert not are_slow(optimizer)
    assert_close(net, expected)


def test_flat_parameters_are_the_same_parameters_and_values() -> None:
    net = make_net()
    parameters, values = list(net.parameters()), [parameter.detach().clone() for parameter in net.parameters()]
    flat = FlatParameters(net.parameters(), with_grad=False)
    assert all(own is before for own, before in zip(net.parameters(), parameters, strict=True))
    assert all(th.equal(own, before) for own, before in zip(net.parameters(), values, strict=True))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in net.parameters())
    net.load_state_dict({name: th.full_like(value, 7) for name, value in net.state_dict().items()})
    assert flat.data.sum() == 7 * sum(parameter.numel() for parameter in parameters)


def accepts_adam(net: nn.Module, **kwargs: Any) -> bool:
    return accepts(th.optim.Adam(net.parameters(), **{"fused": True, **kwargs}), net)


def accepts(optimizer: th.optim.Optimizer, net: nn.Module) -> bool:
    return isinstance(make_fast(optimizer, FlatParameters(net.parameters(), with_grad=False)), FlatAdam)


def test_only_optimizers_with_the_same_steps_are_accepted() -> None:
    net = make_net()
    assert accepts_adam(net)
    assert not accepts_adam(net, fused=False)
    assert not accepts_adam(net, amsgrad=True)
    assert not accepts(th.optim.SGD(net.parameters()), net)
    assert not accepts(th.optim.Adam(net[2].parameters(), fused=True), net)
    groups = [{"params": [net[0].weight]}, {"params": [net[0].bias], "lr": 0.1}]
    assert not accepts(th.optim.Adam(groups, fused=True), net)
    scheduled = th.optim.Adam(net.parameters(), fused=True)
    th.optim.lr_scheduler.StepLR(scheduled, 10)
    assert not accepts(scheduled, net)


def test_hooks_of_the_optimizer_are_called_after_each_update() -> None:
    model = tiny_agent()
    calls: list[int] = []
    model.learn(20)
    model.critic.optimizer.register_step_post_hook(lambda *_: calls.append(model._n_updates))
    before = model._n_updates
    model.learn(5, reset_num_timesteps=False)
    assert len(calls) == model._n_updates - before > 0
