"""
The report of a study: Markdown from the template ``report.md.jinja``, the same as one HTML page that opens offline,
pictures, and the statistics as CSV.
"""

import base64
import html
import json
import re
import shutil
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import markdown  # type: ignore[import-untyped]
import pandas as pd  # type: ignore[import-untyped]

from sb3_td3x.studies import plots
from sb3_td3x.studies.plan import env_file_name
from sb3_td3x.studies.reference import references
from sb3_td3x.studies.results import Results, read_results
from sb3_td3x.studies.statistics import (
    ALL_ENVS,
    MIN_SEEDS,
    MIN_SEEDS_IQM,
    N_BOOTSTRAP,
    normalized_scores,
    study_statistics,
)

# The lines of more arms cannot be told apart
_MAX_DRAWN = 12
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: 60rem; font: 16px/1.5 system-ui, sans-serif; }}
img {{ max-width: 100%; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: .85rem; }}
th, td {{ padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #d4d4d4; }}
code {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
{contents}
{body}
</body>
</html>
"""


def write_report(study: Path) -> Path:
    """
    Write the report of a study into its folder ``report``, and replace an earlier one.

    :param study: folder of a study, finished or not
    :return: the page, ``report.html``
    :raises ValueError: this is no study's folder, a file in it is broken, or no run has finished yet
    """
    results = read_results(study)
    # Takes the place of an earlier report when it is complete
    folder = study / ".report"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        (folder / "pictures").mkdir(parents=True)
        statistics = study_statistics(results, references())
        results.runs.to_csv(folder / "runs.csv", index=False)
        # Six digits are enough to compare
        statistics.to_csv(folder / "statistics.csv", index=False, float_format="%.6g")
        text = _render(results, statistics, folder)
        (folder / "report.md").write_text(text, encoding="utf-8")
        (folder / "report.html").write_text(_to_html(text, folder), encoding="utf-8")
        shutil.rmtree(study / "report", ignore_errors=True)
        folder.rename(study / "report")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return study / "report" / "report.html"


def _render(results: Results, statistics: pd.DataFrame, folder: Path) -> str:
    """Draw the pictures, and return the report as Markdown."""
    pictures = folder / "pictures"
    drawn = list(results.plan.arms)[:_MAX_DRAWN]
    colors = plots.arm_colors(list(results.plan.arms))
    envs = list(results.runs["env"].unique())
    of_all = statistics[statistics["env"] == ALL_ENVS]
    if normalized := normalized_scores(results, references()) if len(envs) > 1 else {}:
        path, label = pictures / f"{ALL_ENVS}-scores.png", "Normalized score"
        plots.draw_scores(None, of_all, "normalized_mean", colors, path, label)
        of_drawn = {arm: scores for arm, scores in normalized.items() if arm in drawn}
        plots.draw_profiles(of_drawn, colors, pictures / f"{ALL_ENVS}-profiles.png", f"{label} τ")
    sections = [_env_section(results, statistics, env, drawn, colors, pictures) for env in envs]
    missing: dict[str, list[str]] = {}
    for run in results.missing:
        missing.setdefault(f"{run.env}, {run.arm}: seed ", []).append(str(run.seed))
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"text": escape, "code": _code, "table": _table, "number": _number}
    source = resources.files("sb3_td3x.studies").joinpath("report.md.jinja").read_text(encoding="utf-8")
    rendered = environment.from_string(source).render(
        name=results.study.resolve().name,
        results=results,
        plan=results.plan,
        missing=[name + ", ".join(seeds) for name, seeds in missing.items()],
        arms=pd.DataFrame(
            {
                "arm": arm.name,
                "algorithm": arm.algo,
                "what it is": escape(arm.description),
                "envs": ", ".join(arm.hyperparams),
            }
            for arm in results.plan.arms.values()
        ),
        drawn=drawn,
        envs=sections,
        overall=_score_table(results, of_all, "normalized_") if len(of_all) else None,
        references=references(),
        versions=_versions(results),
        settings=json.dumps({name: value for name, value in asdict(results.plan).items() if name != "arms"}),
        min_seeds=MIN_SEEDS,
        n_bootstrap=N_BOOTSTRAP,
        pictures={path.name for path in pictures.iterdir()},
    )
    # Conditions in the template leave empty lines
    return re.sub(r"\n{3,}", "\n\n", rendered)


def _env_section(
    results: Results, statistics: pd.DataFrame, env: str, drawn: list[str], colors: plots.Colors, pictures: Path
) -> dict[str, Any]:
    """Draw the pictures of an env, and return what the template says about it."""
    statistics = statistics[statistics["env"] == env]
    shown = statistics[statistics["arm"].isin(drawn)]
    runs = results.runs[results.runs["env"] == env]
    by_arm = runs.groupby("arm", sort=False)
    prefix = str(pictures / env_file_name(env))
    plots.draw_scores(runs, statistics, "mean", colors, Path(f"{prefix}-scores.png"), "Score")
    if (shown["statistic"] == "learning_curve").any():
        plots.draw_learning_curves(shown, colors, Path(f"{prefix}-learning.png"), env)
    if (shown["statistic"] == "over_estimation").any():
        plots.draw_over_estimation(shown, colors, Path(f"{prefix}-over-estimation.png"))
    if profiled := {arm: rows["score"].to_numpy()[None] for arm, rows in by_arm if arm in drawn}:
        plots.draw_profiles(profiled, colors, Path(f"{prefix}-profiles.png"), "Score τ")
    seeds, bars = by_arm["seed"].nunique(), runs["reward_threshold"].dropna()
    machines = runs[["processor", "cores"]].drop_duplicates().itertuples()
    return {
        "name": env,
        "file": env_file_name(env),
        "bar": float(bars.iloc[0]) if len(bars) else None,
        "scores": _score_table(results, statistics),
        "few_seeds": [f"{arm} ({count})" for arm, count in seeds.items() if count < MIN_SEEDS],
        "value_table": _value_table(statistics),
        "speed": _speed_table(runs),
        "machines": sorted(f"{it.processor or 'unknown processor'}, {it.cores} cores" for it in machines),
    }


def _score_table(results: Results, statistics: pd.DataFrame, prefix: str = "") -> pd.DataFrame:
    """
    Return one row of statistics for each arm.

    :param prefix: of the statistics of normalized scores; the columns for one env are left out with it
    """
    single = statistics[statistics["timesteps"].isna()].set_index(["arm", "statistic"])
    rows = []
    for arm in single.index.get_level_values("arm").unique():
        of_arm = single.loc[arm]
        n_seeds = int(of_arm["n_seeds"].max())
        comparison = "the base" if arm == results.base else f"fewer than {MIN_SEEDS} seeds"
        row = {
            "arm": arm,
            "seeds": str(n_seeds),
            "mean [95% interval]": _estimate(of_arm, f"{prefix}mean"),
            "IQM [95% interval]": _estimate(of_arm, f"{prefix}iqm", "the mean" if n_seeds < MIN_SEEDS_IQM else ""),
            f"P(improves on {results.base})": _estimate(of_arm, "probability_of_improvement", comparison),
        }
        if not prefix:
            row["difference"] = _estimate(of_arm, "difference", comparison)
            row["solved"] = f"{of_arm.loc['solved', 'value']:.1%}" if "solved" in of_arm.index else "no bar"
            row["worst 5%"] = _estimate(of_arm, "worst_5_percent")
            row["best agents"] = _estimate(of_arm, "best_agents", "none")
        rows.append(row)
    return pd.DataFrame(rows)


def _value_table(statistics: pd.DataFrame) -> pd.DataFrame:
    """Return the values at the last point of each arm's training."""
    rows = []
    for arm, curve in statistics[statistics["statistic"] == "over_estimation"].groupby("arm", sort=False):
        last = curve["timesteps"].max()
        end = statistics[(statistics["arm"] == arm) & (statistics["timesteps"] == last)].set_index("statistic")
        row = {"arm": arm, "seeds": str(end.loc["over_estimation", "n_seeds"]), "env step": f"{int(last):,}"}
        for column in ("estimated_value", "monte_carlo_value", "over_estimation"):
            row[column.replace("_", " ")] = _estimate(end, column)
        rows.append(row)
    return pd.DataFrame(rows)


def _estimate(statistics: pd.DataFrame, name: str, missing: str = "") -> str:
    """Return an estimate and its interval as text, or what stands for an estimate that is left out."""
    if name not in statistics.index:
        return missing
    value, low, high = statistics.loc[name, ["value", "low", "high"]]
    return _number(value) if pd.isna(low) else f"{_number(value)} [{_number(low)}, {_number(high)}]"


def _speed_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return medians over the trainings that were not interrupted, with lowest and highest."""
    speeds = {"env steps/s": runs["timesteps"] / runs["training_seconds"], "minutes": runs["training_seconds"] / 60}
    table = pd.DataFrame({"arm": runs["arm"], **speeds}).dropna().groupby("arm", sort=False)
    ranges = table.agg(lambda it: f"{_number(it.median())} ({_number(it.min())} to {_number(it.max())})")
    return ranges.reset_index()


def _versions(results: Results) -> str:
    versions = pd.DataFrame([record.versions for record in results.records]).fillna("none")
    return ", ".join(f"{package} {' and '.join(sorted(set(versions[package])))}" for package in versions)


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.3g}"


def escape(text: str) -> str:
    """Escape a text for Markdown."""
    return re.sub(r"([\\`*_\[\]#|~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def _table(frame: pd.DataFrame) -> str:
    """Return a table of texts as Markdown."""
    lines = [frame.columns, ["---"] * len(frame.columns), *frame.to_numpy()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _to_html(text: str, folder: Path) -> str:
    """Return a page with the pictures inside."""

    def embed(match: re.Match[str]) -> str:
        data = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    converter = markdown.Markdown(extensions=["tables", "toc", "sane_lists"])
    body = re.sub(r'src="(pictures/[^"]+)"', embed, converter.convert(text))
    title = html.escape(text.partition("\n")[0].removeprefix("# "))
    # Written by the extension "toc"
    contents: str = converter.toc
    return _PAGE.format(title=title, contents=contents, body=body)
