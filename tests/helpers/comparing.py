"""What is compared where two trainings, agents or processes shall be the same."""

import random
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm


def everything(model: OffPolicyAlgorithm) -> dict[str, np.ndarray]:
    """Copies of all parameters, the optimizers' state and the contents of the buffer."""
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
    assert model.replay_buffer is not None
    for name in ("actions", "rewards", "dones", "timeouts"):
        found[name] = getattr(model.replay_buffer, name).copy()
    return found


def assert_identical(expected: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(actual[key], value, err_msg=key)


def global_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's global generators, comparable by ==."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "random": random.getstate(),
        "numpy": numpy_state,
        "torch": th.get_rng_state().tolist(),
    }


def state_dicts_are_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two state dictionaries hold the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(th.equal(first[key], second[key]) for key in first)
