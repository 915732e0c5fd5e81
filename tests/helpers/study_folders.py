"""Folders of studies with made-up results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x.studies.results import (
    Evaluations,
    RunRecord,
    ValueEstimate,
    run_folder,
    write_record,
)


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
    arms = list(dict.fromkeys(arm for by_arm in scores.values() for arm in by_arm))
    config = {
        "format": 1,
        "kind": "ablation",
        "envs": list(scores),
        "seeds": list(seeds),
        "timesteps": dict.fromkeys(scores, timesteps),
        "evaluation": {
            "freq": dict.fromkeys(scores, timesteps // 2),
            "episodes": 2,
            "final_episodes": 2,
            "value_states": 10,
        },
        "arms": {
            arm: {
                "algo": "td3x",
                "description": f"what {arm} is",
                "hyperparams": {env: {"policy": "MlpPolicy"} for env, by_arm in scores.items() if arm in by_arm},
            }
            for arm in arms
        },
    }
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(config))
    for env, by_arm in scores.items():
        for arm, by_seed in by_arm.items():
            for seed, returns in by_seed.items():
                write(folder, make_record(arm, env, seed, returns, timesteps, **changes))
    return folder


def write(study: Path, record: RunRecord) -> None:
    """Write a record into the folder of its run."""
    folder = run_folder(study, record.arm, record.algo, record.env, record.seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_record(record, folder)


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
        "steps_per_second": timesteps / 100.0,
        "final_returns": values,
        "final_lengths": [200] * len(values),
        "best_returns": [value + 1 for value in values],
        "evaluations": Evaluations([half, timesteps], [[value - 10 for value in values], values]),
        "value_estimates": [ValueEstimate(half, -40.0, -50.0, 10), ValueEstimate(timesteps, -20.0 + seed, -25.0, 10)],
        "versions": {"stable-baselines3": "2.9.2"},
        "machine": {"processor": "A processor", "cores": 2},
        "learning_starts": 1_000,
        "reward_threshold": 0.0,
        **changes,
    }
    return RunRecord(**fields)


# Arms of an ablation, each with its final score, speed of learning, over-estimation, and chance that a seed fails
_ARMS = {
    "full": (1.0, 4.0, 0.02, 0.0),
    "stochastic-policy": (0.9, 3.0, 0.03, 0.0),
    "no-replay": (0.1, 1.0, 0.30, 0.0),
    "no-targets": (0.45, 2.0, 0.60, 0.2),
    "no-smoothing": (0.96, 4.2, 0.06, 0.0),
    "no-delay": (0.93, 4.5, 0.08, 0.0),
    "no-clipping": (0.88, 4.0, 0.22, 0.1),
    "ddpg": (0.7, 3.0, 0.35, 0.3),
    "noise-decay": (1.01, 4.3, 0.02, 0.0),
    "shaping": (0.99, 5.5, 0.01, 0.0),
}
# Worst and best return, length of a training in steps, spread of episodes, steps a second
_ENVS = {
    "Pendulum-v1": (-1300.0, -150.0, 20_000, 90.0, 420.0),
    "LunarLanderContinuous-v3": (-250.0, 265.0, 200_000, 45.0, 230.0),
    "BipedalWalker-v3": (-110.0, 310.0, 500_000, 40.0, 180.0),
}


def write_plausible_study(folder: Path, n_arms: int, envs: Sequence[str], seeds: Sequence[int]) -> Path:
    """
    Write a study that looks like a real one, to look at its report.

    :param folder: folder of the study
    :param n_arms: number of arms, at most 10
    :param envs: ids of some of the three envs that are known here
    :param seeds: seeds of the study
    :return: the folder
    """
    rng = np.random.default_rng(0)
    arms = list(_ARMS)[:n_arms]
    write_study(folder, {env: {arm: {} for arm in arms} for env in envs}, seeds)
    for env in envs:
        worst, best, timesteps, spread, speed = _ENVS[env]
        points = np.linspace(timesteps / 20, timesteps, 20).astype(int)
        for arm in arms:
            level, rate, over, failing = _ARMS[arm]
            for seed in seeds:
                reached = 0.25 if rng.random() < failing else level - abs(rng.normal(0, 0.03))
                progress = reached * (1 - np.exp(-rate * 1.5 * points / timesteps)) + rng.normal(0, 0.03, 20)
                means = worst + (best - worst) * progress

                def episodes(mean: float, n: int, spread: float = spread) -> list[float]:
                    return [float(mean + spread - value) for value in rng.gamma(1.5, spread / 1.5, n)]

                seconds = timesteps / (speed * rng.uniform(0.9, 1.05) * (0.6 + 0.04 * rate))
                scale = abs(best - worst) * 0.2
                true = (progress - 0.5) * scale
                bias = over * scale * np.sqrt(points / timesteps) * rng.uniform(0.7, 1.3)
                record = make_record(
                    arm,
                    env,
                    seed,
                    episodes(means[-1], 100),
                    timesteps,
                    best_returns=episodes(max(means[-1], means.max() - 0.02 * (best - worst)), 100),
                    evaluations=Evaluations(points.tolist(), [episodes(mean, 10) for mean in means]),
                    value_estimates=[
                        ValueEstimate(int(step), float(value + extra), float(value), 10)
                        for step, value, extra in zip(points, true, bias, strict=True)
                    ],
                    training_seconds=float(seconds),
                    steps_per_second=float(timesteps / seconds),
                    versions={"sb3-td3x": "0.1.0", "stable-baselines3": "2.9.2", "torch": "2.13.0"},
                    machine={"processor": "AMD EPYC 9B14", "cores": 2},
                )
                write(folder, record)
    return folder
