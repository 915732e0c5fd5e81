"""The search space of td3x."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import optuna
import pytest
import torch as th
from hyperparameters import BIT_FLIPPING, hyperparameters
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_td3x import TD3X
from sb3_td3x.zoo.search_space import convert_td3x_params, sample_td3x_params, trial_manager

NO_HER = {"using_her_replay_buffer": False, "her_kwargs": {}}


class TestSearchSpace:
    @pytest.mark.parametrize("her", [False, True], ids=["plain", "HER"])
    def test_stored_parameters_are_all_that_was_sampled(self, her: bool):
        """Any sample builds a model, and the parameters that Optuna stores build the same model again."""
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
            sampled = sample_td3x_params(trial, n_actions, 1, additional_args)
            assert None not in trial.params.values()
            assert trial.user_attrs == {"gamma": sampled["gamma"], "batch_size": sampled["batch_size"]}

            converted = convert_td3x_params(trial.params)
            if her:  # as when a trial is loaded, see test_manager.py
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
        # 0 turns these off, and is drawn
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
        assert convert_td3x_params(params) == {
            **expected,
            "noise_type": "ornstein-uhlenbeck",
            "noise_std": 0.3,
        }

        sampled = sample_td3x_params(optuna.trial.FixedTrial(params), 2, 1, NO_HER)  # type: ignore[arg-type]
        assert str(sampled.pop("action_noise")) == "OrnsteinUhlenbeckActionNoise(mu=[0. 0.], sigma=[0.3 0.3])"
        assert sampled == expected

    @pytest.mark.parametrize(
        ("hyperparams", "is_drawn"),
        [
            ({"policy": "MlpPolicy"}, True),
            ({"policy": "MultiInputPolicy"}, True),
            ({"policy": "MlpPolicy", "optimize_memory_usage": True}, True),
            ({"policy": "MlpPolicy", "replay_buffer_class": ReplayBuffer}, False),
        ],
    )
    def test_n_steps_are_not_for_another_replay_buffer(self, hyperparams: dict[str, Any], is_drawn: bool):
        trial = optuna.create_study().ask()
        manager = SimpleNamespace(_hyperparams=hyperparams, normalize_kwargs={})
        token = trial_manager.set(manager)  # type: ignore[arg-type]
        try:
            assert ("n_steps" in sample_td3x_params(trial, 1, 1, NO_HER)) is is_drawn
        finally:
            trial_manager.reset(token)
