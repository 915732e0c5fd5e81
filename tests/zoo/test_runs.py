"""The folder of a run: its settings, its env and its agents."""

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import CountingEnv, tiny
from run_folders import ENV, change
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise

from sb3_td3x import TD3X
from sb3_td3x.shaping import RewardScale
from sb3_td3x.studies.arms import read_entries
from sb3_td3x.zoo import runs
from sb3_td3x.zoo.register import hyperparams_path
from sb3_td3x.zoo.run_files import parse_dict
from sb3_td3x.zoo.runs import ZooRun, check_names


class TestFolder:
    def test_what_a_run_is(self, folder: Path) -> None:
        for steps in (100, 20, 3000):
            (folder / f"rl_model_{steps}_steps.zip").touch()
        change(folder, "config.yml", env_wrapper=[{"rl_zoo3.wrappers.FrameSkip": {"skip": 3}}])
        run = ZooRun(folder)
        assert (run.algo, run.env_id, run.action_repeat) == ("td3x", ENV, 3)
        assert (run.last_agent, run.best_agent) == (folder / f"{ENV}.zip", folder / "best_model.zip")
        assert run.config_folder == folder / ENV
        assert run.hyperparams["policy"] == "MlpPolicy"
        assert run.args["tuple"] == (1, 2)
        assert list(run.saved_agents()) == [60, 300, 9000]
        assert run.saved_agents()[300] == folder / "rl_model_100_steps.zip"

    def test_not_the_folder_of_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="is not the folder of a run of RL Zoo: 0 of its subfolders"):
            ZooRun(tmp_path)

    @pytest.mark.parametrize("key", ["algo", "env"])
    def test_settings_without_names(self, folder: Path, key: str) -> None:
        change(folder, "args.yml", **{key: 3})
        with pytest.raises(ValueError, match=rf"args\.yml has {key}=3, expected a name"):
            ZooRun(folder)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, None),
            (False, None),
            (True, {}),
            ({"norm_obs": True}, {"norm_obs": True}),
            ("dict(norm_obs=True, clip_obs=5.0)", {"norm_obs": True, "clip_obs": 5.0}),
            ("{'norm_reward': False}", {"norm_reward": False}),
        ],
        ids=str,
    )
    def test_normalization(self, folder: Path, value: Any, expected: Any) -> None:
        change(folder, "config.yml", normalize=value)
        assert ZooRun(folder).normalize_kwargs == expected

    @pytest.mark.parametrize("text", ["dict(a=f())", "print(1)", "dict(1)", "[1]", "dict(", "(" * 10_000, 3])
    def test_text_that_is_no_dictionary_is_not_evaluated(self, text: Any) -> None:
        with pytest.raises(ValueError, match=r"^it is .*, expected a dictionary of plain values"):
            parse_dict(text, "it")

    @pytest.mark.parametrize(
        ("wrapper", "repeat"),
        [
            (None, 1),
            ("rl_zoo3.wrappers.FrameSkip", 4),
            ([{"rl_zoo3.wrappers.FrameSkip": {"skip": 2}}, "gymnasium.wrappers.ClipAction"], 2),
            ({"stable_baselines3.common.atari_wrappers.AtariWrapper": {"frame_skip": 5}}, 5),
            ({"stable_baselines3.common.atari_wrappers.AtariWrapper": None}, 4),
        ],
        ids=str,
    )
    def test_action_repeat(self, wrapper: Any, repeat: int) -> None:
        assert runs.action_repeat({"env_wrapper": wrapper}) == repeat


class TestEnv:
    def test_decides_at_every_step(self, folder: Path) -> None:
        wrappers = [{"rl_zoo3.wrappers.FrameSkip": {"skip": 3}}, "gymnasium.wrappers.ClipAction"]
        change(folder, "config.yml", normalize=False, env_wrapper=wrappers)
        run = ZooRun(folder)
        for expected in (6.0, 1.0):
            env = run.make_env()
            env.reset()
            # Rewards 1, 2, 3, ...
            _, rewards, _, _ = env.step(np.zeros((1, *env.action_space.shape)))
            assert rewards == [expected]
            assert env.env_is_wrapped(gym.wrappers.ClipAction) == [True]
            # Its timesteps were decisions in any case
            assert run.action_repeat == 3
            run.act_at_every_step()

    def test_copies_seeds_and_frames(self, folder: Path) -> None:
        change(folder, "args.yml", env="Pendulum-v1", env_kwargs={"g": 1.0})
        change(folder, "config.yml", normalize=False, frame_stack=2)
        env = ZooRun(folder).make_env(n_envs=2, seed=5)
        obs = env.reset()
        assert obs.shape == (2, 6)
        for idx in range(2):
            np.testing.assert_array_equal(obs[idx, 3:], gym.make("Pendulum-v1").reset(seed=5 + idx)[0])
        assert env.get_attr("g") == [1.0, 1.0]
        assert env.env_is_wrapped(Monitor) == [True, True]
        assert env.render_mode == "rgb_array"

    @pytest.mark.parametrize("env", ["evil:Env-v0", "../x", "NotRegistered-v0"])
    def test_package_of_an_env_is_not_imported(self, folder: Path, env: str) -> None:
        change(folder, "args.yml", env=env)
        with pytest.raises(ValueError, match=r"args\.yml has env="):
            ZooRun(folder, trusted=True).make_env()

    @pytest.mark.parametrize("frames", [1001, 10**12, -1, True, "4", [4]], ids=str)
    def test_number_of_frames_is_refused(self, folder: Path, frames: Any) -> None:
        change(folder, "config.yml", frame_stack=frames)
        with pytest.raises(ValueError, match=r"config\.yml has bad env_kwargs or frame_stack.* 1000"):
            ZooRun(folder).make_env()

    @pytest.mark.parametrize(
        ("key", "wrapper", "message"),
        [
            ("env_wrapper", {"gymnasium.wrappers.TimeLimit": {"max_steps": 3}}, "env_wrapper in .*config.yml .*max_st"),
            ("env_wrapper", {"gymnasium.wrappers.TimeLimit": {1: 3}}, "env_wrapper in"),
            ("env_wrapper", "stable_baselines3.common.vec_env.VecNormalize", "which is not a Wrapper"),
            ("vec_env_wrapper", "gymnasium.wrappers.ClipAction", "which is not a VecEnvWrapper"),
            ("vec_env_wrapper", {"stable_baselines3.common.vec_env.VecFrameStack": {"n": 3}}, "vec_env_wrapper in"),
            (
                "vec_env_wrapper",
                {"stable_baselines3.common.vec_env.VecNormalize": {"norm_obs_keys": ["x"]}},
                "vec_env_",
            ),
        ],
        ids=str,
    )
    def test_wrapper_that_cannot_be_made(self, folder: Path, key: str, wrapper: Any, message: str) -> None:
        change(folder, "config.yml", **{key: wrapper})
        with pytest.raises(ValueError, match=message):
            ZooRun(folder).make_env()

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
    def test_wrapper_from_elsewhere_is_refused(self, folder: Path, wrapper: Any, key: str) -> None:
        change(folder, "config.yml", **{key: wrapper})
        with pytest.raises(ValueError, match=r"config\.yml (asks for|is damaged)"):
            ZooRun(folder).make_env()

    def test_wrapper_of_a_users_own_needs_trust(self, folder: Path) -> None:
        change(folder, "config.yml", normalize=False, env_wrapper="envs.DictObs")
        with pytest.raises(ValueError, match=r"asks for the wrapper 'envs\.DictObs'"):
            ZooRun(folder).make_env()
        assert ZooRun(folder, trusted=True).make_env().reset().keys() == {"count", "minus"}

    @pytest.mark.parametrize("name", ["td3x", "documents"])
    def test_what_our_own_entries_name_is_known(self, name: str) -> None:
        for entry in read_entries(hyperparams_path(name)).values():
            check_names(entry, "config.yml")


class TestAgents:
    def test_td3x_and_td3_are_loaded_safely(self, folder: Path) -> None:
        # A schedule and a noise of the user's own are pickled, and not needed to play
        noise = type("OwnNoise", (NormalActionNoise,), {})(np.zeros(1), np.ones(1))
        for cls in (TD3X, TD3):
            kwargs = tiny(learning_rate=lambda progress: 1e-3, action_noise=noise)
            cls("MlpPolicy", CountingEnv(), **kwargs).save(folder / "own.zip")
            model = ZooRun(folder).load_agent(folder / "own.zip")
            assert isinstance(model, TD3X)
            assert model.device.type == "cpu"
            assert model.buffer_size == 1

    def test_other_algorithms_need_trust(self, folder: Path) -> None:
        change(folder, "args.yml", algo="sac")
        SAC("MlpPolicy", CountingEnv(), learning_starts=0, buffer_size=10).save(folder / "sac")
        with pytest.raises(ValueError, match=r"sac\.zip is an agent of sac, which is pickled"):
            ZooRun(folder).load_agent(folder / "sac.zip")
        assert isinstance(ZooRun(folder, trusted=True).load_agent(folder / "sac.zip"), SAC)

    def test_shaping(self, folder: Path) -> None:
        assert ZooRun(folder).make_shaping() is None
        change(folder, "config.yml", reward_shaping={"sb3_td3x.shaping.RewardScale": {"scale": 0.5}})
        assert isinstance(ZooRun(folder).make_shaping(), RewardScale)
        change(folder, "config.yml", reward_shaping="envs.readable")
        with pytest.raises(ValueError, match=r"envs\.readable"):
            ZooRun(folder).make_shaping()
        assert ZooRun(folder, trusted=True).make_shaping() is not None


def test_errors_name_the_file(folder: Path) -> None:
    (folder / ENV / "args.yml").unlink()
    with pytest.raises(ValueError, match=re.escape(str(folder / ENV / "args.yml"))):
        ZooRun(folder)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"env_wrapper": [{"of_mine.Wrapper": {"x": 1}}]}, "asks for the wrapper 'of_mine.Wrapper'"),
        ({"vec_env_wrapper": "of_mine.Wrapper"}, "asks for the wrapper 'of_mine.Wrapper'"),
        ({"callback": [{"of_mine.Callback": {}}]}, "^The arm a asks for the callback 'of_mine.Callback', expected"),
        ({"reward_shaping": "of_mine.hook"}, "^The arm a has reward_shaping='of_mine.hook', which can run any code"),
    ],
)
def test_code_of_the_users_own_needs_trust(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"{error}.*--trusted"):
        check_names(settings, "The arm a")
