"""What a study's folder holds, arranged for its report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sb3_td3x.studies.records import RunRecord, env_file_name, read_records

_MAX_REASON = 200


@dataclass(frozen=True)
class Failure:
    """
    A run that failed and was not finished since.

    :param name: its log, relative to the study's folder
    :param reason: the last line of the log
    """

    name: str
    reason: str


@dataclass(frozen=True)
class MissingRun:
    """
    A run that has not finished.

    :param env: id of the env
    :param arm: name of the arm
    :param seed: seed of the training
    :param failure: how it failed; None: it was not tried yet, or is under way
    """

    env: str
    arm: str
    seed: int
    failure: Failure | None


@dataclass(frozen=True)
class Results:
    """
    A study and its finished runs.

    :param study: its folder
    :param config: what ``study.json`` holds
    :param records: the finished runs by env and arm, of each arm by seed; what has no run is not in it
    :param missing: the runs that have not finished
    :param failures: all failures, those of runs that belong to the study no more among them
    """

    study: Path
    config: dict[str, Any]
    records: dict[str, dict[str, list[RunRecord]]]
    missing: list[MissingRun]
    failures: list[Failure]

    @property
    def name(self) -> str:
        """Name of the study: that of its folder"""
        return self.study.resolve().name

    @property
    def arms(self) -> list[str]:
        """All arms, the base first"""
        return list(self.config["arms"])

    @property
    def base(self) -> str:
        """The arm that the others are compared with"""
        return self.arms[0]

    @property
    def envs(self) -> list[str]:
        """Envs with a finished run"""
        return list(self.records)

    @property
    def runs(self) -> list[RunRecord]:
        """All finished runs, by env, arm and seed"""
        return [record for arms in self.records.values() for records in arms.values() for record in records]

    @property
    def n_planned(self) -> int:
        """How many runs the study has, finished or not"""
        return len(self.runs) + len(self.missing)


def read_results(study: Path) -> Results:
    """
    :param study: folder of a study
    :return: what it holds
    :raises ValueError: it is no study's folder, a file in it is broken, or nothing has finished yet
    """
    all_records = read_records(study)
    config = _read_config(study / "study.json")
    found = {(record.env, record.arm, record.seed): record for record in all_records}
    logs = {path.name: path for path in sorted((study / "failures").glob("*.log"))}
    records: dict[str, dict[str, list[RunRecord]]] = {}
    missing, failures = [], []
    for env in config["envs"]:
        for arm, settings in config["arms"].items():
            if env not in settings["hyperparams"]:
                continue
            for seed in sorted(config["seeds"]):
                log = logs.pop(f"{arm}-{env_file_name(env)}-{seed}.log", None)
                if (env, arm, seed) in found:
                    records.setdefault(env, {}).setdefault(arm, []).append(found[env, arm, seed])
                else:
                    failure = _failure(log, study) if log else None
                    missing.append(MissingRun(env, arm, seed, failure))
                    failures += [failure] if failure else []
    if not records:
        done = f", and {len(failures)} failed: see {study / 'failures'}" if failures else ""
        raise ValueError(f"The study in {study} has no finished run yet, so there is nothing to report{done}")
    return Results(study, config, records, missing, failures + [_failure(log, study) for log in logs.values()])


def _read_config(path: Path) -> dict[str, Any]:
    """
    :param path: a ``study.json``
    :return: what it holds
    :raises ValueError: it is broken; names it
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        lists: Sequence[str] = ("envs", "seeds")
        if not all(isinstance(config[name], list) and config[name] for name in lists) or not config["arms"]:
            raise ValueError("expected envs, seeds and arms")
        for arm in config["arms"].values():
            arm["hyperparams"].keys()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is broken: {reason}") from None
    return dict(config)


def _failure(log: Path, study: Path) -> Failure:
    """
    :param log: output of a failed run
    :param study: folder of the study
    :return: how it failed
    """
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    reason = next((line for line in reversed(lines) if line), "the log is empty")
    return Failure(log.relative_to(study).as_posix(), reason[:_MAX_REASON])
