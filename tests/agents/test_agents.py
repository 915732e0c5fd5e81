"""The published agents, and the scripts that publish and evaluate them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch as th
import yaml
from stable_baselines3.common.env_util import make_vec_env

pytest.importorskip("rliable")

import agent_folders
import evaluate_agents
import publish_agent
import results
from agent_folders import SELECTION_SEED, TEST_SEED, Seed, Training, evaluate, find_agents

from sb3_td3x import TD3X
from sb3_td3x.files.agent import open_agent
from sb3_td3x.zoo.play import config_folder, play

ROOT = Path(__file__).parents[2]
AGENTS = [pytest.param(folder, id=folder.name) for folder in find_agents()]
# Those whose episodes take no time
SMALL = [pytest.param(folder, id=folder.name) for folder in find_agents() if folder.name.startswith(("Pend", "Mount"))]
MAX_SIZE = 6 * 2**20
ENV = "Pendulum-v1"
TIMEOUT = 400

# Several trainings in one process: most of their time is taken by imports
TRAIN = """
import runpy, sys

sys.orig_argv = ["/usr/bin/python", "-m", "rl_zoo3.train", *sys.argv[1:]]
arguments = sys.orig_argv[3:]
for seed in ("7", "8"):
    sys.argv = ["train.py", *arguments, "--seed", seed]
    sys.orig_argv[3:] = sys.argv[1:]
    runpy.run_module("rl_zoo3.train", run_name="__main__", alter_sys=True)
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "SDL_VIDEODRIVER": "dummy", "OMP_NUM_THREADS": "1"}


def run_python(folder: Path, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


# What is published


def test_there_are_agents() -> None:
    assert AGENTS


@pytest.mark.parametrize("folder", AGENTS)
def test_loads_by_the_safe_path(folder: Path) -> None:
    path = folder / f"{config_folder(folder).name}.zip"
    TD3X.load(path, device="cpu", trusted=False)
    agent = open_agent(path)
    assert agent.pickles == {}
    assert agent.is_sealed


@pytest.mark.parametrize("folder", AGENTS)
def test_no_paths_of_a_machine(folder: Path) -> None:
    publish_agent.check_portable(folder)


@pytest.mark.parametrize("folder", AGENTS)
def test_figures_belong_together(folder: Path) -> None:
    training = Training.read(folder)
    assert folder.name == f"{training.env}_1"  # the one that the zoo takes
    assert len({seed.seed for seed in training.seeds}) == len(training.seeds)
    for seed in training.seeds:
        assert seed.selected == agent_folders.best_candidate(seed.selection)
        published = training.published.selection[training.published.selected]
        assert np.mean(seed.selection[seed.selected]) <= np.mean(published)
        assert len(seed.test_returns) == agent_folders.N_TEST_EPISODES
        assert f"--seed {seed.seed} " in seed.command + " "
        # No training or selection has seen an episode of the test
        assert seed.seed + 1000 < SELECTION_SEED
    assert SELECTION_SEED + agent_folders.N_SELECTION_EPISODES <= TEST_SEED
    decisions = open_agent(folder / f"{training.env}.zip").data["num_timesteps"]
    assert decisions * publish_agent.Run(folder).trained.action_repeat == training.published.selected_timesteps


def test_size() -> None:
    files = (ROOT / "rl-trained-agents").rglob("*")
    assert sum(path.stat().st_size for path in files if path.is_file()) < MAX_SIZE


@pytest.mark.parametrize("folder", SMALL)
def test_is_not_worse_than_it_was(folder: Path) -> None:
    training = Training.read(folder)
    returns = evaluate(folder, f"{training.env}.zip", 10, TEST_SEED)
    recorded = training.published.test_returns[:10]
    assert np.mean(recorded) - np.mean(returns) <= evaluate_agents.allowed_loss(recorded, returns)


@pytest.mark.parametrize("folder", SMALL)
def test_enjoy(folder: Path, tmp_path: Path) -> None:
    """From another folder, by what the zoo takes if one says no experiment."""
    env = config_folder(folder).name
    options = ["--algo", "td3x", "--env", env, "--no-render", "-n", "200", "-f", str(ROOT / "rl-trained-agents")]
    output = run_python(tmp_path, "-m", "rl_zoo3.enjoy", *options)
    assert f"{env}_1/{env}.zip" in output
    assert "Episodes" in output


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_enjoy() -> None:
    command = ["make", "-n", "enjoy", f"ENV={ENV}", "ARGS=--no-render"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"-m rl_zoo3.enjoy --algo td3x --env {ENV} -f rl-trained-agents --no-render" in output


# Publishing


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of the zoo."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["--algo", "td3x", "--env", ENV, "-n", "240", "-f", str(folder / "logs"), "--num-threads", "1"]
    options += ["--eval-freq", "120", "--eval-episodes", "1", "--save-freq", "120", "--device", "cpu"]
    params = ["learning_starts:100", "buffer_size:500", "batch_size:16", "policy_kwargs:dict(net_arch=[8, 8])"]
    run_python(
        folder,
        "-c",
        TRAIN,
        *options,
        "-params",
        *params,
        "reward_shaping:{'sb3_td3x.shaping.RewardScale': {'scale': 0.1}}",
    )
    return [folder / "logs" / "td3x" / f"{ENV}_{idx}" for idx in (1, 2)]


@pytest.fixture(scope="module")
def published(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where their agent was published."""
    output = tmp_path_factory.mktemp("published")
    options = ["--selection-episodes", "3", "--test-episodes", "4", "--cpu", "a fast one", "--jobs", "2"]
    assert publish_agent.main([*map(str, runs), "-o", str(output), *options]) == 0
    return output


def best_seed(training: Training) -> Seed:
    return max(training.seeds, key=lambda seed: float(np.mean(seed.selection[seed.selected])))


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
        # The best agent is one of the other two; the final one has learned once more than that after 240 steps
        assert {f"{ENV}.zip", "best_model.zip"} < seed.selection.keys()
        assert len(seed.selection) == 3
        assert {len(returns) for returns in seed.selection.values()} == {3}
        assert (len(seed.test_returns), seed.timesteps, seed.machine["cpu"]) == (4, 240, "a fast one")
        assert seed.evaluations["timesteps"] == [120, 240]
        assert seed.training_seconds > 0
    assert yaml.safe_load((folder / ENV / "args.yml").read_text())["log_folder"] == "logs"
    publish_agent.check_portable(folder)


def test_further_seeds(runs: list[Path], published: Path, tmp_path: Path) -> None:
    """One after the other they give the same as both at once, whichever is better."""
    (together,) = find_agents(published)
    options = ["--selection-episodes", "3", "--test-episodes", "4", "--cpu", "a fast one"]
    for idx, order in enumerate((runs, runs[::-1])):
        output = ["-o", str(tmp_path / str(idx))]
        assert publish_agent.main([str(order[0]), *output, *options]) == 0
        assert publish_agent.main([str(order[1]), *output, *options, "--add"]) == 0
        (folder,) = find_agents(tmp_path / str(idx))
        for path in (path for path in together.rglob("*") if path.is_file() and path.suffix != ".zip"):
            assert (folder / path.relative_to(together)).read_bytes() == path.read_bytes()
        agents = [TD3X.load(place / f"{ENV}.zip", device="cpu") for place in (folder, together)]
        th.testing.assert_close(*(agent.policy.state_dict() for agent in agents), rtol=0, atol=0)


def test_further_seeds_that_do_not_belong_to_the_published(runs: list[Path], published: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in published.rglob("*") if path.is_file()}
    run, options = tmp_path / f"{ENV}_1", ["-o", str(published), "--add"]
    shutil.copytree(runs[0], run)
    with pytest.raises(SystemExit, match="each once"):
        publish_agent.main([str(run), *options])
    args = config_folder(run) / "args.yml"
    args.write_text(yaml.safe_dump({**publish_agent.read_zoo_yaml(args), "seed": 9}))
    with pytest.raises(SystemExit, match="50 --test-episodes 100: expected 3 and 4"):
        publish_agent.main([str(run), *options])
    config = config_folder(run) / "config.yml"
    config.write_text(yaml.safe_dump({**publish_agent.read_zoo_yaml(config), "gamma": 0.5}))
    with pytest.raises(SystemExit, match=r"other hyperparameters than .*td3x"):
        publish_agent.main([str(run), *options])
    with pytest.raises(SystemExit, match="publish_agent: "):
        publish_agent.main([str(run), "-o", str(tmp_path / "nothing"), "--add"])
    assert {path: path.read_bytes() for path in published.rglob("*") if path.is_file()} == before


def test_the_worse_half_of_the_candidates_drops_out(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    final, best, early, late = f"{ENV}.zip", "best_model.zip", "rl_model_120_steps.zip", "rl_model_240_steps.zip"
    asked: list[tuple[str, int, int]] = []

    def evaluate(folder: Path, name: str, n_episodes: int, first_seed: int) -> list[float]:
        first = first_seed - SELECTION_SEED
        asked.append((name, first, n_episodes))
        returns = {final: [9.0] * 2 + [-9.0] * 8, best: [0.0] * 10, early: [3.0] * 10, late: [2.0] * 10}
        return returns[name][first : first + n_episodes]

    monkeypatch.setattr(publish_agent, "evaluate", evaluate)
    monkeypatch.setattr(publish_agent.Run, "candidates", lambda self: [final, best, early, late])
    selection = publish_agent.select(publish_agent.Run(runs[0]), n_episodes=10, n_first=2, n_jobs=1)
    assert {name: len(returns) for name, returns in selection.items()} == {final: 4, best: 2, early: 10, late: 2}
    assert asked[-4:] == [(final, 2, 2), (early, 2, 2), (early, 4, 4), (early, 8, 2)]
    # Who dropped out is not chosen, however well it began
    assert agent_folders.best_candidate({**selection, late: [99.0, 99.0]}) == early


def test_the_time_between_an_interruption_and_its_resumption_is_no_training(tmp_path: Path) -> None:
    for idx, times in enumerate(([1.5, 60.0, 7260.0, 7300.5], [30.0, 7290.0])):
        rows = "".join(f"-1.0,10,{t}\n" for t in times)
        (tmp_path / f"{idx}.monitor.csv").write_text('#{"t_start": 100.0, "env_id": "E"}\nr,l,t\n' + rows)
    # 60 seconds before the pause, 40.5 from the first episode after it
    assert publish_agent.training_seconds(tmp_path) == pytest.approx(60 + 40.5)


def test_agents_play_with_one_thread(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever plays them, and whatever it does beside: returns depend on it."""
    threads: list[int] = []

    def load_player(path: Path) -> TD3X:
        threads.append(th.get_num_threads())
        return TD3X.load(path, device="cpu")

    monkeypatch.setattr(agent_folders, "load_player", load_player)
    before = th.get_num_threads()
    try:
        th.set_num_threads(2)
        evaluate(find_agents(published)[0], f"{ENV}.zip", 1, TEST_SEED)
        assert (threads, th.get_num_threads()) == ([1], 2)
    finally:
        th.set_num_threads(before)


def test_command_can_be_typed(published: Path) -> None:
    training = Training.read(find_agents(published)[0])
    words = shlex.split(training.seeds[0].command)
    assert words[:7] == ["python", "-m", "rl_zoo3.train", "--algo", "td3x", "--env", ENV]
    assert words[words.index("-f") + 1] == "logs"
    assert "policy_kwargs:{'net_arch': [8, 8]}" in words
    assert words[-2:] == ["--seed", "7"]


def test_published_agent_plays_as_it_did(runs: list[Path], published: Path) -> None:
    training = Training.read(find_agents(published)[0])
    run = runs[[7, 8].index(training.published_seed)]
    model = TD3X.load(published / "td3x" / f"{ENV}_1" / f"{ENV}.zip", device="cpu")
    original = TD3X.load(run / training.published.selected, device="cpu")
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_array_equal(model.predict(obs)[0], original.predict(obs)[0])
    for name, value in original.critic.state_dict().items():
        th.testing.assert_close(model.critic.state_dict()[name], value, rtol=0, atol=0)
    assert play(find_agents(published)[0], timesteps=200)


def test_training_goes_on_from_a_published_agent(published: Path) -> None:
    model = TD3X.load(published / "td3x" / f"{ENV}_1" / f"{ENV}.zip", env=make_vec_env(ENV), device="cpu")
    target = next(model.actor_target.parameters()).clone()
    model.learning_starts = 0
    model.learn(20, reset_num_timesteps=False)
    # Networks and targets shared memory in the file, and do so no more
    assert not th.equal(next(model.actor_target.parameters()), target)
    assert not th.equal(next(model.actor_target.parameters()), next(model.actor.parameters()))


def test_agents_with_pickles_are_refused(runs: list[Path], tmp_path: Path) -> None:
    model = TD3X.load(runs[0] / f"{ENV}.zip", device="cpu")
    model.learning_rate = lambda progress: 1e-3
    model.save(tmp_path / "own.zip")
    with pytest.raises(ValueError, match="learning_rate"):
        publish_agent.write_networks(tmp_path / "own.zip", tmp_path / "new.zip")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.yml", {"gamma": 0.5}, "other hyperparameters"),
        ("args.yml", {"seed": 8}, "each once"),
        ("args.yml", {"algo": "td3"}, "expected a run of td3x"),
        ("args.yml", {"n_timesteps": 5000}, "expected a finished run of 5000"),
    ],
)
def test_runs_that_do_not_belong_together(
    runs: list[Path], tmp_path: Path, name: str, change: dict[str, object], message: str
) -> None:
    copy = tmp_path / f"{ENV}_1"
    shutil.copytree(runs[0], copy)
    path = config_folder(copy) / name
    path.write_text(yaml.safe_dump({**publish_agent.read_zoo_yaml(path), **change}))
    with pytest.raises(SystemExit, match=message):
        publish_agent.main([str(runs[1]), str(copy), "-o", str(tmp_path)])


def test_paths_of_a_machine_are_found(published: Path, tmp_path: Path) -> None:
    shutil.copytree(published, tmp_path / "copy")
    (tmp_path / "copy" / "td3x" / f"{ENV}_1" / "note.txt").write_text('"/home/me"')
    with pytest.raises(ValueError, match=r"note\.txt holds the path of a machine"):
        publish_agent.check_portable(tmp_path / "copy")


def test_portable_command() -> None:
    command = "/opt/venv/bin/python -m rl_zoo3.train --algo td3x -f /tmp/a/logs --conf-file /tmp/b/c.yml"
    command += " -params policy_kwargs:dict(net_arch=[8, 8]) gamma:0.9 --seed 1"
    args = {"hyperparams": {"policy_kwargs": {"net_arch": [8, 8]}, "gamma": 0.9}}
    assert publish_agent.portable_command(command, args) == (
        "python -m rl_zoo3.train --algo td3x -f logs --conf-file c.yml "
        """-params 'policy_kwargs:{'"'"'net_arch'"'"': [8, 8]}' gamma:0.9 --seed 1"""
    )


def test_portable_command_of_the_zoos_own_script() -> None:
    command = "/opt/v/bin/python3 /opt/v/bin/rl_zoo3 train --algo td3x --log-folder=/home/me/logs --seed=1"
    expected = "python -m rl_zoo3.train --algo td3x --log-folder logs --seed 1"
    assert publish_agent.portable_command(command, {}) == expected


def test_command_with_a_path_of_a_machine_is_refused_before_anything_is_played(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / runs[0].name
    shutil.copytree(runs[0], copy)
    (copy / ENV / "command.txt").write_text("/usr/bin/python3 /home/me/train.py --algo td3x")
    monkeypatch.setattr(publish_agent, "select", lambda *_: pytest.fail("played"))
    with pytest.raises(SystemExit, match=r"with a path of a machine, b'/home/"):
        publish_agent.main([str(copy), "-o", str(tmp_path / "out")])


@pytest.mark.parametrize("option", ["--jobs", "--selection-episodes", "--first-round", "--test-episodes"])
def test_numbers_of_episodes_and_processes(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        publish_agent.main(["a", option, "0"])
    assert f"argument {option}: '0' is not allowed, expected a whole number of at least 1" in capsys.readouterr().err


# Evaluating


def test_any_number_of_episodes_begins_alike(published: Path) -> None:
    (folder,) = find_agents(published)
    few, many = (evaluate(folder, f"{ENV}.zip", n, TEST_SEED) for n in (4, 14))
    assert few == many[:4] == Training.read(folder).published.test_returns
    assert len(set(many)) == 14  # as many start states


def test_check(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_agents.main(["-f", str(published), "--check"]) == 0
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    (folder,) = find_agents(copy)
    training = Training.read(folder)
    better = replace(training.published, test_returns=[value / 2 for value in training.published.test_returns])
    seeds = [better if seed.seed == better.seed else seed for seed in training.seeds]
    replace(training, seeds=seeds).write(folder)
    assert evaluate_agents.main(["-f", str(copy), "--check", "--episodes", "3"]) == 1
    assert "WORSE" in capsys.readouterr().out


def test_report(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "N_BOOTSTRAP", 100)
    path = tmp_path / "agents.json"
    assert evaluate_agents.main(["-f", str(published), "-o", str(path)]) == 0
    (agent,) = json.loads(path.read_text())["agents"]
    training = Training.read(find_agents(published)[0])
    assert agent["published"]["returns"] == training.published.test_returns
    assert agent["all_seeds"]["means"] == pytest.approx([np.mean(seed.test_returns) for seed in training.seeds])
    assert "td3 -151.9 ± 90.2 at 20k" in capsys.readouterr().out


def test_learning_curves(published: Path, tmp_path: Path) -> None:
    pytest.importorskip("sb3_td3x.studies.reference")
    import plot_agents

    assert plot_agents.main(["-f", str(published), "-o", str(tmp_path)]) == 0
    assert (tmp_path / f"{ENV}.png").read_bytes().startswith(b"\x89PNG")
    timesteps, returns = plot_agents.learning_curve(Training.read(find_agents(published)[0]))
    assert timesteps.tolist() == [120, 240]
    assert returns.shape == (2, 2)
    training = Training.read(find_agents(published)[0])
    # The second seed's evaluations came later: interpolated
    training.seeds[1].evaluations["timesteps"] = [180, 300]
    early, late = returns[1]
    np.testing.assert_allclose(plot_agents.learning_curve(training)[1][1], [early, (early + late) / 2])
    axes = plot_agents.draw(Training.read(find_agents(published)[0])).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    # The zoo's first evaluation came after 10,000 steps
    assert labels == ["td3x, mean of 2 seeds", "95% interval"]


def test_animation(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import animate_agent

    arguments = ["-f", str(published), "-o", str(tmp_path), "--every", "50", "--width", "120"]
    assert animate_agent.main([ENV, *arguments]) == 0
    assert (tmp_path / f"{ENV}.gif").read_bytes().startswith(b"GIF8")
    with pytest.raises(SystemExit):
        animate_agent.main(["Pendulum", *arguments])
    assert f"env Pendulum has no agent in {published}, expected one of {ENV}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        animate_agent.main([ENV, *arguments, "--width", "99"])
    assert "argument --width: '99' is not allowed, expected a whole number of at least 100" in capsys.readouterr().err


def test_no_agents(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there are no agents"):
        evaluate_agents.main(["-f", str(tmp_path)])
    with pytest.raises(SystemExit):
        evaluate_agents.main(["-f", str(tmp_path), "--episodes", "3"])


@pytest.mark.parametrize(
    ("returns", "allowed"),
    [
        ([-100.0, -100.0, -100.0, -100.0], 1.0),
        # All are 5 lower: no chance, no tolerance but for rounding
        ([-105.0, -105.0, -105.0, -105.0], 1.0),
        # The differences are 0 and 20, 10 from their mean: 1.96 * 10 / sqrt(4) = 9.8
        ([-100.0, -120.0, -100.0, -120.0], 10.8),
    ],
)
def test_allowed_loss(returns: list[float], allowed: float) -> None:
    assert evaluate_agents.allowed_loss([-100.0] * 4, returns) == pytest.approx(allowed)


def test_readme_has_a_place_for_the_table(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", readme)
    for table in ("| first |", "| second |"):
        evaluate_agents.write_readme(table, readme)
    text = readme.read_text()
    assert "<!-- agents -->\n| second |\n<!-- end of agents -->" in text
    assert "first |" not in text
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="has not the two lines"):
        evaluate_agents.write_readme("", readme)


def test_best_of_the_zoo() -> None:
    figures = evaluate_agents.read_zoo_benchmark()
    assert evaluate_agents.format_zoo(figures["BipedalWalkerHardcore"]) == (
        "td3 -98.1 ± 16.1 at 10M, tqc 235.2 ± 110.6 at 2M"
    )
