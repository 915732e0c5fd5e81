"""The callback that saves a training, so that it can be resumed after an interruption."""

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from filelock import BaseFileLock
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_td3x.buffers import end_open_episodes
from sb3_td3x.callbacks import tuning
from sb3_td3x.checkpoint import state as training_state
from sb3_td3x.checkpoint.folder import (
    REPLAY_BUFFER,
    list_checkpoints,
    read_checkpoint,
    remove_all_but,
    write_checkpoint,
)
from sb3_td3x.checkpoint.interruption import TerminationRequest
from sb3_td3x.checkpoint.logs import monitor_sizes, tensorboard_folder
from sb3_td3x.checkpoint.resume import Resumed, reset_envs
from sb3_td3x.files.atomic import lock_folder
from sb3_td3x.files.replay import KNOWN_BUFFERS, RowFiles, columns, is_known_buffer, write_new_rows
from sb3_td3x.validation import check_bool, check_integer


@dataclass
class _Boundary:
    """
    The replay buffer at a moment when every transition was stored.

    :param rows: the files that hold the replay buffer; None: write all rows
    """

    replay_buffer: ReplayBuffer
    timesteps: int
    pos: int
    newest_row: dict[str, np.ndarray]
    rows: RowFiles | None

    def rows_since(self, model: OffPolicyAlgorithm) -> int | None:
        """Count the rows that the training added since. The last env step does not count if it was not stored."""
        replay_buffer = model.replay_buffer
        if replay_buffer is None or replay_buffer is not self.replay_buffer:
            return None
        size = replay_buffer.buffer_size
        steps = (model.num_timesteps - self.timesteps) // model.n_envs
        moved = (replay_buffer.pos - self.pos) % size
        rows = next((rows for rows in (steps, steps - 1) if rows >= 0 and rows % size == moved), None)
        if rows is not None and rows < size:
            # Rows that a user has added may bring the position back to where it should be
            newest_row = _row(replay_buffer, self.pos - 1)
            if any(not np.array_equal(newest_row[name], value) for name, value in self.newest_row.items()):
                return None
        return rows


def _row(replay_buffer: ReplayBuffer, row: int) -> dict[str, np.ndarray]:
    """Return a row of a replay buffer, without the arrays that the end of an episode may change later."""
    arrays = columns(replay_buffer).items()
    return {name: array[row].copy() for name, array in arrays if name not in ("dones", "timeouts", "infos")}


class ResumableCheckpoint(BaseCallback):
    """
    Save the whole state of a training, so that ``TD3X.resume`` or ``python -m sb3_td3x resume`` can continue it: every
    ``save_freq`` env timesteps, at the end, and when Ctrl-C, SIGTERM or an error interrupts the training. For RL Zoo's
    ``callback:`` list::

        callback:
          - sb3_td3x.checkpoint.ResumableCheckpoint:
              save_freq: 10000

    A checkpoint is written as a whole or not at all. If the disk is full, the callback warns, the training continues,
    and older checkpoints stay as they are.

    Each checkpoint writes only the transitions that are new. Transitions that are added by hand, and another replay
    buffer, are noticed, and all are written again. If you change transitions that are already stored, for instance
    their rewards, call ``rewrite``: otherwise a resumed training has the old values.

    :param save_path: The folder of the checkpoints, which must not hold those of another training. None: in RL Zoo,
        which sets it to ``checkpoints`` in the folder of the run
    :param save_freq: Number of env timesteps between two checkpoints, of all envs together
    :param keep: How many checkpoints to keep. Older ones are a reserve in case the disk damages files
    :param exact: Whether a training that was stopped and resumed ends with the same parameters, bit for bit, as if it
        had not been stopped (on a CPU). To this end all envs are reset at each checkpoint, with a seed from the
        training's own random generator. Nothing is saved on interruption: resuming from the last checkpoint gives the
        same training
    :param verbose: Verbosity level: 0 for no output, 1 for a message when an interrupted training was saved
    :raises ValueError: an argument is out of range, the folder holds checkpoints of another training or another process
        writes there, or the class of the replay buffer is unknown
    """

    # The ``TD3X``
    model: Any

    def __init__(
        self,
        save_path: str | Path | None = None,
        save_freq: int = 10_000,
        keep: int = 2,
        exact: bool = False,
        verbose: int = 1,
    ):
        super().__init__(verbose)
        self.save_path = None if save_path is None else Path(save_path)
        self.save_freq = check_integer("save_freq", save_freq, low=1)
        self.keep = check_integer("keep", keep, low=1)
        self.exact = check_bool("exact", exact)
        # The folder where the envs' Monitor writes; None: the parent of the checkpoints' folder
        self.run_folder: Path | None = None
        # The envs' seed at the last reset of an exact training
        self.env_seed: int | None = None
        self._active = False
        self._kept: dict[Path, RowFiles] = {}
        # Timestep of the last checkpoint, or of the start
        self._saved_at = 0
        self._boundary: _Boundary | None = None
        self._resumed: Resumed | None = None
        self._termination = TerminationRequest()
        self._lock: BaseFileLock | None = None

    def rewrite(self) -> None:
        """Let the next checkpoint write all transitions again, because some that are stored have changed."""
        if self._boundary is not None:
            self._boundary.rows = None

    # Start and end of a training

    def _init_callback(self) -> None:
        if not hasattr(self.model, "resume"):
            raise ValueError(f"model={self.model!r} is not allowed with ResumableCheckpoint, expected a TD3X")

    def on_learn_start(self) -> None:
        """
        Lock the folder, if it exists. Called by ``TD3X.learn`` before anything is written.

        :raises ValueError: another process writes to the folder
        """
        if not tuning.get() and self.save_path is not None and self.save_path.is_dir():
            self._lock = lock_folder(self.save_path)

    def _on_training_start(self) -> None:
        if tuning.get():
            return
        if self.save_path is None:
            raise ValueError("save_path=None is not allowed outside of RL Zoo, expected a folder for the checkpoints")
        if not is_known_buffer(self.model.replay_buffer):
            raise ValueError(
                f"replay_buffer_class={type(self.model.replay_buffer).__name__} is not allowed with "
                f"ResumableCheckpoint, expected one of {', '.join(cls.__name__ for cls in KNOWN_BUFFERS)}: another "
                "class may have more to save"
            )
        (self.save_path / REPLAY_BUFFER).mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = lock_folder(self.save_path)
        resumed, self.model._resumed = self.model._resumed, None
        if resumed is not None and resumed.checkpoint.num_timesteps == self.model.num_timesteps:
            self._continue(resumed)
        if list_checkpoints(self.save_path) and not self._kept:
            raise ValueError(
                f"save_path='{self.save_path}' holds checkpoints of another training, expected a folder without any: "
                "continue that training by TD3X.resume, or delete them"
            )
        self._saved_at = self.model.num_timesteps
        # The first checkpoint writes all rows, because they may have changed since they were written
        self._boundary = self._make_boundary(self.model.num_timesteps, rows=None)
        self._active = True
        # A new one, because other handlers may have been installed since the last training
        self._termination = TerminationRequest()
        self._termination.install()

    def _continue(self, resumed: Resumed) -> None:
        """Restore callbacks and the logger, which did not exist when the agent was resumed."""
        assert self.save_path is not None
        self._resumed = resumed
        self.env_seed = resumed.env_seed
        checkpoint, callback = resumed.checkpoint, self.locals["callback"]
        training_state.restore_callback_states(callback, checkpoint.state["callbacks"])
        training_state.restore_pending_logs(self.logger, checkpoint.state["logs"])
        if checkpoint.path.parent.resolve() == self.save_path.resolve():
            # Newer ones are damaged, and the next checkpoint deletes them
            older = [path for path in list_checkpoints(self.save_path) if path.name <= checkpoint.path.name]
            for path in older[-self.keep :]:
                with contextlib.suppress(ValueError):
                    self._kept[path] = read_checkpoint(path).rows

    def _on_training_end(self) -> None:
        # The zoo calls it twice, and also after an error
        if not self._active:
            return
        if self._saved_at != self.model.num_timesteps:
            self._checkpoint()
        self.on_learn_end()

    def on_error(self, error: BaseException) -> None:
        """Save what is whole. Called by ``TD3X.learn`` before an error leaves it. Raises nothing."""
        if self._active:
            with contextlib.suppress(Exception):
                self._save_interrupted(type(error).__name__)

    def on_learn_end(self) -> None:
        """Release the lock and the signal. Called by ``TD3X.learn`` at its end, in any case."""
        self._active = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._termination.uninstall()

    # During a training

    def _on_rollout_start(self) -> None:
        if not self._active:
            return
        if self._resumed is not None:
            # Random numbers drawn between resuming and now are not part of the training
            training_state.restore_generators(self.model, self._resumed.generators)
            self._seed_evaluations()
            self._resumed = None
        if self.model.num_timesteps // self.save_freq > self._saved_at // self.save_freq:
            self._checkpoint()
        self._handle_termination()

    def _on_step(self) -> bool:
        if self._active:
            self._handle_termination()
        return True

    def _handle_termination(self) -> None:
        """Save the training if SIGTERM was received, and then let the signal take effect."""
        if self._termination.received:
            self._save_interrupted("SIGTERM")
            self._termination.let_through()

    def _checkpoint(self) -> None:
        """Save between two rollouts. In an exact training the envs are reset, whether or not saving succeeded."""
        self._saved_at = self.model.num_timesteps
        if self.exact:
            end_open_episodes(self.model.replay_buffer)
            if self.model.action_noise is not None:
                self.model.action_noise.reset()
            # From the generator that the seed determines, so that a resumed training draws the same number
            self.env_seed = int(np.random.randint(2**31))
        self._save()
        if self.exact:
            assert self.env_seed is not None
            reset_envs(self.model, self.env_seed)
            self._seed_evaluations()

    def _seed_evaluations(self) -> None:
        """In an exact training, make the next evaluation independent of those before the checkpoint."""
        for env in training_state.evaluation_envs(self.locals["callback"]):
            if self.exact:
                env.seed(self.env_seed)

    def _save_interrupted(self, reason: str) -> None:
        """Save a training that is interrupted, possibly in the middle of a step, unless it was just saved."""
        assert self._boundary is not None
        if self.exact:
            if self.verbose >= 1:
                print(f"{reason}: exact=True, the training continues from its last checkpoint in {self.save_path}")
            return
        replay_buffer = self.model.replay_buffer
        if replay_buffer.pos == replay_buffer.buffer_size:
            # A signal arrived between the two statements that move the position
            replay_buffer.pos, replay_buffer.full = 0, True
        is_new = self._boundary.rows is None or self._boundary.rows_since(self.model) != 0
        if is_new and self._save() and self.verbose >= 1:
            print(f"{reason}: the training was saved in {self.save_path}")

    def _save(self) -> bool:
        """
        Write a checkpoint and delete those that are too old.

        :return: whether it was written
        """
        assert self.save_path is not None
        assert self._boundary is not None
        boundary, timesteps = self._boundary, self.model.num_timesteps
        n_new = boundary.rows_since(self.model)
        if n_new is not None:
            # Without a last step that was not stored
            timesteps = boundary.timesteps + n_new * self.model.n_envs
        if not all(bool(th.isfinite(parameter).all()) for parameter in self.model.policy.parameters()):
            warnings.warn(
                f"No checkpoint at timestep {timesteps}: the networks hold NaN or infinity. "
                "The last checkpoint stays as it is",
                stacklevel=2,
            )
            return False
        try:
            rows = write_new_rows(self.save_path / REPLAY_BUFFER, self.model.replay_buffer, boundary.rows, n_new)
            path = write_checkpoint(self.save_path, self.model, timesteps, self._state(timesteps), rows)
            self._boundary = self._make_boundary(timesteps, rows)
            self._kept[path] = rows
            self._kept = dict(list(self._kept.items())[-self.keep :])
            remove_all_but(self.save_path, self._kept)
        except OSError as error:
            warnings.warn(
                f"No checkpoint at timestep {timesteps} in {self.save_path}: {error}. "
                "The training continues, and the last checkpoint stays as it is",
                stacklevel=2,
            )
            with contextlib.suppress(OSError):
                remove_all_but(self.save_path, self._kept)
            return False
        return True

    def _make_boundary(self, timesteps: int, rows: RowFiles | None) -> _Boundary:
        """Remember the state of the replay buffer, with every transition stored."""
        replay_buffer = self.model.replay_buffer
        return _Boundary(replay_buffer, timesteps, replay_buffer.pos, _row(replay_buffer, replay_buffer.pos - 1), rows)

    def _state(self, timesteps: int) -> dict[str, Any]:
        """Return the state of the training after a number of env timesteps whose transitions are stored."""
        assert self.save_path is not None
        return {
            "generators": training_state.generators(self.model),
            "normalization": training_state.normalization(self.model.get_vec_normalize_env()),
            "callbacks": training_state.callback_states(self.locals["callback"], timesteps),
            "logs": training_state.pending_logs(self.logger),
            "tensorboard": tensorboard_folder(self.logger),
            "save_path": str(self.save_path.resolve()),
            "monitor_sizes": monitor_sizes(self.run_folder or self.save_path.parent),
            "exact": self.exact,
            "env_seed": self.env_seed,
        }
