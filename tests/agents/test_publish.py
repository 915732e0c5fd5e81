"""Publishing the agent of several seeds."""

import shlex
import shutil
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
import yaml
from published_agents import ENV
from stable_baselines3.common.env_util import make_vec_env

from sb3_td3x import TD3X
from sb3_td3x.agents import publish as publish_module
from sb3_td3x.agents.command import main
from sb3_td3x.agents.publish import (
    candidates,
    check_portable,
    episodes_of_test,
    portable_command,
    select,
    training_seconds,
    write_networks,
)
from sb3_td3x.agents.training import SELECTION_SEED, TEST_SEED, Seed, Training, best_candidate, find_agents, to_json
from sb3_td3x.studies.measure import play_test
from sb3_td3x.zoo.play import play
from sb3_td3x.zoo.runs import ZooRun


def best_seed(training: Training) -> Seed:
    return max(training.seeds, key=lambda seed: float(np.mean(seed.selection[seed.selected])))


def change(path: Path, **changes: Any) -> None:
    """Change values in a YAML file of the zoo, and write it as plain data."""
    run = ZooRun(path.parent.parent)
    content = run.args if path.name == "args.yml" else run.hyperparams
    path.write_text(yaml.safe_dump({**content, **changes}))


def test_layout(published: Path) -> None:
    (folder,) = find_agents(published)
    assert {str(path.relative_to(published / "td3x")) for path in published.rglob("*") if path.is_file()} == {
        f"{ENV}_1/{name}"
        for name in (
            *(f"{ENV}.zip", "0.monitor.csv", "evaluations.npz", "training.json"),
            *(f"{ENV}/args.yml", f"{ENV}/config.yml", f"{ENV}/command.txt"),
        )
    }
    training = Training.read(folder)
    assert training.published == best_seed(training)
    assert [seed.seed for seed in training.seeds] == [7, 8]
    for seed in training.seeds:
        # The best agent equals one of the other two; the last one has learned once more than that after 240 steps
        assert {f"{ENV}.zip", "best_model.zip"} < seed.selection.keys()
        assert len(seed.selection) == 3
        assert {len(returns) for returns in seed.selection.values()} == {3}
        assert (len(seed.test_returns), seed.timesteps, seed.machine["cpu"]) == (4, 240, "a fast one")
        assert seed.evaluations["timesteps"] == [120, 240]
        assert seed.training_seconds > 0
    assert yaml.safe_load((folder / ENV / "args.yml").read_text())["log_folder"] == "logs"
    check_portable(folder)


def test_agents_that_decide_at_every_step(runs: list[Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs[0], tmp_path / f"{ENV}_1"))
    wrapper = "rl_zoo3.wrappers.FrameSkip"
    change(run / ENV / "config.yml", env_wrapper=[{wrapper: {"skip": 2}}])
    options = ["-o", str(tmp_path), "--selection-episodes", "1", "--test-episodes", "1", "--every-step"]
    assert main(["publish", str(run), *options]) == 0
    (folder,) = find_agents(tmp_path)
    assert ZooRun(folder).hyperparams["env_wrapper"] == [{wrapper: {"skip": 1}}]
    training = Training.read(folder)
    assert training.published.timesteps == 2 * 240
    assert play_test(ZooRun(folder), folder / f"{ENV}.zip", 1, TEST_SEED) == training.published.test_returns


def test_the_worse_half_of_the_candidates_drops_out(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    final, best, early, late = f"{ENV}.zip", "best_model.zip", "rl_model_120_steps.zip", "rl_model_240_steps.zip"
    asked: list[tuple[str, int, int]] = []

    def play_test(run: ZooRun, agent: Path, n_episodes: int, first_seed: int) -> list[float]:
        first = first_seed - SELECTION_SEED
        asked.append((agent.name, first, n_episodes))
        returns = {final: [9.0] * 2 + [-9.0] * 8, best: [0.0] * 10, early: [3.0] * 10, late: [2.0] * 10}
        return returns[agent.name][first : first + n_episodes]

    monkeypatch.setattr(publish_module, "play_test", play_test)
    monkeypatch.setattr(publish_module, "candidates", lambda run: [final, best, early, late])
    monkeypatch.setattr(publish_module, "FIRST_ROUND", 2)
    selection = select(ZooRun(runs[0]), n_episodes=10, jobs=1)
    assert {name: len(returns) for name, returns in selection.items()} == {final: 4, best: 2, early: 10, late: 2}
    assert asked[-4:] == [(final, 2, 2), (early, 2, 2), (early, 4, 4), (early, 8, 2)]
    # A candidate that dropped out is not chosen, however well it began
    assert best_candidate({**selection, late: [99.0, 99.0]}) == early


def test_an_agent_without_training_is_no_candidate(runs: list[Path], tmp_path: Path) -> None:
    run = tmp_path / f"{ENV}_1"
    shutil.copytree(runs[0], run)
    TD3X("MlpPolicy", gym.make(ENV), policy_kwargs={"net_arch": [8]}).save(run / "best_model.zip")
    names = candidates(ZooRun(run))
    assert f"{ENV}.zip" in names
    assert "best_model.zip" not in names


def test_with_vec_normalize_the_last_agent_is_the_only_candidate(runs: list[Path], tmp_path: Path) -> None:
    """The zoo keeps only the newest statistics."""
    run = Path(shutil.copytree(runs[0], tmp_path / f"{ENV}_1"))
    assert len(candidates(ZooRun(run))) == 3
    change(run / ENV / "config.yml", normalize="dict(norm_reward=False)")
    assert candidates(ZooRun(run)) == [f"{ENV}.zip"]


def test_tests_are_longer_where_luck_decides() -> None:
    assert episodes_of_test("BipedalWalkerHardcore-v3") == episodes_of_test("LunarLanderContinuous-v3") == 1000
    assert episodes_of_test(ENV) == 100


def test_the_time_between_interruption_and_resumption_does_not_count(tmp_path: Path) -> None:
    for idx, times in enumerate(([1.5, 60.0, 7260.0, 7300.5], [30.0, 7290.0])):
        rows = "".join(f"-1.0,10,{t}\n" for t in times)
        (tmp_path / f"{idx}.monitor.csv").write_text('#{"t_start": 100.0, "env_id": "E"}\nr,l,t\n' + rows)
    # 60 seconds before the interruption, 40.5 from the first episode after it
    assert training_seconds(tmp_path) == pytest.approx(60 + 40.5)


def test_the_command_can_be_typed(published: Path) -> None:
    training = Training.read(find_agents(published)[0])
    words = shlex.split(training.seeds[0].command)
    assert words[:7] == ["python", "-m", "rl_zoo3.train", "--algo", "td3x", "--env", ENV]
    assert words[words.index("-f") + 1] == "logs"
    assert "policy_kwargs:{'net_arch': [8, 8]}" in words
    assert words[-2:] == ["--seed", "7"]


def test_portable_command() -> None:
    command = "/opt/venv/bin/python -m rl_zoo3.train --algo td3x -f /tmp/a/logs --conf-file /tmp/b/c.yml"
    command += " -params policy_kwargs:dict(net_arch=[8, 8]) gamma:0.9 --seed 1"
    args = {"hyperparams": {"policy_kwargs": {"net_arch": [8, 8]}, "gamma": 0.9}}
    expected = (
        "python -m rl_zoo3.train --algo td3x -f logs --conf-file c.yml "
        """-params 'policy_kwargs:{'"'"'net_arch'"'"': [8, 8]}' gamma:0.9 --seed 1"""
    )
    assert portable_command(command, args) == expected


def test_portable_command_of_the_zoos_own_script() -> None:
    command = "/opt/v/bin/python3 /opt/v/bin/rl_zoo3 train --algo td3x --log-folder=/home/me/logs --seed=1"
    expected = "python -m rl_zoo3.train --algo td3x --log-folder logs --seed 1"
    assert portable_command(command, {}) == expected


def test_the_published_agent_plays_as_the_trained_one(runs: list[Path], published: Path) -> None:
    training = Training.read(find_agents(published)[0])
    run = runs[[7, 8].index(training.published_seed)]
    model = TD3X.load(published / "td3x" / f"{ENV}_1" / f"{ENV}.zip", device="cpu")
    original = TD3X.load(run / training.published.selected, device="cpu")
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_array_equal(model.predict(obs)[0], original.predict(obs)[0])
    for name, value in original.critic.state_dict().items():
        th.testing.assert_close(model.critic.state_dict()[name], value, rtol=0, atol=0)
    assert play(find_agents(published)[0], timesteps=200)


def test_training_continues_from_a_published_agent(published: Path) -> None:
    model = TD3X.load(published / "td3x" / f"{ENV}_1" / f"{ENV}.zip", env=make_vec_env(ENV), device="cpu")
    target = next(model.actor_target.parameters()).clone()
    model.learning_starts = 0
    model.learn(20, reset_num_timesteps=False)
    # Networks and targets share memory in the file only
    assert not th.equal(next(model.actor_target.parameters()), target)
    assert not th.equal(next(model.actor_target.parameters()), next(model.actor.parameters()))


def n_written(path: Path) -> int:
    """Return the number of tensors that an agent's file has for the policy."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(archive.open("policy.pth")) as policy:
        return sum("/data/" in name for name in policy.namelist())


def test_equal_networks_are_written_once(runs: list[Path], tmp_path: Path) -> None:
    write_networks(runs[0] / f"{ENV}.zip", tmp_path / "new.zip")
    state = TD3X.load(tmp_path / "new.zip", device="cpu").policy.state_dict()
    for name in state:
        assert th.equal(state[name], state[name.replace("_target.", ".")]), name
    assert n_written(tmp_path / "new.zip") == len(state) / 2


def test_only_the_actor_that_plays_is_written(tmp_path: Path) -> None:
    env = make_vec_env(ENV)
    model = TD3X("MlpPolicy", env, learning_starts=10, actor_average_tau=0.1, policy_kwargs={"net_arch": [8]})
    model.learn(40)
    model.save(tmp_path / "trained.zip")
    write_networks(tmp_path / "trained.zip", tmp_path / "new.zip")
    policy = TD3X.load(tmp_path / "new.zip", device="cpu").policy
    for name, value in model.policy.playing_actor.state_dict().items():
        assert not th.equal(value, model.actor.state_dict()[name])
        for actor in (policy.actor, policy.actor_target, policy.playing_actor):
            assert th.equal(actor.state_dict()[name], value)
    assert n_written(tmp_path / "new.zip") == len(policy.actor.state_dict()) + len(policy.critic.state_dict())


def test_agents_with_pickles_are_refused(runs: list[Path], tmp_path: Path) -> None:
    model = TD3X.load(runs[0] / f"{ENV}.zip", device="cpu")
    model.learning_rate = lambda progress: 1e-3
    model.save(tmp_path / "own.zip")
    with pytest.raises(ValueError, match="learning_rate"):
        write_networks(tmp_path / "own.zip", tmp_path / "new.zip")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.yml", {"gamma": 0.5}, "other hyperparameters"),
        ("args.yml", {"seed": 8}, "each once"),
        ("args.yml", {"algo": "td3"}, "expected a run of td3x"),
        ("args.yml", {"n_timesteps": 5000}, "expected a finished run of 5000"),
    ],
)
def test_runs_that_do_not_belong_together(
    runs: list[Path],
    tmp_path: Path,
    name: str,
    changes: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / f"{ENV}_1"
    shutil.copytree(runs[0], copy)
    change(copy / ENV / name, **changes)
    assert main(["publish", str(runs[1]), str(copy), "-o", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_paths_of_a_machine_are_found(published: Path, tmp_path: Path) -> None:
    shutil.copytree(published, tmp_path / "copy")
    (tmp_path / "copy" / "td3x" / f"{ENV}_1" / "note.txt").write_text('"/home/me"')
    with pytest.raises(ValueError, match=r"note\.txt holds the path of a machine"):
        check_portable(tmp_path / "copy")


def test_lists_are_written_on_one_line() -> None:
    assert to_json({"a": [1.5, 2], "b": ["x  y", {"c": []}]}) == (
        '{\n "a": [1.5, 2],\n "b": [\n  "x  y",\n  {\n   "c": []\n  }\n ]\n}\n'
    )
    assert to_json([["a  [b]", 1]]) == '[\n [\n  "a  [b]",\n  1\n ]\n]\n'


@pytest.mark.parametrize("option", ["--jobs", "--selection-episodes", "--test-episodes"])
def test_bad_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["publish", "a", option, "0"])
    assert f"argument {option}: '0' is not allowed, expected a whole number of at least 1" in capsys.readouterr().err
