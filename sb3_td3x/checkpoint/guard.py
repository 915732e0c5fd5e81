"""Locking folders before a training with checkpoints, and saving it when an error ends it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.checkpoint.interruption import naming_dead_workers
from sb3_td3x.checkpoint.state import all_callbacks


@contextlib.contextmanager
def guarded_training(model: Any, callback: MaybeCallback) -> Iterator[None]:
    """
    Lock the folders of a training's checkpoints, save the training before an error leaves it, and if the process of an
    env has died, name that env in the error.
    """
    callbacks = callback if isinstance(callback, list) else [callback] if isinstance(callback, BaseCallback) else []
    found = [child for entry in callbacks for child in all_callbacks(entry)]
    checkpoints = [child for child in found if isinstance(child, ResumableCheckpoint)]
    _check_folders(checkpoints)

    def first_seed() -> int | None:
        seeds = [checkpoint.env_seed for checkpoint in checkpoints if checkpoint.env_seed is not None]
        seed: int | None = (*seeds, model.seed)[0]
        return seed

    try:
        for checkpoint in checkpoints:
            checkpoint.on_learn_start()
        with naming_dead_workers(model, first_seed):
            yield
    except BaseException as error:
        for checkpoint in checkpoints:
            checkpoint.on_error(error)
        raise
    finally:
        for checkpoint in checkpoints:
            checkpoint.on_learn_end()


def _check_folders(checkpoints: list[ResumableCheckpoint]) -> None:
    """Refuse two callbacks with the same folder: each would delete what the other writes."""
    folders = [checkpoint.save_path.resolve() for checkpoint in checkpoints if checkpoint.save_path is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(
                f"save_path='{folder}' is not allowed for two ResumableCheckpoint of one training, "
                "expected a folder for each"
            )
