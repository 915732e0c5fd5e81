"""Reading the files of a run without running code from them."""

import os
import time
from pathlib import Path

import hostile
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, counting_vec_env
from run_folders import ENV, change
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.zoo.play import play_episodes
from sb3_td3x.zoo.run_files import load_vec_normalize, read_zoo_yaml
from sb3_td3x.zoo.runs import ZooRun


def play(folder: Path, trusted: bool = False) -> None:
    """Do all that a run's folder is good for."""
    run = ZooRun(folder, trusted)
    play_episodes(run.load_agent(run.last_agent), run.make_env(), 1)


HOSTILE_YAML = (
    "!!python/object/apply:os.mkdir [{}]",
    "!!python/object/apply:collections.OrderedDict [[[env, !!python/object/apply:os.mkdir [{}]]]]",
    "!!python/object/new:os.mkdir [{}]",
    "env: !!python/name:os.mkdir",
    "env: !!python/name:run_folders.CountingEnv",
    "env: !!python/module:os",
    "!!python/object:subprocess.Popen {{args: [mkdir, {}]}}",
    "[a, list]",
    "a: [unfinished",
    "a: &a [*a, *b]",
    "!!python/object/apply:collections.OrderedDict [1, 2, 3]",
)


def aliases(first: str, level: str, depth: int = 14) -> str:
    """YAML in which each line names the one before it ten times."""
    lines = [f"l0: &l0 {first}"]
    for idx in range(depth):
        content = level.format(",".join([f"*l{idx}"] * 10))
        lines.append(f"l{idx + 1}: &l{idx + 1} {content}")
    return "\n".join(lines) + "\n"


LARGE_YAML = {
    "lists": aliases("[1]", "[{}]"),
    "keys": aliases("!!python/tuple [1]", "!!python/tuple [{}]") + "? *l14\n: 1\n",
    "keys of pairs": aliases("!!python/tuple [1]", "!!python/tuple [{}]")
    + "x: !!python/object/apply:collections.OrderedDict [[[*l14, 1]]]\n",
    "merged": aliases("{a: 1}", "{{<<: [{}]}}"),
    "bytes": "a: 1" + ":1" * 2**17,
    "nested lists": "a: " + "[" * 30_000,
    "nested dictionaries": "a: " + "{" * 30_000,
}
# Not refused, or for another reason
LONG_YAML = {
    "values": f"a: [{'1,' * 16_000}]\n",
    "number": "a: 1" + ":1" * 16_000,
    "itself": "a: &a [*a]\n",
    "few aliases": aliases("!!python/tuple [1]", "!!python/tuple [{}]", 2) + "? *l2\n: 1\n",
}


class TestYaml:
    @pytest.mark.parametrize("name", ["config.yml", "args.yml"])
    @pytest.mark.parametrize("content", HOSTILE_YAML, ids=lambda content: content[:40])
    def test_objects_are_not_made(self, folder: Path, tmp_path: Path, content: str, name: str) -> None:
        sentinel = tmp_path / "sentinel"
        (folder / ENV / name).write_text(content.format(sentinel))
        with pytest.raises(ValueError, match=name) as error:
            ZooRun(folder)
        assert "\n" not in str(error.value)
        assert not sentinel.exists()

    @pytest.mark.parametrize("case", LARGE_YAML)
    def test_what_grows_is_refused(self, folder: Path, case: str) -> None:
        (folder / ENV / "config.yml").write_text(LARGE_YAML[case])
        start = time.process_time()
        with pytest.raises(ValueError, match=r"config\.yml (has|is too large:) more than") as error:
            ZooRun(folder)
        assert len(str(error.value)) < 500
        assert time.process_time() - start < 5

    @pytest.mark.parametrize("case", LONG_YAML)
    def test_what_is_long_takes_seconds(self, folder: Path, case: str) -> None:
        (folder / ENV / "config.yml").write_text(LONG_YAML[case])
        start = time.process_time()
        try:
            play(folder)
        except ValueError as error:
            assert len(str(error)) < 500  # noqa: PT017 - refused or not, both are fine
        assert time.process_time() - start < 5

    def test_classes_of_agents_are_read(self, folder: Path) -> None:
        policy_kwargs = {"activation_fn": th.nn.Tanh, "net_arch": [8]}
        change(folder, "config.yml", replay_buffer_class=HerReplayBuffer, policy_kwargs=policy_kwargs)
        run = ZooRun(folder)
        assert run.hyperparams["replay_buffer_class"] is HerReplayBuffer
        assert run.hyperparams["policy_kwargs"] == policy_kwargs

    def test_other_classes_need_trust(self, folder: Path) -> None:
        change(folder, "config.yml", policy=CountingEnv)
        with pytest.raises(ValueError, match=r"config\.yml holds an object .*it names envs\.CountingEnv.*--trus"):
            ZooRun(folder)
        assert ZooRun(folder, trusted=True).hyperparams["policy"] is CountingEnv

    def test_a_few_aliases_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "config.yml").write_text("a: &a [1, 2]\nb: *a\nc: &c {x: *a}\nd: {<<: *c, y: 3}\n")
        assert read_zoo_yaml(tmp_path / "config.yml")["d"] == {"x": [1, 2], "y": 3}

    @pytest.mark.parametrize("name", ["config.yml", "args.yml", "vecnormalize.pkl"])
    @pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
    def test_file_without_an_end_is_refused(self, folder: Path, name: str, target: str) -> None:
        path = folder / ENV / name
        path.unlink()
        if target == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(target)
        with pytest.raises(ValueError, match=rf"{name} is not a file"):
            play(folder)


class TestStatistics:
    def test_are_those_of_sb3(self, run_folder: Path) -> None:
        path = run_folder / ENV / "vecnormalize.pkl"
        ours, theirs = load_vec_normalize(path, counting_vec_env(1)), VecNormalize.load(str(path), counting_vec_env(1))
        obs = np.array([[3.0, 4.0]], np.float32)
        np.testing.assert_array_equal(ours.normalize_obs(obs), theirs.normalize_obs(obs))
        assert vars(ours.ret_rms).keys() == vars(theirs.ret_rms).keys()
        assert ours.ret_rms.mean == theirs.ret_rms.mean
        assert not ours.training
        assert not ours.norm_reward

    def test_of_other_observations_are_refused(self, run_folder: Path) -> None:
        with pytest.raises(ValueError, match=r"vecnormalize\.pkl holds statistics of other"):
            load_vec_normalize(run_folder / ENV / "vecnormalize.pkl", make_vec_env("Pendulum-v1"))

    def test_gadgets_are_not_run(self, folder: Path, tmp_path: Path) -> None:
        sentinel = tmp_path / "sentinel"
        for name, gadget in hostile.GADGETS.items():
            (folder / ENV / "vecnormalize.pkl").write_bytes(gadget(str(sentinel)))
            with pytest.raises(ValueError, match=r"vecnormalize\.pkl"):
                play(folder)
            assert not sentinel.exists(), name
