"""The report of a study: CSV, HTML and Markdown, of whole studies and of parts."""

import csv
import html.parser
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from PIL import Image
from study_folders import make_record, write, write_plausible_study, write_study

from sb3_td3x.studies import bootstrap, report
from sb3_td3x.studies.arms import ablation_arms
from sb3_td3x.studies.bootstrap import Estimate
from sb3_td3x.studies.document import Bullets, Heading, Paragraph, Table, to_html, to_markdown
from sb3_td3x.studies.figures import _DPI, _STYLE, _WIDTH, Figures, shorten, time_unit
from sb3_td3x.studies.records import ValueEstimate
from sb3_td3x.studies.report import write_report
from sb3_td3x.studies.statistics import Curve


@pytest.fixture(autouse=True)
def short_bootstrap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bootstrap, "N_BOOTSTRAP", 50)


class Page(html.parser.HTMLParser):
    """What a page says and what it would load."""

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
    """Three arms in two envs, of which one run has failed, one was never tried, and one arm has one seed."""
    scores = {
        "Pendulum-v1": {
            "full": {1: [-100.1, -200.0], 2: [-120.0, -140.0], 3: [-150.0, -150.0]},
            "no-delay": {1: [-300.0, -300.0], 2: [-130.0, -150.0]},
            "ddpg": {1: [-1000.0, -1200.0]},
        },
        "LunarLanderContinuous-v3": {"full": {1: [200.0], 2: [250.0], 3: [270.0]}, "no-delay": {1: [100.0], 2: [0.0]}},
    }
    folder = write_study(tmp_path_factory.mktemp("studies") / "partial", scores, seeds=[1, 2, 3])
    write(folder, make_record("ddpg", "Pendulum-v1", 1, [-1000.0, -1200.0], best_returns=None, value_estimates=None))
    (folder / "failures").mkdir()
    (folder / "failures" / "ddpg-Pendulum-v1-2.log").write_text("$ a command\nRuntimeError: <out> of `memory`\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "N_BOOTSTRAP", 50)
        assert write_report(folder, gifs=False) == folder / "report" / "report.html"
    return folder


def test_page_loads_nothing(study: Path):
    page = Page((study / "report" / "report.html").read_text())
    assert all(link.startswith(("data:image/png;base64,", "data:,", "#")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.anchors
    assert not page.tags & {"script", "iframe", "object", "embed", "video"}
    assert page.alts
    assert all(page.alts)
    # Pictures of both envs and of all of them together
    assert len(page.alts) == 2 * 8 + 2


def test_page_says_what_is_missing(study: Path):
    text = Page((study / "report" / "report.html").read_text()).text
    assert "8 of 13" not in text
    assert "11 of 15 runs have finished" in text
    assert "4 of 15 runs have not finished" in text
    assert "Pendulum-v1, no-delay: seed 3" in text
    assert "Pendulum-v1, ddpg: seeds 2, 3" in text
    assert "failures/ddpg-Pendulum-v1-2.log: RuntimeError: <out> of 'memory'" in text
    assert "1 seed, no interval" in text
    assert "One seed, and so no interval: ddpg." in text
    assert "Left out, since they have none: ddpg." in text
    assert "Without a Q critic: ddpg." in text
    assert "in LunarLanderContinuous-v2, an older version of the env" in text
    assert "A processor, 2 cores" in text


def test_markdown_has_the_same(study: Path):
    folder = study / "report"
    text = (folder / "report.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 18
    assert all((folder / picture).is_file() for picture in pictures)
    assert {picture.partition("/")[2] for picture in pictures} == {p.name for p in (folder / "pictures").iterdir()}
    assert "| full | 3 | 6 | -143.3 |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.endswith("|") for row in rows)


def test_pictures_are_of_one_width(study: Path):
    for path in (study / "report" / "pictures").iterdir():
        with Image.open(path) as image:
            assert image.size[0] == 1080
            assert image.size[1] < 1500


def test_tables(study: Path):
    folder = study / "report"
    runs = read_csv(folder / "runs.csv")
    assert len(runs) == 11
    assert list(runs[0])[:5] == ["env", "arm", "algo", "seed", "timesteps"]
    first = next(run for run in runs if (run["env"], run["arm"], run["seed"]) == ("Pendulum-v1", "full", "1"))
    assert float(first["final_mean"]) == np.mean([-100.1, -200.0])
    assert (first["n_episodes"], first["n_best_episodes"], first["cores"]) == ("2", "2", "2")
    ddpg = next(run for run in runs if run["arm"] == "ddpg")
    assert (ddpg["n_best_episodes"], ddpg["best_mean"]) == ("0", "")

    returns = read_csv(folder / "returns.csv")
    assert [row["return"] for row in returns[:3]] == ["-100.1", "-200.0", "-99.1"]
    assert [row["agent"] for row in returns[:3]] == ["last", "last", "best"]
    assert len(read_csv(folder / "evaluations.csv")) == 2 * (6 + 4 + 2 + 3 + 2)
    assert len(read_csv(folder / "value_estimates.csv")) == 2 * 10

    statistics = read_csv(folder / "statistics.csv")
    assert list(statistics[0]) == [
        *("env", "arm", "against", "statistic", "timesteps", "value", "low", "high", "n_seeds", "n_episodes")
    ]
    by_key = {
        tuple(row[name] for name in ("env", "arm", "against", "statistic", "timesteps")): row for row in statistics
    }
    assert len(by_key) == len(statistics)
    iqm = by_key["Pendulum-v1", "full", "", "iqm", ""]
    assert float(iqm["value"]) == np.mean([-150.05, -130.0, -150.0])
    assert (iqm["n_seeds"], iqm["n_episodes"]) == ("3", "6")
    lone = by_key["Pendulum-v1", "ddpg", "", "iqm", ""]
    assert (lone["value"], lone["low"], lone["high"], lone["n_seeds"]) == ("-1100.0", "", "", "1")
    assert by_key["Pendulum-v1", "no-delay", "full", "probability_of_improvement", ""]["value"] == str(2 / 6)
    assert by_key["Pendulum-v1", "full", "", "over_estimation", "20000"]["value"] == "7.0"
    # 0 is random, 1 the zoo's best
    normalized = float(by_key["all", "full", "", "normalized_iqm", ""]["value"])
    assert 0.8 < normalized < 1.1


def test_second_report_replaces_the_first(study: Path):
    pictures = study / "report" / "pictures"
    (pictures / "old.png").write_bytes(b"")
    before = (study / "report" / "report.html").read_bytes()
    write_report(study, gifs=False)
    assert not (pictures / "old.png").exists()
    assert (study / "report" / "report.html").read_bytes() == before


def test_one_run(tmp_path: Path):
    study = write_study(tmp_path / "one", {"Mine/Env-v0": {"full": {1: [1.0]}}}, seeds=[1])
    write(study, make_record("full", "Mine/Env-v0", 1, [1.0], value_estimates=None))
    text = Page(write_report(study, gifs=False).read_text()).text
    assert "1 of 1 run has finished" in text
    assert "no arm has a Q critic" in text
    assert "All envs together" not in text
    assert "What is missing" not in text


def test_many_arms(tmp_path: Path):
    scores = {"Pendulum-v1": {f"arm-{idx}": {1: [float(-idx)], 2: [float(-idx)]} for idx in range(15)}}
    study = write_study(tmp_path / "many", scores, seeds=[1, 2])
    text = Page(write_report(study, gifs=False).read_text()).text
    assert "Curves and episodes are shown of 12 arms" in text
    assert text.count("arm-14") >= 4


@pytest.fixture(scope="module")
def all_64() -> list[str]:
    """The names of all arms of the largest ablation."""
    names = [arm.name for arm in ablation_arms(["BipedalWalker-v3"], all_64=True)]
    assert len(names) == 51
    return names


def test_labels_of_all_combinations_are_told_apart(all_64: list[str], tmp_path: Path):
    for length, labels in Figures(tmp_path, all_64)._labels.items():
        assert labels.keys() == set(all_64)
        assert len(set(labels.values())) == 51
        assert max(map(len, labels.values())) <= length
        assert labels["stochastic-policy"] == "stochastic-policy"


@pytest.mark.parametrize("n_arms", [9, 12])
@pytest.mark.parametrize("differ", [False, True])
def test_titles_of_panels_do_not_run_into_each_other(
    all_64: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_arms: int, differ: bool
):
    boxes = []

    def measure(figures: Figures, name: str, height: float, draw: Callable[[Figure], None]) -> None:
        with rc_context(_STYLE):
            figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
            canvas = FigureCanvasAgg(figure)
            draw(figure)
            canvas.draw()
        titles = {axes.get_title("left") for axes in figure.axes}
        boxes.extend(text.get_window_extent() for text in figure.findobj(Text) if text.get_text() in titles)

    monkeypatch.setattr(Figures, "_save", measure)
    x, y = np.array([1, 2]), np.zeros(2)
    # Names of one to five parts
    arms = all_64[4::4][-n_arms:]
    curves = {arm: Curve(x, y[None], Estimate(y, y, y, 1 + differ * (idx % 2))) for idx, arm in enumerate(arms)}
    handles = [Line2D([], [], label="a line")]
    Figures(tmp_path, all_64)._panels("a", curves, lambda axes, arm: None, handles, "Return")
    assert len(boxes) == n_arms
    for row in {box.y0 for box in boxes}:
        beside = sorted((box.x0, box.x1) for box in boxes if box.y0 == row)
        gaps = [start - end for (_, end), (start, _) in itertools.pairwise([*beside, (_WIDTH * _DPI, 0)])]
        assert min(gaps) > 0, beside


def test_nothing_finished(tmp_path: Path):
    study = write_study(tmp_path / "empty", {"Pendulum-v1": {"full": {}}}, seeds=[1])
    with pytest.raises(ValueError, match="nothing to report"):
        write_report(study)
    assert not (study / "report").exists()


def test_agents_that_cannot_be_played(tmp_path: Path):
    study = write_study(tmp_path / "gone", {"Pendulum-v1": {"full": {1: [1.0]}}}, seeds=[1])
    text = Page(write_report(study).read_text()).text
    assert "Could not be played" in text
    assert "full: " in text.partition("Could not be played")[2]


def test_critic_that_diverged(tmp_path: Path):
    """Its points are left out and named; all else is there."""
    values = [ValueEstimate(10_000, 1.0, 2.0, 10), ValueEstimate(20_000, math.inf, 2.0, 10)]
    scores = {"Pendulum-v1": {"full": {1: [1.0], 2: [2.0]}, "hot": {1: [1.0], 2: [2.0]}, "hotter": {1: [1.0]}}}
    study = write_study(tmp_path / "diverged", scores, seeds=[1, 2])
    write(study, make_record("hot", "Pendulum-v1", 2, [2.0], value_estimates=values))
    nan = [ValueEstimate(10_000, math.nan, 2.0, 10), ValueEstimate(20_000, -math.inf, 2.0, 10)]
    write(study, make_record("hotter", "Pendulum-v1", 1, [1.0], value_estimates=nan))
    text = Page(write_report(study, gifs=False).read_text()).text
    assert "hot, seed 2: step 20,000" in text
    assert "hotter, seed 1: step 10,000, 20,000" in text
    estimates = [row for row in read_csv(study / "report" / "statistics.csv") if row["statistic"] == "over_estimation"]
    assert [(row["arm"], row["timesteps"]) for row in estimates] == [
        ("full", "10000"),
        ("full", "20000"),
        ("hot", "10000"),
    ]


def test_report_that_fails_leaves_the_one_before(study: Path, monkeypatch: pytest.MonkeyPatch):
    before = {path: path.read_bytes() for path in (study / "report").rglob("*") if path.is_file()}
    monkeypatch.setattr(report, "to_html", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(study, gifs=False)
    assert {path: path.read_bytes() for path in (study / "report").rglob("*") if path.is_file()} == before
    assert {path.name for path in study.iterdir()} >= {"report", "study.json"}
    assert not (study / ".report").exists()


def test_plausible_study(tmp_path: Path):
    study = write_plausible_study(tmp_path / "plausible", 3, ["Pendulum-v1"], [1, 2])
    assert "AMD EPYC" in Page(write_report(study, gifs=False).read_text()).text


def test_texts_are_escaped(tmp_path: Path):
    blocks = [Heading("a < b"), Paragraph("`x_1 | y` & <b>"), Bullets(["*c*"]), Table(["a|b"], [["_d_"]], note="e#f")]
    page = Page(to_html("A & B", blocks))
    assert "x_1 | y & <b>" in page.text
    assert "a < b" in page.text
    assert "b" not in page.tags
    markdown = to_markdown("A", blocks, tmp_path)
    assert r"`x_1 \| y` & \<b\>" in markdown
    assert r"- \*c\*" in markdown
    assert r"| a\|b |" in markdown
    assert r"| \_d\_ |" in markdown


def test_names_and_units():
    labels = {"short": "short", "learning_rate=0.001,gamma=0.99": "learn…=0.99", "no-replay+no-delay": "no-re+no-de"}
    assert shorten(list(labels), 11) == labels
    # Initials, where parts would look the same; numbers, where nothing else tells names apart
    assert shorten(["no-replay+no-delay+no-targets"], 11) == {"no-replay+no-delay+no-targets": "nr+nd+nt"}
    assert shorten(["lr0.001+tau1", "lr0.002+tau1"], 8) == {"lr0.001+tau1": "lr…au1#1", "lr0.002+tau1": "lr…au1#2"}
    assert time_unit(59.0) == ("seconds", 1.0)
    assert time_unit(600.0) == ("minutes", 60.0)
    assert time_unit(9000.0) == ("hours", 3600.0)


@pytest.mark.slow
def test_animation_of_the_best_agent(tmp_path: Path):
    study = write_study(tmp_path / "study", {"Pendulum-v1": {"full": {1: [-900.0]}}}, seeds=[1])
    # The zoo numbers the first run of a log folder 1, as the seed
    options = "--algo td3x --env Pendulum-v1 --seed 1 -n 300 --eval-freq 150 --eval-episodes 1 --num-threads 1"
    record = study / "full" / "td3x" / "Pendulum-v1_1" / "run.json"
    content = record.read_bytes()
    record.unlink()
    record.parent.rmdir()
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "rl_zoo3.train",
            *options.split(),
            "-f",
            study / "full",
            "-params",
            "learning_starts:100",
        ],
        cwd=tmp_path,
        env={**os.environ, "SDL_VIDEODRIVER": "dummy"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    record.write_bytes(content)
    page = Page(write_report(study).read_text())
    assert "Could not be played" not in page.text
    assert "full: seed 1, best agent of the evaluations, mean return -899.0; this episode" in page.text
    assert sum(link.startswith("data:image/gif;base64,") for link in page.links) == 1
    path = study / "report" / "pictures" / "Pendulum-v1-full.gif"
    assert path.stat().st_size < 1_000_000
    with Image.open(path) as image:
        assert image.n_frames > 30
