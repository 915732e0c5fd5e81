"""The report of a study: one HTML page that opens offline, the same in Markdown, pictures and CSV files."""

import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies.bootstrap import N_BOOTSTRAP, Estimate
from sb3_td3x.studies.document import Block, Bullets, Gallery, Heading, Paragraph, Picture, Table, to_html, to_markdown
from sb3_td3x.studies.figures import Figures, draws_pairs, time_unit
from sb3_td3x.studies.records import RunRecord, env_file_name
from sb3_td3x.studies.reference import Reference, references
from sb3_td3x.studies.results import Results, read_results
from sb3_td3x.studies.statistics import (
    EnvStatistics,
    OverallStatistics,
    env_statistics,
    is_finite,
    most_successful,
    overall_statistics,
)
from sb3_td3x.studies.tables import FILES, write_tables

_FOLDER = "report"
_PICTURES = "pictures"
_KINDS = {"ablation": "An ablation", "compare": "A comparison of algorithms", "sweep": "A sweep of settings"}
# Lines of more arms in one picture are told apart by nobody
_MAX_DRAWN = 12
_NO_INTERVAL = "1 seed, no interval"


def write_report(study: Path, gifs: bool = True) -> Path:
    """
    Write ``report.html``, ``report.md``, pictures and CSV files into the study's folder ``report``, which is replaced.

    :param study: folder of a study, finished or not
    :param gifs: whether to play an episode of each arm's best agent and show it
    :return: ``report.html``
    :raises ValueError: it is no study's folder, a file in it is broken, or nothing has finished yet
    """
    results = read_results(study)
    # Takes the place of an earlier one when it is whole
    folder = study / f".{_FOLDER}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _write(results, folder, gifs)
        shutil.rmtree(study / _FOLDER, ignore_errors=True)
        folder.rename(study / _FOLDER)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return study / _FOLDER / "report.html"


def _write(results: Results, folder: Path, gifs: bool) -> None:
    """
    :param results: a study
    :param folder: where the report goes, which is made
    :param gifs: whether to play an episode of each arm's best agent and show it
    """
    pictures = folder / _PICTURES
    pictures.mkdir(parents=True)
    by_env = [env_statistics(results, env) for env in results.envs]
    overall = overall_statistics(results, references()) if len(results.envs) > 1 else None
    write_tables(folder, results, by_env, overall)

    drawn = results.arms
    if len(drawn) > _MAX_DRAWN:
        drawn = most_successful(by_env, results.base, _MAX_DRAWN)
    figures = Figures(pictures, list(dict.fromkeys([*drawn, *results.arms])))
    blocks = _introduction(results)
    blocks += _arms_section(results, drawn)
    for statistics in by_env:
        blocks += _env_section(results, statistics, drawn, figures, gifs)
    if overall is not None:
        blocks += _overall_section(overall, drawn, figures)
    blocks += _runs_section(results)
    blocks += _method_section(results)
    title = f"Study {results.name}"
    for name, text in (("report.md", to_markdown(title, blocks, folder)), ("report.html", to_html(title, blocks))):
        with atomic_write(folder / name) as file:
            file.write(text.encode())


def _introduction(results: Results) -> list[Block]:
    """
    :param results: a study
    :return: what it is, and what is not there
    """
    config, runs = results.config, results.runs
    kind = _KINDS.get(config.get("kind", ""), "A study")
    timesteps = dict.fromkeys((run.env, run.timesteps) for run in runs)
    trained = ", ".join(f"{env} for {steps:,} env steps" for env, steps in timesteps)
    blocks: list[Block] = [
        Paragraph(
            f"{kind}: {_count(len(results.arms), 'arm')}, {_count(len(results.envs), 'env')}, "
            f"{_count(len(config['seeds']), 'seed')}. Trained in {trained}. {_share(len(runs), results)} finished. "
            f"Returns are the env's own sums of rewards, neither shaped nor normalized; the agents play "
            f"deterministically. Arms are compared with the first one, {results.base}."
        )
    ]
    if results.missing:
        incomplete = [
            f"{env}, {arm}: seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
            for (env, arm), seeds in _missing_seeds(results).items()
        ]
        blocks += [
            Heading("What is missing"),
            Paragraph(f"{_share(len(results.missing), results)} not finished. All figures are of the runs that have."),
            Bullets(incomplete),
        ]
    if results.failures:
        blocks += [
            *([] if results.missing else [Heading("What is missing")]),
            Paragraph("Failed, with the last line of each log in the study's folder:"),
            Bullets([f"`{failure.name}`: `{failure.reason.replace('`', chr(39))}`" for failure in results.failures]),
        ]
    return blocks


def _missing_seeds(results: Results) -> dict[tuple[str, str], list[int]]:
    """
    :param results: a study
    :return: the seeds that have not finished, by env and arm
    """
    seeds: dict[tuple[str, str], list[int]] = {}
    for run in results.missing:
        seeds.setdefault((run.env, run.arm), []).append(run.seed)
    return seeds


def _arms_section(results: Results, drawn: Sequence[str]) -> list[Block]:
    """
    :param results: a study
    :param drawn: the arms whose curves are drawn
    :return: the arms
    """
    rows = [
        [arm, settings.get("algo", ""), settings.get("description", ""), ", ".join(settings["hyperparams"])]
        for arm, settings in results.config["arms"].items()
    ]
    left_out = ""
    if len(drawn) < len(results.arms):
        left_out = (
            f" Curves and episodes are shown of {len(drawn)} arms, which are the base and those with the best mean "
            "rank of final scores over the envs; all others are in the tables, the bars, and the CSV files."
        )
    return [
        Heading("Arms"),
        Table(
            ["arm", "algorithm", "what it is", "envs"],
            rows,
            n_text_columns=4,
            long=2,
            note="All hyperparameters: `hyperparams/ARM.yml` in the study's folder." + left_out,
        ),
    ]


def _env_section(
    results: Results, statistics: EnvStatistics, drawn: Sequence[str], figures: Figures, gifs: bool
) -> list[Block]:
    """
    :param results: a study
    :param statistics: the figures of one of its envs
    :param drawn: the arms whose curves are drawn
    :param figures: draws the pictures
    :param gifs: whether to show the best agents
    :return: all about the env
    """
    env = statistics.env
    name = env_file_name(env)
    shown = statistics.of(drawn)
    blocks: list[Block] = [Heading(env), *_scores(statistics, figures, name)]
    if shown.arms:
        blocks += _learning(shown, references().get(env), figures, name)
        blocks += _distributions(shown, figures, name)
    blocks += _improvement(statistics, figures, name)
    blocks += _over_estimation(statistics, shown, figures, name)
    blocks += _speed(statistics, figures, name)
    if gifs:
        blocks += _gallery(results, shown, figures.folder)
    return blocks


def _scores(statistics: EnvStatistics, figures: Figures, name: str) -> list[Block]:
    """
    :param statistics: the figures of an env
    :param figures: draws the pictures
    :param name: of the env in file names
    :return: the final scores
    """
    rows = []
    for arm in statistics.arms:
        scores, best = statistics.scores[arm], statistics.best_scores[arm]
        improvement = statistics.improvement.get(arm)
        rows.append(
            [
                arm,
                str(len(scores)),
                f"{statistics.n_episodes(arm):,}",
                _number(statistics.iqm[arm].value[0]),
                _interval(statistics.iqm[arm]),
                f"{_number(scores.mean())} ± {_number(scores.std())}",
                f"{_number(scores.min())} to {_number(scores.max())}",
                _number(best.mean()) if len(best) else "none",
                "the base" if improvement is None else f"{improvement.value[0]:.2f}",
            ]
        )
    if statistics.base is None:
        rows = [row[:-1] for row in rows]
    beats = [] if statistics.base is None else [f"P(beats {statistics.base})"]
    columns = ["arm", "seeds", "episodes", "IQM", "95% interval", "mean ± std", "worst to best seed", "best agents"]
    missing = "" if statistics.base else " The base has no finished run here, so nothing is compared with it."
    return [
        Heading("Final scores", 3),
        Table(
            columns + beats,
            rows,
            note="The score of a run is the mean return of its last agent's episodes. IQM: interquartile mean over the "
            "seeds. Mean ± std: over the seeds. Best agents: mean over the seeds for the best agents of the "
            f"evaluations instead, on the same episodes.{missing}",
        ),
        Picture(
            figures.scores(statistics, f"{name}-scores"),
            f"Interquartile mean of the final scores of each arm in {statistics.env}, with 95% intervals and all seeds",
            f"Final scores in {statistics.env}: the bar is the 95% interval of the interquartile mean over the seeds, "
            f"each circle a seed ({_episodes_a_run(statistics)}). Further to the right is better. The dashed line is "
            f"the base. {_lone(statistics)}".strip(),
        ),
    ]


def _learning(statistics: EnvStatistics, reference: Reference | None, figures: Figures, name: str) -> list[Block]:
    """
    :param statistics: the figures of an env
    :param reference: what the zoo has published of it
    :param figures: draws the pictures
    :param name: of the env in file names
    :return: the learning curves
    """
    if not statistics.learning:
        return [Heading("Learning curves", 3), Paragraph("No evaluations while training.")]
    last = max(int(curve.timesteps[-1]) for curve in statistics.learning.values())
    note = "."
    if reference is not None and any(steps[0] <= last for steps, _ in reference.curves.values()):
        older = f", in {reference.published_as}, an older version of the env" * (
            reference.published_as != reference.env
        )
        note = (
            f". Dotted: the agents that RL Zoo has published (one seed each, 5 to 10 episodes a point, older "
            f"versions of all packages{older}), for orientation, not as a side-by-side measurement."
        )
    episodes = {len(r) for runs in statistics.runs.values() for run in runs for r in run.evaluations.returns}
    per_point = f"{min(episodes)} to {max(episodes)}" if len(episodes) > 1 else str(min(episodes))
    blocks: list[Block] = [
        Heading("Learning curves", 3),
        Picture(
            figures.learning_curves(statistics, reference, f"{name}-learning"),
            f"Learning curves of all arms in {statistics.env}",
            f"Learning curves in {statistics.env}: interquartile mean over {_seed_range(statistics)} of the "
            f"evaluations while training ({per_point} episodes each){note}",
        ),
    ]
    if len(statistics.learning) > 1:
        base = f" The dashed line is the base, {statistics.base}." if statistics.base in statistics.learning else ""
        blocks.append(
            Picture(
                figures.learning_panels(statistics, f"{name}-learning-arms"),
                f"Learning curve of each arm in {statistics.env}, with all seeds and the 95% interval",
                f"The same, an arm each: interquartile mean, its pointwise 95% interval, and every seed.{base} "
                f"{_lone(statistics)}".strip(),
            )
        )
    return blocks


def _distributions(statistics: EnvStatistics, figures: Figures, name: str) -> list[Block]:
    """
    :param statistics: the figures of an env
    :param figures: draws the pictures
    :param name: of the env in file names
    :return: performance profiles, and the distribution of returns
    """
    return [
        Heading("Distributions", 3),
        Picture(
            figures.distributions(statistics, f"{name}-distributions"),
            f"Performance profiles, and empirical distribution of the returns, of all arms in {statistics.env}",
            "Left, performance profiles: how many of the runs score more than τ. A curve further up and to the right "
            "is better. Right, the empirical distribution function of the returns of all final episodes "
            f"({_episodes_a_run(statistics)}, {_seed_range(statistics)}): how many episodes return x or less. A curve "
            "further down and to the right is better.",
        ),
    ]


def _improvement(statistics: EnvStatistics, figures: Figures, name: str) -> list[Block]:
    """
    :param statistics: the figures of an env
    :param figures: draws the pictures
    :param name: of the env in file names
    :return: probabilities of improvement
    """
    if not statistics.improvement or statistics.base is None:
        return []
    sides = "Against the base, with 95% intervals."
    if draws_pairs(statistics.arms):
        sides = "Left: against the base, with 95% intervals. Right: all pairs, the row against the column."
    return [
        Heading("Probability of improvement", 3),
        Picture(
            figures.improvement(
                statistics.improvement,
                statistics.base,
                f"{name}-improvement",
                (statistics.arms, statistics.pairs),
            ),
            f"Probability that an arm beats another in {statistics.env}",
            "How likely a run of an arm with a random seed scores more than one of another arm; 0.5 is a draw. "
            f"{sides} {_seed_range(statistics)} an arm. {_lone(statistics)}".strip(),
        ),
        Table(
            ["arm", "seeds", f"P(beats {statistics.base})", "95% interval"],
            [
                [arm, str(len(statistics.scores[arm])), f"{estimate.value[0]:.2f}", _interval(estimate, 2)]
                for arm, estimate in statistics.improvement.items()
            ],
        ),
    ]


def _over_estimation(statistics: EnvStatistics, shown: EnvStatistics, figures: Figures, name: str) -> list[Block]:
    """
    :param statistics: the figures of an env
    :param shown: those of the arms whose curves are drawn
    :param figures: draws the pictures
    :param name: of the env in file names
    :return: the critics' values against the returns
    """
    heading = Heading("Over-estimation of values", 3)
    runs = [run for runs in statistics.runs.values() for run in runs]
    if not any(run.value_estimates for run in runs):
        return [heading, Paragraph("No values were measured: no arm has a Q critic.")]
    left_out = _infinite_values(runs)
    if not shown.values:
        return [heading, *left_out]
    without = [arm for arm, runs in statistics.runs.items() if not any(run.value_estimates for run in runs)]
    states = sorted({curves.n_states for curves in statistics.values.values()})
    rows = []
    for arm, curves in statistics.values.items():
        final = [curve.estimate[-1] for curve in (curves.estimated, curves.monte_carlo, curves.difference)]
        rows.append(
            [
                arm,
                str(final[0].n_seeds),
                str(curves.n_states),
                f"{int(curves.difference.timesteps[-1]):,}",
                *(_number(estimate.value[0]) for estimate in final),
                _interval(final[-1]),
            ]
        )
    return [
        heading,
        Picture(
            figures.over_estimation(shown.values, f"{name}-over-estimation"),
            f"Over-estimation of values of all arms in {statistics.env}",
            "How much the first critic over-estimates (as figure 1 of Fujimoto et al. 2018): Q1 of the start states of "
            f"{' or '.join(map(str, states))} episodes minus the discounted returns that the policy gets from there, "
            "in the rewards that the agent learned from; mean over the seeds. 0 is right, above 0 over-estimated. In "
            "envs with a time limit the sum of rewards ends there, while the critic's value goes on. Points far off "
            "the others may lie outside the picture; all are in `statistics.csv`."
            + (f" Without a Q critic: {', '.join(without)}." if without else ""),
        ),
        Picture(
            figures.value_panels(shown.values, f"{name}-values"),
            f"Values of each arm in {statistics.env}, estimated and true",
            "The same, an arm each: what the critic says (line) and what the policy gets (dashed), means over the "
            f"seeds with pointwise 95% intervals. {_lone(statistics)}".strip(),
        ),
        Table(
            ["arm", "seeds", "states", "at step", "estimated", "Monte Carlo", "over-estimation", "95% interval"],
            rows,
            note="At the last point of the training; means over the seeds.",
        ),
        *left_out,
    ]


def _infinite_values(runs: Sequence[RunRecord]) -> list[Block]:
    """
    :param runs: the finished runs of an env
    :return: which points of them have values that are not finite, and are left out
    """
    infinite = {
        f"{run.arm}, seed {run.seed}": [point.timesteps for point in run.value_estimates or () if not is_finite(point)]
        for run in runs
    }
    lines = [f"{name}: step {', '.join(f'{step:,}' for step in steps)}" for name, steps in infinite.items() if steps]
    if not lines:
        return []
    return [Paragraph("Values that are not finite, so that these points are left out of their arms:"), Bullets(lines)]


def _speed(statistics: EnvStatistics, figures: Figures, name: str) -> list[Block]:
    """
    :param statistics: the figures of an env
    :param figures: draws the pictures
    :param name: of the env in file names
    :return: how long the trainings took
    """
    unit, seconds = time_unit(max(run.training_seconds for runs in statistics.runs.values() for run in runs))
    rows = []
    for arm, runs in statistics.runs.items():
        speeds = [run.steps_per_second for run in runs]
        durations = [run.training_seconds / seconds for run in runs]
        rows.append(
            [
                arm,
                str(len(runs)),
                f"{np.median(speeds):,.0f}",
                f"{min(speeds):,.0f} to {max(speeds):,.0f}",
                f"{np.median(durations):,.1f}",
                f"{min(durations):,.1f} to {max(durations):,.1f}",
            ]
        )
    machines = sorted({_machine(run) for runs in statistics.runs.values() for run in runs})
    return [
        Heading("Speed", 3),
        Picture(
            figures.speed(statistics, f"{name}-speed"),
            f"Steps a second and duration of the trainings of each arm in {statistics.env}",
            "Env steps a second and wall-clock time of the trainings, their evaluations included; bars are medians "
            f"over the seeds. Trainings that ran side by side slowed each other down. Measured on: "
            f"{'; '.join(machines)}.",
        ),
        Table(["arm", "seeds", "steps/s, median", "range", f"{unit}, median", "range"], rows),
    ]


def _gallery(results: Results, statistics: EnvStatistics, folder: Path) -> list[Block]:
    """
    :param results: a study
    :param statistics: the figures of an env
    :param folder: where the pictures go
    :return: an episode of each arm's best agent
    """
    # PyTorch, SB3 and the zoo are needed here alone
    animations = importlib.import_module("sb3_td3x.studies.animations")
    pictures, failed = [], []
    for arm, runs in statistics.runs.items():
        path = folder / f"{env_file_name(statistics.env)}-{arm}.gif"
        try:
            animation = animations.animate(results.study, runs, path, results.config.get("gym_packages", ()))
        # A report without one of its animations is better than none, whatever an env's way to draw itself stumbles over
        except Exception as error:
            failed.append(f"{arm}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        agent = "best agent of the evaluations" if animation.is_best else "last agent"
        pictures.append(
            Picture(
                path,
                f"An episode of the best agent of {arm} in {statistics.env}",
                f"{arm}: seed {animation.run.seed}, {agent}, mean return {_number(animation.score)}; this episode "
                f"{_number(animation.episode_return)}",
            )
        )
    blocks: list[Block] = [Heading("The best agents", 3)]
    if pictures:
        blocks += [
            Paragraph(
                "An episode of each arm's best agent, all from the same start. Below each picture: its actions, and "
                "the env's reward of each step."
            ),
            Gallery(pictures),
        ]
    if failed:
        blocks += [Paragraph("Could not be played:"), Bullets(failed)]
    return blocks


def _overall_section(overall: OverallStatistics, drawn: Sequence[str], figures: Figures) -> list[Block]:
    """
    :param overall: the figures of all envs together
    :param drawn: the arms whose curves are drawn
    :param figures: draws the pictures
    :return: all about them
    """
    blocks: list[Block] = [
        Heading("All envs together"),
        Paragraph(
            f"Over {', '.join(overall.envs)}, and the seeds that an arm has finished in all of them."
            + (f" Left out, since they have none: {', '.join(overall.left_out)}." if overall.left_out else "")
        ),
    ]
    if overall.unknown:
        blocks.append(
            Paragraph(
                "Returns of different envs cannot be averaged as they are, and no published scores are at hand to "
                f"normalize those of {', '.join(overall.unknown)}."
            )
        )
    else:
        known = [references()[env] for env in overall.envs]
        scale = "; ".join(
            f"{reference.env}: 0 = {_number(reference.random_score)}, 1 = {_number(reference.zoo_score)} "
            f"({reference.zoo_algo}{f', in {reference.published_as}' * (reference.published_as != reference.env)})"
            for reference in known
        )
        blocks += [
            Paragraph(
                "Scores are normalized as usual, so that they can be averaged: 0 is the mean return of random actions, "
                f"1 that of the best agent in RL Zoo's benchmark. {scale}."
            ),
            Picture(
                figures.overall_scores(overall, drawn, "all-scores"),
                "Interquartile means of the normalized scores of each arm, and performance profiles",
                "Left: interquartile mean over seeds and envs, with 95% stratified bootstrap intervals; the dashed "
                "line is the base. Right: how many of the runs have a normalized score above τ.",
            ),
            Table(
                ["arm", "seeds", "envs", "episodes", "IQM of normalized scores", "95% interval"],
                [
                    [
                        arm,
                        str(overall.n_seeds[arm]),
                        str(len(overall.envs)),
                        f"{overall.n_episodes[arm]:,}",
                        f"{estimate.value[0]:.3f}",
                        _interval(estimate, 3),
                    ]
                    for arm, estimate in overall.iqm.items()
                ],
            ),
        ]
    if overall.improvement and overall.base is not None:
        blocks += [
            Picture(
                figures.improvement(overall.improvement, overall.base, "all-improvement", None),
                "Probability that an arm beats the base, mean over all envs",
                "How likely a run of an arm with a random seed scores more than one of the base in a random env of "
                "these; this needs no normalization.",
            ),
            Table(
                ["arm", "seeds", "envs", f"P(beats {overall.base})", "95% interval"],
                [
                    [arm, str(overall.n_seeds[arm]), str(len(overall.envs)), f"{e.value[0]:.2f}", _interval(e, 2)]
                    for arm, e in overall.improvement.items()
                ],
            ),
        ]
    return blocks


def _runs_section(results: Results) -> list[Block]:
    """
    :param results: a study
    :return: every run
    """
    rows = []
    for run in results.runs:
        best = _mean_std(run.best_returns) if run.best_returns else "none"
        rows.append(
            [
                *(run.env, run.arm, run.algo, str(run.seed), f"{run.timesteps:,}", str(len(run.final_returns))),
                *(_mean_std(run.final_returns), best),
                *(f"{run.training_seconds:,.0f}", f"{run.steps_per_second:,.0f}"),
            ]
        )
    columns = ["env", "arm", "algorithm", "seed", "steps", "episodes", "last agent", "best agent", "seconds", "steps/s"]
    return [
        Heading("All runs"),
        Table(
            columns, rows, n_text_columns=3, note="Last and best agent: mean ± std of the returns over the episodes."
        ),
    ]


def _method_section(results: Results) -> list[Block]:
    """
    :param results: a study
    :return: how the figures were made
    """
    versions: dict[str, set[str]] = {}
    for run in results.runs:
        for package, version in run.versions.items():
            versions.setdefault(package, set()).add(version or "none")
    packages = ", ".join(f"{package} {' and '.join(sorted(found))}" for package, found in versions.items())
    return [
        Heading("How the figures were made"),
        Bullets(
            [
                "Each run is a training by RL Zoo's command line with its own seed. After it, the last and the best "
                "agent play the same episodes: episode i has the same start in all runs of an env.",
                "Interquartile mean: the mean without the lowest and the highest quarter of the seeds, both rounded "
                "down (with less than 4 seeds, the mean).",
                f"Intervals: 95%, percentile, from rliable's stratified bootstrap with {N_BOOTSTRAP:,} resamples of "
                "the seeds (Agarwal et al. 2021). With few seeds they tend to be too narrow; an arm with one seed has "
                "none.",
                "Probability of improvement: over all pairs of a seed of one arm and a seed of the other, the fraction "
                "in which the one scores more, ties half (the Mann-Whitney statistic).",
                "Learning curves have the points that all finished seeds of an arm have.",
                f"Versions: {packages or 'not recorded'}.",
                f"Settings of the study: `{json.dumps(_settings(results.config))}`",
            ]
        ),
        Heading("Files"),
        Bullets([f"`{name}`: {what}." for name, what in FILES.items()]),
    ]


def _settings(config: Mapping[str, object]) -> dict[str, object]:
    """
    :param config: what ``study.json`` holds
    :return: it without the arms, which have a table of their own
    """
    return {name: value for name, value in config.items() if name != "arms"}


def _episodes_a_run(statistics: EnvStatistics) -> str:
    """
    :param statistics: the figures of an env
    :return: how many final episodes its runs have, in words
    """
    counts = sorted({len(run.final_returns) for runs in statistics.runs.values() for run in runs})
    return f"{' or '.join(map(str, counts))} episodes each"


def _seed_range(statistics: EnvStatistics) -> str:
    """
    :param statistics: the figures of an env
    :return: how many seeds its arms have, in words
    """
    counts = sorted({len(scores) for scores in statistics.scores.values()})
    return _count(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"


def _lone(statistics: EnvStatistics) -> str:
    """
    :param statistics: the figures of an env
    :return: which arms have no interval
    """
    arms = [arm for arm, scores in statistics.scores.items() if len(scores) == 1]
    return f"One seed, and so no interval: {', '.join(arms)}." if arms else ""


def _machine(run: RunRecord) -> str:
    """
    :param run: a run
    :return: where it was trained
    """
    return f"{run.machine.get('processor') or 'a processor without a name'}, {run.machine.get('cores')} cores"


def _count(number: int, noun: str) -> str:
    """
    :param number: how many
    :param noun: of what, in the singular
    :return: both
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def _share(number: int, results: Results) -> str:
    """
    :param number: how many of its runs
    :param results: a study
    :return: beginning of a sentence: they, of how many, and "have"
    """
    return f"{number} of {_count(results.n_planned, 'run')} {'has' if number == 1 else 'have'}"


def _number(value: float) -> str:
    """
    :param value: a return or value
    :return: it with as many digits as say something
    """
    return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.3g}"


def _interval(estimate: Estimate, digits: int | None = None) -> str:
    """
    :param estimate: of one quantity
    :param digits: after the point; None: as many as say something
    :return: its interval, or that there is none
    """
    if np.isnan(estimate.low[0]):
        return _NO_INTERVAL
    bounds = (float(estimate.low[0]), float(estimate.high[0]))
    low, high = (_number(bound) if digits is None else f"{bound:.{digits}f}" for bound in bounds)
    return f"[{low}, {high}]"


def _mean_std(returns: Sequence[float]) -> str:
    """
    :param returns: returns of episodes
    :return: their mean and standard deviation
    """
    return f"{_number(float(np.mean(returns)))} ± {_number(float(np.std(returns)))}"
