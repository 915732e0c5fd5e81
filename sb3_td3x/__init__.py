"""TD3X: TD3 for users of Stable-Baselines3 and RL Zoo."""

from sb3_td3x._version import __version__
from sb3_td3x.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_td3x.td3x import TD3X

__all__ = ["TD3X", "CnnPolicy", "MlpPolicy", "MultiInputPolicy", "__version__"]
