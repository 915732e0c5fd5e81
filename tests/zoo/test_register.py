"""How td3x is added to the zoo."""

import argparse
from pathlib import Path

import pytest
from managers import make_manager
from rl_zoo3 import exp_manager, hyperparams_opt, utils
from rl_zoo3.exp_manager import ExperimentManager

from sb3_td3x import TD3X
from sb3_td3x.zoo import register, search_space

ROOT = Path(__file__).parents[2]


class TestRegistration:
    def test_tables(self):
        assert utils.ALGOS["td3x"] is TD3X
        assert hyperparams_opt.HYPERPARAMS_SAMPLER["td3x"] is search_space.sample_td3x_params
        assert hyperparams_opt.HYPERPARAMS_CONVERTER["td3x"] is search_space.convert_td3x_params

    def test_default_hyperparameters(self, tmp_path: Path):
        assert make_manager(tmp_path).config == str(ROOT / "hyperparams/td3x.yml")
        assert make_manager(tmp_path, config="mine.yml").config == "mine.yml"
        # Every other algorithm reads the zoo's own
        zoo_folder = Path(exp_manager.__file__).parent
        assert make_manager(tmp_path, algo="td3").config == str(zoo_folder / "hyperparams/td3.yml")

    def test_patching_twice_changes_nothing(self):
        before = dict(vars(ExperimentManager))
        register.patch_experiment_manager(exp_manager)
        assert dict(vars(ExperimentManager)) == before

    def test_model_card(self, tmp_path: Path):
        from rl_zoo3.push_to_hub import generate_model_card, save_model_card

        card, metadata = generate_model_card("td3x", "TD3X", "me", "Pendulum-v1", -150.0, 10.0, {"tau": 0.005}, {})
        save_model_card(tmp_path, card, metadata)
        text = (tmp_path / "README.md").read_text()
        assert "**TD3X** Agent playing **Pendulum-v1**" in text
        assert "-150.00 +/- 10.00" in text.partition("---\n")[2].partition("---\n")[0]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--algo td3x --trial-id best --seed 1", "--algo td3x --trial-id -1 --seed 1"),
        ("train --trial-id best --algo td3x", "train --trial-id -1 --algo td3x"),
        ("--algo td3 --study-name td3x --trial-id best", "--algo td3 --study-name td3x --trial-id best"),
        ("--algo td3x --study-name best --trial-id 3", "--algo td3x --study-name best --trial-id 3"),
        ("--algo", "--algo"),
    ],
)
def test_best_trial_becomes_a_number_for_the_zoos_parser(argv: str, expected: str) -> None:
    assert register._without_best_trial(argv.split()) == expected.split()


class TestParams:
    """The zoo evaluates the values of ``-params`` as Python."""

    def parse(self, *argv: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--algo")
        parser.add_argument("-params", "--hyperparams", nargs="+", action=utils.StoreDict)
        return parser.parse_args(argv)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("reward_shaping:my_hooks.Nope", "name 'my_hooks' is not defined"),
            ("qf_learning_rate:1e-3 x", "invalid syntax (<string>, line 1)"),
        ],
    )
    def test_text_without_quotes(self, value: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            self.parse("--algo", "td3x", "-params", "tau:0.1", value)
        assert (
            f"-params tau:0.1 {value} cannot be evaluated ({reason}). Values are Python expressions, and text needs "
            "quotes that the shell keeps: -params \"name:'text'\""
        ) in capsys.readouterr().err

    def test_text_with_quotes(self) -> None:
        assert self.parse("--algo", "td3x", "-params", "a:'b'", "c:[1]").hyperparams == {"a": "b", "c": [1]}

    def test_other_algorithms_are_as_in_the_zoo(self) -> None:
        with pytest.raises(NameError, match="my_hooks"):
            self.parse("--algo", "sac", "-params", "x:my_hooks.Nope")
