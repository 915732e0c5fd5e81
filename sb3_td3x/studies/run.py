"""One run of a study: the zoo trains it in a folder of its own, it is measured, and moved into place."""

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

import torch as th

from sb3_td3x.files.atomic import atomic_write, lock_folder, sync_folder
from sb3_td3x.studies import measure
from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.measure import TrainedRun
from sb3_td3x.studies.plan import FINAL_EPISODES, FINAL_SEED, VALUE_SEED, VALUE_STATES, Run
from sb3_td3x.studies.records import RunRecord, write_record
from sb3_td3x.zoo.register import ALGO, checkpoint_folder

PACKAGES = ("sb3-td3x", "stable-baselines3", "sb3-contrib", "rl-zoo3", "gymnasium", "torch", "numpy")
# Between looks at whether the training has ended, in seconds
_POLL = 0.2


@dataclass(frozen=True)
class Outcome:
    """
    What became of a run.

    :param run: the run
    :param error: what went wrong, in one sentence; None: nothing
    """

    run: Run
    error: str | None = None


class RunError(RuntimeError):
    """A run that failed, in one sentence."""


@dataclass
class _Timing:
    """
    How long a training took, over interruptions; a file beside it.

    :param path: the file
    :param seconds: of the parts that are over and count
    :param finished: whether the training is over
    """

    path: Path
    seconds: float = 0.0
    finished: bool = False

    def read(self) -> None:
        """Take what the file says; without one, nothing was done."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            content = json.loads(self.path.read_text())
            self.seconds, self.finished = float(content["seconds"]), bool(content["finished"])

    def write(self) -> None:
        """Write the file."""
        with atomic_write(self.path) as file:
            file.write(json.dumps({"seconds": self.seconds, "finished": self.finished}).encode())


def zoo_command(run: Run) -> list[str]:
    """
    :param run: a run
    :return: the zoo's command line for its training
    """
    options = {
        "--algo": run.algo,
        "--env": run.env,
        "--seed": run.seed,
        "-n": run.zoo_timesteps,
        "-f": run.workplace,
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


def do_run_in_worker(run: Run, engine: int) -> Outcome:
    """
    :param run: a run
    :param engine: id of the process that has given it to this one; it may be this one
    :return: what became of it
    """
    if os.getpid() != engine:
        _end_with_parent()
    return do_run(run)


@functools.cache
def _end_with_parent() -> None:
    """
    From now on, end this process, and by that its training, when the one that started it was killed: a worker of
    joblib would finish its run, while the next start does the same one.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def do_run(run: Run) -> Outcome:
    """
    Train what is not trained yet, measure, and move into place. Whatever goes wrong is written to the run's file in
    ``failures``.

    :param run: a run
    :return: what became of it
    """
    try:
        if run.is_finished():
            return Outcome(run)
        for package in run.gym_packages:
            importlib.import_module(package)
        th.set_num_threads(run.num_threads)
        _train(run)
        # After a kill on the way into place the agents on the way may be gone: measure once
        if not run.is_measured(run.unfinished):
            _measure(run)
        _move_into_place(run)
    except Exception as error:
        _write_failure(run, error)
        return Outcome(run, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    run.failure.unlink(missing_ok=True)
    return Outcome(run)


def _log(run: Run) -> Path:
    """
    :param run: a run
    :return: where the output of its training goes
    """
    return run.workplace / "train.log"


def _timing(run: Run) -> _Timing:
    """
    :param run: a run
    :return: how long its training has taken
    """
    timing = _Timing(run.workplace / "timing.json")
    timing.read()
    return timing


def _train(run: Run) -> None:
    """
    Train from the newest checkpoint if there is one, else from the beginning; nothing if it is done.

    :param run: a run
    :raises RunError: the zoo failed
    :raises ValueError: another process trains it
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
    :param run: a run
    :param timing: how long it has taken so far, which is brought up to date
    :return: whether it went on from its newest checkpoint, however far; a checkpoint that does not work must not keep
        the run from ever being done
    """
    checkpoint = _newest_checkpoint(run)
    if run.algo != ALGO or checkpoint is None:
        return False
    status = _train_part(run, timing, ["sb3_td3x", "resume", str(run.unfinished)])
    # One that was killed, or interrupted and ended well, says nothing of its checkpoint
    return status <= 0 or _newest_checkpoint(run) != checkpoint


def _clear(run: Run) -> None:
    """
    Leave nothing in the workplace of a run.

    :param run: the run
    :raises ValueError: another process trains there, as one may on a machine that a cluster takes for dead
    """
    lock_folder(checkpoint_folder(run.unfinished)).release()
    shutil.rmtree(run.workplace, ignore_errors=True)
    run.workplace.mkdir(parents=True)


def _train_part(run: Run, timing: _Timing, module: list[str]) -> int:
    """
    :param run: a run
    :param timing: how long it has taken so far, which is brought up to date; finished if the training is whole
    :param module: the module to run, and its arguments
    :return: exit status of the process, below 0 where a signal ended it
    """
    start = time.perf_counter()
    before = timing.seconds
    with _zoo_process(run, module) as process:
        seen = _newest_checkpoint(run)
        while process.poll() is None:
            time.sleep(_POLL)
            newest = _newest_checkpoint(run)
            if newest != seen:
                # What the next start would go on from
                seen, timing.seconds = newest, before + time.perf_counter() - start
                timing.write()
    # An interrupted zoo saves its agent too, and ends well
    if process.returncode == 0 and measure.agent_timesteps(_trained(run).last_agent) >= run.zoo_timesteps:
        timing.seconds, timing.finished = before + time.perf_counter() - start, True
        timing.write()
    return process.returncode


def _newest_checkpoint(run: Run) -> str | None:
    """
    :param run: a run
    :return: name of its newest checkpoint; None: there is none
    """
    return max((path.parent.name for path in checkpoint_folder(run.unfinished).glob("*/manifest.json")), default=None)


@contextlib.contextmanager
def _zoo_process(run: Run, module: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """
    Start a command of the zoo, and end it with the block, whatever happens.

    :param run: a run
    :param module: the module to run, and its arguments
    :return: the process
    """
    command = [sys.executable, "-m", f"{__package__}.zoo_process", *module]
    with _log(run).open("ab") as log:
        # A session of its own: Ctrl-C is for the study, which ends it; the zoo would save its agent as if it were done.
        # NumPy's and PyTorch's threads would fight for the cores of parallel runs.
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


def _trained(run: Run) -> TrainedRun:
    """
    :param run: a run
    :return: what the zoo left of it
    """
    return TrainedRun(run.unfinished, run.algo, run.env)


def _measure(run: Run) -> None:
    """
    Measure a trained run, and write its ``run.json``.

    :param run: a run
    """
    trained = _trained(run)
    returns, lengths = measure.play_episodes(trained, trained.last_agent, FINAL_EPISODES, FINAL_SEED)
    best_returns = None
    if trained.best_agent.exists():
        best_returns, _ = measure.play_episodes(trained, trained.best_agent, FINAL_EPISODES, FINAL_SEED)
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
        training_returns=measure.read_training_returns(trained.folder),
        versions=here["versions"],
        machine={"processor": here["cpu"], "cores": here["cores"]},
    )
    write_record(record, trained.folder)


def _move_into_place(run: Run) -> None:
    """
    Delete what was needed on the way only, and give the run's folder its name: at once, and with ``run.json`` in it.
    Goes on where a kill ended it.

    :param run: a run
    """
    for path in _trained(run).saved_agents().values():
        path.unlink()
    shutil.rmtree(checkpoint_folder(run.unfinished), ignore_errors=True)
    if _log(run).exists():
        _log(run).replace(run.unfinished / "train.log")
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    # Without a run.json it is no run of a study
    shutil.rmtree(run.folder, ignore_errors=True)
    run.unfinished.rename(run.folder)
    sync_folder(run.folder.parent)
    shutil.rmtree(run.workplace)


def _write_failure(run: Run, error: Exception) -> None:
    """
    :param run: a run
    :param error: why it failed
    """
    run.failure.parent.mkdir(parents=True, exist_ok=True)
    output = _log(run).read_text(errors="replace") if _log(run).exists() else ""
    if not isinstance(error, RunError):
        output += f"\n{''.join(traceback.format_exception(error))}"
    run.failure.write_text(f"{shlex.join(zoo_command(run))}\n\n{output}")
