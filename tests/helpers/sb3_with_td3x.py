"""A pytest plugin for SB3's own tests: ``stable_baselines3.TD3`` is ``TD3X``."""

import stable_baselines3

from sb3_td3x import TD3X

stable_baselines3.TD3 = stable_baselines3.td3.TD3 = TD3X  # type: ignore[misc]
