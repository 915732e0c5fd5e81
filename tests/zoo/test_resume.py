"""``python -m sb3_td3x resume`` of runs of the zoo."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from comparing import state_dicts_are_equal
from envs import CountingEnv, counting_vec_env, tiny
from managers import make_manager
from processes import environment, held_by_another_process, run_python
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.monitor import load_results

from sb3_td3x import TD3X, cli
from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import list_checkpoints
from sb3_td3x.zoo.resume import ResumedExperiment

ENV = "Pendulum-v1"
STEPS = 1600
RUN = Path(f"logs/td3x/{ENV}_1")
CONFIG = f"""
{ENV}:
  n_timesteps: {STEPS}
  policy: MlpPolicy
  n_envs: 2
  normalize: true
  learning_rate: lin_1e-3
  learning_starts: 100
  buffer_size: 1000
  batch_size: 16
  train_freq: 2
  noise_type: ornstein-uhlenbeck
  noise_std: 0.1
  n_steps: 3
  policy_kwargs: "dict(net_arch=[16])"
  callback:
    - sb3_td3x.checkpoint.ResumableCheckpoint: {{save_freq: 200, exact: true}}
"""
TRAIN = (
    *("-m", "rl_zoo3.train", "--algo", "td3x", "--env", ENV, "--conf-file", "config.yml", "--seed", "1"),
    *("--eval-freq", "400", "--eval-episodes", "1", "-tb", "tb"),
)


def train_until_killed(folder: Path) -> None:
    """Start the run and kill it after its second checkpoint."""
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *TRAIN], cwd=folder, env=environment(**paths()), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 400
            while len(list_checkpoints(folder / RUN / "checkpoints")) < 2:
                assert process.poll() is None, (folder / "output.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == -signal.SIGKILL


def paths() -> dict[str, str]:
    """Let processes import this working tree, whatever is installed."""
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.slow
@pytest.mark.xdist_group("zoo_commands")
def test_killed_run_is_resumed_exactly(tmp_path: Path) -> None:
    """The agent is the same bit for bit, and each episode, evaluation and logged value is there once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "config.yml").write_text(CONFIG)
    process = run_python(whole, *TRAIN, **paths())
    assert process.returncode == 0, process.stderr

    train_until_killed(killed)
    before = {path.name: path.read_bytes() for path in (killed / RUN / ENV).iterdir() if path.suffix != ".pkl"}
    process = run_python(killed, "-m", "sb3_td3x", "resume", str(RUN), **paths())
    assert process.returncode == 0, process.stderr
    assert f"Resuming from {RUN}/checkpoints/" in process.stdout
    assert [path.name for path in (killed / "logs/td3x").iterdir()] == [f"{ENV}_1"]
    assert {name: (killed / RUN / ENV / name).read_bytes() for name in before} == before

    models = [TD3X.load(folder / RUN / f"{ENV}.zip", device="cpu") for folder in (whole, killed)]
    assert models[0].num_timesteps == models[1].num_timesteps == STEPS
    assert state_dicts_are_equal(models[0].policy.state_dict(), models[1].policy.state_dict())
    evaluations = [dict(np.load(folder / RUN / "evaluations.npz")) for folder in (whole, killed)]
    assert evaluations[0]["timesteps"].tolist() == [400, 800, 1200, 1600]
    np.testing.assert_equal(evaluations[1], evaluations[0])
    returns = [load_results(str(folder / RUN)) for folder in (whole, killed)]
    for results in returns:
        assert results.t.is_monotonic_increasing
    for rank in range(2):
        rows = [(folder / RUN / f"{rank}.monitor.csv").read_text().splitlines()[2:] for folder in (whole, killed)]
        assert [row.rsplit(",", 1)[0] for row in rows[0]] == [row.rsplit(",", 1)[0] for row in rows[1]]
    steps = []
    for folder in (whole, killed):
        events = EventAccumulator(str(folder / f"tb/{ENV}/TD3X_1")).Reload()
        steps.append([event.step for event in events.Scalars("eval/mean_reward")])
    assert steps[1] == steps[0] == [400, 800, 1200, 1600]

    # A finished run stays as it is
    process = run_python(killed, "-m", "sb3_td3x", "resume", str(RUN), **paths())
    assert process.returncode == 0, process.stderr
    again = TD3X.load(killed / RUN / f"{ENV}.zip", device="cpu")
    assert state_dicts_are_equal(again.policy.state_dict(), models[1].policy.state_dict())


class SuccessEnv(CountingEnv):
    """Reports success at each step, as the envs of some packages do."""

    def step(self, action: Any) -> Any:
        *transition, info = super().step(action)
        return *transition, {**info, "is_success": False}


@pytest.mark.parametrize("name", ["Counting-parking-v0", "CountingPanda-v0"])
def test_monitor_files_with_success_are_appended_to(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo asks Monitor for it while it makes the envs."""
    monkeypatch.setattr(
        ExperimentManager, "entry_point", staticmethod(lambda env_id: "panda_gym.envs" if "Panda" in env_id else "")
    )
    defaults = {"policy": "MlpPolicy", "n_timesteps": 10}
    gym.register(name, SuccessEnv)
    try:
        manager = make_manager(tmp_path, defaults, name)
        env = manager.create_envs(1)
        folder = Path(manager.save_path)
        env.reset()
        for _ in range(8):
            env.step(np.zeros((1, 1)))
        env.close()
        rows = (folder / "0.monitor.csv").read_text().splitlines()
        assert rows[1] == "r,l,t,is_success"
        assert len(rows) == 4

        run = SimpleNamespace(folder=folder, config_folder=folder / name)
        manager_class = functools.partial(ResumedExperiment, run, defaults, folder / "checkpoints")
        env = make_manager(tmp_path, defaults, name, manager_class).create_envs(1)
        env.reset()
        for _ in range(5):
            env.step(np.zeros((1, 1)))
        env.close()
        after = (folder / "0.monitor.csv").read_text().splitlines()
        assert after[:4] == rows
        assert len(after) == 5
        assert after[4].endswith(",False")
    finally:
        gym.registry.pop(name)


ARGS = "algo: td3x\nenv: Pendulum-v1\noptimize_hyperparameters: false\ngym_packages: []\n"


def write_run(folder: Path, args: str = ARGS, config: str = "policy: MlpPolicy") -> None:
    """Write the settings of a run."""
    (folder / ENV).mkdir()
    (folder / ENV / "args.yml").write_text(args)
    (folder / ENV / "config.yml").write_text(config)


def test_run_that_another_process_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run and its files are left alone."""
    write_run(tmp_path)
    TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(20, ResumableCheckpoint(tmp_path / "checkpoints"))
    (tmp_path / "0.monitor.csv").write_text("12345")
    with held_by_another_process(tmp_path / "checkpoints"):
        assert cli.main(["resume", str(tmp_path)]) == 2
    assert "is in use by another process" in capsys.readouterr().err
    assert (tmp_path / "0.monitor.csv").read_text() == "12345"


def test_not_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "is not the folder of a run of RL Zoo" in capsys.readouterr().err


CHECKPOINT = "callback: {sb3_td3x.checkpoint.ResumableCheckpoint: {save_path: elsewhere}}"


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        (ARGS.replace("td3x", "td3"), "a: 1", "is not a training of td3x"),
        (ARGS.replace("false", "true"), "a: 1", "is not a training of td3x"),
        (ARGS, "a: 1", "There is no checkpoint in .*checkpoints: a run has some if it is trained with --save-freq"),
        (ARGS, CHECKPOINT, "There is no checkpoint in elsewhere: "),
    ],
)
@pytest.mark.parametrize("options", [[], ["--trusted"]], ids=["", "trusted"])
def test_run_without_a_checkpoint(
    args: str, config: str, message: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, args, config)
    assert cli.main(["resume", str(tmp_path), *options]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        (
            ARGS + "x: !!python/object/apply:os.mkdir [sentinel]",
            "a: 1",
            r"args\.yml holds an object .*--trusted",
        ),
        (
            ARGS,
            "policy: !!python/name:sentinel.Policy ''",
            r"config\.yml holds an object .*--trusted",
        ),
        (ARGS, "env_wrapper: sentinel.Wrapper", "asks for the wrapper 'sentinel.Wrapper'"),
        (ARGS, "vec_env_wrapper: [sentinel.Wrapper]", "asks for the wrapper 'sentinel.Wrapper'"),
        (ARGS, "callback: sentinel.Callback", "asks for the callback 'sentinel.Callback'.*--trusted"),
        (ARGS, "normalize: open('sentinel', 'w')", "normalize in .*config.yml is .*, expected a dictionary"),
        (ARGS, "monitor_kwargs: open('sentinel', 'w')", "monitor_kwargs in .*config.yml is"),
        (ARGS, "policy_kwargs: open('sentinel', 'w')", "There is no checkpoint"),
        (ARGS.replace("[]", "[sentinel]"), "a: 1", r"imports sentinel\. .*--trusted"),
    ],
)
def test_nothing_is_run_or_imported_without_trust(
    args: str,
    config: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sentinel.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_run(tmp_path, args, config)
    assert cli.main(["resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "sentinel").exists()


def train(folder: Path, *options: str, **variables: str) -> None:
    """Train a short run with two checkpoints, at 200 and 300 steps."""
    shared = ("--algo", "td3x", "--env", ENV, "-n", "300", "--save-freq", "200", "--eval-freq", "-1", *options)
    small = ("learning_starts:100", "batch_size:16", "policy_kwargs:dict(net_arch=[16])", "buffer_size:500")
    params = [*small, *([variables.pop("params")] if "params" in variables else [])]
    process = run_python(folder, "-m", "rl_zoo3.train", *shared, "-params", *params, **variables)
    assert process.returncode == 0, process.stderr


def lose_the_last_checkpoint(folder: Path) -> None:
    newest = list_checkpoints(folder / RUN / "checkpoints")[-1]
    assert newest.name.endswith("_300_steps.zip")
    newest.unlink()


@pytest.mark.slow
@pytest.mark.xdist_group("zoo_commands")
def test_run_with_a_hook_of_the_users_own(tmp_path: Path) -> None:
    """It needs trust. Where the hook's module is missing, it ends with a sentence before anything is changed."""
    train_folder, other = tmp_path / "train", tmp_path / "other"
    for folder in (train_folder, other):
        folder.mkdir()
    (train_folder / "my_hooks.py").write_text("def halve(batch): return batch.rewards / 2, batch.terminations")
    root = paths()["PYTHONPATH"]
    with_hook = {"PYTHONPATH": os.pathsep.join([root, str(train_folder)])}
    train(train_folder, "-P", params="reward_shaping:'my_hooks.halve'", **with_hook)
    lose_the_last_checkpoint(train_folder)
    files = {path: path.stat().st_mtime_ns for path in train_folder.rglob("*") if path.name != ".lock"}

    run = str(train_folder / RUN)
    for options, message in (([], "add --trusted"), (["--trusted"], "No module named 'my_hooks'")):
        process = run_python(other, "-m", "sb3_td3x", "resume", run, *options, PYTHONPATH=root)
        assert process.returncode == 2
        (line,) = process.stderr.splitlines()
        assert message in line
        assert {path: path.stat().st_mtime_ns for path in train_folder.rglob("*") if path.name != ".lock"} == files

    process = run_python(other, "-m", "sb3_td3x", "resume", run, "--trusted", **with_hook)
    assert process.returncode == 0, process.stderr
    assert TD3X.load(train_folder / RUN / f"{ENV}.zip", device="cpu").num_timesteps == 300


STAND_IN = """
from pathlib import Path
from types import SimpleNamespace

run = None

def init(**kwargs):
    global run
    run = SimpleNamespace(id=kwargs.get("id", "abc123"), config=SimpleNamespace(setdefaults=lambda settings: None))
    folder = Path("wandb", f"offline-run-{len(list(Path('wandb').glob('*')))}-{run.id}")
    folder.mkdir(parents=True)
    (folder / "init.txt").write_text(f"{kwargs.get('resume')} {kwargs['name']}")
    return run
"""


@pytest.mark.slow
@pytest.mark.xdist_group("zoo_commands")
@pytest.mark.parametrize("package", ["stand-in", "wandb"])
def test_tracked_run_goes_on_under_its_id(package: str, tmp_path: Path) -> None:
    if package == "wandb":
        pytest.importorskip("wandb")
    else:
        (tmp_path / "wandb.py").write_text(STAND_IN)
    variables = {"PYTHONPATH": os.pathsep.join([paths()["PYTHONPATH"], str(tmp_path)]), "WANDB_MODE": "offline"}

    def tracked() -> list[str]:
        return sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))

    def resume() -> None:
        process = run_python(tmp_path, "-m", "sb3_td3x", "resume", str(RUN), **variables)
        assert process.returncode == 0, process.stderr

    train(tmp_path, "--track", **variables)
    (first,) = tracked()
    resume()
    assert tracked() == [first]  # nothing was left to train
    lose_the_last_checkpoint(tmp_path)
    resume()
    assert tracked()[0] == first
    assert [name.rpartition("-")[2] for name in tracked()] == [first.rpartition("-")[2]] * 2
    if package == "stand-in":
        assert (tmp_path / "wandb" / tracked()[1] / "init.txt").read_text() == "allow None"
