"""The statistics of ``VecNormalize`` as tensors, to normalize batches on the device that trains."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.td3.policies import Actor


class BatchNormalizer:
    """Normalize batches as ``VecNormalize`` does, in float64 and then cast to float32."""

    def __init__(self, env: VecNormalize, device: th.device):
        self.env = env
        is_dict = isinstance(env.observation_space, spaces.Dict)
        self._keys: list[Any] = [] if not env.norm_obs else list(env.norm_obs_keys or ()) if is_dict else [None]
        shapes = {key: np.shape(self._statistics(key).mean) for key in self._keys}
        options: dict[str, Any] = {"dtype": th.float64, "device": device}
        self._means = {key: th.zeros(shape, **options) for key, shape in shapes.items()}
        self._stds = {key: th.ones(shape, **options) for key, shape in shapes.items()}
        self._reward_std = th.ones((), **options)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The numbers of ``VecNormalize`` that a CUDA graph keeps"""
        env = self.env
        return (env.norm_obs, env.norm_reward, env.clip_obs, env.clip_reward, *self._keys)

    def refresh(self) -> None:
        """Copy the current statistics."""
        for key in self._keys:
            statistics = self._statistics(key)
            self._means[key].copy_(th.as_tensor(statistics.mean))
            self._stds[key].copy_(th.as_tensor(np.sqrt(statistics.var + self.env.epsilon)))
        self._reward_std.fill_(float(np.sqrt(self.env.ret_rms.var + self.env.epsilon)))

    def observations(self, batch: th.Tensor, key: str | None) -> th.Tensor:
        """
        Normalize observations.

        :param batch: observations, (b, ...)
        :param key: their key in a Dict space, None in other spaces
        :return: normalized observations in float32, or ``batch`` where ``VecNormalize`` leaves them unchanged
        """
        if key not in self._means:
            return batch
        normalized = (batch.double() - self._means[key]) / self._stds[key]
        return normalized.clamp_(-self.env.clip_obs, self.env.clip_obs).float()

    def rewards(self, batch: th.Tensor) -> th.Tensor:
        """
        Normalize rewards.

        :param batch: rewards, (b, ...)
        :return: normalized rewards in float32
        """
        if not self.env.norm_reward:
            return batch
        return (batch.double() / self._reward_std).clamp_(-self.env.clip_reward, self.env.clip_reward).float()

    def _statistics(self, key: str | None) -> Any:
        """Return the running mean and variance of the observations of a key."""
        return self.env.obs_rms if key is None else self.env.obs_rms[key]


def check_renormalizable(actor: Actor, env: VecNormalize) -> None:
    """
    Check that ``renormalize`` can change an actor.

    :raises ValueError: it does not take the observations as they are
    """
    extractor = type(actor.features_extractor)
    if env.norm_obs and not issubclass(extractor, FlattenExtractor):
        raise ValueError(
            "norm_obs=True of VecNormalize is not allowed with policy_checkpoint_episodes > 0 and "
            f"features_extractor_class={extractor.__name__}, expected FlattenExtractor, or norm_obs=False"
        )


def renormalize(actor: Actor, old: RunningMeanStd, new: RunningMeanStd, epsilon: float) -> None:
    """
    Change an actor's first layer so that, for the same observations of the env, it acts on those that ``new``
    normalizes as it did on those that ``old`` normalizes. This is exact where ``clip_obs`` changes nothing.

    :param old: statistics of ``VecNormalize`` that the actor is for
    :param new: statistics that it is to be for
    :param epsilon: that of ``VecNormalize``
    """
    layer = next(module for module in actor.modules() if isinstance(module, th.nn.Linear))
    arrays = (old.mean, np.sqrt(old.var + epsilon), new.mean, np.sqrt(new.var + epsilon))
    old_mean, old_std, new_mean, new_std = (th.as_tensor(array.ravel(), device=layer.weight.device) for array in arrays)
    with th.no_grad():
        weight = layer.weight / old_std
        layer.bias.add_(weight @ (new_mean - old_mean))
        layer.weight.copy_(weight * new_std)
