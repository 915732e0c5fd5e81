"""The folder of a study: ``run.json`` of each finished run, ``study.json``, and the logs of failed runs."""

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from sb3_td3x.files.atomic import atomic_write

FORMAT = 1
RUN_FILE = "run.json"
STUDY_FILE = "study.json"
# Names in the folder of a study that no arm can have
RESERVED_NAMES = ("failures", "hyperparams", "report", STUDY_FILE, "unfinished")
_MAX_REASON = 200


@dataclass(frozen=True)
class Evaluations:
    """
    Evaluations during training, from the zoo's ``evaluations.npz``.

    :param timesteps: env steps before each evaluation
    """

    timesteps: list[int]
    returns: list[list[float]]


@dataclass(frozen=True)
class ValueEstimate:
    """
    Values of start states: the critic's estimate and the return (Fujimoto et al. 2018, figure 1).

    :param timesteps: env steps before the agent was saved
    :param estimated: mean of Q1(s_0, π(s_0))
    :param monte_carlo: mean discounted sum of rewards from s_0, in the units that the critic learned
    """

    timesteps: int
    estimated: float
    monte_carlo: float
    n_states: int


@dataclass(frozen=True)
class RunRecord:
    """
    A finished run. All returns except ``value_estimates`` are the env's own, neither shaped nor normalized.

    :param algo: name of the algorithm in the zoo
    :param timesteps: length of the training in env steps
    :param training_seconds: wall-clock time of the training with its evaluations
    :param steps_per_second: ``timesteps / training_seconds``
    :param final_returns: returns of the last agent, deterministic; episode i has the same start in all runs of an env
    :param final_lengths: lengths of these episodes in env steps
    :param best_returns: returns of the best agent of the evaluations from the same starts; None: no trained agent was
        evaluated
    :param value_estimates: values of start states; None: the algorithm has no Q critic
    :param versions: versions of the packages that matter; None: not installed
    :param machine: ``processor`` and number of ``cores``
    :param learning_starts: env steps of random actions before the first update; None: the algorithm has none
    :param reward_threshold: mean return at which the env counts as solved; None: the env declares none
    """

    arm: str
    algo: str
    env: str
    seed: int
    timesteps: int
    command: list[str]
    training_seconds: float
    steps_per_second: float
    final_returns: list[float]
    final_lengths: list[int]
    best_returns: list[float] | None
    evaluations: Evaluations
    value_estimates: list[ValueEstimate] | None
    versions: dict[str, str | None]
    machine: dict[str, Any]
    learning_starts: int | None = None
    reward_threshold: float | None = None

    def check(self) -> None:
        """
        Check that the run has a score, and that its lists belong together.

        :raises ValueError: a return is not finite, or lists differ in length
        """
        n_points, n_values = len(self.evaluations.timesteps), len(self.evaluations.returns)
        if n_points != n_values:
            raise ValueError(f"evaluations have {n_points} timesteps and {n_values} returns")
        if not self.final_returns or len(self.final_returns) != len(self.final_lengths):
            raise ValueError(f"{len(self.final_returns)} final_returns and {len(self.final_lengths)} final_lengths")
        returns = {
            "final_returns": self.final_returns,
            "best_returns": self.best_returns or [],
            "evaluations": [value for values in self.evaluations.returns for value in values],
        }
        for name, values in returns.items():
            for value in values:
                if not math.isfinite(value):
                    raise ValueError(f"{name} have a {value}: the agent has diverged, or its env gives such rewards")


def run_folder(study: Path, arm: str, algo: str, env: str, seed: int) -> Path:
    """Return the folder of a finished run, named as the zoo names runs, with the seed as the run's number."""
    return study / arm / algo / f"{env_file_name(env)}_{seed}"


def env_file_name(env: str) -> str:
    """
    Return the id of an env as part of a file name, as in the zoo.

    :return: the id without slashes
    """
    return env.replace("/", "-")


def write_record(record: RunRecord, folder: Path) -> None:
    """
    Write ``run.json``.

    :raises ValueError: a return is not finite
    """
    record.check()
    with atomic_write(folder / RUN_FILE) as file:
        file.write(json.dumps({"format": FORMAT, **asdict(record)}, indent=1).encode())


def read_record(path: Path) -> RunRecord:
    """
    Read a ``run.json``.

    :raises ValueError: the file is damaged or has another format; the error names its folder
    """
    try:
        content = _read_json(path)
        estimates = content.pop("value_estimates")
        record = RunRecord(
            value_estimates=None if estimates is None else [ValueEstimate(**estimate) for estimate in estimates],
            evaluations=Evaluations(**content.pop("evaluations")),
            **{name: value for name, value in content.items() if name in RunRecord.__dataclass_fields__},
        )
        record.check()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The run in {path.parent} has a broken {path.name}: {_reason(error)}. Delete that folder, and the next "
            "start of the study repeats the run"
        ) from None
    return record


def read_config(path: Path) -> dict[str, Any]:
    """
    Read a ``study.json``.

    :raises ValueError: the file is missing, damaged, or has another format
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} is no folder of a study: it has no {path.name}")
    try:
        config = _read_json(path)
        for name in ("arms", "envs", "seeds"):
            if not config[name]:
                raise ValueError(f"{name} is empty")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is broken: {_reason(error)}") from None
    return config


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if (found := content.pop("format")) != FORMAT:
        raise ValueError(f"format {found!r}, expected {FORMAT}")
    return content


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


@dataclass(frozen=True)
class MissingRun:
    """A run that has not finished."""

    env: str
    arm: str
    seed: int


@dataclass(frozen=True)
class Results:
    """
    A study and its finished runs.

    :param config: content of ``study.json``
    :param records: finished runs by env, arm and seed, in the order of the study
    :param missing: runs that have not finished
    :param failures: for each log of a failed run that has not finished since, its last line
    """

    study: Path
    config: dict[str, Any]
    records: list[RunRecord]
    missing: list[MissingRun]
    failures: dict[str, str]

    @property
    def arms(self) -> list[str]:
        """All arms, the base first"""
        return list(self.config["arms"])

    @property
    def base(self) -> str:
        """The arm that the others are compared with"""
        return self.arms[0]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row for each finished run"""
        return pd.DataFrame(
            {
                **_names(record),
                "algo": record.algo,
                "timesteps": record.timesteps,
                "training_seconds": record.training_seconds,
                "steps_per_second": record.steps_per_second,
                "score": sum(record.final_returns) / len(record.final_returns),
                "best_agent_score": sum(record.best_returns) / len(record.best_returns)
                if record.best_returns
                else None,
                "learning_starts": record.learning_starts,
                "reward_threshold": record.reward_threshold,
                "processor": record.machine.get("processor"),
                "cores": record.machine.get("cores"),
            }
            for record in self.records
        )

    @cached_property
    def returns(self) -> pd.DataFrame:
        """One row for each episode of the final test, of a run's last and of its best agent"""
        return pd.DataFrame(
            (
                {**_names(record), "agent": agent, "episode": episode, "return": value, "length": length}
                for record in self.records
                for agent, returns, lengths in (
                    ("last", record.final_returns, record.final_lengths),
                    ("best", record.best_returns or [], [None] * len(record.best_returns or [])),
                )
                for episode, (value, length) in enumerate(zip(returns, lengths, strict=True))
            ),
            columns=["env", "arm", "seed", "agent", "episode", "return", "length"],
        )

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row for each episode of the evaluations during training"""
        return pd.DataFrame(
            (
                {**_names(record), "timesteps": timesteps, "episode": episode, "return": value}
                for record in self.records
                for timesteps, returns in zip(record.evaluations.timesteps, record.evaluations.returns, strict=True)
                for episode, value in enumerate(returns)
            ),
            columns=["env", "arm", "seed", "timesteps", "episode", "return"],
        )

    @cached_property
    def value_estimates(self) -> pd.DataFrame:
        """One row for each point of a training at which the critic's values were compared with returns"""
        return pd.DataFrame(
            (
                {**_names(record), **asdict(estimate)}
                for record in self.records
                for estimate in record.value_estimates or []
            ),
            columns=["env", "arm", "seed", "timesteps", "estimated", "monte_carlo", "n_states"],
        )


def _names(record: RunRecord) -> dict[str, Any]:
    return {"env": record.env, "arm": record.arm, "seed": record.seed}


def read_results(study: Path) -> Results:
    """
    Read the folder of a study.

    :return: its finished runs, and which are missing
    :raises ValueError: this is no study's folder, a file in it is broken, or no run has finished yet
    """
    config = read_config(study / STUDY_FILE)
    logs = {path.name: path for path in sorted((study / "failures").glob("*.log"))}
    records, missing, failures = [], [], {}
    for env in config["envs"]:
        for arm, settings in config["arms"].items():
            if env not in settings["hyperparams"]:
                continue
            for seed in sorted(config["seeds"]):
                log = logs.get(failure_name(arm, env, seed))
                path = run_folder(study, arm, settings["algo"], env, seed) / RUN_FILE
                if path.exists():
                    records.append(read_record(path))
                    continue
                missing.append(MissingRun(env, arm, seed))
                if log is not None:
                    failures[log.relative_to(study).as_posix()] = _last_line(log)
    if not records:
        failed = f", and {len(failures)} failed: see {study / 'failures'}" if failures else ""
        raise ValueError(f"The study in {study} has no finished run yet, so there is nothing to report{failed}")
    return Results(study, config, records, missing, failures)


def failure_name(arm: str, env: str, seed: int) -> str:
    """Return the name of a failed run's log in the folder ``failures``."""
    return f"{arm}-{env_file_name(env)}-{seed}.log"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "the log is empty")[:_MAX_REASON]
