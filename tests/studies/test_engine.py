"""Whole studies, with trainings of a few steps: failures, interruptions, kills, a cluster that loses a machine."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from processes import held_by_another_process

from sb3_td3x.studies import engine
from sb3_td3x.studies.arms import Arm
from sb3_td3x.studies.command import _make_parser, _make_plan, main
from sb3_td3x.studies.engine import run_study
from sb3_td3x.studies.plan import Evaluation, Plan, Run
from sb3_td3x.studies.results import read_record, read_results
from sb3_td3x.studies.run import Outcome, interrupted

ROOT = Path(__file__).parents[2]
ENV = "StudyPoint-v0"
TINY = {
    "n_timesteps": 60,
    "policy": "MlpPolicy",
    "learning_starts": 10,
    "noise_type": "normal",
    "noise_std": 0.1,
    "policy_kwargs": "dict(net_arch=[8])",
}
VARIABLES = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
    ),
    "OMP_NUM_THREADS": "1",
}


def arguments(folder: Path, arms: dict[str, Any], *options: str) -> list[str]:
    """Return the arguments of the command for a sweep with these arms."""
    (folder / "td3x.yml").write_text(yaml.safe_dump({ENV: TINY}))
    (folder / "arms.yml").write_text(yaml.safe_dump(arms))
    files = ["--conf-file", str(folder / "td3x.yml"), "-f", str(folder / "study"), "--gym-packages", "study_env"]
    settings = ["--env", ENV, "--seeds", "1", "--eval-freq", "20", "--eval-episodes", "2"]
    return ["sweep", str(folder / "arms.yml"), *files, *settings, *options]


def start(folder: Path, arms: dict[str, Any], *options: str, **variables: str) -> "subprocess.Popen[str]":
    """Start the sweep in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "sb3_td3x", "study", *arguments(folder, arms, *options)],
        env={**VARIABLES, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def finish(process: "subprocess.Popen[str]", status: int = 0) -> str:
    # Until its workers have closed their ends, too
    output, errors = process.communicate(timeout=200)
    assert process.returncode == status, output + errors
    return output + errors


def wait_until(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def zoo_processes(folder: Path) -> list[int]:
    """Return the ids of the processes that train into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if b"child_process" in command and str(folder).encode() in command:
                found.append(int(path.parent.name))
    return found


def wait_for_silence(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while zoo_processes(folder):
        assert time.monotonic() < deadline, "trainings continue without their study"
        time.sleep(0.1)


def has_rows(run: Run) -> bool:
    """Return whether an episode of the training has ended."""
    return any(len(path.read_text().splitlines()) > 2 for path in run.unfinished.glob("*monitor.csv"))


def make_plan(*arms: str) -> Plan:
    named = {name: Arm(name, "td3x", "", {ENV: {}}) for name in arms}
    return Plan("sweep", [ENV], [1], {ENV: 60}, Evaluation({ENV: 20}), named)


def runs(folder: Path, *arms: str) -> list[Run]:
    return list(make_plan(*arms).runs(folder / "study"))


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the sweep in this process, which is faster than starting another."""
    monkeypatch.setenv("PYTHONPATH", VARIABLES["PYTHONPATH"])

    def run(arms: dict[str, Any], status: int) -> str:
        assert main(arguments(tmp_path, arms)) == status
        return "".join(capsys.readouterr())

    return run


@pytest.mark.slow
def test_a_study_from_start_to_end(tmp_path: Path, sweep: Callable[..., str]) -> None:
    arms = {"plain": {}, "broken": {"tau": 2.0}}
    output = sweep(arms, status=1)
    assert "0 of 2 runs are finished, 2 to do" in output
    failure = tmp_path / "study/failures/broken-StudyPoint-v0-1.log"
    assert f"FAILED broken, {ENV}, seed 1: RunError: the training ended without its 60 timesteps" in output
    assert str(failure) in output
    assert "-m rl_zoo3.train --algo td3x" in failure.read_text().splitlines()[0]
    assert "tau=2.0 is not allowed" in failure.read_text()

    (record,) = read_results(tmp_path / "study").records
    assert (record.arm, record.timesteps, record.seed) == ("plain", 60, 1)
    assert len(record.final_returns) == len(record.best_returns or []) == 100
    assert record.evaluations["timesteps"] == [20, 40, 60]
    assert np.shape(record.evaluations["returns"]) == (3, 2)
    assert [estimate["timesteps"] for estimate in record.value_estimates or []] == [20, 40, 60]
    assert record.training_seconds is not None
    folder = runs(tmp_path, "plain")[0].folder
    left = {path.name for path in folder.iterdir()}
    assert left == {
        *("0.monitor.csv", "StudyPoint-v0", "StudyPoint-v0.zip", "best_model.zip", "evaluations.npz"),
        *("run.json", "train.log"),
    }
    # The zoo's own commands on a run
    play = ["enjoy", "--algo", "td3x", "--env", ENV, "-f", str(tmp_path / "study/plain"), "--exp-id", "1"]
    plot = ["plots.all_plots", "-a", "td3x", "-e", "StudyPoint", "-f", str(tmp_path / "study/plain"), "--no-display"]
    play_options = ["--gym-packages", "study_env", "--no-render", "-n", "30"]
    for zoo in ([*play, *play_options], [*plot, "-o", str(tmp_path / "plots")]):
        process = subprocess.run(
            [sys.executable, "-m", "sb3_td3x", "zoo", *zoo], env=VARIABLES, capture_output=True, text=True, cwd=tmp_path
        )
        assert process.returncode == 0, process.stderr
    assert (tmp_path / "plots.pkl").exists()

    # The next start tries the failed run again, and touches no other
    written = (folder / "run.json").stat().st_mtime_ns
    assert "1 of 2 runs are finished, 1 to do" in sweep(arms, status=1)
    assert (folder / "run.json").stat().st_mtime_ns == written

    # A broken run is named, and nothing is mixed with another configuration
    (folder / "run.json").write_text("{")
    assert f"The run in {folder} has a broken run.json" in sweep({"plain": {}}, status=1)
    difference = f"arms.plain.hyperparams.{ENV}.gamma was None and is 0.5"
    assert difference in sweep({"plain": {"gamma": 0.5}}, status=2)


@pytest.mark.slow
def test_modules_of_the_users_own_are_found_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "of_mine.py").write_text(
        "import gymnasium as gym\n"
        "def half(batch):\n    return batch.rewards / 2, batch.terminations\n"
        "class Wrapper(gym.Wrapper):\n    pass\n"
    )
    arms = {"hook": {"reward_shaping": "of_mine.half"}, "wrapper": {"env_wrapper": "of_mine.Wrapper"}}
    refused = finish(start(tmp_path, arms), status=2)
    assert f"The arm hook in {ENV} has reward_shaping='of_mine.half', which can run any code" in refused
    finish(start(tmp_path, arms, "--jobs", "2", "--trusted"))
    assert {record.arm for record in read_results(tmp_path / "study").records} == {"hook", "wrapper"}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_study_continues(tmp_path: Path, sweep: Callable[..., str]) -> None:
    arms = {"quick": {}, "slow": {"env_kwargs": {"delay": 0.3}}}
    quick, slow = runs(tmp_path, *arms)
    process = start(tmp_path, arms)
    checkpoints = slow.unfinished / "checkpoints"
    wait_until(lambda: quick.folder.exists() and list(checkpoints.glob("*_steps.zip")), process)
    process.kill()
    process.communicate(timeout=60)
    wait_for_silence(tmp_path)
    assert not slow.folder.exists()
    written = (quick.folder / "run.json").stat().st_mtime_ns

    assert "1 of 2 runs are finished, 1 to do" in sweep(arms, status=0)
    assert (quick.folder / "run.json").stat().st_mtime_ns == written
    assert "Resuming from" in (slow.folder / "train.log").read_text()
    record = read_record(slow, slow.folder)
    assert record is not None
    assert record.evaluations["timesteps"] == [20, 40, 60]
    assert record.training_seconds is None
    assert not list((tmp_path / "study/unfinished").glob("*/*"))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "jobs", "status", "output"),
    [
        (signal.SIGINT, "2", 130, "Interrupted: the same command continues"),
        (signal.SIGTERM, "1", -signal.SIGTERM, ""),
        # No handler runs; the trainings must end by themselves
        (signal.SIGKILL, "2", -signal.SIGKILL, ""),
    ],
)
def test_signals_end_the_trainings(tmp_path: Path, number: int, jobs: str, status: int, output: str) -> None:
    arms = {name: {"env_kwargs": {"delay": delay}} for name, delay in (("a", 0.5), ("b", 0.6))}
    first = runs(tmp_path, "a")[0]
    process = start(tmp_path, arms, "--jobs", jobs)
    wait_until(lambda: has_rows(first), process)
    process.send_signal(number)
    assert output in finish(process, status)
    wait_for_silence(tmp_path)


def test_length_of_trainings_and_evaluations(tmp_path: Path) -> None:
    def lengths(*options: str) -> tuple[dict[str, int], dict[str, int]]:
        plan = _make_plan(
            _make_parser().parse_args(["sweep", str(tmp_path / "arms.yml"), "--env", "Pendulum-v1", *options])
        )
        return plan.timesteps, plan.evaluation.freq

    (tmp_path / "arms.yml").write_text("plain:\n")
    assert lengths() == ({"Pendulum-v1": 10_000}, {"Pendulum-v1": 500})
    assert lengths("--timesteps", "10") == ({"Pendulum-v1": 10}, {"Pendulum-v1": 1})
    assert lengths("--eval-freq", "300") == ({"Pendulum-v1": 10_000}, {"Pendulum-v1": 300})
    # Repeated actions count as env steps
    (tmp_path / "arms.yml").write_text("plain: {env_wrapper: [{rl_zoo3.wrappers.FrameSkip: {skip: 3}}]}\n")
    assert lengths() == ({"Pendulum-v1": 30_000}, {"Pendulum-v1": 1500})


def test_one_study_after_another_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the first one does not interrupt the runs of the second one."""
    seen = []

    def fake_run(run: Run) -> Outcome:
        seen.append(interrupted.is_set())
        return Outcome(run)

    monkeypatch.setattr(engine, "do_run", fake_run)
    for name in ("first", "second"):
        assert run_study(make_plan("a", "b"), tmp_path / name, jobs=2) == 0
    assert seen
    assert not any(seen)
    assert not interrupted.is_set()


def test_one_study_in_a_folder(tmp_path: Path) -> None:
    with held_by_another_process(tmp_path), pytest.raises(ValueError, match="is in use by another process"):
        run_study(make_plan(), tmp_path)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["ablation", "--env", "Pendulm-v1"], "The env 'Pendulm-v1' is unknown: did you mean 'Pendulum-v1'?"),
        (["ablation", "--arms", "ful"], "The arm 'ful' is unknown: did you mean 'full'?"),
        (["ablation", "--arms", "no-decay"], "Pendulum-v1 has none of the arms no-decay: expected one of full, stoch"),
        (["compare", "td3z", "--env", "Pendulum-v1"], "The algorithm 'td3z' is unknown: did you mean 'td3"),
        (["sweep", "no.yml", "--env", "Pendulum-v1"], "no.yml is no YAML file that can be read"),
        (["ablation", "--gym-packages", "no_such_package"], "--gym-packages no_such_package cannot be imported"),
        (["report", "no-such-study"], "no-such-study"),
        (["ablation", "--env", "Pendulum-v1", "-f", __file__], f"{__file__} cannot be the folder of a study"),
        (["ablation", "--env", "Pendulum-v1", "-f", f"{__file__}/a"], f"{__file__}/a cannot be the folder of a study"),
    ],
)
def test_bad_command_lines(
    command: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert error in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option", [["--seeds", "-1"], ["--seeds", "0"], ["--jobs", "0"], ["--timesteps", "1e5"], ["--eval-freq", "0"]]
)
def test_bad_numbers(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ablation", *option])
    assert "is not allowed, expected" in capsys.readouterr().err


@pytest.fixture
def ray_cluster() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start two nodes on this machine with one processor each; return their address and the process of the second."""
    # Sockets need a short path
    folder = tempfile.mkdtemp(prefix="ray")
    ray_module = pytest.importorskip("ray.util", reason="Ray is not installed (pip install .[ray])")
    # Ray takes 127.0.0.1 for this address
    with socket.socket() as free:
        free.bind(("", 0))
        address = f"{ray_module.get_node_ip_address()}:{free.getsockname()[1]}"
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=1"]
    small = ["--object-store-memory=80000000"]
    head = ["--head", f"--port={address.split(':')[1]}", "--include-dashboard=false", f"--temp-dir={folder}"]
    environment = {**VARIABLES, "RAY_memory_monitor_refresh_ms": "0"}
    nodes = []
    try:
        for options in (head, [f"--address={address}"]):
            log = (Path(folder) / f"node{len(nodes)}.log").open("wb")
            nodes.append(
                subprocess.Popen(
                    [*ray, *small, *options], env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
            try:
                wait_until_ready(address, len(nodes))
            except subprocess.SubprocessError:
                # It gives itself 30 seconds to start, which a busy machine exceeds
                pytest.skip("Ray did not start on this machine")
        yield address, nodes[1]
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_ready(address: str, n_nodes: int) -> None:
    code = f"""
import ray, time
deadline = time.monotonic() + 120
while True:
    try:
        ray.init({address!r}, log_to_driver=False, logging_level=40)
        if sum(node["Alive"] for node in ray.nodes()) == {n_nodes}:
            break
        ray.shutdown()
    except ConnectionError:
        pass
    assert time.monotonic() < deadline
    time.sleep(0.5)
"""
    subprocess.run([sys.executable, "-c", code], env=VARIABLES, check=True, capture_output=True, timeout=150)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_cluster_that_loses_a_machine(tmp_path: Path, ray_cluster: tuple[str, "subprocess.Popen[bytes]"]) -> None:
    address, second_node = ray_cluster
    arms = {name: {"env_kwargs": {"delay": delay}} for name, delay in (("a", 0.3), ("b", 0.31))}
    both = runs(tmp_path, *arms)
    process = start(tmp_path, arms, "--jobs", "2", "--backend", "ray", RAY_ADDRESS=address)
    wait_until(lambda: all(has_rows(run) for run in both), process)
    os.killpg(second_node.pid, signal.SIGKILL)
    output = finish(process)
    assert "2 of 2 runs are finished" in output
    assert [record.arm for record in read_results(tmp_path / "study").records] == ["a", "b"]
    wait_for_silence(tmp_path)
