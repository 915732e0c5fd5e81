"""The settings of a study: what may be added to them, and what is refused."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import yaml

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies import plan
from sb3_td3x.studies.arms import Arm
from sb3_td3x.studies.plan import Evaluation, Plan, prepare, read_plan

A = Arm("a", "td3x", "first", {"E-v0": {"tau": 0.1}, "n/F-v0": {"tau": 0.2}})
B = Arm("b", "sac", "second", {"E-v0": {"net": [4, 4]}})
PLAN = Plan(
    kind="sweep",
    envs=["E-v0", "n/F-v0"],
    seeds=[1, 2],
    timesteps={"E-v0": 100, "n/F-v0": 200},
    evaluation=Evaluation({"E-v0": 5, "n/F-v0": 10}),
    arms={"a": A, "b": B},
)


def named(*arms: Arm) -> dict[str, Arm]:
    return {arm.name: arm for arm in arms}


def test_runs() -> None:
    runs = list(PLAN.runs(Path("study")))
    assert [(run.arm, run.env, run.seed) for run in runs] == [
        *(("a", "E-v0", 1), ("b", "E-v0", 1), ("a", "n/F-v0", 1)),
        *(("a", "E-v0", 2), ("b", "E-v0", 2), ("a", "n/F-v0", 2)),
    ]
    run = runs[2]
    study = Path("study").resolve()
    assert (run.algo, run.timesteps) == ("td3x", 200)
    assert run.folder == study / "a/td3x/n-F-v0_1"
    assert run.unfinished == study / "unfinished/a/n-F-v0_1/td3x/n-F-v0_1"
    assert runs[3].unfinished == study / "unfinished/a/E-v0_2/td3x/E-v0_1"
    assert runs[3].failure == study / "failures/a-E-v0-2.log"


def test_repeated_actions_count_as_env_steps() -> None:
    repeating: dict[str, Any] = {"env_wrapper": [{"rl_zoo3.wrappers.FrameSkip": {"skip": 3}}]}
    arms = named(Arm("a", "td3x", "", {"E-v0": {}}), Arm("b", "td3x", "", {"E-v0": repeating}))
    plain, repeated = replace(PLAN, arms=arms, seeds=[1]).runs(Path("study"))
    assert (plain.zoo_steps(100), repeated.zoo_steps(100), repeated.zoo_steps(2)) == (100, 33, 1)


def test_the_folder_of_a_study(tmp_path: Path) -> None:
    study = tmp_path / "new" / "study"
    prepare(PLAN, study)
    config = json.loads((study / "study.json").read_text())
    assert read_plan(study) == PLAN
    assert yaml.safe_load((study / "hyperparams/a.yml").read_text()) == A.hyperparams
    # The second time, settings stay and others are added
    prepare(PLAN, study)
    assert json.loads((study / "study.json").read_text()) == config
    more = Arm("c", "td3x", "third", {"G-v0": {"tau": 0.3}})
    grow = replace(PLAN, arms=named(more), envs=["G-v0"], timesteps={"G-v0": 7}, evaluation=Evaluation({"G-v0": 1}))
    prepare(replace(grow, seeds=[3]), study)
    grown = json.loads((study / "study.json").read_text())
    assert grown["seeds"] == [1, 2, 3]
    assert grown["envs"] == ["E-v0", "n/F-v0", "G-v0"]
    assert grown["timesteps"] == {"E-v0": 100, "n/F-v0": 200, "G-v0": 7}
    assert grown["arms"]["a"] == config["arms"]["a"]
    assert grown["arms"]["c"]["hyperparams"] == {"G-v0": {"tau": 0.3}}


def test_full_stays_the_base_of_an_ablation(tmp_path: Path) -> None:
    arms = [Arm(name, "td3x", "", {"E-v0": {}}) for name in ("no-delay", "full", "no-replay")]
    study = replace(PLAN, kind="ablation")
    prepare(replace(study, arms=named(*arms[:1])), tmp_path)
    prepare(replace(study, arms=named(*arms[1:])), tmp_path)
    assert list(json.loads((tmp_path / "study.json").read_text())["arms"]) == ["full", "no-delay", "no-replay"]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_kill_while_the_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    written: list[Path] = []

    @contextlib.contextmanager
    def killed(path: Path) -> Iterator[BinaryIO]:
        if len(written) == kept:
            path.with_name(f".{path.name}.0123abcd.partial").touch()
            raise KeyboardInterrupt
        written.append(path)
        with atomic_write(path) as file:
            yield file

    study = tmp_path / "study"
    with monkeypatch.context() as patch:
        patch.setattr(plan, "atomic_write", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(PLAN, study)
    prepare(PLAN, study)
    assert json.loads((study / "study.json").read_text())["seeds"] == [1, 2]
    for arm in (A, B):
        assert yaml.safe_load((study / f"hyperparams/{arm.name}.yml").read_text()) == arm.hyperparams


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"kind": "compare"}, "kind was 'sweep' and is 'compare'"),
        ({"timesteps": {"E-v0": 101}}, "timesteps.E-v0 was 100 and is 101"),
        ({"evaluation": Evaluation({"E-v0": 6})}, "evaluation.freq.E-v0 was 5 and is 6"),
        ({"evaluation": Evaluation({}, episodes=3)}, "evaluation.episodes was 10 and is 3"),
        ({"device": "cuda"}, "device was 'cpu' and is 'cuda'"),
        ({"arms": named(Arm("b", "tqc", "", {"E-v0": {"net": [4, 4]}}))}, "arms.b.algo was 'sac' and is 'tqc'"),
        (
            {"arms": named(Arm("a", "td3x", "", {"E-v0": {"tau": 0.5}}))},
            "arms.a.hyperparams.E-v0.tau was 0.1 and is 0.5",
        ),
        (
            {"arms": named(Arm("a", "td3x", "", {"E-v0": {"tau": 0.1, "gamma": 0.9}}))},
            "arms.a.hyperparams.E-v0.gamma was None and is 0.9",
        ),
    ],
)
def test_another_study_is_refused(tmp_path: Path, changes: dict[str, Any], difference: str) -> None:
    prepare(PLAN, tmp_path / "study")
    before = (tmp_path / "study/study.json").read_bytes()
    with pytest.raises(ValueError, match=re.escape(difference)):
        prepare(replace(PLAN, **changes), tmp_path / "study")
    assert (tmp_path / "study/study.json").read_bytes() == before


@pytest.mark.parametrize("name", ["description", "a.description", "a.hyperparams"])
def test_arms_named_like_settings(tmp_path: Path, name: str) -> None:
    for value in (0.1, 0.2):
        changed = replace(PLAN, arms=named(Arm(name, "td3x", f"{value}", {"E-v0": {"tau": value}})))
        if value == 0.1:
            prepare(changed, tmp_path)
        else:
            with pytest.raises(ValueError, match=r"hyperparams\.E-v0\.tau was 0\.1 and is 0\.2"):
                prepare(changed, tmp_path)


def test_folders_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"not empty, and has no study\.json"):
        prepare(PLAN, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "study.json").write_text('{"format": 7}')
    with pytest.raises(ValueError, match=r"study\.json is broken: format 7, expected 1"):
        prepare(PLAN, tmp_path)
