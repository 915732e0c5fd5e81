"""What is known of a finished run of a study: ``run.json`` in its folder."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sb3_td3x.files.atomic import atomic_write

FORMAT = 1
FILE_NAME = "run.json"
# Names in a study's folder that are not those of arms
RESERVED = ("failures", "hyperparams", "report", "study.json", "unfinished")


@dataclass(frozen=True)
class Evaluations:
    """
    The evaluations while training, from the zoo's ``evaluations.npz``.

    :param timesteps: env steps before each evaluation
    :param returns: for each evaluation, the returns of its episodes
    """

    timesteps: list[int]
    returns: list[list[float]]


@dataclass(frozen=True)
class TrainingReturns:
    """
    The episodes of the training, from its ``monitor.csv``.

    :param timesteps: env steps of the training at the end of each episode
    :param returns: return of each episode, as the env gave it
    """

    timesteps: list[int]
    returns: list[float]


@dataclass(frozen=True)
class ValueEstimate:
    """
    What the critic says of the start states, and what the policy gets from there (Fujimoto et al. 2018, figure 1).

    :param timesteps: env steps before the agent was saved
    :param estimated: mean of Q1(s_0, π(s_0))
    :param monte_carlo: mean of the discounted sum of rewards from s_0 on, in the units that the critic learned
    :param n_states: number of start states
    """

    timesteps: int
    estimated: float
    monte_carlo: float
    n_states: int


@dataclass(frozen=True)
class RunRecord:
    """
    A finished run. All returns but those of ``value_estimates`` are the env's own: neither shaped nor normalized.

    :param arm: name of the arm
    :param algo: name of the algorithm in the zoo
    :param env: id of the env
    :param seed: seed of the training
    :param timesteps: length of the training in env steps
    :param command: the zoo's command line
    :param training_seconds: duration of the training with its evaluations, in seconds
    :param steps_per_second: ``timesteps / training_seconds``
    :param final_returns: returns of the last agent, deterministic; episode i has the same start in all runs of an env
    :param final_lengths: lengths of these episodes in env steps
    :param best_returns: returns of the best agent of the evaluations from the same starts; None: there is none
    :param evaluations: the evaluations while training
    :param value_estimates: values of the start states; None: the algorithm has no Q critic
    :param training_returns: the episodes of the training
    :param versions: versions of the packages that matter; None: not installed
    :param machine: ``processor`` and number of ``cores``
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
    training_returns: TrainingReturns
    versions: dict[str, str | None]
    machine: dict[str, Any]

    def folder(self, study: Path) -> Path:
        """
        :param study: folder of the study
        :return: the folder of this run
        """
        return run_folder(study, self.arm, self.algo, self.env, self.seed)


def run_folder(study: Path, arm: str, algo: str, env: str, seed: int) -> Path:
    """
    :param study: folder of the study
    :param arm: name of the arm
    :param algo: name of the algorithm in the zoo
    :param env: id of the env
    :param seed: seed of the training
    :return: the folder of the finished run; as the zoo names them, with the seed for the number of the run
    """
    return study / arm / algo / f"{env_file_name(env)}_{seed}"


def env_file_name(env: str) -> str:
    """
    :param env: id of an env
    :return: it as a part of a file name, as in the zoo
    """
    return env.replace("/", "-")


def write_record(record: RunRecord, folder: Path) -> None:
    """
    :param record: what is known of a run
    :param folder: the run's folder, wherever it is now
    :raises ValueError: a return is not finite
    """
    _check_returns(record)
    with atomic_write(folder / FILE_NAME) as file:
        file.write(json.dumps({"format": FORMAT, **asdict(record)}, indent=1).encode())


def read_record(path: Path) -> RunRecord:
    """
    :param path: a ``run.json``
    :return: what it holds
    :raises ValueError: it is damaged, or of another format; names its folder
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
        return _record(content)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"The run in {path.parent} has a broken {path.name}: {reason}. Delete that folder, and the next start of "
            "the study repeats the run"
        ) from None


def read_records(study: Path) -> list[RunRecord]:
    """
    :param study: folder of a study
    :return: its finished runs, in the order of their folders' names
    :raises ValueError: the folder is none of a study, or a ``run.json`` is broken; names the run's folder
    """
    if not (study / "study.json").is_file():
        raise ValueError(f"{study} is no folder of a study: it has no study.json")
    paths = sorted(study.glob(f"*/*/*/{FILE_NAME}"))
    return [read_record(path) for path in paths if path.relative_to(study).parts[0] not in RESERVED]


def _record(content: dict[str, Any]) -> RunRecord:
    """
    :param content: of a ``run.json``
    :return: it, with every field checked
    """
    estimates = content["value_estimates"]
    record = RunRecord(
        **{name: str(content[name]) for name in ("arm", "algo", "env")},
        seed=int(content["seed"]),
        timesteps=int(content["timesteps"]),
        command=_list(content, "command", str),
        training_seconds=float(content["training_seconds"]),
        steps_per_second=float(content["steps_per_second"]),
        final_returns=_list(content, "final_returns", float),
        final_lengths=_list(content, "final_lengths", int),
        best_returns=None if content["best_returns"] is None else _list(content, "best_returns", float),
        evaluations=Evaluations(
            _list(content["evaluations"], "timesteps", int),
            _list(content["evaluations"], "returns", lambda row: [float(value) for value in row]),
        ),
        value_estimates=None if estimates is None else [ValueEstimate(**estimate) for estimate in estimates],
        training_returns=TrainingReturns(
            _list(content["training_returns"], "timesteps", int),
            _list(content["training_returns"], "returns", float),
        ),
        versions=dict(content["versions"]),
        machine=dict(content["machine"]),
    )
    for name, curve in (("evaluations", record.evaluations), ("training_returns", record.training_returns)):
        if len(curve.timesteps) != len(curve.returns):
            raise ValueError(f"{name} has {len(curve.timesteps)} timesteps and {len(curve.returns)} returns")
    if not record.final_returns or len(record.final_returns) != len(record.final_lengths):
        raise ValueError(f"{len(record.final_returns)} final_returns and {len(record.final_lengths)} final_lengths")
    _check_returns(record)
    return record


def _check_returns(record: RunRecord) -> None:
    """
    :param record: what is known of a run
    :raises ValueError: a return is not finite, so that the run has no score that could be compared
    """
    returns = {
        "final_returns": record.final_returns,
        "best_returns": record.best_returns or [],
        "evaluations": [value for values in record.evaluations.returns for value in values],
    }
    for name, values in returns.items():
        for value in values:
            if not math.isfinite(value):
                raise ValueError(f"{name} have a {value}: the agent has diverged, or its env gives such rewards")


def _list(content: dict[str, Any], name: str, convert: Callable[[Any], Any]) -> list[Any]:
    """
    :param content: names and values
    :param name: one of the names
    :param convert: makes an item what it should be
    :return: the list of this name
    """
    value = content[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} is {type(value).__name__}, expected a list")
    return [convert(item) for item in value]
