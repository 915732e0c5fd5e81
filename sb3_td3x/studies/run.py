"""One run of a study: the zoo trains it in its own folder, it is measured, and moved into place."""

import contextlib
import functools
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import torch as th

from sb3_td3x.checkpoint.folder import list_checkpoints
from sb3_td3x.files.atomic import atomic_write, lock_folder, sync_folder
from sb3_td3x.studies import measure
from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.plan import FINAL_EPISODES, FINAL_SEED, VALUE_SEED, VALUE_STATES, Run
from sb3_td3x.studies.results import RunRecord, write_record
from sb3_td3x.zoo.register import ALGO
from sb3_td3x.zoo.runs import ZooRun, checkpoint_folder

PACKAGES = ("sb3-td3x", "stable-baselines3", "sb3-contrib", "rl-zoo3", "gymnasium", "torch", "numpy")
# Seconds between looks at whether the training has ended
_POLL = 0.2


@dataclass(frozen=True)
class Outcome:
    """
    The outcome of a run.

    :param error: what went wrong, in one sentence; None: nothing
    """

    run: Run
    error: str | None = None


class RunError(RuntimeError):
    """A training that failed."""


@dataclass
class _Timing:
    """Duration of a training over interruptions, in a file."""

    path: Path
    seconds: float = 0.0
    finished: bool = False

    def read(self) -> None:
        """Read the file, if there is one."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            content = json.loads(self.path.read_text())
            self.seconds, self.finished = float(content["seconds"]), bool(content["finished"])

    def write(self) -> None:
        """Write the file."""
        with atomic_write(self.path) as file:
            file.write(json.dumps({"seconds": self.seconds, "finished": self.finished}).encode())


def zoo_command(run: Run) -> list[str]:
    """Return the zoo's command line for a training."""
    options = {
        "--algo": run.algo,
        "--env": run.env,
        "--seed": run.seed,
        "-n": run.zoo_timesteps,
        "-f": run.log_dir,
        "--conf-file": run.study / "hyperparams" / f"{run.arm}.yml",
        "--num-threads": run.num_threads,
        "--device": run.device,
        "--eval-freq": run.zoo_eval_freq,
        "--eval-episodes": run.eval_episodes,
    }
    if measure.has_critic(run.algo):
        # Agents for the comparison of values and returns, and checkpoints of td3x
        options["--save-freq"] = run.zoo_eval_freq
    parts = [str(part) for option in options.items() for part in option]
    packages = ["--gym-packages", *run.gym_packages] if run.gym_packages else []
    return [sys.executable, "-m", "rl_zoo3.train", *parts, *packages]


def do_run_in_worker(run: Run, engine_pid: int) -> Outcome:
    """
    Do a run in a process of joblib.

    :param engine_pid: id of the process that has given out the run; it may be this one
    """
    if os.getpid() != engine_pid:
        _end_with_parent()
    return do_run(run)


@functools.cache
def _end_with_parent() -> None:
    """
    Make this process, and its training, end when the process that started it is killed.

    Otherwise a worker of joblib would finish its run while the next start of the study does the same one.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def do_run(run: Run) -> Outcome:
    """
    Train what is not trained yet, measure, and move into place.

    :return: the outcome; an error is also written to the run's log in ``failures``
    """
    try:
        if run.is_finished():
            return Outcome(run)
        for package in run.gym_packages:
            importlib.import_module(package)
        th.set_num_threads(run.num_threads)
        _train(run)
        # After a kill on the way into place, agents that were saved during training may be gone: measure once
        if not run.is_measured(run.unfinished):
            _measure(run)
        _move_into_place(run)
    except Exception as error:
        _write_failure(run, error)
        return Outcome(run, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    run.failure.unlink(missing_ok=True)
    return Outcome(run)


def _log(run: Run) -> Path:
    """Return the file with the output of the training."""
    return run.log_dir / "train.log"


def _timing(run: Run) -> _Timing:
    timing = _Timing(run.log_dir / "timing.json")
    timing.read()
    return timing


def _train(run: Run) -> None:
    """
    Train from the newest checkpoint if there is one, else from the beginning; do nothing if the training is over.

    :raises RunError: the zoo failed
    :raises ValueError: another process trains this run
    """
    timing = _timing(run)
    if timing.finished and run.unfinished.is_dir():
        return
    if not _resume(run, timing):
        _clear(run)
        timing = _Timing(timing.path)
        _train_part(run, timing, zoo_command(run)[2:])
    if not timing.finished:
        raise RunError(f"the training ended without its {run.zoo_timesteps} timesteps, see {run.failure}")


def _resume(run: Run, timing: _Timing) -> bool:
    """
    Resume a training from its newest checkpoint.

    :return: whether the checkpoint works; if it does not, the run must start again, or it would never be finished
    """
    checkpoint = _newest_checkpoint(run)
    if run.algo != ALGO or checkpoint is None:
        return False
    # The user has named the packages for this study, but `resume` finds them in the settings of the run
    trusted = ["--trusted"] if run.trusted or run.gym_packages else []
    status = _train_part(run, timing, ["sb3_td3x", "resume", str(run.unfinished), *trusted])
    # A process that was killed, or interrupted and ended well, says nothing about its checkpoint
    return status <= 0 or _newest_checkpoint(run) != checkpoint


def _clear(run: Run) -> None:
    """
    Delete the log folder of a run.

    :raises ValueError: another process trains there, as one may on a machine that a cluster considers dead
    """
    lock_folder(checkpoint_folder(run.unfinished)).release()
    shutil.rmtree(run.log_dir, ignore_errors=True)
    run.log_dir.mkdir(parents=True)


def _train_part(run: Run, timing: _Timing, module: list[str]) -> int:
    """
    Run a command of the zoo, and count its time up to each checkpoint.

    :param timing: duration so far, which is updated; finished if the training is whole
    :return: exit status of the process, below 0 if a signal ended it
    """
    start = time.perf_counter()
    before = timing.seconds
    with _zoo_process(run, module) as process:
        seen = _newest_checkpoint(run)
        while process.poll() is None:
            time.sleep(_POLL)
            newest = _newest_checkpoint(run)
            if newest != seen:
                # The next start would resume here
                seen, timing.seconds = newest, before + time.perf_counter() - start
                timing.write()
    # An interrupted zoo saves its agent too, and ends well
    last_agent = run.unfinished / f"{run.unfinished.name.rpartition('_')[0]}.zip"
    if process.returncode == 0 and measure.agent_data(last_agent).get("num_timesteps", 0) >= run.zoo_timesteps:
        timing.seconds, timing.finished = before + time.perf_counter() - start, True
        timing.write()
    return process.returncode


def _newest_checkpoint(run: Run) -> str | None:
    names = [path.name for path in list_checkpoints(checkpoint_folder(run.unfinished))]
    return names[-1] if names else None


@contextlib.contextmanager
def _zoo_process(run: Run, module: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command of the zoo, and end it with the block, whatever happens."""
    command = [sys.executable, "-m", f"{__package__}.zoo_process", *module]
    with _log(run).open("ab") as log:
        # A separate session: Ctrl-C ends the study, which ends the zoo; the zoo would save its agent as if finished.
        # Threads of NumPy and PyTorch would fight for the cores of parallel runs.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(run.num_threads)},
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _measure(run: Run) -> None:
    """Measure a trained run, and write its ``run.json``."""
    # Agents of other algorithms are pickles, but the study has just trained them itself
    trained = ZooRun(run.unfinished, trusted=run.trusted or run.algo != ALGO)
    returns, lengths = measure.play_test(trained, trained.last_agent, FINAL_EPISODES, FINAL_SEED)
    best_returns = None
    # Before the first update an evaluation says nothing about the training
    if measure.agent_data(trained.best_agent).get("_n_updates", 0) > 0:
        best_returns, _ = measure.play_test(trained, trained.best_agent, FINAL_EPISODES, FINAL_SEED)
    learning_starts = measure.agent_data(trained.last_agent).get("learning_starts")
    seconds = _timing(run).seconds
    here = machine(PACKAGES)
    record = RunRecord(
        arm=run.arm,
        algo=run.algo,
        env=run.env,
        seed=run.seed,
        timesteps=run.timesteps,
        command=zoo_command(run),
        training_seconds=round(seconds, 3),
        steps_per_second=round(run.timesteps / seconds, 3),
        final_returns=returns,
        final_lengths=lengths,
        best_returns=best_returns,
        evaluations=measure.read_evaluations(trained),
        value_estimates=measure.estimate_values(trained, run.timesteps, VALUE_STATES, VALUE_SEED),
        versions=here["versions"],
        machine={"processor": here["cpu"], "cores": here["cores"]},
        learning_starts=None if learning_starts is None else learning_starts * run.action_repeat,
        reward_threshold=gym.spec(run.env).reward_threshold,
    )
    write_record(record, trained.folder)


def _move_into_place(run: Run) -> None:
    """
    Delete what only the training needed, and move the run's folder, with ``run.json`` in it, into place in one step.

    A start after a kill continues here.
    """
    for path in run.unfinished.glob("rl_model_*_steps.zip"):
        path.unlink()
    shutil.rmtree(checkpoint_folder(run.unfinished), ignore_errors=True)
    if _log(run).exists():
        _log(run).replace(run.unfinished / "train.log")
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder without run.json is no finished run
    shutil.rmtree(run.folder, ignore_errors=True)
    run.unfinished.rename(run.folder)
    sync_folder(run.folder.parent)
    shutil.rmtree(run.log_dir)


def _write_failure(run: Run, error: Exception) -> None:
    run.failure.parent.mkdir(parents=True, exist_ok=True)
    output = _log(run).read_text(errors="replace") if _log(run).exists() else ""
    if not isinstance(error, RunError):
        output += f"\n{''.join(traceback.format_exception(error))}"
    run.failure.write_text(f"{shlex.join(zoo_command(run))}\n\n{output}")
