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
from study_folders import make_record, write

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies import plan
from sb3_td3x.studies.arms import Arm
from sb3_td3x.studies.plan import Plan, Settings, prepare, runs_of, settings_of

PLAN = Plan(
    kind="sweep",
    arms=[
        Arm("a", "td3x", "first", {"E-v0": {"tau": 0.1}, "n/F-v0": {"tau": 0.2}}),
        Arm("b", "sac", "second", {"E-v0": {"net": [4, 4]}}),
    ],
    envs={"E-v0": Settings(100, 5), "n/F-v0": Settings(200, 10)},
    seeds=[1, 2],
)


def test_runs() -> None:
    runs = runs_of(PLAN, Path("study"))
    assert [(run.arm, run.env, run.seed) for run in runs] == [
        *(("a", "E-v0", 1), ("b", "E-v0", 1), ("a", "n/F-v0", 1)),
        *(("a", "E-v0", 2), ("b", "E-v0", 2), ("a", "n/F-v0", 2)),
    ]
    run = runs[2]
    study = Path("study").resolve()
    assert (run.timesteps, run.eval_freq) == (200, 10)
    assert run.folder == study / "a/td3x/n-F-v0_1"
    assert run.unfinished == study / "unfinished/a/n-F-v0_1/td3x/n-F-v0_1"
    assert runs[3].unfinished == study / "unfinished/a/E-v0_2/td3x/E-v0_1"
    assert runs[3].failure == study / "failures/a-E-v0-2.log"


def test_settings() -> None:
    assert settings_of({"n_timesteps": 2e4}, None, None) == Settings(20_000, 1000)
    assert settings_of({"n_timesteps": 2e4}, 10, None) == Settings(10, 1)
    assert settings_of({"n_timesteps": 2e4}, None, 300) == Settings(20_000, 300)


def test_repeated_actions_count_as_env_steps() -> None:
    repeating: dict[str, Any] = {"n_timesteps": 2e4, "env_wrapper": [{"rl_zoo3.wrappers.FrameSkip": {"skip": 3}}]}
    assert settings_of(repeating, None, None) == Settings(60_000, 3000)
    arms = [Arm("a", "td3x", "", {"E-v0": {}}), Arm("b", "td3x", "", {"E-v0": repeating})]
    plain, repeated = runs_of(replace(PLAN, arms=arms, envs={"E-v0": Settings(100, 5)}, seeds=[1]), Path("study"))
    assert (plain.zoo_timesteps, plain.zoo_eval_freq) == (100, 5)
    assert (repeated.zoo_timesteps, repeated.zoo_eval_freq) == (33, 1)
    assert plain.timesteps == repeated.timesteps == 100


def test_the_folder_of_a_study(tmp_path: Path) -> None:
    study = tmp_path / "new" / "study"
    prepare(PLAN, study)
    config = json.loads((study / "study.json").read_text())
    assert config["arms"]["b"] == {
        "algo": "sac",
        "description": "second",
        "hyperparams": {"E-v0": {"net": [4, 4]}},
    }
    assert yaml.safe_load((study / "hyperparams/a.yml").read_text()) == PLAN.arms[0].hyperparams
    # The second time, settings stay and others are added
    prepare(PLAN, study)
    assert json.loads((study / "study.json").read_text()) == config
    more = Arm("c", "td3x", "third", {"G-v0": {"tau": 0.3}})
    prepare(replace(PLAN, arms=[more], envs={"G-v0": Settings(7, 1)}, seeds=[3]), study)
    grown = json.loads((study / "study.json").read_text())
    assert grown["seeds"] == [1, 2, 3]
    assert grown["envs"] == ["E-v0", "n/F-v0", "G-v0"]
    assert grown["timesteps"] == {"E-v0": 100, "n/F-v0": 200, "G-v0": 7}
    assert grown["arms"]["a"] == config["arms"]["a"]
    assert grown["arms"]["c"]["hyperparams"] == {"G-v0": {"tau": 0.3}}


def test_full_stays_the_base_of_an_ablation(tmp_path: Path) -> None:
    arms = [Arm(name, "td3x", "", {"E-v0": {}}) for name in ("no-delay", "full", "no-replay")]
    study = replace(PLAN, kind="ablation", envs={"E-v0": Settings(100, 5)})
    prepare(replace(study, arms=arms[:1]), tmp_path)
    prepare(replace(study, arms=arms[1:]), tmp_path)
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
    for arm in PLAN.arms:
        assert yaml.safe_load((study / f"hyperparams/{arm.name}.yml").read_text()) == arm.hyperparams


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"kind": "compare"}, "kind was 'sweep' and is 'compare'"),
        ({"envs": {"E-v0": Settings(101, 5)}}, "timesteps.E-v0 was 100 and is 101"),
        ({"envs": {"E-v0": Settings(100, 6)}}, "evaluation.freq.E-v0 was 5 and is 6"),
        ({"eval_episodes": 3}, "evaluation.episodes was 10 and is 3"),
        ({"device": "cuda"}, "device was 'cpu' and is 'cuda'"),
        ({"arms": [Arm("b", "tqc", "", {"E-v0": {"net": [4, 4]}})]}, "arms.b.algo was 'sac' and is 'tqc'"),
        (
            {"arms": [Arm("a", "td3x", "", {"E-v0": {"tau": 0.5}})]},
            "arms.a.hyperparams.E-v0.tau was 0.1 and is 0.5",
        ),
        (
            {"arms": [Arm("a", "td3x", "", {"E-v0": {"tau": 0.1, "gamma": 0.9}})]},
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
        changed = replace(PLAN, arms=[Arm(name, "td3x", f"{value}", {"E-v0": {"tau": value}})])
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


def test_a_finished_run_is_this_one(tmp_path: Path) -> None:
    run = runs_of(PLAN, tmp_path)[0]
    assert not run.is_finished()
    write(tmp_path, make_record("a", "E-v0", 1, [1.0], timesteps=100))
    assert run.is_finished()
    write(tmp_path, make_record("a", "E-v0", 1, [1.0], timesteps=50))
    with pytest.raises(ValueError, match="is another one") as info:
        run.is_finished()
    assert str(run.folder) in str(info.value)
