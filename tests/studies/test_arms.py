"""The arms of a study: the hyperparameters of each, and that every arm can be constructed."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3 import TD3

from sb3_td3x import TD3X
from sb3_td3x.studies.arms import (
    DECAY_HALVINGS,
    Arm,
    ablation_arms,
    check_arm_name,
    comparison_arms,
    sweep_arms,
    with_policy_kwargs,
    without_equals,
)
from sb3_td3x.zoo.register import hyperparams_path
from sb3_td3x.zoo.runs import check_names

PENDULUM, LUNAR, WALKER, HARDCORE = (
    "Pendulum-v1",
    "LunarLanderContinuous-v3",
    "BipedalWalker-v3",
    "BipedalWalkerHardcore-v3",
)
NETS = "dict(net_arch=[128, 128])"


def construct(arm: Arm, env: str, folder: Path) -> TD3X:
    """Construct an agent as the zoo does, from the YAML file of the arm."""
    path = folder / f"{arm.name}.yml"
    path.write_text(yaml.safe_dump({env: arm.hyperparams[env]}))
    options: dict[str, Any] = {"device": "cpu", "config": str(path), "verbose": 0, "eval_freq": -1, "n_timesteps": 100}
    manager = ExperimentManager(argparse.Namespace(), "td3x", env, str(folder / "logs"), **options)
    result = manager.setup_experiment()
    assert result is not None
    assert isinstance(result[0], TD3X)
    return result[0]


def changes(arms: list[Arm], name: str, env: str) -> dict[str, Any]:
    """Return the hyperparameters in which an arm differs from the first, None for those that it does not have."""
    base = arms[0].hyperparams[env]
    entry = next(arm.hyperparams[env] for arm in arms if arm.name == name)
    return {key: entry.get(key) for key in {**base, **entry} if base.get(key) != entry.get(key)}


def test_arms_of_the_ablation() -> None:
    arms = ablation_arms([PENDULUM], 20_000)
    assert [arm.name for arm in arms][:8] == [
        *("full", "stochastic-policy", "no-replay", "no-targets", "no-smoothing", "no-delay", "no-clipping", "ddpg")
    ]
    expected: dict[str, dict[str, Any]] = {
        "stochastic-policy": {
            "noise_type": None,
            "noise_std": None,
            "policy_kwargs": f"dict({NETS}, stochastic_actor=True)",
        },
        "no-replay": {"buffer_size": 1, "batch_size": 1},
        "no-targets": {"tau": 1.0, "policy_delay": 1},
        "no-smoothing": {"target_policy_noise": 0.0},
        "no-delay": {"policy_delay": 1},
        "no-clipping": {"clipped_double_q": False},
        "ddpg": {"policy_delay": 1, "target_policy_noise": 0.0, "policy_kwargs": f"dict({NETS}, n_critics=1)"},
    }
    assert {name: changes(arms, name, PENDULUM) for name in expected} == expected


def test_decay_and_shaping_are_switched(capsys: pytest.CaptureFixture[str]) -> None:
    arms = ablation_arms([PENDULUM, LUNAR, WALKER, HARDCORE], None)
    assert capsys.readouterr().out == ""
    decay = changes(arms, "decay", PENDULUM)
    # Half after a fifth of its 10,000 timesteps
    assert decay["action_noise_decay"] ** 2000 == pytest.approx(0.5)
    assert decay["action_noise_min_scale"] == 0.1
    assert changes(arms, "no-decay", LUNAR) == {"action_noise_decay": None, "action_noise_min_scale": None}
    assert changes(arms, "no-shaping", HARDCORE) == {"reward_shaping": None}
    switched = {arm.name: list(arm.hyperparams) for arm in arms}
    assert (switched["decay"], switched["no-decay"]) == ([PENDULUM], [LUNAR, WALKER, HARDCORE])
    assert switched["no-shaping"] == [LUNAR, WALKER, HARDCORE]


def test_shaping_where_the_entry_has_none(tmp_path: Path) -> None:
    file = tmp_path / "plain.yml"
    file.write_text(yaml.safe_dump({WALKER: {"n_timesteps": 1000, "policy": "MlpPolicy"}}))
    shaped = changes(ablation_arms([WALKER], conf_file=file), "shaping", WALKER)["reward_shaping"]
    # Hardcore's entry at the start of the training
    (fall_penalty, scale) = ablation_arms([HARDCORE])[0].hyperparams[HARDCORE]["reward_shaping"]
    ((path, arguments),) = fall_penalty.items()
    assert shaped == [
        {path: {"threshold": arguments["threshold"], "penalty": arguments["initial_penalty"]}},
        scale,
    ]


def test_every_arm_can_be_constructed_and_learns(tmp_path: Path) -> None:
    arms = ablation_arms([PENDULUM], 20_000, all_64=True)
    # Without target networks there is no delay, so 16 of the 64 combinations equal others
    assert len(arms) == 48 + 2
    for arm in arms:
        model = construct(arm, PENDULUM, tmp_path)
        model.learning_starts = 2
        model.learn(4)
        tricks = arm.name.split("+")
        assert model.policy.stochastic_actor == ("stochastic-policy" in tricks)
        assert (model.action_noise is None) == ("stochastic-policy" in tricks)
        assert (model.buffer_size, model.batch_size) == ((1, 1) if "no-replay" in tricks else (200_000, 128))
        assert (model.tau == 1) == ("no-targets" in tricks)
        assert (model.target_policy_noise == 0) == bool({"no-smoothing", "ddpg"} & set(tricks))
        assert (model.policy_delay == 1) == bool({"no-delay", "no-targets", "ddpg"} & set(tricks))
        assert model.clipped_double_q != ("no-clipping" in tricks)
        assert model.critic.n_critics == (1 if arm.name == "ddpg" else 2)


@pytest.mark.parametrize("env", [LUNAR, WALKER, HARDCORE])
def test_every_arm_of_the_other_environments_can_be_constructed(tmp_path: Path, env: str) -> None:
    for arm in ablation_arms([env]):
        model = construct(arm, env, tmp_path)
        assert model.policy.net_arch == [256, 256]


def test_equal_arms_are_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"tau": 0.1}
    arms = [Arm("a", "td3x", "", {"E": entry, "F": entry}), Arm("b", "td3x", "", {"E": entry, "F": {"tau": 0.2}})]
    assert without_equals(arms)[1].hyperparams == {"F": {"tau": 0.2}}
    assert capsys.readouterr().out == "E: b is left out, it is the same as a\n"
    # Another algorithm is another arm
    assert len(without_equals([*arms, Arm("c", "td3", "", {"E": entry})])) == 3


def test_policy_kwargs_as_the_zoo_evaluates_them() -> None:
    entry = with_policy_kwargs({"policy_kwargs": "dict(net_arch=[8], n_critics=3)"}, {"n_critics": 1})
    assert eval(entry["policy_kwargs"]) == {"net_arch": [8], "n_critics": 1}
    assert with_policy_kwargs({"policy_kwargs": {"net_arch": [8]}}, {"n_critics": 1})["policy_kwargs"] == {
        "net_arch": [8],
        "n_critics": 1,
    }
    assert with_policy_kwargs({}, {"n_critics": 1}) == {"policy_kwargs": {"n_critics": 1}}


def test_comparison_takes_the_own_hyperparameters_of_each_algorithm() -> None:
    td3x, sac = comparison_arms(["td3x", "sac"], [PENDULUM])
    assert (td3x.name, td3x.algo, sac.algo) == ("td3x", "td3x", "sac")
    assert sac.hyperparams[PENDULUM]["learning_rate"] == 1e-3
    assert td3x.hyperparams[PENDULUM]["learning_starts"] == 1_000


def test_sweep(tmp_path: Path) -> None:
    file = tmp_path / "arms.yml"
    file.write_text("as-is:\nfast: {learning_rate: 0.01, noise_type: null}\nother: {algo: sac, gamma: 0.5}\n")
    as_is, fast, other = sweep_arms(file, [PENDULUM])
    assert as_is.hyperparams == ablation_arms([PENDULUM])[0].hyperparams
    assert fast.hyperparams[PENDULUM]["learning_rate"] == 0.01
    assert "noise_type" not in fast.hyperparams[PENDULUM]
    assert (other.algo, other.hyperparams[PENDULUM]["gamma"]) == ("sac", 0.5)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("a: {learning_rat: 0.1}", "learning_rat' is unknown: did you mean 'learning_rate'"),
        ("a: {algo: td4x}", "'td4x' is unknown: did you mean 'td3x'"),
        ("a: {algo: ppo, tau: 1}", "a: the hyperparameter 'tau' is unknown"),
        ("a: {learning_rate: 1e-3}", "a: learning_rate='1e-3' is not allowed, expected a number and not text"),
        ("a: {gamma: nan}", "a: gamma='nan' is not allowed, expected a number and not text"),
        ("a: {algo: null}", "The algorithm None is unknown: expected text"),
        ("a: {1: 2}", "the hyperparameter 1 is unknown: expected text"),
        ("a: {on: 2}", "the hyperparameter True is unknown: expected text"),
        ("a: {seed: 5}", "the hyperparameter 'seed' is unknown"),
        ("a: {device: cpu}", "the hyperparameter 'device' is unknown"),
        ("study.json: {tau: 1}", "The arm 'study.json' is not allowed"),
        ("a: 3", "a: 3 is not allowed, expected hyperparameters"),
        ("a: {n_timesteps: 3}", "n_timesteps is not allowed"),
        ("report: {tau: 1}", "The arm 'report' is not allowed"),
        ("a/b: {tau: 1}", "The arm 'a/b' is not allowed"),
        ("[a, b]", "names no arms"),
        ("a: {", "no YAML file that can be read"),
    ],
)
def test_bad_sweeps(tmp_path: Path, content: str, error: str) -> None:
    file = tmp_path / "arms.yml"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"arms\.yml|The arm") as info:
        sweep_arms(file, [PENDULUM])
    assert error in str(info.value)


def test_bad_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"The arm 'no_delay' is unknown: did you mean 'no-delay'\?"):
        ablation_arms([PENDULUM], names=["no_delay"])
    with pytest.raises(ValueError, match=r"Pendulum-v1 has none of the arms no-decay, no-shaping: .*, ddpg, decay$"):
        ablation_arms([LUNAR, PENDULUM], names=["no-decay", "no-shaping"])
    assert [arm.name for arm in ablation_arms([LUNAR, PENDULUM], names=["no-decay", "decay"])] == ["no-decay", "decay"]
    assert capsys.readouterr().out.splitlines() == [f"{LUNAR} has no arm decay", f"{PENDULUM} has no arm no-decay"]
    with pytest.raises(ValueError, match=r"The algorithm 'tq' is unknown: did you mean 'tqc'\?"):
        comparison_arms(["tq"], [PENDULUM])
    file = tmp_path / "conf.yml"
    file.write_text("Other-v0: {n_timesteps: 1}")
    with pytest.raises(ValueError, match="has no hyperparameters for Pendulum-v1, and no entry named default"):
        ablation_arms([PENDULUM], conf_file=file)
    for value, error in (("1e4", "expected a number and not text"), ("many", "expected a"), ("[1]", "expected a")):
        file.write_text(f"{PENDULUM}: {{n_timesteps: {value}}}")
        with pytest.raises(ValueError, match=rf"conf\.yml, Pendulum-v1: n_timesteps=.* is not allowed, {error}"):
            ablation_arms([PENDULUM], conf_file=file)
    for name in ("", "..", ".a", "unfinished", 3):
        with pytest.raises(ValueError, match="is not allowed"):
            check_arm_name(name)


@pytest.mark.parametrize("as_list", [False, True])
def test_all_runs_have_one_length(as_list: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop: Any = {"sb3_td3x.callbacks.StopWhenSolved": {"threshold": 200.0}}
    kept = ["rl_zoo3.callbacks.RawStatisticsCallback"] if as_list else []
    file = tmp_path / "conf.yml"
    entry = {"n_timesteps": 1000, "callback": [stop, *kept] if as_list else stop}
    file.write_text(yaml.safe_dump({PENDULUM: entry}))
    arms = ablation_arms([PENDULUM], conf_file=file)
    assert [arm.hyperparams[PENDULUM]["callback"] for arm in arms] == [kept] * len(arms)
    line = f"{PENDULUM}: callbacks that end a training early are left out, all runs have one length\n"
    assert capsys.readouterr().out.count(line) == 1
    assert ablation_arms([LUNAR], conf_file=hyperparams_path("documents"))[0].hyperparams[LUNAR]["callback"] == []


def test_the_noise_decays_over_decisions(tmp_path: Path) -> None:
    wrapper = {"rl_zoo3.wrappers.FrameSkip": {"skip": 2}}
    entry = {"n_timesteps": 1000, "noise_type": "normal", "noise_std": 0.1, "env_wrapper": [wrapper]}
    path = tmp_path / "skipping.yml"
    path.write_text(yaml.safe_dump({PENDULUM: entry}))
    (arm,) = ablation_arms([PENDULUM], 1000, path, names=["decay"])
    # 1,000 env steps are 500 decisions
    assert arm.hyperparams[PENDULUM]["action_noise_decay"] ** 500 == pytest.approx(0.5**DECAY_HALVINGS)
    # Less than one decision counts as one
    (arm,) = ablation_arms([PENDULUM], 1, path, names=["decay"])
    assert arm.hyperparams[PENDULUM]["action_noise_decay"] == pytest.approx(0.5**DECAY_HALVINGS)


def test_the_arms_of_the_ablation_need_no_trust() -> None:
    for arm in ablation_arms([PENDULUM, LUNAR, WALKER, HARDCORE]):
        for entry in arm.hyperparams.values():
            check_names(entry, arm.name)


def test_parity_trains_with_the_hyperparameters_of_the_zoos_td3() -> None:
    td3, td3x = sweep_arms(Path(__file__).parents[2] / "docs" / "results" / "parity.yml", [PENDULUM])
    zoos, own = td3.hyperparams[PENDULUM], td3x.hyperparams[PENDULUM]
    # The zoo's entry does not name values that are SB3's default
    defaults = {"batch_size": TD3("MlpPolicy", PENDULUM).batch_size}
    assert {**own, "n_timesteps": zoos["n_timesteps"]} == {**defaults, **zoos}
