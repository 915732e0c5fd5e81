"""Parameters: from one agent to another, from files, and in SB3's layout."""

import pathlib
from copy import deepcopy
from typing import Any

import pytest
import torch as th
from agents import assert_same, assert_same_predictions, optimizer_states, train_on_same_data
from envs import CountingEnv, tiny, tiny_agent, zip_of
from stable_baselines3 import TD3

from sb3_td3x import TD3X
from sb3_td3x.policies import TD3XPolicy


def test_parameters_of_another_agent() -> None:
    # The number of updates, which decides on the delayed ones, is no parameter; it is odd in both
    model, other = tiny_agent(seed=1).learn(20), tiny_agent(seed=2).learn(10)
    other.set_parameters(model.get_parameters())
    assert_same(model.get_parameters(), other.get_parameters())
    assert_same_predictions(model, other)
    train_on_same_data([model, other], model)
    assert_same({**model.policy.state_dict()}, {**other.policy.state_dict()})


@pytest.mark.lowest_sb3
def test_parameters_have_sb3_s_layout() -> None:
    sb3, td3x = TD3("MlpPolicy", CountingEnv(), **tiny()).learn(20), tiny_agent()
    td3x.set_parameters(sb3.get_parameters())
    assert_same(sb3.get_parameters()["policy"], td3x.get_parameters()["policy"])
    assert_same(optimizer_states(sb3), optimizer_states(td3x))
    sb3.set_parameters(td3x.get_parameters())  # type: ignore[arg-type]


def test_parameters_from_a_path(tmp_path: pathlib.Path) -> None:
    for algorithm in (TD3, TD3X):
        source: Any = algorithm("MlpPolicy", CountingEnv(), **tiny())
        source.learn(20)
        source.save(tmp_path / "agent")
        for path in (tmp_path / "agent", str(tmp_path / "agent.zip"), zip_of(source)):
            model = tiny_agent(seed=3)
            model.set_parameters(path)
            assert_same_predictions(source, model)
            assert_same(optimizer_states(source), optimizer_states(model))


def test_some_parameters_only_if_the_match_need_not_be_exact() -> None:
    model, other = tiny_agent(seed=1), tiny_agent(seed=2)
    params = {"policy": model.get_parameters()["policy"]}
    with pytest.raises(ValueError, match=r"critic\.optimizer"):
        other.set_parameters(params)
    other.set_parameters(params, exact_match=False)
    assert_same_predictions(model, other)
    actor = {key: value for key, value in params["policy"].items() if key.startswith("actor.")}
    third = tiny_agent(seed=3)
    with pytest.raises(RuntimeError, match="Missing key"):
        third.set_parameters({**model.get_parameters(), "policy": actor})
    critic = {key: value.clone() for key, value in third.critic.state_dict().items()}
    third.set_parameters({"policy": actor}, exact_match=False)
    assert_same_predictions(model, third)
    assert_same(critic, dict(third.critic.state_dict()))


def test_parameters_of_one_critic_only_if_the_match_need_not_be_exact() -> None:
    source, model = tiny_agent(seed=1), tiny_agent(seed=2)
    second = {key: value.clone() for key, value in model.policy.state_dict().items() if ".qf1." in key}
    first = {key: value for key, value in source.policy.state_dict().items() if key.startswith("critic.qf0.")}
    with pytest.raises(RuntimeError, match=r"Missing key.*critic\.qf1\.0\.weight"):
        tiny_agent(seed=2).set_parameters({**source.get_parameters(), "policy": first})
    model.set_parameters({"policy": first}, exact_match=False)
    assert_same({**second, **first}, {key: model.policy.state_dict()[key] for key in {**second, **first}})


def test_parameters_of_a_policy_without_memory() -> None:
    source = tiny_agent(seed=1)
    with th.device("meta"):
        policy: Any = type("Meta", (TD3XPolicy,), {"device": th.device("meta")})(
            source.observation_space, source.action_space, lambda _: 0.0, net_arch=[8]
        )
    policy.load_state_dict(source.policy.state_dict(), assign=True)
    assert {parameter.device.type for parameter in policy.parameters()} == {"cpu"}


def test_set_parameters_leaves_the_given_dictionary_alone() -> None:
    params = tiny_agent(seed=1).learn(20).get_parameters()
    keys = {name: list(value) for name, value in params.items()}
    tiny_agent(seed=2).set_parameters(params)
    assert {name: list(value) for name, value in params.items()} == keys


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        tiny_agent().set_parameters({"nonsense": {}}, exact_match=False)


@pytest.mark.parametrize(("own", "given"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_parameters_of_another_number_of_critics_are_refused(own: int, given: int) -> None:
    source = tiny_agent(policy_kwargs={"net_arch": [8], "n_critics": given}).learn(20)
    model = tiny_agent(policy_kwargs={"net_arch": [8], "n_critics": own})
    before = {key: value.clone() for key, value in model.policy.state_dict().items()}
    with pytest.raises(ValueError, match="saved with other policy_kwargs"):
        model.set_parameters(source.get_parameters())
    with pytest.raises(ValueError, match="saved with other policy_kwargs"):
        model.set_parameters(zip_of(source))
    assert_same(before, dict(model.policy.state_dict()))
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        model.set_parameters({"policy": source.get_parameters()["policy"]})


def test_parameters_of_other_layers_are_refused() -> None:
    source, model = tiny_agent(policy_kwargs={"net_arch": [9]}).learn(20), tiny_agent()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.set_parameters(source.get_parameters())


def test_agents_with_the_same_parameters_train_independently() -> None:
    model, other = tiny_agent(seed=1).learn(20), tiny_agent(seed=2)
    other.set_parameters(model.get_parameters())
    before = deepcopy(model.get_parameters())
    other.learn(20)
    assert_same(before, model.get_parameters())


@pytest.mark.parametrize("state", [{}, {"state": {}}])
def test_incomplete_state_dictionaries_give_pytorch_s_error(state: dict[str, Any]) -> None:
    """As in SB3, where the policy comes first."""
    for model in (tiny_agent(), TD3("MlpPolicy", CountingEnv(), **tiny())):
        params = dict.fromkeys(model.get_parameters(), state)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.set_parameters(params, exact_match=True)
        complete = {**model.get_parameters(), "critic.optimizer": state}
        with pytest.raises(KeyError, match="param_groups"):
            model.set_parameters(complete, exact_match=True)
