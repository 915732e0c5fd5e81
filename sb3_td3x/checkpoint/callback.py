"""Runs that survive: checkpoints of everything that a training consists of, and going on from them."""

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch as th
from filelock import BaseFileLock
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import HumanOutputFormat, KVWriter, Logger, TensorBoardOutputFormat
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback

from sb3_td3x.buffers import end_open_episodes
from sb3_td3x.callbacks import tuning
from sb3_td3x.checkpoint import state as run_state
from sb3_td3x.checkpoint.folder import (
    REPLAY_BUFFER,
    Checkpoint,
    list_checkpoints,
    newest_whole_checkpoint,
    read_checkpoint,
    remove_all_but,
    write_checkpoint,
)
from sb3_td3x.checkpoint.interruption import (
    PIPE_ERRORS,
    TerminationRequest,
    broken_pipes_to_dead_workers,
    dead_worker_error,
    describe_workers,
)
from sb3_td3x.checkpoint.logs import cut_tensorboard, monitor_sizes, write_evaluations
from sb3_td3x.files.atomic import lock_folder
from sb3_td3x.files.replay import describe_replay_buffer, make_described_replay_buffer
from sb3_td3x.files.segments import (
    Chain,
    bookkeeping,
    check_supported,
    read_segments,
    restore_bookkeeping,
    write_segments,
)
from sb3_td3x.validation import check_bool, check_integer

if TYPE_CHECKING:
    from sb3_td3x.td3x import TD3X

    SelfTD3X = TypeVar("SelfTD3X", bound="TD3X")

_MODEL = "model.zip"
_STATE = "state.json"
_BOOKKEEPING = "replay_buffer.npz"

# Arguments of the agent that decide on what is stored in it
_REPLAY_BUFFER_ARGUMENTS = {"buffer_size", "replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage"}


@dataclass
class Resumed:
    """
    Where a resumed agent comes from, for the callbacks of the training that goes on.

    :param checkpoint: the checkpoint
    :param state: its state
    :param generators: states of the random generators right after resuming
    """

    checkpoint: Checkpoint
    state: dict[str, Any]
    generators: dict[str, Any]


@dataclass(frozen=True)
class _Boundary:
    """
    A moment at which every transition was stored.

    :param replay_buffer: the replay buffer
    :param timesteps: number of env timesteps
    :param pos: the replay buffer's position
    :param chain: the replay buffer's files, if they were written then
    """

    replay_buffer: ReplayBuffer
    timesteps: int
    pos: int
    chain: Chain | None

    def rows_since(self, model: "TD3X") -> int | None:
        """
        :param model: the agent
        :return: how many rows its replay buffer was given since, the last env step not counted if its transition was
            not stored; None if it was changed in another way
        """
        if model.replay_buffer is not self.replay_buffer:
            return None
        steps = (model.num_timesteps - self.timesteps) // model.n_envs
        moved = (model.replay_buffer.pos - self.pos) % model.replay_buffer.buffer_size
        return next(
            (rows for rows in (steps, steps - 1) if rows >= 0 and rows % model.replay_buffer.buffer_size == moved), None
        )


class ResumableCheckpoint(BaseCallback):
    """
    Save all that a training consists of, so that ``TD3X.resume`` or ``python -m sb3_td3x resume`` can go on with it:
    every ``save_freq`` env timesteps, at the end, and when the training is interrupted by Ctrl-C, SIGTERM or an error.
    For RL Zoo's ``callback:`` list::

        callback:
          - sb3_td3x.checkpoint.ResumableCheckpoint:
              save_freq: 10000

    A checkpoint is written whole or not at all. If the disk is full a warning is given, the training goes on, and the
    older checkpoints stay as they are.

    :param save_path: The folder of the checkpoints, which must hold none of another run. None: in RL Zoo, where it is
        ``checkpoints`` in the folder of the run
    :param save_freq: Number of env timesteps between two checkpoints, those of all envs together
    :param keep: How many checkpoints to keep; the older ones are a reserve for a disk that damages files
    :param exact: At each checkpoint all envs are reset with a seed from the run's own generator, so that a run that
        was stopped and resumed ends with the same parameters, bit for bit, as if it had not been (on a CPU). Nothing is
        saved on interruption then: going on from the last checkpoint gives the same run
    :param verbose: Verbosity level: 0 for no output, 1 for a message when an interrupted training was saved
    :raises ValueError: an argument is out of range, the folder holds checkpoints of another run or another process
        writes there, or the replay buffer is of a class that it does not know
    """

    model: "TD3X"

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
        # Where the envs' Monitor writes; None: where the folder of the checkpoints lies
        self.run_folder: Path | None = None
        # The envs' seed at the last reset of an exact run
        self.env_seed: int | None = None
        self._active = False
        self._kept: list[Checkpoint] = []
        self._due_after = 0
        self._boundary: _Boundary | None = None
        self._resumed: Resumed | None = None
        self._termination = TerminationRequest()
        self._lock: BaseFileLock | None = None

    def _init_callback(self) -> None:
        from sb3_td3x.td3x import TD3X

        if not isinstance(self.model, TD3X):
            raise ValueError(f"model={self.model!r} is not allowed with ResumableCheckpoint, expected a TD3X")

    def on_entering(self) -> None:
        """
        Called by ``TD3X.learn`` at its start, before anything is written.

        :raises ValueError: another process writes to the folder
        """
        if not tuning.get() and self.save_path is not None and self.save_path.is_dir():
            self._take_lock(self.save_path)

    def _take_lock(self, folder: Path) -> None:
        if self._lock is None:
            self._lock = lock_folder(folder)

    def _on_training_start(self) -> None:
        if tuning.get():
            return
        if self.save_path is None:
            raise ValueError("save_path=None is not allowed outside of RL Zoo, expected a folder for the checkpoints")
        check_supported(self.model.replay_buffer)
        (self.save_path / REPLAY_BUFFER).mkdir(parents=True, exist_ok=True)
        self._take_lock(self.save_path)
        resumed, self.model._resumed = self.model._resumed, None
        if resumed is not None and resumed.state["num_timesteps"] == self.model.num_timesteps:
            self._go_on(resumed)
        if list_checkpoints(self.save_path) and not self._kept:
            raise ValueError(
                f"save_path='{self.save_path}' holds checkpoints of another run, expected a folder without any: "
                "go on with that run by TD3X.resume, or delete it"
            )
        self._due_after = self.model.num_timesteps
        # The first checkpoint writes the whole replay buffer, which may have changed since it was written last
        self._boundary = self._here(chain=None)
        self._active = True
        # A new one: since the last training somebody may have put the handlers in another order
        self._termination = TerminationRequest()
        self._termination.install()

    def _go_on(self, resumed: Resumed) -> None:
        """
        Put back what did not exist yet when the agent was resumed: callbacks and the logger.

        :param resumed: where the agent comes from
        """
        assert self.save_path is not None
        self._resumed = resumed
        self.env_seed = resumed.state["env_seed"]
        callback = self.locals["callback"]
        run_state.restore_callback_states(callback, resumed.state["callbacks"])
        run_state.restore_pending_logs(self.logger, resumed.state["logs"])
        for child in run_state.all_callbacks(callback):
            if isinstance(child, EvalCallback):
                write_evaluations(child)
        if resumed.checkpoint.path.parent.resolve() == self.save_path.resolve():
            # Newer ones are damaged, and are deleted at the next checkpoint
            older = [path for path in list_checkpoints(self.save_path) if path.name <= resumed.checkpoint.path.name]
            for path in older[-self.keep :]:
                with contextlib.suppress(ValueError):
                    self._kept.append(read_checkpoint(path))

    def _on_rollout_start(self) -> None:
        if not self._active:
            return
        if self._resumed is not None:
            # What was drawn between resuming and here is no part of the run
            run_state.restore_generators(self.model, self._resumed.generators)
            self._seed_evaluations()
            self._resumed = None
        if self._is_due():
            self._checkpoint()
        if self._termination.received:
            self._save_before_the_end("SIGTERM")
            self._termination.let_through()

    def _is_due(self) -> bool:
        """
        :return: whether a multiple of ``save_freq`` was reached since the last checkpoint
        """
        return self.model.num_timesteps // self.save_freq > self._due_after // self.save_freq

    def _on_step(self) -> bool:
        if self._active and self._termination.received:
            self._save_before_the_end("SIGTERM")
            self._termination.let_through()
        return True

    def _on_training_end(self) -> None:
        # The zoo calls it again, also after an error
        if not self._active:
            return
        if self._due_after != self.model.num_timesteps:
            self._checkpoint()
        self._stop()

    def on_error(self, error: BaseException) -> None:
        """
        Called by ``TD3X.learn`` before an error leaves it. Saves what is whole; raises nothing.

        :param error: what ended the training
        """
        if self._active:
            with contextlib.suppress(Exception):
                self._save_before_the_end(type(error).__name__)

    def on_leaving(self) -> None:
        """Called by ``TD3X.learn`` at its end, however it ends."""
        self._stop()

    def _stop(self) -> None:
        self._active = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._termination.uninstall()

    def _here(self, chain: Chain | None) -> _Boundary:
        """
        :param chain: the files that hold the replay buffer now
        :return: this moment, at which every transition is stored
        """
        replay_buffer = self.model.replay_buffer
        return _Boundary(replay_buffer, self.model.num_timesteps, replay_buffer.pos, chain)

    def _checkpoint(self) -> None:
        """Save between two rollouts. In an exact run the envs are reset, whether or not it could be saved."""
        self._due_after = self.model.num_timesteps
        if self.exact:
            end_open_episodes(self.model.replay_buffer)
            if self.model.action_noise is not None:
                self.model.action_noise.reset()
            # From the generator that the run's seed decides, so that the same run draws it again
            self.env_seed = int(np.random.randint(2**31))
        self._save()
        if self.exact:
            assert self.env_seed is not None
            reset_envs(self.model, self.env_seed)
            self._seed_evaluations()

    def _seed_evaluations(self) -> None:
        """In an exact run, let the next evaluation not depend on those before the checkpoint."""
        for env in run_state.evaluation_envs(self.locals["callback"]):
            if self.exact:
                env.seed(self.env_seed)

    def _save_before_the_end(self, reason: str) -> None:
        """
        Save a training that is interrupted, maybe in the middle of a step, unless it was just saved.

        :param reason: why
        """
        assert self._boundary is not None
        if self.exact:
            if self.verbose >= 1:
                print(f"{reason}: exact=True, the run goes on from its last checkpoint in {self.save_path}")
            return
        replay_buffer = self.model.replay_buffer
        if replay_buffer.pos == replay_buffer.buffer_size:
            # A signal came right between these two
            replay_buffer.pos, replay_buffer.full = 0, True
        rows = self._boundary.rows_since(self.model)
        if (rows != 0 or self._boundary.chain is None) and self._save() and self.verbose >= 1:
            print(f"{reason}: the training was saved in {self.save_path}")

    def _save(self) -> bool:
        """
        Write a checkpoint and delete those that are too old.

        :return: whether it was written
        """
        assert self.save_path is not None
        assert self._boundary is not None
        rows = self._boundary.rows_since(self.model)
        timesteps = self.model.num_timesteps
        if rows is not None:
            # Without the step whose transition was not stored
            timesteps = self._boundary.timesteps + rows * self.model.n_envs
        if not parameters_are_finite(self.model):
            warnings.warn(
                f"No checkpoint at timestep {timesteps}: the networks hold NaN or infinity. "
                "The last checkpoint stays as it is",
                stacklevel=2,
            )
            return False
        try:
            chain = write_segments(self.save_path / REPLAY_BUFFER, self.model.replay_buffer, self._boundary.chain, rows)
            checkpoint = write_checkpoint(self.save_path, self._files(timesteps), chain, timesteps)
            self._boundary = _Boundary(self.model.replay_buffer, timesteps, self.model.replay_buffer.pos, chain)
            self._kept = [*self._kept, checkpoint][-self.keep :]
            remove_all_but(self.save_path, self._kept)
        except OSError as error:
            warnings.warn(
                f"No checkpoint at timestep {timesteps} in {self.save_path}: {error}. "
                "The training goes on, and the last checkpoint stays as it is",
                stacklevel=2,
            )
            with contextlib.suppress(OSError):
                remove_all_but(self.save_path, self._kept)
            return False
        return True

    def _files(self, timesteps: int) -> dict[str, bytes]:
        """
        :param timesteps: number of env timesteps whose transitions are stored
        :return: the files of a checkpoint, but for the replay buffer's rows
        """
        assert self.save_path is not None
        # Not to the disk at once: PyTorch hides that it is full
        zip_file = io.BytesIO()
        self.model.save(zip_file)
        replay_buffer = self.model.replay_buffer
        state = {
            "num_timesteps": timesteps,
            "counters": run_state.counters(self.model),
            "generators": run_state.generators(self.model),
            "normalization": run_state.normalization(self.model.get_vec_normalize_env()),
            "callbacks": run_state.callback_states(self.locals["callback"], timesteps),
            "logs": run_state.pending_logs(self.logger),
            "tensorboard": _tensorboard_folder(self.logger),
            "save_path": str(self.save_path.resolve()),
            "monitor_sizes": monitor_sizes(self.run_folder or self.save_path.parent),
            "replay_buffer": describe_replay_buffer(replay_buffer),
            "exact": self.exact,
            "env_seed": self.env_seed,
        }
        files = {_MODEL: zip_file.getvalue(), _STATE: json.dumps(state).encode()}
        arrays = bookkeeping(replay_buffer)
        if arrays:
            npz = io.BytesIO()
            np.savez(npz, **arrays)  # type: ignore[arg-type]
            files[_BOOKKEEPING] = npz.getvalue()
        return files


def resume(
    model_class: "type[SelfTD3X]", directory: str | Path, env: GymEnv, device: th.device | str, **kwargs: Any
) -> "SelfTD3X":
    """
    See ``TD3X.resume``.

    :param model_class: the class of the agent
    :param directory: the folder of the checkpoints
    :param env: the envs, made as those of the run were
    :param device: Device on which the code should run.
    :param kwargs: further arguments of ``load``
    :return: the agent, ready for ``learn``
    :raises ValueError: there is no whole checkpoint, or the envs or arguments do not fit it
    """
    checkpoint = newest_whole_checkpoint(Path(directory))
    state = read_state(checkpoint)
    model = model_class.load(io.BytesIO((checkpoint.path / _MODEL).read_bytes()), env=env, device=device, **kwargs)
    replay_buffer = model.replay_buffer = _empty_replay_buffer(model, checkpoint, state["replay_buffer"], kwargs)
    read_segments(checkpoint.replay_buffer_folder, replay_buffer, checkpoint.chain)
    if (checkpoint.path / _BOOKKEEPING).exists():
        with np.load(checkpoint.path / _BOOKKEEPING, allow_pickle=False) as arrays:
            restore_bookkeeping(replay_buffer, dict(arrays))
    end_open_episodes(replay_buffer)

    run_state.restore_normalization(model.get_vec_normalize_env(), state["normalization"])
    model.num_timesteps = state["num_timesteps"]
    run_state.restore_counters(model, state["counters"])
    run_state.restore_generators(model, state["generators"])
    env_seed = state["env_seed"] if state["exact"] else int(np.random.randint(2**31))
    reset_envs(model, env_seed)
    state["env_seed"] = env_seed
    model._resumed = Resumed(checkpoint, state, run_state.generators(model))
    return model


def _empty_replay_buffer(
    model: "TD3X", checkpoint: Checkpoint, saved: dict[str, Any], kwargs: dict[str, Any]
) -> ReplayBuffer:
    """
    :param model: the agent
    :param checkpoint: where it comes from
    :param saved: what the checkpoint says of the replay buffer, which may be one that the agent was given
    :param kwargs: arguments that were changed at loading
    :return: an empty one like it
    :raises ValueError: the arguments ask for another one, or there is another number of envs
    """
    # What is stored are single steps, which are summed when they are drawn
    saved = {**saved, **{name: getattr(model, name) for name in ("n_steps", "gamma") if name in saved}}
    # Older checkpoints name class, size and number of envs alone: they have what the agent makes by itself
    is_whole = "handle_timeout_termination" in saved
    asks_for_another = bool(kwargs.keys() & _REPLAY_BUFFER_ARGUMENTS) or saved["n_envs"] != model.n_envs
    if is_whole and not asks_for_another:
        return make_described_replay_buffer(saved, model, str(checkpoint.path))
    replay_buffer = model.replay_buffer
    described = describe_replay_buffer(replay_buffer)
    if any(described.get(name) != value for name, value in saved.items()):
        raise ValueError(f"The replay buffer in {checkpoint.path} is {saved}, expected {described}")
    return replay_buffer


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """
    :param checkpoint: a checkpoint that is whole
    :return: what it says of the run, see ``ResumableCheckpoint._files``
    """
    state: dict[str, Any] = json.loads((checkpoint.path / _STATE).read_bytes())
    return state


def reset_envs(model: "TD3X", seed: int) -> None:
    """
    Begin a new episode in every env.

    :param model: the agent
    :param seed: seed of the first env; the second has the next number, and so on
    """
    assert model.env is not None
    model.env.seed(seed)
    model._last_obs = model.env.reset()  # type: ignore[assignment]
    model._last_episode_starts = np.ones((model.n_envs,), dtype=bool)
    vec_normalize = model.get_vec_normalize_env()
    if vec_normalize is not None:
        model._last_original_obs = vec_normalize.get_original_obs()


@contextlib.contextmanager
def guarded_training(model: "TD3X", callback: MaybeCallback) -> Iterator[None]:
    """
    Keep other processes from a training's checkpoints, save it before an error leaves it, and say which env's process
    has died if that was the error.

    :param model: the agent
    :param callback: the callback of the training, as given to ``learn``
    """
    callbacks = callback if isinstance(callback, list) else [callback] if isinstance(callback, BaseCallback) else []
    found = [child for entry in callbacks for child in run_state.all_callbacks(entry)]
    checkpoints = [child for child in found if isinstance(child, ResumableCheckpoint)]
    _check_folders(checkpoints)
    workers: list[str] = []
    try:
        workers = describe_workers(model.env)
        for checkpoint in checkpoints:
            checkpoint.on_entering()
        _continue_logging(model)
        with broken_pipes_to_dead_workers(model.env):
            yield
    except BaseException as error:
        for checkpoint in checkpoints:
            checkpoint.on_error(error)
        if isinstance(error, PIPE_ERRORS):
            seeds = [checkpoint.env_seed for checkpoint in checkpoints if checkpoint.env_seed is not None]
            dead = dead_worker_error(model.env, workers, (*seeds, model.seed)[0], model.num_timesteps)
            if dead is not None:
                raise dead from error
        raise
    finally:
        for checkpoint in checkpoints:
            checkpoint.on_leaving()


def _check_folders(checkpoints: list[ResumableCheckpoint]) -> None:
    """
    :param checkpoints: the callbacks of a training
    :raises ValueError: two of them have the same folder, where each would delete what the other writes
    """
    folders = [checkpoint.save_path.resolve() for checkpoint in checkpoints if checkpoint.save_path is not None]
    for idx, folder in enumerate(folders):
        if folder in folders[:idx]:
            raise ValueError(
                f"save_path='{folder}' is not allowed for two ResumableCheckpoint of one training, "
                "expected a folder for each"
            )


def parameters_are_finite(model: "TD3X") -> bool:
    """
    :param model: the agent
    :return: whether no parameter of its networks is NaN or infinite
    """
    return all(bool(th.isfinite(param).all()) for param in model.policy.parameters())


def _continue_logging(model: "TD3X") -> None:
    """
    Let a training that goes on log to TensorBoard where it did before. A copy of its checkpoints logs elsewhere, and a
    user's own logger is not replaced.

    :param model: the agent
    """
    resumed = model._resumed
    if resumed is None or resumed.state["num_timesteps"] != model.num_timesteps or model._custom_logger:
        return
    folder = resumed.state["tensorboard"]
    here = str(resumed.checkpoint.path.parent.resolve())
    # Older checkpoints do not say where they were written
    is_original = resumed.state.get("save_path", here) == here
    if is_original and folder is not None and Path(folder).is_dir():
        model.set_logger(_continued_logger(folder, model.num_timesteps, model.verbose))


def _tensorboard_folder(logger: Logger) -> str | None:
    """
    :param logger: the logger of the training
    :return: where it writes for TensorBoard, if it does
    """
    for output in logger.output_formats:
        if isinstance(output, TensorBoardOutputFormat):
            return str(Path(output.writer.log_dir).resolve())
    return None


def _continued_logger(folder: str, timesteps: int, verbose: int) -> Logger:
    """
    :param folder: where a run wrote for TensorBoard
    :param timesteps: number of env timesteps of the checkpoint
    :param verbose: the agent's verbosity level
    :return: a logger like SB3's own that goes on there
    """
    cut_tensorboard(folder, timesteps)
    outputs: list[KVWriter] = [HumanOutputFormat(sys.stdout)] if verbose >= 1 else []
    return Logger(folder, [*outputs, TensorBoardOutputFormat(folder)])
