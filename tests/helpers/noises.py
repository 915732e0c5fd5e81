"""Action noises."""

import numpy as np
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise


def normal_noise(sigma: float = 0.1, size: int = 1) -> NormalActionNoise:
    return NormalActionNoise(np.zeros(size), sigma * np.ones(size))


class ConstantNoise(ActionNoise):
    """Noise with a constant value, so that the actions of a zero policy show its scale."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value

    def __call__(self) -> np.ndarray:
        return np.full(1, self.value, np.float32)

    def __repr__(self) -> str:
        return f"ConstantNoise({self.value})"
