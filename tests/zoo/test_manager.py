"""What td3x does differently in the zoo's ``ExperimentManager``."""

import ast
import sys
import types
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from envs import counting_vec_env, tiny
from hyperparameters import BIT_FLIPPING, hyperparameters
from managers import make_manager
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from rl_zoo3 import exp_manager
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import EvalCallback

from sb3_td3x import TD3X
from sb3_td3x.checkpoint.callback import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import newest_whole_checkpoint
from sb3_td3x.zoo.runs import ZooRun
from sb3_td3x.zoo.search_space import BEST_TRIAL, suggest_td3x_params

SMALL = {"policy": "MlpPolicy", "n_timesteps": 10, "buffer_size": 100}
LOW_MEMORY = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
HER = {
    "policy": "MultiInputPolicy",
    "replay_buffer_class": "HerReplayBuffer",
    # As text, as in the zoo's files, with an option that is not sampled
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
        """Training a trial by its id builds the same model and the same ``VecNormalize`` as the trial itself."""
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
        assert tuner.normalize_kwargs == normalize_kwargs  # trials share it
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

        # -params goes over a trial's values
        result = make_manager(
            tmp_path, hyperparams, env_id, **storage, trial_id=0, hyperparams={"tau": 0.5}
        ).setup_experiment()
        assert result is not None
        assert result[0].tau == 0.5  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="study s has no trial 7"):
            make_manager(tmp_path, hyperparams, env_id, **storage, trial_id=7).setup_experiment()

    def test_best_trial(self, tmp_path: Path) -> None:
        path = str(tmp_path / "study.log")
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(path)), study_name="s", direction="maximize"
        )
        for value in (1.0, 3.0, 2.0):
            trial = study.ask()
            suggest_td3x_params(trial, n_step=True, her=False)
            study.tell(trial, value)
        given = {"storage": path, "study_name": "s"}
        hyperparams = [
            make_manager(tmp_path, {"policy": "MlpPolicy"}, **given, trial_id=trial_id).read_hyperparameters()
            for trial_id in (BEST_TRIAL, 1)
        ]
        assert hyperparams[0] == hyperparams[1]

    def test_trial_of_another_algorithm(self, tmp_path: Path) -> None:
        path = str(tmp_path / "study.log")
        study = optuna.create_study(storage=JournalStorage(JournalFileBackend(path)), study_name="s")
        study.optimize(lambda trial: trial.suggest_float("lr", 0, 1), n_trials=1)
        manager = make_manager(tmp_path, {"policy": "MlpPolicy"}, storage=path, study_name="s", trial_id=0)
        with pytest.raises(ValueError, match="trial 0 of the study s is not one of td3x: it has no 'one_minus_gamma'"):
            manager.setup_experiment()

    def test_trial_without_a_study(self, tmp_path: Path) -> None:
        manager = make_manager(tmp_path, {"policy": "MlpPolicy"}, storage="study.log", trial_id=0)
        with pytest.raises(ValueError, match="--trial-id needs --storage and --study-name"):
            manager.setup_experiment()


# Settings of a run, and of another one that continues its agent
PRETRAINED: dict[str, Any] = {
    "policy": "CustomPolicy",
    "policy_kwargs": {"net_arch": [8], "layer_norm": True},
    "learning_rate": "lin_7e-4",
    "learning_starts": 5,
    "gamma": 0.9,
    "noise_type": "normal",
    "noise_std": 0.3,
    "reward_shaping": {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}},
    "n_timesteps": 10,
    "n_envs": 2,
    "normalize": True,
}
CONTINUED: dict[str, Any] = {
    "policy": "MlpPolicy",
    "policy_kwargs": "dict(net_arch=[400, 300])",
    "gamma": 0.95,
    "n_timesteps": 20,
    "buffer_size": 500,
}


class TestPretrainedAgent:
    """The settings of a run that continues an agent (``-i``) include what the agent keeps from its run."""

    def config(self, folder: Path, agent: Path) -> dict[str, Any]:
        TD3X("MlpPolicy", "Pendulum-v1", **tiny()).save(agent)
        manager = make_manager(folder, CONTINUED, trained_agent=str(agent))
        assert manager.setup_experiment() is not None
        return ZooRun(Path(manager.save_path)).hyperparams

    def test_what_the_agent_keeps(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "Pendulum-v1").mkdir()
        (tmp_path / "Pendulum-v1/config.yml").write_text(yaml.dump(OrderedDict(PRETRAINED)))
        config = self.config(tmp_path, tmp_path / "agent.zip")
        assert config == {
            # From the agent's run, but not what concerns its envs and its length
            **{name: value for name, value in PRETRAINED.items() if name not in ("n_envs", "normalize")},
            # From the YAML file, which goes over the agent's
            "gamma": 0.95,
            "n_timesteps": 20,
            "buffer_size": 500,
        }
        printed = capsys.readouterr().out.partition("which stay as they are:\n")[2].partition("Log path")[0]
        assert ast.literal_eval(printed) == {
            name: value for name, value in config.items() if name not in ("gamma", "n_timesteps", "buffer_size")
        }

    def test_settings_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "Pendulum-v1").mkdir()
        (tmp_path / "Pendulum-v1/config.yml").write_text("policy: !!python/name:os.mkdir ''")
        with pytest.warns(UserWarning, match=r"keeps are not saved: .*config\.yml holds an object"):
            assert self.config(tmp_path, tmp_path / "agent.zip") == CONTINUED

    def test_agent_without_a_run(self, tmp_path: Path) -> None:
        assert self.config(tmp_path, tmp_path / "agent.zip") == CONTINUED


def test_folder_of_checkpoints(tmp_path: Path) -> None:
    """Checkpoints of the YAML file or of --save-freq are in the folder of the run."""
    manager = make_manager(tmp_path, save_freq=100)
    manager.callbacks = []
    manager.create_callbacks()
    (checkpoint,) = [callback for callback in manager.callbacks if isinstance(callback, ResumableCheckpoint)]
    assert checkpoint.save_path == Path(manager.save_path) / "checkpoints"
    assert checkpoint.save_freq == 100

    # Checkpoints elsewhere still know the run's own files
    manager = make_manager(tmp_path, save_freq=100)
    checkpoint = ResumableCheckpoint(tmp_path / "elsewhere")
    manager.callbacks = [checkpoint]
    manager.create_callbacks()
    Path(manager.save_path).mkdir(parents=True)
    (Path(manager.save_path) / "0.monitor.csv").write_text("12345")
    TD3X("MlpPolicy", counting_vec_env(1), **tiny()).learn(20, checkpoint)
    assert newest_whole_checkpoint(tmp_path / "elsewhere").state["monitor_sizes"] == {"0.monitor.csv": 5}

    manager = make_manager(tmp_path, save_freq=100)
    manager.callbacks = [ResumableCheckpoint(save_freq=7)]
    manager.create_callbacks()
    (checkpoint,) = [callback for callback in manager.callbacks if isinstance(callback, ResumableCheckpoint)]
    assert checkpoint.save_freq == 7
    assert checkpoint.save_path == Path(manager.save_path) / "checkpoints"

    manager = make_manager(tmp_path, algo="td3", save_freq=100)
    manager.callbacks = []
    manager.create_callbacks()
    assert not any(isinstance(callback, ResumableCheckpoint) for callback in manager.callbacks)


@pytest.mark.parametrize(
    ("given", "training", "evaluation"),
    [
        ({}, 3.0, 3.0),
        ({"env_kwargs": {"g": 2.0}}, 2.0, 2.0),
        ({"eval_env_kwargs": {"g": 1.0}}, 3.0, 1.0),
    ],
    ids=["file", "--env-kwargs", "--eval-env-kwargs"],
)
def test_env_kwargs_of_the_file_are_for_evaluations_too(
    given: dict[str, Any], training: float, evaluation: float, tmp_path: Path
) -> None:
    manager = make_manager(tmp_path, {**SMALL, "env_kwargs": {"g": 3.0}}, eval_freq=10, **given)
    result = manager.setup_experiment()
    assert result is not None
    model = result[0]
    assert model.env is not None
    assert model.env.get_attr("g") == [training]
    (evaluations,) = (callback for callback in manager.callbacks if isinstance(callback, EvalCallback))
    assert evaluations.eval_env.get_attr("g") == [evaluation]


def test_run_that_cannot_have_checkpoints_is_trained(tmp_path: Path) -> None:
    """--save-freq alone gives a warning."""

    class Own(ReplayBuffer):
        pass

    manager = make_manager(tmp_path, save_freq=10)
    manager.callbacks = []
    manager.create_callbacks()
    model = TD3X("MlpPolicy", counting_vec_env(1), **tiny(replay_buffer_class=Own))
    with pytest.warns(UserWarning, match="This run cannot be resumed: replay_buffer_class=Own is not allowed"):
        model.learn(20, manager.callbacks)
    assert not (Path(manager.save_path) / "checkpoints").exists()


@pytest.mark.parametrize("options", [{}, {"save_freq": 10}], ids=str)
def test_error_before_the_progress_bar_starts_is_shown(options: dict[str, Any], tmp_path: Path) -> None:
    """The zoo ends the progress bar although it has not started."""
    manager = make_manager(tmp_path, SMALL, show_progress=True, **options)
    result = manager.setup_experiment()
    assert result is not None
    model: Any = result[0]
    model.reward_shaping = "no_such_module.Hook"
    with pytest.raises(ValueError, match=r"no_such_module\.Hook"):
        manager.learn(model)


def test_id_of_a_tracked_run_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = types.ModuleType("wandb")
    wandb.run = Namespace(id="abc123")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    manager = make_manager(tmp_path, SMALL, args=Namespace(track=True, algo="td3x", env="Pendulum-v1"))
    assert manager.setup_experiment() is not None
    assert ZooRun(Path(manager.save_path)).args["wandb_run_id"] == "abc123"
