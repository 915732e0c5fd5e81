"""Activations and features extractors, as users write their own."""

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn


class LearnedActivation(nn.PReLU):
    """An activation with a weight."""


class CenteredActivation(nn.Module):
    """An activation that is not elementwise: it uses the mean of all features."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return nn.functional.relu(x - x.mean(dim=1, keepdim=True))


class LinearExtractor(BaseFeaturesExtractor):
    """
    A features extractor with weights.

    :param observation_space: Observation space
    :param features_dim: Number of features
    :param frozen: Whether the weights are not trained, as in a pretrained extractor
    """

    def __init__(self, observation_space: spaces.Box, features_dim: int = 4, frozen: bool = False) -> None:
        super().__init__(observation_space, features_dim)
        self.linear = nn.Linear(observation_space.shape[0], features_dim).requires_grad_(not frozen)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return 2 * self.linear(observations)


class WithStatistics(BaseFeaturesExtractor):
    """A features extractor with batch normalization, dropout, and an unused layer."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, 4)
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.unused = nn.Linear(2, 2)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.layers(observations)
        return features
