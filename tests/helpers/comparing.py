"""Compare agents, random generators and training runs bit for bit."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th


def everything(model: Any) -> dict[str, np.ndarray]:
    """Return copies of an agent's parameters, optimizer states, and stored actions, rewards and dones."""
    found = {}
    for name, state in model.get_parameters().items():
        if name == "policy":
            found.update({key: value.numpy().copy() for key, value in state.items()})
        else:
            found.update(
                {
                    f"{name} {idx} {key}": value.numpy().copy()
                    for idx, entry in state["state"].items()
                    for key, value in entry.items()
                }
            )
    for name in ("actions", "rewards", "dones", "timeouts"):
        found[name] = getattr(model.replay_buffer, name).copy()
    return found


def assert_identical(expected: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
    """Assert that two results of ``everything`` are equal."""
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(actual[key], value, err_msg=key)


def global_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's global random generators, in a form that == compares."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "random": random.getstate(),
        "numpy": numpy_state,
        "torch": th.get_rng_state().tolist(),
    }


def state_dicts_are_equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two state dictionaries contain the same tensors."""
    return first.keys() == second.keys() and all(th.equal(first[key], second[key]) for key in first)


def assert_same_tensors(expected: Mapping[str, th.Tensor], actual: Mapping[str, th.Tensor]) -> None:
    """Assert that two state dictionaries contain the same tensors, and name the first that differs."""
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert th.equal(value, actual[key]), key


def assert_same_weights(expected: Any, actual: Any) -> None:
    """Assert that two agents have the same weights."""
    assert_same_tensors(expected.policy.state_dict(), actual.policy.state_dict())
