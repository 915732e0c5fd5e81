"""List the private methods of SB3 that TD3X uses, and check that SB3 still has them."""

import inspect

import pytest
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x import TD3X
from sb3_td3x.policies import TD3XPolicy
from sb3_td3x.saving import SavableAlgorithm

# Private methods of SB3 that TD3X overrides, with their parameters
OVERRIDDEN = {
    "_excluded_save_params": [],
    "_get_torch_save_params": [],
    "_sample_action": ["learning_starts", "action_noise", "n_envs"],
    "_setup_learn": ["total_timesteps", "callback", "reset_num_timesteps", "tb_log_name", "progress_bar"],
    "_setup_lr_schedule": [],
    "_setup_model": [],
    "_store_transition": ["replay_buffer", "buffer_action", "new_obs", "reward", "dones", "infos"],
}
# Private methods of SB3 that TD3X calls
CALLED = {
    "_convert_train_freq": [],
    "_wrap_env": ["env", "verbose", "monitor_wrapper"],
}
# Private methods of SB3's HerReplayBuffer that checkpoints call
HER_CALLED = {"_compute_episode_length": ["env_idx"]}
# Private methods of SB3's policy that TD3X's policy overrides
POLICY_OVERRIDDEN = {
    "_get_constructor_parameters": [],
    "_predict": ["observation", "deterministic"],
    "make_actor": ["features_extractor"],
    "make_critic": ["features_extractor"],
}

pytestmark = pytest.mark.lowest_sb3


def parameters(cls: type, name: str) -> list[str]:
    return [parameter for parameter in inspect.signature(getattr(cls, name)).parameters if parameter != "self"]


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_sb3_has_the_method(name: str) -> None:
    assert parameters(OffPolicyAlgorithm, name) == {**OVERRIDDEN, **CALLED}[name]


@pytest.mark.parametrize("name", HER_CALLED)
def test_sb3s_her_buffer_has_the_method(name: str) -> None:
    assert parameters(HerReplayBuffer, name) == HER_CALLED[name]


@pytest.mark.parametrize("name", POLICY_OVERRIDDEN)
def test_sb3s_policy_has_the_method(name: str) -> None:
    assert parameters(TD3Policy, name) == POLICY_OVERRIDDEN[name]


def test_all_overridden_methods_are_listed() -> None:
    sb3_methods = set(dir(OffPolicyAlgorithm))
    methods = {**vars(SavableAlgorithm), **vars(TD3X)}
    assert {name for name, value in methods.items() if is_private_method(name, value)} & sb3_methods == set(OVERRIDDEN)
    own = {
        name for name, value in vars(TD3XPolicy).items() if is_private_method(name, value) or name.startswith("make_")
    }
    assert own & set(dir(TD3Policy)) == set(POLICY_OVERRIDDEN)


def is_private_method(name: str, value: object) -> bool:
    return name.startswith("_") and not name.startswith("__") and inspect.isfunction(value)
