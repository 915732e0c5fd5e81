"""The report of a study: Markdown, HTML, pictures and tables, of whole studies and of parts."""

import csv
import html.parser
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from study_folders import make_record, value_estimates, write, write_study

from sb3_td3x.studies import report, statistics
from sb3_td3x.studies.report import escape, write_report


@pytest.fixture(autouse=True)
def short_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "N_BOOTSTRAP", 50)


class Page(html.parser.HTMLParser):
    """Collect what a page says and what it would load."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.tags: set[str] = set()
        self.alts: list[str | None] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.links += [values[name] or "" for name in ("src", "href", "srcset", "data", "poster") if name in values]
        self.anchors |= {values["id"] or ""} if "id" in values else set()
        if tag == "img":
            self.alts.append(values.get("alt"))

    def handle_data(self, data: str) -> None:
        self.text += data


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three arms in two envs: one run has failed, one was never tried, and one arm has a single seed."""
    scores = {
        "Pendulum-v1": {
            "full": {1: [-100.1, -200.0], 2: [-120.0, -140.0], 3: [-150.0, -150.0]},
            "no-delay": {1: [-300.0, -300.0], 2: [-130.0, -150.0], 3: [-160.0, -170.0]},
            "ddpg": {1: [-1000.0, -1200.0]},
        },
        "LunarLanderContinuous-v3": {"full": {1: [200.0], 2: [250.0], 3: [270.0]}, "no-delay": {1: [100.0], 2: [0.0]}},
    }
    folder = write_study(tmp_path_factory.mktemp("studies") / "partial", scores, seeds=[1, 2, 3])
    write(folder, make_record("ddpg", "Pendulum-v1", 1, [-1000.0, -1200.0], best_returns=None, value_estimates=None))
    (folder / "failures").mkdir()
    (folder / "failures" / "ddpg-Pendulum-v1-2.log").write_text("$ a command\nRuntimeError: <out> of `memory`\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "N_BOOTSTRAP", 50)
        assert write_report(folder) == folder / "report" / "report.html"
    return folder


def test_page_loads_nothing(study: Path) -> None:
    page = Page((study / "report" / "report.html").read_text())
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.anchors
    assert not page.tags & {"script", "iframe", "object", "embed", "video"}
    assert page.alts
    assert all(page.alts)
    # Four of each env, and two of both
    assert len(page.alts) == 4 + 4 + 2


def test_page_says_what_is_missing(study: Path) -> None:
    text = Page((study / "report" / "report.html").read_text()).text
    assert "12 of 15 runs have finished" in text
    assert "LunarLanderContinuous-v3, no-delay: seed 3" in text
    assert "Pendulum-v1, ddpg: seed 2, 3" in text
    assert "failures/ddpg-Pendulum-v1-2.log: RuntimeError: <out> of 'memory'" in text
    assert "Intervals and comparisons need 3 seeds, so they are left out for ddpg (1)." in text
    assert "left out for no-delay (2)." in text
    assert "for LunarLanderContinuous-v2, an older version of the env" in text
    assert "A processor, 2 cores" in text


def test_markdown_has_all_pictures(study: Path) -> None:
    folder = study / "report"
    text = (folder / "report.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert {picture.partition("/")[2] for picture in pictures} == {p.name for p in (folder / "pictures").iterdir()}
    assert len(pictures) == 10
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.endswith("|") for row in rows)
    for path in (folder / "pictures").iterdir():
        with Image.open(path) as image:
            assert image.size[0] == 960
            assert image.size[1] < 1000


def test_estimators_are_named(study: Path) -> None:
    rows = (study / "report" / "report.md").read_text().splitlines()
    full = next(row for row in rows if row.startswith("| full | 3 | -143.3 "))
    # With three seeds there are no quarters to leave out
    assert "| the mean | the base | the base | 0.0% | -200.0 |" in full
    lone = next(row for row in rows if row.startswith("| ddpg | 1 |"))
    assert "| -1,100.0 | the mean | fewer than 3 seeds | fewer than 3 seeds |" in lone
    assert lone.endswith("| none |")


def test_tables(study: Path) -> None:
    folder = study / "report"
    runs = read_csv(folder / "runs.csv")
    assert len(runs) == 12
    first = next(run for run in runs if (run["env"], run["arm"], run["seed"]) == ("Pendulum-v1", "full", "1"))
    assert float(first["score"]) == np.mean([-100.1, -200.0])
    assert next(run for run in runs if run["arm"] == "ddpg")["best_agent_score"] == ""
    means = {(row["env"], row["arm"]): row for row in read_csv(folder / "statistics.csv") if row["statistic"] == "mean"}
    lone = means["Pendulum-v1", "ddpg"]
    assert [lone[column] for column in ("value", "low", "high", "n_seeds")] == ["-1100", "", "", "1"]
    assert means["Pendulum-v1", "full"]["value"] == f"{np.mean([-150.05, -130.0, -150.0]):.6g}"


def test_a_second_report_replaces_the_first(study: Path) -> None:
    pictures = study / "report" / "pictures"
    (pictures / "old.png").write_bytes(b"")
    before = (study / "report" / "report.html").read_bytes()
    write_report(study)
    assert not (pictures / "old.png").exists()
    assert (study / "report" / "report.html").read_bytes() == before


def test_a_report_that_fails_leaves_the_one_before(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in (study / "report").rglob("*") if path.is_file()}
    monkeypatch.setattr(report, "_to_html", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(study)
    assert {path: path.read_bytes() for path in (study / "report").rglob("*") if path.is_file()} == before
    assert not (study / ".report").exists()


def test_one_run(tmp_path: Path) -> None:
    study = write_study(tmp_path / "one", {"Mine/Env-v0": {"full": {1: [1.0]}}}, seeds=[1], reward_threshold=None)
    write(study, make_record("full", "Mine/Env-v0", 1, [1.0], value_estimates=None, reward_threshold=None))
    text = Page(write_report(study).read_text()).text
    assert "1 of 1 runs have finished" in text
    assert "no arm has a Q critic" in text
    assert "declares no bar" in text
    assert "All envs" not in text
    assert "Missing runs" not in text


def test_many_arms(tmp_path: Path) -> None:
    scores = {"Pendulum-v1": {f"arm-{idx}": {1: [float(-idx)], 2: [float(-idx)]} for idx in range(15)}}
    study = write_study(tmp_path / "many", scores, seeds=[1, 2])
    text = Page(write_report(study).read_text()).text
    assert "Curves and profiles show the first 12 arms" in text
    assert text.count("arm-14") >= 3


def test_nothing_finished(tmp_path: Path) -> None:
    study = write_study(tmp_path / "empty", {"Pendulum-v1": {"full": {}}}, seeds=[1])
    with pytest.raises(ValueError, match="nothing to report"):
        write_report(study)
    assert not (study / "report").exists()


def test_critics_that_diverged_are_left_out(tmp_path: Path) -> None:
    study = write_study(tmp_path / "diverged", {"Pendulum-v1": {"full": {1: [1.0]}, "hot": {1: [1.0]}}}, seeds=[1])
    hot = value_estimates((10_000, math.nan, 2.0), (20_000, math.inf, 2.0))
    write(study, make_record("hot", "Pendulum-v1", 1, [1.0], value_estimates=hot))
    rows = read_csv(write_report(study).parent / "statistics.csv")
    assert {row["arm"] for row in rows if row["statistic"] == "over_estimation"} == {"full"}


def test_interrupted_trainings_have_no_speed(tmp_path: Path) -> None:
    study = write_study(tmp_path / "speed", {"Pendulum-v1": {"full": {1: [1.0], 2: [2.0]}}}, seeds=[1, 2])
    write(study, make_record("full", "Pendulum-v1", 2, [2.0], training_seconds=None))
    report = write_report(study).with_name("report.md")
    assert "| full | 200.0 (200.0 to 200.0) | 1.7 (1.7 to 1.7) |" in report.read_text()
    write(study, make_record("full", "Pendulum-v1", 1, [1.0], training_seconds=None))
    write_report(study)


def test_texts_are_escaped(tmp_path: Path) -> None:
    study = write_study(tmp_path / "a_b_<c>", {"Pendulum-v1": {"full": {1: [1.0]}}}, seeds=[1])
    config = json.loads((study / "study.json").read_text())
    config["arms"]["full"]["description"] = "x_1 | <b>y</b> *z*"
    (study / "study.json").write_text(json.dumps(config))
    page = Page(write_report(study).read_text())
    assert "x_1 | <b>y</b> *z*" in page.text
    assert "Study a_b_<c>" in page.text
    assert "b" not in page.tags
    assert escape("a\nb | `c`") == "a b \\| \\`c\\`"
