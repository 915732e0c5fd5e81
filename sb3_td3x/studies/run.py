"""
One run of a study: the zoo trains it in its own folder, it is measured, and moved into place. Training and measurement
have a process each::

    python -m sb3_td3x.studies.run STUDY ARM ENV SEED [--trusted]     measures a trained run
"""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import torch as th

from sb3_td3x.checkpoint.folder import list_checkpoints
from sb3_td3x.files.atomic import atomic_write, lock_folder, sync_folder
from sb3_td3x.studies import measure
from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.plan import Run, env_file_name, read_plan
from sb3_td3x.studies.results import RunRecord, read_record, write_record
from sb3_td3x.zoo.register import ALGO
from sb3_td3x.zoo.runs import ZooRun, checkpoint_folder

# In the folder of a run that is trained and not yet in place, with the duration of the training
TRAINED_FILE = "trained.json"
# Seconds between looks at whether a process has ended
_POLL = 0.2
# Set when the study is interrupted: its runs end their processes
interrupted = threading.Event()


@dataclass(frozen=True)
class Outcome:
    """
    The outcome of a run.

    :param error: what went wrong, in one sentence; None: nothing
    """

    run: Run
    error: str | None = None


class RunError(RuntimeError):
    """A process that failed."""


def zoo_command(run: Run) -> list[str]:
    """Return the zoo's command line for a training."""
    plan = run.plan
    eval_freq = run.zoo_steps(plan.evaluation.freq[run.env])
    options = {
        "--algo": run.algo,
        "--env": run.env,
        "--seed": run.seed,
        "-n": run.zoo_steps(run.timesteps),
        "-f": run.log_dir,
        "--conf-file": run.study / "hyperparams" / f"{run.arm}.yml",
        "--num-threads": plan.num_threads,
        "--device": plan.device,
        "--eval-freq": eval_freq,
        "--eval-episodes": plan.evaluation.episodes,
    }
    if measure.has_critic(run.algo):
        # Agents for the comparison of values and returns, and checkpoints of td3x
        options["--save-freq"] = eval_freq
    parts = [str(part) for option in options.items() for part in option]
    packages = ["--gym-packages", *plan.gym_packages] if plan.gym_packages else []
    return [sys.executable, "-m", "rl_zoo3.train", *parts, *packages]


def do_run(run: Run) -> Outcome:
    """
    Train what is not trained yet, measure, and move into place.

    :return: the outcome; an error is also written to the run's log in ``failures``
    """
    try:
        if read_record(run, run.folder) is None:
            # After a kill on the way into place, agents that were saved during training may be gone: measure once
            if read_record(run, run.unfinished) is None:
                _train(run)
                trusted = ["--trusted"] if run.trusted else []
                module = ["sb3_td3x.studies.run", str(run.study), run.arm, run.env, str(run.seed), *trusted]
                if _run_process(run, module) != 0:
                    raise RunError(f"the measurement failed, see {run.failure}")
            _move_into_place(run)
    except Exception as error:
        _write_failure(run, error)
        return Outcome(run, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    run.failure.unlink(missing_ok=True)
    return Outcome(run)


def _log(run: Run) -> Path:
    """Return the file with the output of the training."""
    return run.log_dir / "train.log"


def _train(run: Run) -> None:
    """
    Train from the newest checkpoint if there is one, else from the beginning; do nothing if the training is over.

    :raises RunError: the zoo failed
    :raises ValueError: another process trains this run, as one may on a machine that a cluster considers dead
    """
    if (run.unfinished / TRAINED_FILE).exists():
        return
    seconds = None
    status = _resume(run)
    if status is None:
        lock_folder(checkpoint_folder(run.unfinished)).release()
        shutil.rmtree(run.log_dir, ignore_errors=True)
        run.log_dir.mkdir(parents=True)
        start = time.perf_counter()
        status = _run_process(run, zoo_command(run)[2:])
        seconds = round(time.perf_counter() - start, 3)
    # An interrupted zoo saves its agent too, and ends well
    n_timesteps = run.zoo_steps(run.timesteps)
    last_agent = run.unfinished / f"{env_file_name(run.env)}.zip"
    if status != 0 or measure.agent_data(last_agent).get("num_timesteps", 0) < n_timesteps:
        raise RunError(f"the training ended without its {n_timesteps} timesteps, see {run.failure}")
    with atomic_write(run.unfinished / TRAINED_FILE) as file:
        file.write(json.dumps({"seconds": seconds}).encode())


def _resume(run: Run) -> int | None:
    """
    Resume a training from its newest checkpoint.

    :return: exit status of the process, below 0 if a signal ended it; None: there is no checkpoint that works, so the
        run must start again, or it would never be finished
    """
    checkpoints = list_checkpoints(checkpoint_folder(run.unfinished))
    if run.algo != ALGO or not checkpoints:
        return None
    # The user has named the packages for this study, but `resume` finds them in the settings of the run
    trusted = ["--trusted"] if run.trusted or run.plan.gym_packages else []
    status = _run_process(run, ["sb3_td3x", "resume", str(run.unfinished), *trusted])
    # A process that was killed, or interrupted and ended well, says nothing about its checkpoint
    works = status <= 0 or list_checkpoints(checkpoint_folder(run.unfinished))[-1:] != checkpoints[-1:]
    return status if works else None


def _run_process(run: Run, module: list[str]) -> int:
    """
    Run a module in a process that ends with this one, and when the study is interrupted.

    :param module: its name and arguments
    :return: exit status, below 0 if a signal ended it
    """
    command = [sys.executable, "-m", f"{__package__}.child_process", *module]
    # Threads of NumPy and PyTorch would fight for the cores of parallel runs
    variables = {**os.environ, "OMP_NUM_THREADS": str(run.plan.num_threads)}
    with (
        _log(run).open("ab") as log,
        # A separate session: Ctrl-C ends the study, which ends the zoo; the zoo would save its agent as if finished
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=variables
        ) as process,
    ):
        # The end of the block closes the standard input, and so ends the process
        while process.poll() is None:
            if interrupted.wait(_POLL):
                raise SystemExit
    return process.returncode


def _measure(run: Run) -> None:
    """Measure a trained run, and write its ``run.json``."""
    settings = run.plan.evaluation
    # Agents of other algorithms are pickles, but the study has just trained them itself
    trained = ZooRun(run.unfinished, trusted=run.trusted or run.algo != ALGO)
    test = settings.final_episodes, settings.final_seed
    # Before the first update an evaluation says nothing about the training. With VecNormalize the zoo keeps only
    # the newest statistics, which are the last agent's
    has_updates = measure.agent_data(trained.best_agent).get("_n_updates", 0) > 0
    has_best = has_updates and trained.normalize_kwargs is None
    here = machine()
    record = RunRecord(
        arm=run.arm,
        algo=run.algo,
        env=run.env,
        seed=run.seed,
        timesteps=run.timesteps,
        command=zoo_command(run),
        training_seconds=json.loads((run.unfinished / TRAINED_FILE).read_text())["seconds"],
        final_returns=measure.play_test(trained, trained.last_agent, *test),
        best_returns=measure.play_test(trained, trained.best_agent, *test) if has_best else None,
        evaluations=measure.read_evaluations(trained),
        value_estimates=measure.estimate_values(trained, run.timesteps, settings.value_states, settings.value_seed),
        versions=here["versions"],
        machine={"processor": here["cpu"], "cores": here["cores"]},
        reward_threshold=gym.spec(run.env).reward_threshold,
    )
    write_record(record, trained.folder)


def _move_into_place(run: Run) -> None:
    """
    Delete what only the training needed, and move the run's folder, with ``run.json`` in it, into place in one step.

    A start after a kill continues here.
    """
    for path in (*run.unfinished.glob("rl_model_*_steps.zip"), run.unfinished / TRAINED_FILE):
        path.unlink(missing_ok=True)
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


def main(study: str, arm: str, env: str, seed: str, *trusted: str) -> None:
    """Measure a trained run."""
    run = Run(Path(study), arm, env, int(seed), read_plan(Path(study)), bool(trusted))
    for package in run.plan.gym_packages:
        importlib.import_module(package)
    th.set_num_threads(run.plan.num_threads)
    _measure(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
