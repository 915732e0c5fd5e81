"""Callbacks."""

from collections.abc import Callable
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback


class At(BaseCallback):
    """
    Call a function at a timestep.

    :param timestep: The timestep
    :param function: The function; training stops if it returns False
    """

    def __init__(self, timestep: int, function: Callable[[], Any]) -> None:
        super().__init__()
        self.timestep = timestep
        self.function = function

    def _on_step(self) -> bool:
        return self.num_timesteps != self.timestep or self.function() is not False


def stop() -> bool:
    """Stop the training, as the function of an ``At`` callback."""
    return False
