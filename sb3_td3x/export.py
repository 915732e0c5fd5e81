"""Actors as ONNX files, to run them without Python or PyTorch."""

import logging
import os
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.normalization import BatchNormalizer
from sb3_td3x.policies import is_stochastic
from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.run_files import load_vec_normalize

# Observations on which an exported actor is compared with its agent
_N_CHECKS = 1000
# Largest difference, as a share of an action's range
_TOLERANCE = 1e-4


def export_actor(model: TD3X, path: str | os.PathLike[str], vec_normalize: VecNormalize | None = None) -> None:
    """
    Write the actor of an agent to an ONNX file: observations of the env in, actions for the env out.

    The inputs have the shapes and types of ``model.observation_space`` and a batch dimension in front. A Dict space
    has one input per key, other spaces the input ``observation``. Images have their channels first. The output is
    ``action``. The file is written only if it acts as ``predict(..., deterministic=True)`` does on 1,000 random
    observations.

    :param model: the agent
    :param path: the file
    :param vec_normalize: normalization of the observations, which becomes part of the file; None: that of the agent's
        env, if it has one
    :raises ImportError: onnx, onnxruntime or onnxscript is missing
    :raises ValueError: the file would act differently
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError('Exporting needs ONNX: pip install "sb3-td3x[onnx]"') from error
    space, vec_normalize = model.observation_space, vec_normalize or model.get_vec_normalize_env()
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
    samples = {name: _sample(part) for name, part in parts.items()}
    tensors: dict[str, Any] = {name: th.as_tensor(sample) for name, sample in samples.items()}
    batched: dict[str, Any] = {name: {0: th.export.Dim.DYNAMIC} for name in samples}
    obs: Any = samples
    if not isinstance(space, spaces.Dict):
        tensors, batched, obs = tensors["observation"], batched["observation"], obs["observation"]
    program = th.onnx.export(
        _EnvActor(model, vec_normalize).eval(),
        kwargs={"obs": tensors},
        input_names=list(samples),
        output_names=["action"],
        dynamic_shapes={"obs": batched},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    content = program.model_proto.SerializeToString()

    (actions,) = onnxruntime.InferenceSession(content).run(["action"], samples)
    expected, _ = model.predict(obs if vec_normalize is None else vec_normalize.normalize_obs(obs), deterministic=True)
    difference = np.abs((actions - expected) / (model.action_space.high - model.action_space.low)).max()
    if not difference <= _TOLERANCE:
        raise ValueError(f"The exported actor differs from the agent by {difference:.2g} of an action's range")
    with atomic_write(path) as file:
        file.write(content)


class _EnvActor(th.nn.Module):
    """A copy of an agent's actor with what surrounds it in ``predict``."""

    def __init__(self, model: TD3X, vec_normalize: VecNormalize | None):
        super().__init__()
        self.actor: Any = deepcopy(model.policy.playing_actor).cpu()
        self.is_stochastic = is_stochastic(model.policy)
        self.normalizer = None
        if vec_normalize is not None:
            self.normalizer = BatchNormalizer(vec_normalize, th.device("cpu"))
            self.normalizer.refresh()
        self.low, self.high = th.as_tensor(model.action_space.low), th.as_tensor(model.action_space.high)

    def forward(self, obs: PyTorchObs) -> th.Tensor:
        """Return the env's actions for its observations."""
        if self.normalizer is not None and isinstance(obs, dict):
            obs = {key: self.normalizer.observations(part, key) for key, part in obs.items()}
        elif self.normalizer is not None and isinstance(obs, th.Tensor):
            obs = self.normalizer.observations(obs, None)
        scaled = th.tanh(self.actor.get_action_dist_params(obs)[0]) if self.is_stochastic else self.actor(obs)
        actions: th.Tensor = (self.low + 0.5 * (scaled + 1) * (self.high - self.low)).clamp(self.low, self.high)
        return actions


def _sample(space: spaces.Space) -> np.ndarray:
    """Return random observations, without the huge numbers that some spaces allow."""
    space = deepcopy(space)
    space.seed(0)
    samples = np.stack([space.sample() for _ in range(_N_CHECKS)])
    return samples.clip(-10, 10) if samples.dtype.kind == "f" else samples


def export_file(agent: Path, actor: Path, statistics: Path | None) -> Path | None:
    """
    Export the actor of a file, without running code that it holds.

    :param statistics: file of ``VecNormalize``; None: that in the run's folder, if any
    :return: the statistics that became part of the file
    """
    # PyTorch's exporter warns about its own code, and that torchvision is missing
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    model = TD3X.load(agent, device="cpu")
    # The zoo saves them in the folder of the run's settings, next to its agents
    statistics = statistics or next(agent.parent.glob("*/vecnormalize.pkl"), None)
    vec_normalize = None
    if statistics is not None:
        env: gym.Env = gym.Env()
        env.observation_space, env.action_space = model.observation_space, model.action_space
        vec_normalize = load_vec_normalize(statistics, DummyVecEnv([lambda: env]))
    export_actor(model, actor, vec_normalize)
    return statistics
