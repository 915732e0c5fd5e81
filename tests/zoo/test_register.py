"""TD3X in RL Zoo: registration, default hyperparameters, search space, and the package's own command line."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import optuna
import pytest
import torch as th
import yaml
from managers import make_manager
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.noise import ActionNoise

import _sb3_td3x_autoload as autoload
from sb3_td3x import TD3X, cli
from sb3_td3x.zoo import register as zoo

# As in an environment where the package is installed
autoload.install(force=True)

from rl_zoo3 import exp_manager, hyperparams_opt, utils  # noqa: E402
from rl_zoo3.exp_manager import ExperimentManager  # noqa: E402

ROOT = Path(__file__).parents[2]

BIT_FLIPPING = "TD3XBitFlipping-v0"
if BIT_FLIPPING not in gym.registry:
    gym.register(BIT_FLIPPING, "stable_baselines3.common.envs:BitFlippingEnv", kwargs={"n_bits": 4, "continuous": True})

NO_HER = {"using_her_replay_buffer": False, "her_kwargs": {}}


def describe(value: Any) -> Any:
    """Something comparable for an attribute of a model."""
    if isinstance(value, ActionNoise):
        return type(value).__name__, {key: describe(item) for key, item in sorted(vars(value).items())}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if callable(value) and not isinstance(value, type):  # a schedule
        return [value(progress) for progress in (1.0, 0.3, 0.0)]
    return value


HYPERPARAMETERS = (
    "action_noise",
    "action_noise_decay",
    "action_noise_min_scale",
    "batch_size",
    "buffer_size",
    "clipped_double_q",
    "gamma",
    "gradient_steps",
    "learning_starts",
    "lr_schedule",
    "n_steps",
    "optimize_memory_usage",
    "policy_class",
    "policy_delay",
    "policy_kwargs",
    "qf_lr_schedule",
    "replay_buffer_class",
    "replay_buffer_kwargs",
    "target_noise_clip",
    "target_policy_noise",
    "tau",
    "train_freq",
)


def hyperparameters(model: TD3X) -> dict[str, Any]:
    return {name: describe(getattr(model, name)) for name in HYPERPARAMETERS}


class TestRegistration:
    def test_tables(self):
        assert utils.ALGOS["td3x"] is TD3X
        assert hyperparams_opt.HYPERPARAMS_SAMPLER["td3x"] is zoo.sample_td3x_params
        assert hyperparams_opt.HYPERPARAMS_CONVERTER["td3x"] is zoo.convert_td3x_params

    def test_default_hyperparameters(self, tmp_path: Path):
        assert make_manager(tmp_path).config == str(ROOT / "hyperparams/td3x.yml")
        assert make_manager(tmp_path, config="mine.yml").config == "mine.yml"
        # Every other algorithm reads the zoo's own
        zoo_folder = Path(exp_manager.__file__).parent
        assert make_manager(tmp_path, algo="td3").config == str(zoo_folder / "hyperparams/td3.yml")

    def test_patching_twice_changes_nothing(self):
        before = dict(vars(ExperimentManager))
        zoo.patch_experiment_manager(exp_manager)
        assert dict(vars(ExperimentManager)) == before

    def test_model_card(self, tmp_path: Path):
        from rl_zoo3.push_to_hub import generate_model_card, save_model_card

        card, metadata = generate_model_card("td3x", "TD3X", "me", "Pendulum-v1", -150.0, 10.0, {"tau": 0.005}, {})
        save_model_card(tmp_path, card, metadata)
        text = (tmp_path / "README.md").read_text()
        assert "**TD3X** Agent playing **Pendulum-v1**" in text
        assert "-150.00 +/- 10.00" in text.partition("---\n")[2].partition("---\n")[0]


class TestSearchSpace:
    @pytest.mark.parametrize("her", [False, True], ids=["plain", "HER"])
    def test_stored_parameters_are_all_that_was_sampled(self, her: bool):
        """Whatever is drawn can be built, and the parameters that Optuna stores build the same once more."""
        her_kwargs = {"copy_info_dict": True, "n_sampled_goal": 3}
        given: dict[str, Any] = {"policy": "MultiInputPolicy" if her else "MlpPolicy", "buffer_size": 100}
        if her:
            given.update(replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs=her_kwargs)
        env = gym.make(BIT_FLIPPING if her else "Pendulum-v1")
        n_actions = env.action_space.shape[0]  # type: ignore[index]
        manager = ExperimentManager.__new__(ExperimentManager)
        manager.n_actions = n_actions
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))

        drawn: dict[str, set[Any]] = {}
        for _ in range(50 if her else 200):
            trial = study.ask()
            additional_args = {"using_her_replay_buffer": her, "her_kwargs": her_kwargs if her else {}}
            sampled = zoo.sample_td3x_params(trial, n_actions, 1, additional_args)
            assert None not in trial.params.values()
            assert trial.user_attrs == {"gamma": sampled["gamma"], "batch_size": sampled["batch_size"]}

            converted = zoo.convert_td3x_params(trial.params)
            if her:  # as the zoo merges them when it loads a trial, see TestStoredTrials
                converted["replay_buffer_kwargs"] = {**her_kwargs, **converted["replay_buffer_kwargs"]}
            rebuilt = manager._preprocess_action_noise(manager._preprocess_schedules(converted), {}, env)  # type: ignore[arg-type]

            models = [TD3X(env=env, seed=1, device="cpu", **{**given, **kwargs}) for kwargs in (sampled, rebuilt)]
            assert hyperparameters(models[0]) == hyperparameters(models[1])
            for first, second in zip(*(model.policy.parameters() for model in models), strict=True):
                assert th.equal(first, second)
            for key, value in trial.params.items():
                drawn.setdefault(key, set()).add(value)

        assert ("n_steps" in drawn) is not her
        assert ("n_sampled_goal" in drawn) is her
        # Off is among the values, and reached
        assert all(0.0 in drawn[key] for key in ("target_policy_noise", "noise_std", "action_noise_min_scale"))
        assert drawn["layer_norm"] == {False, True}
        assert drawn["policy_delay"] == {1, 2, 3, 4}

    def test_values(self):
        params = {
            "one_minus_gamma": 0.01,
            "batch_size_pow": 8,
            "learning_rate": 1e-3,
            "qf_learning_rate": 5e-4,
            "train_freq": 4,
            "tau": 0.005,
            "policy_delay": 2,
            "target_policy_noise": 0.2,
            "noise_type": "ornstein-uhlenbeck",
            "noise_std": 0.3,
            "one_minus_action_noise_decay": 1e-4,
            "action_noise_min_scale": 0.1,
            "net_arch": "big",
            "layer_norm": True,
            "n_steps": 3,
        }
        expected = {
            "gamma": 0.99,
            "batch_size": 256,
            "learning_rate": 1e-3,
            "qf_learning_rate": 5e-4,
            "train_freq": 4,
            "gradient_steps": 4,
            "tau": 0.005,
            "policy_delay": 2,
            "target_policy_noise": 0.2,
            "action_noise_decay": 0.9999,
            "action_noise_min_scale": 0.1,
            "policy_kwargs": {"net_arch": [400, 300], "layer_norm": True},
            "n_steps": 3,
        }
        assert zoo.convert_td3x_params(params) == {
            **expected,
            "noise_type": "ornstein-uhlenbeck",
            "noise_std": 0.3,
        }

        sampled = zoo.sample_td3x_params(optuna.trial.FixedTrial(params), 2, 1, NO_HER)  # type: ignore[arg-type]
        assert str(sampled.pop("action_noise")) == "OrnsteinUhlenbeckActionNoise(mu=[0. 0.], sigma=[0.3 0.3])"
        assert sampled == expected

    @pytest.mark.parametrize(
        ("hyperparams", "possible"),
        [
            ({"policy": "MlpPolicy"}, True),
            ({"policy": "CnnPolicy", "n_steps": 3}, True),
            ({"policy": "MultiInputPolicy"}, False),
            ({"policy": TD3X.policy_aliases["MultiInputPolicy"]}, False),
            ({"policy": "MlpPolicy", "optimize_memory_usage": True}, False),
            ({"policy": "MlpPolicy", "replay_buffer_class": HerReplayBuffer}, False),
        ],
    )
    def test_n_steps_only_where_a_buffer_supports_them(self, hyperparams: dict[str, Any], possible: bool):
        assert zoo.n_step_is_possible(hyperparams) is possible


LOW_MEMORY = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
HER = {
    "policy": "MultiInputPolicy",
    "replay_buffer_class": "HerReplayBuffer",
    # Given as a string, as in the zoo's files, and with an option that is not sampled
    "replay_buffer_kwargs": "dict(goal_selection_strategy='future', n_sampled_goal=4, copy_info_dict=True)",
}


class TestStoredTrials:
    @pytest.mark.parametrize(
        ("env_id", "hyperparams"),
        [
            ("Pendulum-v1", {"policy": "MlpPolicy", "policy_kwargs": "dict(n_critics=1)"}),
            ("Pendulum-v1", {"policy": "MlpPolicy", "normalize": "dict(norm_obs=True, gamma=0.5)", "gamma": 0.9}),
            ("Pendulum-v1", {"policy": "MlpPolicy", **LOW_MEMORY, "n_envs": 2, "normalize": True}),
            (BIT_FLIPPING, HER),
        ],
        ids=["plain", "VecNormalize", "memory", "HER"],
    )
    def test_trial_is_rebuilt(
        self, env_id: str, hyperparams: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """The zoo tries, then trains every trial by its id: the same model, the same discount of VecNormalize."""
        built: dict[float, Any] = {}  # by gamma, which no two trials share

        class Recorded(TD3X):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **kwargs)
                vec_normalize = self.get_vec_normalize_env()
                built[self.gamma] = (hyperparameters(self), vec_normalize and vec_normalize.gamma)

            def learn(self, *args: Any, **kwargs: Any) -> "Recorded":  # type: ignore[override]
                return self

        monkeypatch.setitem(exp_manager.ALGOS, "td3x", Recorded)
        hyperparams = {"n_timesteps": 100, "learning_starts": 50, "buffer_size": 1000, **hyperparams}
        storage = {"storage": str(tmp_path / "study.log"), "study_name": "s"}
        tuner = make_manager(
            tmp_path,
            hyperparams,
            env_id,
            **storage,
            optimize_hyperparameters=True,
            n_trials=4,
            n_jobs=2,
            no_optim_plots=True,
            sampler="random",
        )
        assert tuner.setup_experiment() is None
        normalize_kwargs = dict(tuner.normalize_kwargs)
        tuner.hyperparameters_optimization()
        assert tuner.normalize_kwargs == normalize_kwargs  # shared by the trials, so not theirs to change
        tried = dict(built)
        assert len(tried) == 4

        built.clear()
        for trial_id in range(4):
            assert make_manager(tmp_path, hyperparams, env_id, **storage, trial_id=trial_id).setup_experiment()
        assert built == tried
        for gamma, (attributes, vec_normalize_gamma) in built.items():
            assert vec_normalize_gamma == (gamma if "normalize" in hyperparams else None)
            if env_id == BIT_FLIPPING:
                assert attributes["replay_buffer_kwargs"].keys() == {
                    "copy_info_dict",
                    "goal_selection_strategy",
                    "n_sampled_goal",
                }

        # What is given by hand goes over a trial's values
        result = make_manager(
            tmp_path, hyperparams, env_id, **storage, trial_id=0, hyperparams={"tau": 0.5}
        ).setup_experiment()
        assert result is not None
        assert result[0].tau == 0.5  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="study s has no trial 7"):
            make_manager(tmp_path, hyperparams, env_id, **storage, trial_id=7).setup_experiment()

    def test_trial_that_has_not_run(self, tmp_path: Path):
        path = str(tmp_path / "study.log")
        storage = JournalStorage(JournalFileBackend(path))
        optuna.create_study(storage=storage, study_name="s", direction="maximize").enqueue_trial({})
        manager = make_manager(tmp_path, {"policy": "MlpPolicy"}, storage=path, study_name="s", trial_id=0)
        with pytest.raises(ValueError, match=r"trial 0 of the study s has no '.*': it has not run yet"):
            manager.setup_experiment()


def run_python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "SB3_TD3X_AUTOLOAD": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


class TestCommandLine:
    def test_status(self, capsys: pytest.CaptureFixture[str]):
        assert cli.main([]) == 0
        output = capsys.readouterr().out
        assert "registered with rl_zoo3: yes" in output
        assert str(ROOT / "hyperparams/td3x.yml") in output

    @pytest.mark.parametrize(
        ("name", "hint"), [("trian", "did you mean train?"), ("all_plots", "did you mean plots.all_plots?")]
    )
    def test_unknown_zoo_command(self, name: str, hint: str, capsys: pytest.CaptureFixture[str]):
        assert cli.main(["zoo", name, "--algo", "td3x"]) == 2
        assert capsys.readouterr().err == f"rl_zoo3 has no command {name!r}: {hint}\n"

    def test_zoo_commands(self):
        names = cli.zoo_commands()
        assert {"train", "enjoy", "record_video", "record_training", "push_to_hub", "cli"} <= set(names)
        assert {"plots.plot_train", "plots.all_plots", "plots.plot_from_file"} <= set(names)
        assert "utils" not in names

    @pytest.mark.slow
    def test_zoo_without_start_up_files(self, tmp_path: Path):
        """`python -S` processes no start-up file; train, then watch."""
        path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
        for command in (
            ["train", "-n", "120", "--eval-freq", "-1", "-params", "learning_starts:100"],
            ["enjoy", "-n", "200", "--no-render"],
        ):
            arguments = (
                "-S",
                "-m",
                "sb3_td3x",
                "zoo",
                *command,
                "--algo",
                "td3x",
                "--env",
                "Pendulum-v1",
                "-f",
                "logs",
            )
            process = run_python(*arguments, folder=tmp_path, PYTHONPATH=path)
            assert process.returncode == 0, process.stderr
        assert "Mean reward" in process.stdout
        assert (tmp_path / "logs/td3x/Pendulum-v1_1/Pendulum-v1.zip").is_file()

    @pytest.mark.slow
    @pytest.mark.parametrize("storage", ["logs/td3x.log", "sqlite:///td3x.db"])
    def test_optimize(self, storage: str, tmp_path: Path):
        """The issue's commands, one after the other."""
        train = (
            *("-m", "sb3_td3x", "zoo", "train", "--algo", "td3x", "--env", "Pendulum-v1", "-n", "110"),
            *("--storage", storage, "--study-name", "s"),
            *("-params", "learning_starts:100", "--eval-episodes", "1", "--num-threads", "1"),
        )
        process = run_python(*train, "-optimize", "--n-trials", "2", folder=tmp_path, PYTHONPATH=str(ROOT))
        assert process.returncode == 0, process.stderr
        assert "Best trial" in process.stdout
        process = run_python(*train, "--trial-id", "0", "--eval-freq", "-1", folder=tmp_path, PYTHONPATH=str(ROOT))
        assert process.returncode == 0, process.stderr
        assert "Loading from Optuna study" in process.stdout

        config = (tmp_path / "logs/td3x/Pendulum-v1_2/Pendulum-v1/config.yml").read_text()
        saved = dict(yaml.load(config, Loader=yaml.UnsafeLoader))
        url = f"sqlite:///{tmp_path / 'td3x.db'}"
        if storage.endswith(".log"):
            backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / storage))
            trial = optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend)).trials[0]
        else:
            trial = optuna.load_study(study_name="s", storage=url).trials[0]
        assert saved.items() >= {**zoo.convert_td3x_params(trial.params), "learning_starts": 100}.items()
