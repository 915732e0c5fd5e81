"""
The report of a study: Markdown from the template ``report.md.jinja``, the same as one HTML page that opens offline,
pictures, and all statistics as JSON and CSV.
"""

import base64
import html
import json
import re
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import markdown  # type: ignore[import-untyped]
import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies import plots
from sb3_td3x.studies.reference import Reference, references
from sb3_td3x.studies.results import Results, env_file_name, read_results
from sb3_td3x.studies.statistics import (
    ALL_ENVS,
    MIN_SEEDS,
    MIN_SEEDS_IQM,
    N_BOOTSTRAP,
    most_successful,
    normalized_scores,
    performance_profiles,
    study_statistics,
)

_KINDS = {"ablation": "An ablation", "compare": "A comparison of algorithms", "sweep": "A sweep of hyperparameters"}
# The lines of more arms cannot be told apart
_MAX_DRAWN = 12
# The browser loads nothing and runs nothing
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
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
        _write_tables(results, statistics, folder)
        text = _render(results, statistics, folder)
        for name, content in (("report.md", text), ("report.html", _to_html(text, folder))):
            with atomic_write(folder / name) as file:
                file.write(content.encode())
        shutil.rmtree(study / "report", ignore_errors=True)
        folder.rename(study / "report")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return study / "report" / "report.html"


def _write_tables(results: Results, statistics: pd.DataFrame, folder: Path) -> None:
    for name in ("runs", "returns", "evaluations", "value_estimates"):
        getattr(results, name).to_csv(folder / f"{name}.csv", index=False)
    statistics.to_csv(folder / "statistics.csv", index=False)
    rows = statistics.astype(object).where(statistics.notna(), None).to_numpy().tolist()
    content = {
        "settings": results.config,
        "versions": _versions(results),
        "machines": _machines(results.runs),
        "columns": list(statistics.columns),
        "rows": [],
    }
    # Six digits are enough to compare, and keep a file that is committed small
    lines = ",\n".join(
        json.dumps([float(f"{cell:.6g}") if isinstance(cell, float) else cell for cell in row]) for row in rows
    )
    text = json.dumps(content, indent=1).replace('"rows": []', f'"rows": [\n{lines}\n]')
    (folder / "statistics.json").write_text(text + "\n")


def _render(results: Results, statistics: pd.DataFrame, folder: Path) -> str:
    """Draw the pictures, and return the report as Markdown."""
    drawn = results.arms
    if len(drawn) > _MAX_DRAWN:
        drawn = most_successful(statistics, results.base, _MAX_DRAWN)
    colors = plots.arm_colors([*drawn, *(arm for arm in results.arms if arm not in drawn)])
    envs = list(results.runs["env"].unique())
    scales, overall = [], None
    if len(envs) > 1:
        overall = _score_table(results, statistics[statistics["env"] == ALL_ENVS], "normalized_")
        if normalized := normalized_scores(results, references()):
            scales = [_scale(references()[env]) for env in envs]
            _draw_overall(normalized, statistics[statistics["env"] == ALL_ENVS], drawn, colors, folder / "pictures")
    missing: dict[str, list[str]] = {}
    for run in results.missing:
        missing.setdefault(f"{run.env}, {run.arm}: seed ", []).append(str(run.seed))
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"text": escape, "code": _code, "table": _table}
    source = resources.files("sb3_td3x.studies").joinpath("report.md.jinja").read_text(encoding="utf-8")
    rendered = environment.from_string(source).render(
        name=results.study.resolve().name,
        kind=_KINDS[results.config["kind"]],
        results=results,
        n_planned=len(results.records) + len(results.missing),
        missing=[name + ", ".join(seeds) for name, seeds in missing.items()],
        arms=_arms_table(results),
        drawn=drawn,
        envs=[_env_section(results, statistics, env, drawn, colors, folder / "pictures") for env in envs],
        overall=overall,
        scales=scales,
        unknown=[env for env in envs if env not in references()],
        runs=_runs_table(results),
        versions=", ".join(f"{package} {version}" for package, version in _versions(results).items()),
        settings=json.dumps({name: value for name, value in results.config.items() if name != "arms"}),
        min_seeds=MIN_SEEDS,
        n_bootstrap=N_BOOTSTRAP,
    )
    # Conditions in the template leave empty lines
    return re.sub(r"\n{3,}", "\n\n", rendered)


def _env_section(
    results: Results, statistics: pd.DataFrame, env: str, drawn: list[str], colors: plots.Colors, pictures: Path
) -> dict[str, Any]:
    """Draw the pictures of an env, and return what the template says about it."""
    statistics = statistics[statistics["env"] == env]
    runs = results.runs[results.runs["env"] == env]
    evaluations = results.evaluations[results.evaluations["env"] == env]
    shown = statistics[statistics["arm"].isin(drawn)]
    name = env_file_name(env)
    reference = references().get(env)
    starts = runs.groupby("arm", sort=False)["learning_starts"].min().dropna()
    has = {
        statistic: bool((shown["statistic"] == statistic).any()) for statistic in ("learning_curve", "over_estimation")
    }
    improved = statistics[statistics["statistic"] == "probability_of_improvement"]
    profiled = {arm: rows["score"].to_numpy()[:, None] for arm, rows in runs.groupby("arm", sort=False) if arm in drawn}

    plots.draw_scores(runs, statistics, "mean", colors, pictures / f"{name}-scores.png", "Score")
    if has["learning_curve"]:
        common_start = starts.min() if set(starts.index) >= set(shown["arm"]) else None
        plots.draw_learning_curves(shown, colors, pictures / f"{name}-learning.png", common_start, reference)
        plots.draw_learning_panels(
            evaluations, shown, results.base, colors, pictures / f"{name}-learning-arms.png", starts.to_dict()
        )
    if profiled:
        profiles = performance_profiles(profiled)
        plots.draw_profiles(*profiles, colors, pictures / f"{name}-profiles.png", "Score τ")
    if len(improved):
        plots.draw_improvement(statistics, colors, pictures / f"{name}-improvement.png")
    if has["over_estimation"]:
        plots.draw_over_estimation(shown, colors, pictures / f"{name}-over-estimation.png")
    seeds = runs.groupby("arm", sort=False)["seed"].nunique()
    bars = runs["reward_threshold"].dropna()
    estimates = results.value_estimates[results.value_estimates["env"] == env]
    return {
        "name": env,
        "file": name,
        "timesteps": int(runs["timesteps"].iloc[0]),
        "bar": float(bars.iloc[0]) if len(bars) else None,
        "scores": _score_table(results, statistics),
        "few_seeds": [f"{arm} ({count})" for arm, count in seeds.items() if count < MIN_SEEDS],
        "has_curves": has["learning_curve"],
        "reference": reference.published_as if reference else None,
        "has_profiles": bool(profiled),
        "has_improvement": len(improved) > 0,
        "has_value_curves": has["over_estimation"],
        "value_table": _value_table(statistics) if len(estimates) else None,
        "infinite": _infinite_values(estimates),
        "speed": _speed_table(runs),
        "machines": _machines(runs),
    }


def _draw_overall(
    normalized: Mapping[str, np.ndarray],
    statistics: pd.DataFrame,
    drawn: list[str],
    colors: plots.Colors,
    pictures: Path,
) -> None:
    label = "Normalized score"
    nothing = pd.DataFrame({"arm": [], "score": []})
    plots.draw_scores(nothing, statistics, "normalized_mean", colors, pictures / "all-scores.png", label)
    profiles = performance_profiles({arm: scores for arm, scores in normalized.items() if arm in drawn})
    plots.draw_profiles(*profiles, colors, pictures / "all-profiles.png", f"{label} τ")


def _arms_table(results: Results) -> pd.DataFrame:
    arms = results.config["arms"]
    return pd.DataFrame(
        {
            "arm": arm,
            "algorithm": settings["algo"],
            "what it is": escape(settings["description"]),
            "envs": ", ".join(settings["hyperparams"]),
        }
        for arm, settings in arms.items()
    )


def _score_table(results: Results, statistics: pd.DataFrame, prefix: str = "") -> pd.DataFrame:
    """Return one row of statistics for each arm."""
    single = statistics[statistics["timesteps"].isna()].set_index(["arm", "statistic"])
    with_solved = "solved" in single.index.get_level_values("statistic")
    rows = []
    for arm in single.index.get_level_values("arm").unique():
        of_arm = single.loc[arm]
        n_seeds = int(of_arm["n_seeds"].max())
        few_seeds = "the mean" if not prefix and n_seeds < MIN_SEEDS_IQM else ""
        comparison = "the base" if arm == results.base else "fewer than 3 seeds"
        row = {"arm": arm, "seeds": str(n_seeds)}
        row["mean [95% interval]"] = _estimate(of_arm, f"{prefix}mean", "")
        row["IQM [95% interval]"] = _estimate(of_arm, f"{prefix}iqm", few_seeds)
        if not prefix:
            row["difference"] = _estimate(of_arm, "difference", comparison)
        row[f"P(improves on {results.base})"] = _estimate(of_arm, "probability_of_improvement", comparison, 2)
        if with_solved:
            row["solved"] = f"{of_arm.loc['solved', 'value']:.1%}" if "solved" in of_arm.index else ""
        if not prefix:
            row["worst 5%"] = _estimate(of_arm, "worst_5_percent", "")
            row["best agents"] = _estimate(of_arm, "best_agents", "none")
        rows.append(row)
    return pd.DataFrame(rows)


def _estimate(statistics: pd.DataFrame, name: str, missing: str, digits: int | None = None) -> str:
    """Return an estimate and its interval as text, or what stands for an estimate that is left out."""
    if name not in statistics.index:
        return missing
    value, low, high = statistics.loc[name, ["value", "low", "high"]]
    text = _number(value, digits)
    return text if pd.isna(low) else f"{text} [{_number(low, digits)}, {_number(high, digits)}]"


def _value_table(statistics: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for arm, curve in statistics[statistics["statistic"] == "over_estimation"].groupby("arm", sort=False):
        last = curve["timesteps"].max()
        end = statistics[(statistics["arm"] == arm) & (statistics["timesteps"] == last)].set_index("statistic")
        row = {"arm": arm, "seeds": str(end.loc["over_estimation", "n_seeds"]), "env step": f"{int(last):,}"}
        row["estimated"] = _number(end.loc["estimated_value", "value"])
        row["return"] = _number(end.loc["monte_carlo_value", "value"])
        rows.append({**row, "over-estimation [95% interval]": _estimate(end, "over_estimation", "")})
    return pd.DataFrame(rows)


def _infinite_values(estimates: pd.DataFrame) -> list[str]:
    infinite = estimates[~np.isfinite(estimates[["estimated", "monte_carlo"]].astype(float)).all(axis=1)]
    return [
        f"{arm}, seed {seed}: step {', '.join(f'{step:,}' for step in points['timesteps'])}"
        for (arm, seed), points in infinite.groupby(["arm", "seed"], sort=False)
    ]


def _speed_table(runs: pd.DataFrame) -> pd.DataFrame:
    by_arm = runs.groupby("arm", sort=False)
    minutes = (runs["training_seconds"] / 60).groupby(runs["arm"], sort=False)
    return pd.DataFrame(
        {
            "arm": list(by_arm.groups),
            "env steps/s": _ranges(by_arm["steps_per_second"]),
            "minutes": _ranges(minutes),
        }
    )


def _ranges(groups: Any) -> list[str]:
    return [f"{_number(values.median())} ({_number(values.min())} to {_number(values.max())})" for _, values in groups]


def _runs_table(results: Results) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "env": run.env,
            "arm": run.arm,
            "algorithm": run.algo,
            "seed": str(run.seed),
            "env steps": f"{run.timesteps:,}",
            "last agent": _mean_std(run.final_returns),
            "best agent": _mean_std(run.best_returns) if run.best_returns else "none",
            "seconds": f"{run.training_seconds:,.0f}",
            "env steps/s": f"{run.steps_per_second:,.0f}",
        }
        for run in results.records
    )


def _versions(results: Results) -> dict[str, str]:
    versions: dict[str, list[str]] = {}
    for run in results.records:
        for package, version in run.versions.items():
            versions.setdefault(package, []).append(version or "none")
    return {package: " and ".join(sorted(set(found))) for package, found in versions.items()}


def _machines(runs: pd.DataFrame) -> list[str]:
    machines = runs[["processor", "cores"]].drop_duplicates().itertuples()
    return sorted(f"{machine.processor or 'unknown processor'}, {machine.cores} cores" for machine in machines)


def _scale(reference: Reference) -> str:
    older = f", in {reference.published_as}" if reference.published_as != reference.env else ""
    return (
        f"{reference.env}: 0 is {_number(reference.random_score)}, 1 is {_number(reference.zoo_score)} "
        f"({reference.zoo_algo}{older})"
    )


def _number(value: float, digits: int | None = None) -> str:
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.3g}"


def _mean_std(returns: list[float]) -> str:
    return f"{_number(float(np.mean(returns)))} ± {_number(float(np.std(returns)))}"


def escape(text: str) -> str:
    """Escape a text for Markdown."""
    return re.sub(r"([\\`*_\[\]#|~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def _table(frame: pd.DataFrame) -> str:
    """Return a table of texts as Markdown."""
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).to_numpy().tolist()]
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
