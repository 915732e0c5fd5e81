"""What a study has measured: ``run.json`` of each finished run, and tables of all of them."""

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies.plan import FORMAT, Plan, Run, read_plan

RUN_FILE = "run.json"
_MAX_REASON = 200


class Evaluations(TypedDict):
    """
    Evaluations during training, from the zoo's ``evaluations.npz``.

    :param timesteps: env steps before each evaluation
    :param returns: for each evaluation, the returns of its episodes
    """

    timesteps: list[int]
    returns: list[list[float]]


class ValueEstimate(TypedDict):
    """
    Values of start states: the critic's estimate and the return (Fujimoto et al. 2018, figure 1).

    :param timesteps: env steps before the agent was saved
    :param estimated: mean of Q1(s_0, π(s_0))
    :param monte_carlo: mean discounted sum of rewards from s_0, in the units that the critic learned
    """

    timesteps: int
    estimated: float
    monte_carlo: float


@dataclass(frozen=True)
class RunRecord:
    """
    A finished run. All returns except ``value_estimates`` are the env's own, neither shaped nor normalized.

    :param algo: name of the algorithm in the zoo
    :param timesteps: length of the training in env steps
    :param training_seconds: wall-clock time of the training with its evaluations; None: it was interrupted
    :param final_returns: returns of the last agent, deterministic; episode i has the same start in all runs of an env
    :param best_returns: returns of the best agent of the evaluations from the same starts; None: no trained agent was
        evaluated
    :param value_estimates: values of start states; None: the algorithm has no Q critic
    :param versions: versions of the packages that matter; None: not installed
    :param machine: ``processor`` and number of ``cores``
    :param reward_threshold: mean return at which the env counts as solved; None: the env declares none
    """

    arm: str
    algo: str
    env: str
    seed: int
    timesteps: int
    command: list[str]
    training_seconds: float | None
    final_returns: list[float]
    best_returns: list[float] | None
    evaluations: Evaluations
    value_estimates: list[ValueEstimate] | None
    versions: dict[str, str | None]
    machine: dict[str, Any]
    reward_threshold: float | None = None

    def check(self) -> None:
        """
        Check that the run has a score, and that its lists belong together.

        :raises ValueError: a return is not finite, or lists are empty or differ in length
        """
        n_points, n_values = len(self.evaluations["timesteps"]), len(self.evaluations["returns"])
        if n_points != n_values or not self.final_returns:
            raise ValueError(
                f"{len(self.final_returns)} final_returns, evaluations with {n_points} timesteps and {n_values} returns"
            )
        for value in np.concatenate([self.final_returns, self.best_returns or [], *self.evaluations["returns"]]):
            if not math.isfinite(value):
                raise ValueError(f"a return is {value}: the agent has diverged, or its env gives such rewards")


def write_record(record: RunRecord, folder: Path) -> None:
    """
    Write ``run.json``.

    :raises ValueError: a return is not finite
    """
    record.check()
    with atomic_write(folder / RUN_FILE) as file:
        file.write(json.dumps({"format": FORMAT, **asdict(record)}, indent=1).encode())


def read_record(run: Run, folder: Path) -> RunRecord | None:
    """
    Read the ``run.json`` of a run.

    :param folder: folder of the run, finished or not
    :return: the record; None: there is none
    :raises ValueError: the file is damaged, has another format, or belongs to another run; the error names its folder
    """
    path = folder / RUN_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
        record = RunRecord(**{field.name: content[field.name] for field in fields(RunRecord)})
        record.check()
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"The run in {folder} has a broken {RUN_FILE}: {reason}. Delete that folder, and the next "
            "start of the study repeats the run"
        ) from None
    found = (record.arm, record.algo, record.env, record.seed, record.timesteps)
    expected = (run.arm, run.algo, run.env, run.seed, run.timesteps)
    if found != expected:
        raise ValueError(f"The run in {folder} is another one: its {RUN_FILE} says {found}, not {expected}")
    return record


@dataclass(frozen=True)
class Results:
    """
    A study and its finished runs.

    :param records: finished runs by env, arm and seed, in the order of the study
    :param missing: runs that have not finished
    :param failures: for each log of a failed run that has not finished since, its last line
    """

    study: Path
    plan: Plan
    records: list[RunRecord]
    missing: list[Run]
    failures: dict[str, str]

    @property
    def base(self) -> str:
        """The arm that the others are compared with"""
        return next(iter(self.plan.arms))

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row for each finished run"""
        return pd.DataFrame(
            {
                **_names(record),
                "algo": record.algo,
                "timesteps": record.timesteps,
                "training_seconds": record.training_seconds,
                "score": np.mean(record.final_returns),
                "best_agent_score": np.mean(record.best_returns) if record.best_returns else None,
                "reward_threshold": record.reward_threshold,
                "processor": record.machine.get("processor"),
                "cores": record.machine.get("cores"),
            }
            for record in self.records
        )

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row for each evaluation during training, with the mean return of its episodes"""
        return pd.DataFrame(
            (
                {**_names(record), "timesteps": timesteps, "return": np.mean(returns)}
                for record in self.records
                for timesteps, returns in zip(
                    record.evaluations["timesteps"], record.evaluations["returns"], strict=True
                )
            ),
            columns=["env", "arm", "seed", "timesteps", "return"],
        )

    @cached_property
    def value_estimates(self) -> pd.DataFrame:
        """One row for each point of a training at which the critic's values were compared with returns"""
        return pd.DataFrame(
            ({**_names(record), **estimate} for record in self.records for estimate in record.value_estimates or []),
            columns=["env", "arm", "seed", "timesteps", "estimated", "monte_carlo"],
        )


def _names(record: RunRecord) -> dict[str, Any]:
    return {"env": record.env, "arm": record.arm, "seed": record.seed}


def read_results(study: Path) -> Results:
    """
    Read the folder of a study.

    :raises ValueError: this is no study's folder, a file in it is broken, or no run has finished yet
    """
    plan = read_plan(study)
    arms = list(plan.arms)
    records, missing, failures = [], [], {}
    for run in sorted(plan.runs(study), key=lambda run: (plan.envs.index(run.env), arms.index(run.arm), run.seed)):
        record = read_record(run, run.folder)
        if record is not None:
            records.append(record)
            continue
        missing.append(run)
        if run.failure.exists():
            failures[f"{run.failure.parent.name}/{run.failure.name}"] = _last_line(run.failure)
    if not records:
        failed = f", and {len(failures)} failed: see {study / 'failures'}" if failures else ""
        raise ValueError(f"The study in {study} has no finished run yet, so there is nothing to report{failed}")
    return Results(study, plan, records, missing, failures)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")[:_MAX_REASON]
