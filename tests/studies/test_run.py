"""One run of a study, with stand-ins for the zoo's processes: what is kept when one dies or is killed."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import study_env
import yaml
from processes import held_by_another_process
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from study_folders import make_record

from sb3_td3x import TD3X
from sb3_td3x.studies import run as run_module
from sb3_td3x.studies.arms import Arm
from sb3_td3x.studies.plan import Evaluation, Plan, Run, prepare
from sb3_td3x.studies.results import read_record, write_record
from sb3_td3x.studies.run import TRAINED_FILE, RunError, _train, do_run
from sb3_td3x.zoo.runs import checkpoint_folder

ENV = "StudyPoint-v0"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run of a study of its own, whose processes find the env."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    plan = Plan(
        kind="sweep",
        envs=[ENV],
        seeds=[1],
        timesteps={ENV: 60},
        evaluation=Evaluation({ENV: 20}, 2),
        arms={"a": Arm("a", "td3x", "", {ENV: {}})},
        gym_packages=[study_env.__name__],
    )
    prepare(plan, tmp_path / "study")
    return next(plan.runs(tmp_path / "study"))


def write_checkpoint(run: Run, number: int) -> Path:
    path = checkpoint_folder(run.unfinished) / f"{number:06d}_{20 * number}_steps.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def write_training(run: Run, finished: bool = True) -> None:
    """Write what a whole training leaves, with an agent that was saved during training."""
    folder = run.unfinished / ENV
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(yaml.safe_dump({"policy": "MlpPolicy"}))
    (folder / "args.yml").write_text(yaml.safe_dump({"algo": "td3x", "env": ENV, "env_kwargs": None}))
    model = TD3X("MlpPolicy", gym.make(ENV), policy_kwargs={"net_arch": [8]}, learning_starts=100, seed=0)
    model.learn(run.timesteps)
    for path in (run.unfinished / f"{ENV}.zip", run.unfinished / "rl_model_20_steps.zip"):
        model.save(path)
    if finished:
        (run.unfinished / TRAINED_FILE).write_text(json.dumps({"seconds": 2.0}))
    (run.log_dir / "train.log").write_text("trained")


@pytest.mark.parametrize(
    ("progress", "status", "kept"),
    [
        # Out of memory, or an env's error, and a newer checkpoint is there
        *((True, -9, True), (True, 1, True)),
        # Killed, or interrupted, before the next one
        *((False, -9, True), (False, 0, True)),
        # The checkpoint does not work
        (False, 1, False),
    ],
)
def test_a_resumed_training_that_dies(
    run: Run, monkeypatch: pytest.MonkeyPatch, progress: bool, status: int, kept: bool
) -> None:
    checkpoint = write_checkpoint(run, 1)
    modules = []

    def dying(run: Run, module: list[str]) -> int:
        modules.append(module[0])
        if progress:
            write_checkpoint(run, 2)
        return status

    monkeypatch.setattr(run_module, "_run_process", dying)
    with pytest.raises(RunError, match="ended without its 60 timesteps"):
        _train(run)
    assert checkpoint.exists() == kept
    assert modules == ["sb3_td3x"] + ["rl_zoo3.train"] * (not kept)


def test_a_training_that_another_process_continues(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(run, 1)

    monkeypatch.setattr(run_module, "_run_process", lambda *_: 1)
    with held_by_another_process(checkpoint_folder(run.unfinished)):
        assert "is in use by another process" in str(do_run(run).error)
    assert checkpoint.exists()


@pytest.mark.parametrize(
    ("where", "what"),
    [
        # After the agents that were saved on the way were deleted
        (run_module, "checkpoint_folder"),
        # After the log was moved
        (Path, "rename"),
    ],
)
def test_a_run_that_is_killed_on_its_way_into_place(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: Any, what: str
) -> None:
    write_training(run)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, what, killed)
        with pytest.raises(KeyboardInterrupt):
            do_run(run)
    assert not list(run.unfinished.glob("rl_model_*"))
    measured = read_record(run, run.unfinished)
    assert measured is not None
    assert [estimate["timesteps"] for estimate in measured.value_estimates or []] == [20, 60]

    assert do_run(run).error is None
    assert read_record(run, run.folder) == measured
    assert (run.folder / "train.log").read_text().startswith("trained")
    assert not run.log_dir.exists()


def test_a_training_that_is_over_is_not_repeated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []

    def training(run: Run, module: list[str]) -> int:
        modules.append(module[0])
        write_training(run, finished=False)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_run_process", training)
        _train(run)
        _train(run)
    assert modules == ["rl_zoo3.train"]
    assert do_run(run).error is None
    record = read_record(run, run.folder)
    assert record is not None
    assert record.training_seconds is not None


def test_a_measurement_that_fails(run: Run) -> None:
    write_training(run)
    (run.unfinished / ENV / "config.yml").unlink()
    assert "the measurement failed" in str(do_run(run).error)
    assert "is not the folder of a run of RL Zoo" in run.failure.read_text()


def test_a_record_of_another_run_is_not_taken(run: Run) -> None:
    run.unfinished.mkdir(parents=True)
    write_record(make_record(run.arm, run.env, run.seed + 1, [1.0], run.timesteps), run.unfinished)
    assert "is another one" in str(do_run(run).error)
    assert not run.folder.exists()


def test_an_agent_that_has_learned_nothing_is_never_the_best(run: Run) -> None:
    write_training(run)
    untrained = TD3X("MlpPolicy", gym.make(ENV), policy_kwargs={"net_arch": [8]}, learning_starts=100, seed=0)
    untrained.learn(20)
    untrained.save(run.unfinished / "best_model.zip")
    assert do_run(run).error is None
    record = read_record(run, run.folder)
    assert record is not None
    assert record.best_returns is None


@pytest.mark.parametrize("normalize", [False, True])
def test_the_best_agent_needs_its_own_statistics(run: Run, normalize: bool) -> None:
    """The zoo keeps only the newest statistics of ``VecNormalize``."""
    write_training(run)
    best = TD3X("MlpPolicy", gym.make(ENV), policy_kwargs={"net_arch": [8]}, learning_starts=10, seed=0)
    best.learn(20)
    best.save(run.unfinished / "best_model.zip")
    (run.unfinished / ENV / "config.yml").write_text(yaml.safe_dump({"policy": "MlpPolicy", "normalize": normalize}))
    VecNormalize(make_vec_env(ENV)).save(str(run.unfinished / ENV / "vecnormalize.pkl"))
    assert do_run(run).error is None
    record = read_record(run, run.folder)
    assert record is not None
    assert (record.best_returns is None) == normalize
