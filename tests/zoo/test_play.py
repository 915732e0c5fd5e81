"""The commands that read strangers' files: inspect and play."""

import io
import os
import pathlib
import re
import shutil
import time
from collections import OrderedDict
from typing import Any

import gymnasium as gym
import hostile
import numpy as np
import pytest
import torch as th
import yaml
from envs import CountingEnv, counting_vec_env, tiny
from stable_baselines3 import TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.cli import main
from sb3_td3x.files.inspect import describe_agent
from sb3_td3x.files.pickles import named_in_pickle, read_pickle
from sb3_td3x.studies.arms import read_entries
from sb3_td3x.zoo.play import _wrapper, load_vec_normalize, play, read_zoo_yaml
from sb3_td3x.zoo.register import hyperparams_path

ENV = "TD3XCounting-v0"
gym.register(ENV, CountingEnv)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder as the zoo leaves it."""
    folder = tmp_path_factory.mktemp("td3x") / f"{ENV}_1"
    params = folder / ENV
    params.mkdir(parents=True)
    env = VecNormalize(counting_vec_env(2))
    model = TD3X("MlpPolicy", env, **tiny()).learn(20)
    model.save(folder / ENV)
    model.save(folder / "best_model")
    env.save(str(params / "vecnormalize.pkl"))
    config = {"normalize": "dict(norm_obs=True)", "policy": "MlpPolicy", "policy_kwargs": "dict(net_arch=[8])"}
    (params / "config.yml").write_text(yaml.dump(OrderedDict(config)))
    args = {"env": ENV, "env_kwargs": None, "wandb_tags": [], "tuple": (1, 2)}
    (params / "args.yml").write_text(yaml.dump(OrderedDict(args)))
    return folder


@pytest.fixture
def folder(run_folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of it to change."""
    return pathlib.Path(shutil.copytree(run_folder, tmp_path / "run"))


def change_config(folder: pathlib.Path, **changed: Any) -> None:
    path = folder / ENV / "config.yml"
    path.write_text(yaml.dump({**read_zoo_yaml(path), **changed}))


def test_play_prints_returns(run_folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--best"], ["--stochastic", "--seed", "3"]):
        assert main(["play", str(run_folder), "-n", "16", *options]) == 0
        output = capsys.readouterr().out
        # Rewards 1, 2, 3, 4, 5 and 1, 2, 3, in turn
        assert "Episode 1: 15.00\nEpisode 2: 6.00\n" in output
        assert "4 episodes, mean return 10.50 +/- 4.50" in output


def test_play_with_wrappers_and_frames(folder: pathlib.Path) -> None:
    change_config(
        folder,
        normalize=False,
        env_wrapper=[
            "gymnasium.wrappers.RecordEpisodeStatistics",
            {"gymnasium.wrappers.TimeLimit": {"max_episode_steps": 2}},
        ],
    )
    assert play(folder, 8) == [3.0] * 4
    change_config(folder, frame_stack=2)
    with pytest.raises(ValueError, match=r"spaces|shape"):
        play(folder, 8)


def test_statistics_are_those_of_sb3(run_folder: pathlib.Path) -> None:
    path = run_folder / ENV / "vecnormalize.pkl"
    ours, theirs = load_vec_normalize(path, counting_vec_env(1)), VecNormalize.load(str(path), counting_vec_env(1))
    obs = np.array([[3.0, 4.0]], np.float32)
    np.testing.assert_array_equal(ours.normalize_obs(obs), theirs.normalize_obs(obs))
    assert vars(ours.ret_rms).keys() == vars(theirs.ret_rms).keys()
    assert ours.ret_rms.mean == theirs.ret_rms.mean
    assert not ours.training
    assert not ours.norm_reward


def test_statistics_of_other_observations_are_refused(run_folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"vecnormalize\.pkl holds statistics of other"):
        load_vec_normalize(run_folder / ENV / "vecnormalize.pkl", make_vec_env("Pendulum-v1"))


def test_gadget_as_statistics_is_not_run(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    sentinel = tmp_path / "sentinel"
    for name, gadget in hostile.GADGETS.items():
        (folder / ENV / "vecnormalize.pkl").write_bytes(gadget(str(sentinel)))
        with pytest.raises(ValueError, match=r"vecnormalize\.pkl"):
            play(folder, 5)
        assert not sentinel.exists(), name


HOSTILE_YAML = (
    "!!python/object/apply:os.mkdir [{}]",
    "!!python/object/apply:collections.OrderedDict [[[env, !!python/object/apply:os.mkdir [{}]]]]",
    "!!python/object/new:os.mkdir [{}]",
    "env: !!python/name:os.mkdir",
    "env: !!python/module:os",
    "!!python/object:subprocess.Popen {{args: [mkdir, {}]}}",
    "[a, list]",
    "a: [unfinished",
    "a: &a [*a, *b]",
    "!!python/object/apply:collections.OrderedDict [1, 2, 3]",
)


@pytest.mark.parametrize("name", ["config.yml", "args.yml"])
@pytest.mark.parametrize("content", HOSTILE_YAML)
def test_yaml_that_makes_objects_is_refused(
    folder: pathlib.Path, tmp_path: pathlib.Path, content: str, name: str
) -> None:
    sentinel = tmp_path / "sentinel"
    (folder / ENV / name).write_text(content.format(sentinel))
    with pytest.raises(ValueError, match=name) as error:
        play(folder, 5)
    assert "\n" not in str(error.value)
    assert not sentinel.exists()


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
    "itself": "a: &a [*a]\n",
    "values": f"a: [{'1,' * 20_001}]\n",
    "bytes": "a: 1" + ":1" * 2**17,
}


@pytest.mark.parametrize("name", ["config.yml", "args.yml"])
@pytest.mark.parametrize("case", LARGE_YAML)
def test_yaml_that_grows_is_refused(folder: pathlib.Path, case: str, name: str) -> None:
    (folder / ENV / name).write_text(LARGE_YAML[case])
    start = time.process_time()
    with pytest.raises(ValueError, match=rf"{name} is too large: more than") as error:
        play(folder, 5)
    assert time.process_time() - start < 10
    assert len(str(error.value)) < 500


def test_aliases_that_do_not_grow_are_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.yml").write_text("a: &a [1, 2]\nb: *a\nc: &c {x: *a}\nd: {<<: *c, y: 3}\n")
    assert read_zoo_yaml(tmp_path / "config.yml")["d"] == {"x": [1, 2], "y": 3}


@pytest.mark.parametrize("name", ["config.yml", "args.yml", "vecnormalize.pkl"])
@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_file_without_an_end_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path, name: str, target: str) -> None:
    path = folder / ENV / name
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(ValueError, match=rf"{name} is no file"):
        play(folder, 5)


def test_no_more_is_read_than_allowed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that says that it is small, too."""
    path = tmp_path / "config.yml"
    path.write_text("a: 1\n")
    monkeypatch.setattr(pathlib.Path, "is_file", lambda self: True)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"config\.yml is too large: more than 131072 bytes"):
        read_zoo_yaml(path)


@pytest.mark.parametrize("frames", [1001, 10**12, -1, True, "4", [4]], ids=str)
def test_number_of_frames_is_refused(folder: pathlib.Path, frames: Any) -> None:
    change_config(folder, frame_stack=frames)
    with pytest.raises(ValueError, match=r"config\.yml has bad env_kwargs or frame_stack.* 1000"):
        play(folder, 5)


@pytest.mark.parametrize(
    ("key", "wrapper", "message"),
    [
        ("env_wrapper", {"gymnasium.wrappers.TimeLimit": {"max_steps": 3}}, "wrappers.TimeLimit.*TypeError.*max_steps"),
        ("env_wrapper", {"gymnasium.wrappers.TimeLimit": {1: 3}}, "wrappers.TimeLimit.*TypeError"),
        ("env_wrapper", {"gymnasium.wrappers.TimeLimit": {"\x1b[2J": 3}}, "wrappers.TimeLimit.*TypeError"),
        ("env_wrapper", "gymnasium.wrappers.\x1b[2J", "which is no Wrapper"),
        ("env_wrapper", "stable_baselines3.common.vec_env.VecNormalize", "which is no Wrapper"),
        ("vec_env_wrapper", "gymnasium.wrappers.ClipAction", "which is no VecEnvWrapper"),
        ("vec_env_wrapper", {"stable_baselines3.common.vec_env.VecFrameStack": {"n": 3}}, "VecFrameStack.*TypeError"),
        ("vec_env_wrapper", {"stable_baselines3.common.vec_env.VecNormalize": {"norm_obs_keys": ["x"]}}, "VecNormal"),
    ],
    ids=str,
)
def test_wrapper_that_cannot_be_made_is_refused(
    folder: pathlib.Path, key: str, wrapper: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, **{key: wrapper})
    assert main(["play", str(folder), "-n", "5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"config\.yml asks for .*{message}", line)
    assert line.isprintable()


@pytest.mark.parametrize(
    "wrapper",
    [
        "os.mkdir",
        {"os.mkdir": {"path": "x"}},
        "gymnasium.wrappers.nonsense",
        "gymnasium.wrappers.numpy",
        "gymnasium.wrappers.transform_observation.TimeLimit",
        {"gymnasium.wrappers.rendering.RecordVideo": {"video_folder": "x"}},
        {"gymnasium.wrappers.RecordVideo": {"video_folder": "x"}},
        ["rl_zoo3.wrappers.ActionNoiseWrapper", "stable_baselines3.common.vec_env.VecMonitor"],
        {"gymnasium.wrappers.TimeLimit": [1]},
        "evil",
        1,
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["env_wrapper", "vec_env_wrapper"])
def test_wrapper_from_elsewhere_is_refused(folder: pathlib.Path, wrapper: Any, key: str) -> None:
    change_config(folder, **{key: wrapper})
    with pytest.raises(ValueError, match=r"config\.yml asks for"):
        play(folder, 5)


@pytest.mark.parametrize("name", ["td3x", "documents"])
def test_wrappers_of_the_package_s_own_entries_are_known(name: str) -> None:
    kinds: dict[str, type] = {"env_wrapper": gym.Wrapper, "vec_env_wrapper": VecEnvWrapper}
    for entry in read_entries(hyperparams_path(name)).values():
        for key, kind in kinds.items():
            if entry.get(key):
                _wrapper(entry[key], kind, "config.yml")


@pytest.mark.parametrize("env", ["evil:Env-v0", "../x", None, 1, ["Pendulum-v1"], "NotRegistered-v0"], ids=str)
def test_env_that_would_be_imported_is_refused(folder: pathlib.Path, env: Any) -> None:
    (folder / ENV / "args.yml").write_text(yaml.dump({"env": env}))
    with pytest.raises(ValueError, match=r"args\.yml has env"):
        play(folder, 5)


def test_no_folder_of_a_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", str(tmp_path)]) == 1
    assert "no folder of a run" in capsys.readouterr().err


def test_inspect(run_folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run_folder / f"{ENV}.zip")]) == 0
    output = capsys.readouterr().out
    for line in (
        "checksum: right",
        "policy_class: sb3_td3x.policies.TD3XPolicy",
        "policy_kwargs: {'net_arch': [8]}",
        "num_timesteps: 20",
        "pickles: none",
        "  gamma: 0.99",
    ):
        assert f"{line}\n" in f"{output}\n"
    assert "  actor: " in output

    TD3("MlpPolicy", CountingEnv(), **tiny(learning_rate=lambda progress: 1e-3)).save(tmp_path / "sb3")
    assert main(["inspect", str(tmp_path / "sb3.zip")]) == 0
    output = capsys.readouterr().out
    assert "checksum: none" in output
    assert "  learning_rate: needs trusted=True: names cloudpickle" in output
    assert "  lr_schedule: not needed" in output
    assert "  policy_class: names only what is allowed" in output

    (tmp_path / "text.zip").write_text("text")
    for path in (tmp_path / "text.zip", tmp_path / "missing.zip"):
        assert main(["inspect", str(path)]) == 1
        assert path.name in capsys.readouterr().err


def test_inspect_says_nothing_that_a_terminal_obeys(tmp_path: pathlib.Path) -> None:
    file = io.BytesIO()
    TD3X("MlpPolicy", CountingEnv(), **tiny()).save(file)
    content = hostile.with_data(file.getvalue(), tensorboard_log="\x1b[2J", **{"\x1b[31m": "\x1b]0;"})
    policy = hostile.torch_file({"\x1b[2J.weight": th.zeros(1)})
    content = hostile.with_members(content, system_info__txt=b"\x1b[2J\r\n", policy__pth=policy)
    content = hostile.with_members(content, **{"\x1b[2J__pth": policy})
    assert "\x1b" not in describe_agent(io.BytesIO(content))


def test_pickles_name_what_they_would_import() -> None:
    gadget = hostile.GADGETS["in a noise"]("x")
    assert {"posix.mkdir", "stable_baselines3.common.noise.NormalActionNoise"} <= set(
        named_in_pickle(io.BytesIO(gadget), "it")
    )


def test_memory_that_a_pickle_asks_for_is_not_taken() -> None:
    """It is refused at once: a memo of two billion entries, bytes that are not there, a number of a million digits."""
    for content in (
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"L" + b"9" * 10**6 + b"L\n.",
    ):
        try:
            assert read_pickle(io.BytesIO(content), "it", None) is None
        except ValueError as error:
            print(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "-3"], "n_timesteps=-3 is not allowed"),
        (["--seed", "-1"], "seed=-1 is not allowed"),
        (["--gym-packages", "no_such_package"], "No module named 'no_such_package'"),
    ],
)
def test_wrong_options_get_one_sentence(
    options: list[str], message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", str(tmp_path), *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
