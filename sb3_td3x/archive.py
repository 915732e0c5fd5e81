"""Reading saved agents: TD3X's own zips and those of SB3's TD3 and DDPG."""

import io
import json
import pathlib
import pickle
import zipfile
import zlib
from typing import Any

import torch as th
from stable_baselines3.common.save_util import load_from_zip_file, open_path
from stable_baselines3.common.type_aliases import TensorDict

# What tells a zip of the TD3 family from one of another algorithm
_HYPERPARAMETERS = ("policy_delay", "target_policy_noise", "target_noise_clip")
_STATE_DICTS = ("policy.pth", "actor.optimizer.pth", "critic.optimizer.pth")

# What reading a damaged file may raise
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, pickle.UnpicklingError, RuntimeError, ValueError)

SavePath = str | pathlib.Path | io.BufferedIOBase


def read_zip(
    path: SavePath,
    device: th.device | str = "auto",
    custom_objects: dict[str, Any] | None = None,
    print_system_info: bool = False,
) -> tuple[dict[str, Any], TensorDict]:
    """
    Read an agent saved by ``TD3X``, or by SB3's ``TD3`` or ``DDPG``.

    :param path: path to the file, with or without ``.zip``, or a file-like object
    :param device: Device on which the tensors should be
    :param custom_objects: objects to take instead of those in the file, by name
    :param print_system_info: Whether to print the system info that was saved with the agent
    :return: the attributes of the algorithm, and its state dictionaries
    :raises ValueError: the file is damaged, or holds another algorithm's agent
    """
    _check_zip(path)
    try:
        data, params, _ = load_from_zip_file(
            path, device=device, custom_objects=custom_objects, print_system_info=print_system_info
        )
    except _DAMAGE as error:
        # SB3's own error hides the cause; PyTorch's has many sentences
        reason = str(error.__cause__ or error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{_name(path)} is damaged: {reason}") from None
    assert data is not None
    return data, params


def _check_zip(path: SavePath) -> None:
    """
    :param path: path to the file, or a file-like object
    """
    file = open_path(path, "r", suffix="zip")
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.namelist()
            attributes = json.loads(archive.read("data")) if "data" in members else {}
    except (*_DAMAGE, OSError) as error:
        raise ValueError(f"{_name(path)} is no agent's zip file, or is cut short or damaged: {error}") from None
    finally:
        if isinstance(path, (str, pathlib.Path)):
            file.close()
        else:
            file.seek(0)
    if not isinstance(attributes, dict) or "policy_class" not in attributes:
        raise ValueError(f"{_name(path)} is a zip file but no agent saved by Stable-Baselines3")
    absent = [name for name in _HYPERPARAMETERS if name not in attributes]
    if absent:
        policy_class = attributes["policy_class"]
        module = policy_class.get("__module__", "unknown") if isinstance(policy_class, dict) else policy_class
        raise ValueError(
            f"{_name(path)} was saved by another algorithm (policy from {module}, without {', '.join(absent)}): "
            "TD3X loads agents of TD3X, TD3 and DDPG"
        )
    absent = [name for name in _STATE_DICTS if name not in members]
    if absent:
        raise ValueError(f"{_name(path)} is no whole agent, it lacks {', '.join(absent)}")


def _name(path: SavePath) -> str:
    """
    :param path: path to a file, or a file-like object
    :return: how to name it in an error
    """
    return str(path) if isinstance(path, (str, pathlib.Path)) else "The file"
