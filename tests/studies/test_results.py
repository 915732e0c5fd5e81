"""What is read from a study's folder, and its figures."""

from pathlib import Path

import numpy as np
import pytest
from study_folders import make_record, write, write_study

from sb3_td3x.studies import bootstrap
from sb3_td3x.studies.records import Evaluations
from sb3_td3x.studies.reference import Reference, references
from sb3_td3x.studies.results import read_results
from sb3_td3x.studies.statistics import env_statistics, most_successful, overall_statistics


@pytest.fixture(autouse=True)
def short_bootstrap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bootstrap, "N_BOOTSTRAP", 200)


def test_missing_and_failed_runs(tmp_path: Path):
    scores = {"Pendulum-v1": {"full": {2: [1.0], 1: [1.0]}, "ddpg": {1: [2.0]}}}
    study = write_study(tmp_path / "study", scores, seeds=[1, 2, 3])
    failures = study / "failures"
    failures.mkdir()
    (failures / "ddpg-Pendulum-v1-2.log").write_text("a command\nTraceback\nValueError: NaN in the reward\n\n")
    # It has finished since, and this one has never belonged to the study
    (failures / "full-Pendulum-v1-1.log").write_text("old")
    (failures / "gone-Pendulum-v1-1.log").write_text("")
    results = read_results(study)
    assert results.name == "study"
    assert results.base == "full"
    assert [run.seed for run in results.records["Pendulum-v1"]["full"]] == [1, 2]
    assert [(run.arm, run.seed) for run in results.missing] == [("full", 3), ("ddpg", 2), ("ddpg", 3)]
    assert [failure.name for failure in results.failures] == [
        "failures/ddpg-Pendulum-v1-2.log",
        "failures/gone-Pendulum-v1-1.log",
    ]
    assert results.failures[0].reason == "ValueError: NaN in the reward"
    assert results.n_planned == 6


def test_refused_folders(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no study\.json"):
        read_results(tmp_path)
    study = write_study(tmp_path / "study", {"Pendulum-v1": {"full": {}}}, seeds=[1])
    with pytest.raises(ValueError, match="has no finished run yet"):
        read_results(study)
    (study / "failures").mkdir()
    (study / "failures" / "full-Pendulum-v1-1.log").write_text("broken")
    with pytest.raises(ValueError, match=r"1 failed: see .*failures"):
        read_results(study)
    (study / "study.json").write_text('{"envs": ["Pendulum-v1"]}')
    with pytest.raises(ValueError, match=r"study\.json is broken: it has no 'seeds'"):
        read_results(study)


def test_env_statistics(tmp_path: Path):
    full = {1: [0.0, 0.0], 2: [5.0, 15.0], 3: [20.0], 4: [900.0, 1100.0]}
    scores = {"Pendulum-v1": {"full": full, "other": {1: [30.0], 2: [0.0]}, "one": {3: [7.0]}}}
    study = write_study(tmp_path / "study", scores, seeds=[1, 2, 3, 4])
    # A run whose evaluations are at other steps, and one without values
    shifted = Evaluations([5_000, 20_000], [[1.0], [2.0]])
    write(study, make_record("other", "Pendulum-v1", 2, [0.0], evaluations=shifted))
    write(study, make_record("one", "Pendulum-v1", 3, [7.0], value_estimates=None, best_returns=None))
    statistics = env_statistics(read_results(study), "Pendulum-v1")

    assert statistics.scores["full"].tolist() == [0.0, 10.0, 20.0, 1000.0]
    assert statistics.iqm["full"].value[0] == 15.0
    assert statistics.mean["full"].value[0] == 257.5
    assert statistics.n_episodes("full") == 7
    assert 0.0 <= statistics.iqm["full"].low[0] < 15.0 < statistics.iqm["full"].high[0] <= 1000.0
    assert np.isnan(statistics.iqm["one"].low[0])
    assert statistics.best_scores["full"].tolist() == [1.0, 11.0, 21.0, 1001.0]
    assert statistics.best_scores["one"].size == 0
    # 30 beats three of four, 0 none and draws with one
    assert statistics.improvement["other"].value[0] == (3 + 0.5) / 8
    assert statistics.pairs[0, 1] == 1 - (3 + 0.5) / 8
    assert statistics.learning["full"].timesteps.tolist() == [10_000, 20_000]
    assert statistics.learning["full"].estimate.value.tolist() == [5.0, 15.0]
    assert statistics.learning["other"].timesteps.tolist() == [20_000]
    # Estimated -20 + seed against -25
    assert statistics.values["full"].difference.estimate.value.tolist() == [10.0, 7.5]
    assert list(statistics.values) == ["full", "other"]
    profile = statistics.profile.estimates["full"].value
    assert (profile[0], profile[-1]) == (1.0, 0.0)

    part = statistics.of(["other", "one"])
    assert part.arms == ["other", "one"]
    assert part.base is None
    assert part.pairs.tolist() == statistics.pairs[1:, 1:].tolist()
    assert list(part.profile.estimates) == ["other", "one"]


def test_statistics_without_the_base(tmp_path: Path):
    scores = {"Pendulum-v1": {"full": {}, "other": {1: [3.0], 2: [4.0]}}}
    statistics = env_statistics(read_results(write_study(tmp_path / "study", scores, seeds=[1, 2])), "Pendulum-v1")
    assert statistics.base is None
    assert statistics.improvement == {}
    assert statistics.arms == ["other"]


def test_overall_statistics(tmp_path: Path):
    scores = {
        "A-v0": {"full": {1: [0.0], 2: [10.0], 3: [99.0]}, "other": {1: [10.0]}, "half": {1: [1.0]}},
        "B-v0": {"full": {1: [-100.0], 2: [-50.0]}, "other": {1: [0.0], 2: [0.0]}, "half": {2: [1.0]}},
    }
    results = read_results(write_study(tmp_path / "study", scores, seeds=[1, 2, 3]))
    known = {
        "A-v0": Reference("A-v0", "A-v0", {}, random_score=0.0, zoo_score=10.0, zoo_algo="tqc"),
        "B-v0": Reference("B-v0", "B-v0", {}, random_score=-100.0, zoo_score=0.0, zoo_algo="tqc"),
    }
    overall = overall_statistics(results, known)
    # Seeds 1 and 2 have finished in both envs: normalized 0 and 1, 0 and 0.5
    assert overall.n_seeds == {"full": 2, "other": 1}
    assert overall.n_episodes == {"full": 4, "other": 2}
    assert overall.left_out == ["half"]
    assert overall.iqm["full"].value[0] == 0.25
    assert overall.iqm["other"].value[0] == 1.0
    assert np.isnan(overall.iqm["other"].low[0])
    assert overall.improvement["other"].value[0] == (0.75 + 1.0) / 2

    unknown = overall_statistics(results, {"A-v0": known["A-v0"]})
    assert unknown.unknown == ["B-v0"]
    assert unknown.iqm == {}
    assert unknown.improvement["other"].value[0] == (0.75 + 1.0) / 2


def test_most_successful(tmp_path: Path):
    scores = {"A-v0": {"base": {1: [0.0]}, "a": {1: [1.0]}, "b": {1: [3.0]}, "c": {1: [2.0]}}}
    results = read_results(write_study(tmp_path / "study", scores, seeds=[1]))
    assert most_successful([env_statistics(results, "A-v0")], "base", 3) == ["base", "b", "c"]


def test_references():
    known = references()
    assert set(known) >= {"Pendulum-v1", "LunarLanderContinuous-v3", "BipedalWalker-v3", "BipedalWalkerHardcore-v3"}
    assert known["LunarLanderContinuous-v3"].published_as == "LunarLanderContinuous-v2"
    for reference in known.values():
        assert reference.random_score < reference.zoo_score
        assert set(reference.curves) >= {"td3", "sac", "tqc"}
        for timesteps, returns in reference.curves.values():
            assert len(timesteps) == len(returns)
            assert np.all(np.diff(timesteps) > 0)
