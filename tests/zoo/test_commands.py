"""
RL Zoo's commands with td3x, as a user types them: separate processes, started outside the repository, which know TD3X
only through its installation.
"""

import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from comparing import state_dicts_are_equal
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from processes import TIMEOUT, environment, run_python
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint.folder import list_checkpoints
from sb3_td3x.zoo.register import hyperparams_path
from sb3_td3x.zoo.runs import ZooRun
from sb3_td3x.zoo.search_space import convert_td3x_params

# One pytest worker for the whole module: its tests share trained agents
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("zoo_commands")]

ENV = "Pendulum-v1"
LEARNING_STARTS = 100
SMALL = (f"learning_starts:{LEARNING_STARTS}", "buffer_size:1000", "batch_size:16", "train_freq:1", "gradient_steps:1")
SMALL_NET = "policy_kwargs:dict(net_arch=[16])"
# As in docs/get-started.md, and a learning rate schedule for the critics
DECAY = 0.9999
ADDITIONS = (
    f"action_noise_decay:{DECAY}",
    "reward_shaping:{'sb3_td3x.shaping.RewardScale':{'scale':0.1}}",
    "qf_learning_rate:'lin_7e-4'",
)
DEFAULT = yaml.safe_load(hyperparams_path("td3x").read_text())[ENV]
# Steps of the run that most tests share, and of the run that continues it by `-i`
STEPS, MORE_STEPS = 420, 220

# Three commands in one process, because most of their time is imports
PLOT = """
import runpy, sys

for command in sys.argv[1:]:
    sys.argv = command.split()
    runpy.run_module(f"rl_zoo3.plots.{sys.argv[0]}", run_name="__main__", alter_sys=True)
"""

# `python -m rl_zoo3.push_to_hub` where the hub is a folder. Calls must fit the signatures of the real client
PUSH_OFFLINE = """
import runpy, sys
from pathlib import Path
from unittest import mock
import huggingface_hub

api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
api.snapshot_download.side_effect = lambda repo_id, local_dir: Path(local_dir).mkdir(parents=True)
api.upload_folder.side_effect = lambda repo_id, **kwargs: print("uploaded", repo_id)
huggingface_hub.HfApi = lambda: api
runpy.run_module("rl_zoo3.push_to_hub", run_name="__main__", alter_sys=True)
"""

# `python -m rl_zoo3.load_from_hub` from that folder
LOAD_OFFLINE = """
import runpy
from pathlib import Path
from types import SimpleNamespace
import huggingface_hub
from huggingface_hub.utils import EntryNotFoundError, HfHubHTTPError

class MissingError(EntryNotFoundError, HfHubHTTPError):
    pass

def hf_hub_download(repo_id, filename, **kwargs):
    path = Path("hub", str(repo_id).partition("/")[2], filename)
    if not path.exists():
        raise MissingError("404", response=SimpleNamespace(headers={}, request=None))
    return path

huggingface_hub.hf_hub_download = hf_hub_download
runpy.run_module("rl_zoo3.load_from_hub", run_name="__main__", alter_sys=True)
"""

PACKAGE_CONFIG = """
TD3XGoal-v0:
  n_timesteps: 110
  policy: MultiInputPolicy
  replay_buffer_class: HerReplayBuffer
  replay_buffer_kwargs: "dict(goal_selection_strategy='future', n_sampled_goal=2)"
  learning_starts: 50
  buffer_size: 500
  batch_size: 16
  noise_type: normal
  noise_std: 0.1
  policy_kwargs: "dict(net_arch=[16])"
TD3XImage-v0:
  n_timesteps: 60
  policy: CnnPolicy
  frame_stack: 2
  optimize_memory_usage: True
  replay_buffer_kwargs: "dict(handle_timeout_termination=False)"
  learning_starts: 50
  buffer_size: 100
  batch_size: 4
  policy_kwargs: "dict(net_arch=[8])"
"""


def run_module(folder: Path, module: str, *arguments: str, **variables: str) -> str:
    """Run a module that must succeed, and return what it prints."""
    process = run_python(folder, "-m", module, *arguments, **variables)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def agent(env_id: str = ENV, algo: str = "td3x") -> tuple[str, ...]:
    """Return the arguments that all commands share."""
    return "--algo", algo, "--env", env_id


@dataclass
class Run:
    """
    A run of ``rl_zoo3.train``.

    :param folder: the working directory
    :param path: the folder of the run
    :param output: what was printed
    """

    folder: Path
    path: Path
    output: str

    @property
    def zip(self) -> Path:
        return self.path / f"{ENV}.zip"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train an agent with TD3X's additions, two evaluations, two checkpoints and its replay buffer."""
    folder = tmp_path_factory.mktemp("user")
    output = run_module(
        folder,
        "rl_zoo3.train",
        *(*agent(), "-P", "-n", str(STEPS), "--seed", "1", "--eval-freq", str(STEPS // 2), "--eval-episodes", "2"),
        *("--save-freq", "200", "--save-replay-buffer", "-params", *SMALL, SMALL_NET, *ADDITIONS),
    )
    return Run(folder, folder / f"logs/td3x/{ENV}_1", output)


@pytest.fixture(scope="module")
def continued(trained: Run) -> Run:
    """Continue from the agent's zip file; of its settings only the sizes are given again."""
    output = run_module(
        trained.folder,
        "rl_zoo3.train",
        *(*agent(), "-i", str(trained.zip.relative_to(trained.folder)), "-n", str(MORE_STEPS), "--save-replay-buffer"),
        *("--seed", "2", "--eval-freq", str(MORE_STEPS // 2), "--eval-episodes", "2", "-params", *SMALL),
    )
    return Run(trained.folder, trained.folder / f"logs/td3x/{ENV}_2", output)


@pytest.fixture(scope="module")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train an agent in two env processes, with normalized observations and rewards."""
    folder = tmp_path_factory.mktemp("normalized")
    output = run_module(
        folder,
        "rl_zoo3.train",
        *(*agent(), "-n", str(STEPS), "--eval-freq", "-1", "--vec-env", "subproc"),
        *("-params", *SMALL, SMALL_NET, "normalize:True", "n_envs:2"),
    )
    return Run(folder, folder / f"logs/td3x/{ENV}_1", output)


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a user's folder with a module of envs and hyperparameters for them."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copy(Path(__file__).parents[1] / "helpers" / "zoo_helpers.py", folder)
    (folder / "config.yml").write_text(PACKAGE_CONFIG)
    return folder


class TestTrain:
    def test_output(self, trained: Run) -> None:
        assert f"Loading hyperparameters from: {hyperparams_path('td3x')}\n" in trained.output
        assert f"{STEPS}/{STEPS}" in trained.output  # the progress bar
        assert f"Saving to logs/td3x/{ENV}_1\n" in trained.output

    def test_files(self, trained: Run) -> None:
        files = {path.relative_to(trained.path).as_posix() for path in trained.path.rglob("*") if path.is_file()}
        files = {name for name in files if not name.startswith("checkpoints/")}
        assert files == {
            f"{ENV}.zip",
            f"{ENV}/args.yml",
            f"{ENV}/command.txt",
            f"{ENV}/config.yml",
            "0.monitor.csv",
            "best_model.zip",
            "evaluations.npz",
            "replay_buffer.pkl",
            "rl_model_200_steps.zip",
            "rl_model_400_steps.zip",
        }
        checkpoints = [path.name for path in list_checkpoints(trained.path / "checkpoints")]
        assert checkpoints == ["000002_400_steps.zip", "000003_420_steps.zip"]
        config = dict(yaml.load((trained.path / ENV / "config.yml").read_text(), Loader=yaml.UnsafeLoader))
        params = {param.partition(":")[0] for param in (*SMALL, SMALL_NET, *ADDITIONS)}
        assert config.keys() == DEFAULT.keys() | params
        assert config["reward_shaping"] == {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}}

    def test_command_line_reaches_the_agent(self, trained: Run) -> None:
        model = TD3X.load(trained.zip, device="cpu")
        assert model.reward_shaping == {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}}
        assert model.action_noise_decay == DECAY
        assert model.action_noise_scale == pytest.approx(DECAY ** (STEPS - LEARNING_STARTS))
        assert model._n_updates == STEPS - LEARNING_STARTS
        assert model.qf_lr_schedule(0.5) == pytest.approx(3.5e-4)
        assert model.gamma == DEFAULT["gamma"]

    def test_statistics_stay_raw_under_shaping(self, trained: Run) -> None:
        model = TD3X.load(trained.zip, device="cpu")
        model.load_replay_buffer(trained.path / "replay_buffer.pkl")
        shaped = model.replay_buffer.rewards[:400, 0].reshape(2, 200).sum(axis=1)
        returns = load_results(str(trained.path)).r.to_numpy()
        np.testing.assert_allclose(returns, 10 * shaped, rtol=1e-4)

        evaluations = np.load(trained.path / "evaluations.npz")
        assert evaluations["timesteps"].tolist() == [STEPS // 2, STEPS]
        # After a few hundred steps an agent is far from swinging up: some -1000, of which a tenth would be -100
        assert evaluations["results"].shape == (2, 2)
        assert (evaluations["results"] < -300).all()


class TestContinuing:
    def test_counters_and_replay_buffer(self, continued: Run) -> None:
        assert "Loading pretrained agent" in continued.output
        assert "Loading replay buffer" in continued.output
        model = TD3X.load(continued.zip, device="cpu")
        assert model.num_timesteps == MORE_STEPS  # the zoo counts each run from 0
        steps = STEPS - LEARNING_STARTS + MORE_STEPS - LEARNING_STARTS
        assert model._n_updates == steps
        assert model.action_noise_scale == pytest.approx(DECAY**steps)
        model.load_replay_buffer(continued.path / "replay_buffer.pkl")
        assert model.replay_buffer.pos == STEPS + MORE_STEPS

    def test_additions_without_giving_them_again(self, trained: Run, continued: Run) -> None:
        before, after = (TD3X.load(run.zip, device="cpu") for run in (trained, continued))
        assert after.reward_shaping == before.reward_shaping
        assert after.qf_learning_rate == "lin_7e-4"
        after.load_replay_buffer(continued.path / "replay_buffer.pkl")
        shaped = after.replay_buffer.rewards[STEPS : STEPS + 200].sum()
        assert load_results(str(continued.path)).r[0] == pytest.approx(10 * shaped, rel=1e-4)
        assert not state_dicts_are_equal(before.policy.state_dict(), after.policy.state_dict())

    def test_settings_of_the_new_run_name_the_additions(self, continued: Run) -> None:
        config = ZooRun(continued.path).hyperparams
        assert config["action_noise_decay"] == DECAY
        assert config["reward_shaping"] == {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}}
        assert config["policy_kwargs"] == {"net_arch": [16]}
        printed = continued.output.partition("Hyperparameters of the pretrained agent")[2]
        assert f"'action_noise_decay': {DECAY}" in printed
        assert "'reward_shaping': {'sb3_td3x.shaping.RewardScale': {'scale': 0.1}}" in printed


class TestPlaying:
    def test_enjoy_a_checkpoint(self, trained: Run) -> None:
        options = ("-f", "logs", "--exp-id", "1", "--no-render", "-n", "300", "--load-checkpoint", "400")
        output = run_module(trained.folder, "rl_zoo3.enjoy", *agent(), *options)
        assert f"Loading logs/td3x/{ENV}_1/rl_model_400_steps.zip\n" in output
        assert "1 Episodes" in output
        reward = float(output.partition("Mean reward: ")[2].partition(" ")[0])
        assert reward < -300  # raw

    def test_enjoy_of_normalized_agent_in_several_envs(self, normalized: Run) -> None:
        assert {path.name for path in normalized.path.glob("*.csv")} == {"0.monitor.csv", "1.monitor.csv"}
        with (normalized.path / ENV / "vecnormalize.pkl").open("rb") as file:
            statistics: VecNormalize = pickle.load(file)
        assert isinstance(statistics.obs_rms, RunningMeanStd)
        assert statistics.obs_rms.count == pytest.approx(STEPS + 2)  # two after the reset
        assert statistics.gamma == DEFAULT["gamma"]

        arguments = (*agent(), "-f", "logs", "--no-render", "-n", "50", "-P", "--n-envs", "2")
        output = run_module(normalized.folder, "rl_zoo3.enjoy", *arguments)
        assert "Loading running average" in output
        assert "50/50" in output

    def test_record_training(self, normalized: Run) -> None:
        """The command also runs `python -m rl_zoo3.record_video`, with one env where training had two."""
        pytest.importorskip("moviepy")
        ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
        programs = normalized.folder / "bin"
        programs.mkdir()
        (programs / "ffmpeg").symlink_to(ffmpeg)
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        run_module(normalized.folder, "rl_zoo3.record_training", *agent(), "-f", "logs", "-n", "20", PATH=path)
        videos = {video.name: video.stat().st_size for video in (normalized.path / "videos").glob("*.mp4")}
        assert videos.keys() == {f"final-model-td3x-{ENV}-step-0-to-step-20.mp4", "training.mp4"}
        assert min(videos.values()) > 1000

    def test_push_to_hub(self, trained: Run) -> None:
        arguments = (*agent(), "-f", "logs", "--exp-id", "1", "-orga", "me", "--no-render")
        process = run_python(trained.folder, "-c", PUSH_OFFLINE, *arguments)
        assert process.returncode == 0, process.stderr
        assert f"uploaded me/td3x-{ENV}" in process.stdout
        card = (trained.folder / f"hub/td3x-{ENV}/README.md").read_text()
        assert f"# **TD3X** Agent playing **{ENV}**" in card
        assert "('reward_shaping'," in card
        pushed = TD3X.load(trained.folder / f"hub/td3x-{ENV}/td3x-{ENV}.zip", device="cpu")
        original = TD3X.load(trained.zip, device="cpu")
        assert state_dicts_are_equal(pushed.policy.state_dict(), original.policy.state_dict())

        # A stranger downloads it, and plays it without running code from its folder
        options = ("-f", "downloaded", "-orga", "me")
        process = run_python(trained.folder, "-c", LOAD_OFFLINE, *agent(), *options, TRUST_REMOTE_CODE="True")
        assert process.returncode == 0, process.stderr
        folder = f"downloaded/td3x/{ENV}_1"
        assert "num_timesteps: 420" in run_module(trained.folder, "sb3_td3x", "inspect", f"{folder}/{ENV}.zip")
        assert "return so far" in run_module(trained.folder, "sb3_td3x", "play", folder, "-n", "10")


def test_plots(continued: Run) -> None:
    """Plot the two runs of the folder."""
    process = run_python(
        continued.folder,
        *("-c", PLOT, f"all_plots -a td3x -e {ENV} -f logs -print -o results"),
        *("plot_from_file -i results -o results.svg", f"plot_train -a td3x -e {ENV} -f logs -w 1"),
    )
    assert process.returncode == 0, process.stderr
    assert f"{ENV}-TD3X-logs: 2" in process.stdout
    results = pickle.loads((continued.folder / "results.pkl").read_bytes())
    assert results[ENV]["TD3X-logs"]["mean_per_eval"].shape == (2, 2)
    assert "keys: ['TD3X-logs']" in process.stdout
    assert "</svg>" in (continued.folder / "results.svg").read_text()


@pytest.mark.parametrize("storage", ["logs/td3x.log", "sqlite:///td3x.db"])
def test_tuning(storage: str, tmp_path: Path) -> None:
    """Try two sets of hyperparameters, then train with the better one."""
    train = (*agent(), "-n", "110", "--storage", storage, "--study-name", "s", "-params", "learning_starts:100")
    tune = ("-optimize", "--n-trials", "2", "--eval-episodes", "1", "--no-optim-plots")
    assert "Best trial" in run_module(tmp_path, "rl_zoo3.train", *train, *tune)
    output = run_module(tmp_path, "rl_zoo3.train", *train, "--trial-id", "best", "--eval-freq", "-1")

    path = tmp_path / storage.removeprefix("sqlite:///")
    is_journal = storage.endswith(".log")
    opened: Any = JournalStorage(JournalFileBackend(str(path))) if is_journal else f"sqlite:///{path}"
    best = optuna.load_study(study_name="s", storage=opened).best_trial
    assert f"Loading the trial {best.number} of the Optuna study s\n" in output
    (run,) = (path for path in tmp_path.glob(f"logs/td3x/{ENV}_*") if (path / f"{ENV}.zip").exists())
    expected = {**convert_td3x_params(best.params), "learning_starts": 100}
    assert ZooRun(run).hyperparams.items() >= expected.items()


class TestOwnEnvs:
    """Envs of a user's module, which the zoo imports for ``--gym-packages``."""

    def test_hindsight_replay_through_the_zoos_cli(self, package_folder: Path) -> None:
        variables = {"PYTHONPATH": str(package_folder)}
        shared = (*agent("TD3XGoal-v0"), "--gym-packages", "zoo_helpers")
        options = ("--conf-file", "config.yml", "--eval-freq", "55", "--eval-episodes", "1", "--save-freq", "50")
        run_module(package_folder, "rl_zoo3.cli", "train", *shared, *options, **variables)
        model = TD3X.load(package_folder / "logs/td3x/TD3XGoal-v0_1/TD3XGoal-v0.zip", device="cpu")
        assert model.replay_buffer_class is HerReplayBuffer
        assert model._n_updates == 60

        playing = ("-f", "logs", "--no-render", "-n", "60", "--load-last-checkpoint")
        output = run_module(package_folder, "rl_zoo3.cli", "enjoy", *shared, *playing, **variables)
        assert "rl_model_100_steps.zip" in output
        assert "Success rate: " in output

    def test_images_where_start_up_files_are_disabled(self, package_folder: Path) -> None:
        """Train with the environment variable set, play with a Python that processes no start-up files."""
        shared = (*agent("TD3XImage-v0"), "--gym-packages", "zoo_helpers")
        options = ("--conf-file", "config.yml", "--eval-freq", "30", "--eval-episodes", "1")
        variables = {"SB3_TD3X_AUTOLOAD": "0", "PYTHONPATH": str(package_folder)}
        run_module(package_folder, "sb3_td3x", "zoo", "train", *shared, *options, **variables)

        folders = [package_folder]
        for module in ("sb3_td3x", "rl_zoo3"):
            spec = importlib.util.find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            folders.append(Path(spec.origin).parent.parent)
        playing = ("-f", "logs", "--no-render", "-n", "60", "--load-best")
        process = run_python(
            package_folder,
            *("-S", "-m", "sb3_td3x", "zoo", "enjoy", *shared, *playing),
            PYTHONPATH=os.pathsep.join(map(str, folders)),
        )
        assert process.returncode == 0, process.stderr
        assert "Mean reward: 20.00 +/- 0.00" in process.stdout


def test_plain_command_is_refused_where_autoload_is_off(tmp_path: Path) -> None:
    process = run_python(tmp_path, "-m", "rl_zoo3.train", *agent(), SB3_TD3X_AUTOLOAD="0")
    assert process.returncode == 2
    assert "argument --algo: invalid choice: 'td3x'" in process.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("param", "last_line"),
    [
        (
            "reward_shaping:{'sb3_td3x.shaping.RewardScal':{}}",
            "ValueError: reward_shaping='sb3_td3x.shaping.RewardScal' is not allowed ('sb3_td3x.shaping' has no "
            "'RewardScal'), did you mean 'sb3_td3x.shaping.RewardScale'?",
        ),
        ("policy_delay:0", "ValueError: policy_delay=0 is not allowed, expected an integer >= 1"),
    ],
    ids=["hook", "number"],
)
def test_bad_value_stops_with_one_clear_line(param: str, last_line: str, tmp_path: Path) -> None:
    process = run_python(tmp_path, "-m", "rl_zoo3.train", *agent(), "-n", "100", "-params", param)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == last_line


def test_interrupted_run_of_a_documents_settings_is_saved(tmp_path: Path) -> None:
    """Press Ctrl-C after the second episode, with the settings of document 002."""
    conf_file = str(hyperparams_path("documents"))
    monitor = tmp_path / f"logs/td3x/{ENV}_1/0.monitor.csv"
    with (tmp_path / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_zoo3.train", *agent(), "--conf-file", conf_file, "-params", SMALL[0]],
            cwd=tmp_path,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            # A shell's background jobs ignore SIGINT, and so do their children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            deadline = time.monotonic() + TIMEOUT
            # Two lines of header, then one line per episode, written before the episode's last step is counted
            while not monitor.exists() or len(monitor.read_text().splitlines()) < 4:
                assert process.poll() is None, (tmp_path / "output.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            returncode = process.wait(timeout=TIMEOUT)
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "output.txt").read_text()
    assert returncode == 0, text
    assert f"Loading hyperparameters from: {conf_file}\n" in text
    assert f"Saving to logs/td3x/{ENV}_1\n" in text

    model = TD3X.load(monitor.parent / f"{ENV}.zip", device="cpu")
    assert model.policy_kwargs == {"net_arch": [256]}
    assert model.num_timesteps >= 200
    assert model.num_timesteps - LEARNING_STARTS - 1 <= model._n_updates <= model.num_timesteps - LEARNING_STARTS
    assert model.predict(np.zeros(3, np.float32))[0].shape == (1,)


@pytest.fixture(scope="module")
def td3_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Train SB3's TD3 without TD3X and with it."""
    runs = []
    for name, variables in (("without", {"SB3_TD3X_AUTOLOAD": "0"}), ("with", {})):
        folder = tmp_path_factory.mktemp(name)
        output = run_module(
            folder,
            "rl_zoo3.train",
            *(*agent(algo="td3"), "-n", "220", "--seed", "1", "--eval-freq", "110", "--eval-episodes", "2"),
            *("--save-replay-buffer", "-params", *SMALL, SMALL_NET),
            **variables,
        )
        runs.append(Run(folder, folder / f"logs/td3/{ENV}_1", output))
    return runs


def test_td3_is_unchanged(td3_runs: list[Run]) -> None:
    without, with_td3x = td3_runs
    assert with_td3x.output == without.output
    evaluations = [(run.path / "evaluations.npz").read_bytes() for run in td3_runs]
    assert evaluations[0] == evaluations[1]
    models = [TD3.load(run.zip, device="cpu") for run in td3_runs]
    assert models[0]._n_updates == 120
    assert state_dicts_are_equal(models[0].policy.state_dict(), models[1].policy.state_dict())


def test_td3x_continues_an_agent_of_td3(td3_runs: list[Run]) -> None:
    folder, zip_file = td3_runs[1].folder, td3_runs[1].zip
    options = ("-i", str(zip_file), "-n", "110", "--eval-freq", "-1", "-params", *SMALL, "policy_delay:1")
    output = run_module(folder, "rl_zoo3.train", *agent(), *options)
    assert "Loading replay buffer" in output
    model = TD3X.load(folder / f"logs/td3x/{ENV}_1/{ENV}.zip", device="cpu")
    assert model._n_updates == 130
    assert model.policy_delay == 1
