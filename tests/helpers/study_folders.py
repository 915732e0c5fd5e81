"""Folders of studies with made-up results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sb3_td3x.studies.arms import Arm
from sb3_td3x.studies.plan import Evaluation, Plan, Run, prepare
from sb3_td3x.studies.results import Evaluations, RunRecord, ValueEstimate, write_record


def write_study(
    folder: Path,
    scores: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    seeds: Sequence[int],
    timesteps: int = 20_000,
    **changes: Any,
) -> Path:
    """
    Write the folder of a study with made-up results.

    :param folder: folder of the study
    :param scores: for each env, arm and seed the returns of the final episodes; seeds that are left out did not finish
    :param seeds: seeds of the study
    :param timesteps: length of a training
    :param changes: fields to change in all records
    :return: the folder
    """
    hyperparams: dict[str, dict[str, Any]] = {}
    for env, by_arm in scores.items():
        for arm in by_arm:
            hyperparams.setdefault(arm, {})[env] = {"policy": "MlpPolicy"}
    plan = Plan(
        kind="ablation",
        envs=list(scores),
        seeds=list(seeds),
        timesteps=dict.fromkeys(scores, timesteps),
        evaluation=Evaluation(dict.fromkeys(scores, timesteps // 2), episodes=2, final_episodes=2),
        arms={arm: Arm(arm, "td3x", f"what {arm} is", entries) for arm, entries in hyperparams.items()},
    )
    prepare(plan, folder)
    for env, by_arm in scores.items():
        for arm, by_seed in by_arm.items():
            for seed, returns in by_seed.items():
                write(folder, make_record(arm, env, seed, returns, timesteps, **changes))
    return folder


def run_of(study: Path, record: RunRecord) -> Run:
    """Return the run of a record."""
    arms = {record.arm: Arm(record.arm, record.algo, "", {record.env: {}})}
    timesteps = {record.env: record.timesteps}
    plan = Plan("ablation", [record.env], [record.seed], timesteps, Evaluation(timesteps), arms)
    return Run(study, record.arm, record.env, record.seed, plan)


def write(study: Path, record: RunRecord) -> None:
    """Write a record into the folder of its run."""
    folder = run_of(study, record).folder
    folder.mkdir(parents=True, exist_ok=True)
    write_record(record, folder)


def value_estimates(*points: tuple[int, float, float]) -> list[ValueEstimate]:
    """Return estimates from timesteps, estimated value and return."""
    return [ValueEstimate(timesteps=t, estimated=value, monte_carlo=returns) for t, value, returns in points]


def make_record(
    arm: str, env: str, seed: int, returns: Sequence[float], timesteps: int = 20_000, **changes: Any
) -> RunRecord:
    """Return a record with two evaluations and two value estimates."""
    half = timesteps // 2
    values = [float(value) for value in returns]
    fields: dict[str, Any] = {
        "arm": arm,
        "algo": "td3x",
        "env": env,
        "seed": seed,
        "timesteps": timesteps,
        "command": ["python", "-m", "rl_zoo3.train"],
        "training_seconds": 100.0,
        "final_returns": values,
        "best_returns": [value + 1 for value in values],
        "evaluations": Evaluations(timesteps=[half, timesteps], returns=[[value - 10 for value in values], values]),
        "value_estimates": value_estimates((half, -40.0, -50.0), (timesteps, -20.0 + seed, -25.0)),
        "versions": {"stable-baselines3": "2.9.2"},
        "machine": {"processor": "A processor", "cores": 2},
        "reward_threshold": 0.0,
        **changes,
    }
    return RunRecord(**fields)
