"""
Train agents with the zoo's own command line, test each on the same 100 episodes, and compare the algorithms.

    python scripts/results.py pendulum --log-folder logs/results --jobs 2

A run that has finished is not repeated, so the same command goes on after an interruption. Where its hyperparameters or
length have changed since, the command is refused: to take another log folder, or to delete the old one, is the user's
choice. Every run has a log folder of its own (``LOG_FOLDER/STUDY/ALGO/seed_N``), which ``rl_zoo3.enjoy -f`` takes as
well. With ``--reuse`` runs that an earlier report has are not repeated either, so that the seeds of a study can be
trained one after the other, on several machines; a report of before they said their hyperparameters has none. All
figures are written to ``LOG_FOLDER/STUDY.json``; the exit status is 1 if the study's criterion does not hold.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from options import at_least
from rliable import library as rly  # type: ignore[import-untyped]
from rliable import metrics

from sb3_td3x.studies.arms import Entry, action_repeat, entries_of, entry_of
from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.measure import TrainedRun, agent_timesteps, play_episodes

N_EVAL_EPISODES = 100
# Episode i of every test starts from seed EVAL_SEED + i, far from the seeds of the trainings
EVAL_SEED = 100_000
N_BOOTSTRAP = 10_000
# Not behind: the difference of interquartile means lies above -5% of the peer's absolute value
MARGIN = 0.05
PACKAGES = ("sb3-td3x", "stable-baselines3", "rl-zoo3", "gymnasium", "torch", "numpy")


@dataclass(frozen=True)
class Study:
    """
    What to train, and what the agents must reach.

    :param env: id of the environment
    :param algos: names of the algorithms in the zoo; the first is compared with each of the others
    :param seeds: one training for each algorithm and seed
    :param steps: length of a training in env steps; the zoo counts fewer where a wrapper repeats actions
    :param peer_steps: length of the trainings of the other algorithms; None: the same
    :param bar: the mean return that every agent of the first algorithm must reach; None: compare with the peers
    :param params: hyperparameters that differ from the zoo's files, as for the zoo's ``-params``, for all algorithms
    """

    env: str
    algos: Sequence[str]
    seeds: Sequence[int]
    steps: int
    peer_steps: int | None = None
    bar: float | None = None
    params: tuple[str, ...] = ()

    def steps_of(self, algo: str) -> int:
        """
        :param algo: one of the algorithms
        :return: length of its trainings
        """
        return self.steps if algo == self.algos[0] or self.peer_steps is None else self.peer_steps


# What the zoo's td3 has for Pendulum-v1, where td3x's own entry differs
TD3_PENDULUM = (
    "learning_starts:10000",
    "gradient_steps:1",
    "batch_size:256",
    "policy_kwargs:dict(net_arch=[400, 300])",
)
STUDIES = {
    "parity": Study("Pendulum-v1", ("td3x", "td3"), range(1, 11), 20_000, params=TD3_PENDULUM),
    "pendulum": Study("Pendulum-v1", ("td3x", "td3", "sac", "tqc"), range(1, 6), 10_000, peer_steps=20_000),
    "lunarlander": Study("LunarLanderContinuous-v3", ("td3x",), (1, 2), 300_000, bar=200.0),
    "hardcore": Study("BipedalWalkerHardcore-v3", ("td3x",), (1,), 100_000, bar=-80.0),
}


@dataclass(frozen=True)
class Run:
    """
    One training.

    :param env: id of the environment
    :param algo: name of the algorithm in the zoo
    :param seed: seed of the training
    :param steps: its length in env steps
    :param folder: the zoo's log folder for this run alone
    :param params: hyperparameters to change, as for the zoo's ``-params``
    """

    env: str
    algo: str
    seed: int
    steps: int
    folder: Path
    params: tuple[str, ...] = ()

    @property
    def run_path(self) -> Path:
        """The folder that the zoo makes in an empty log folder"""
        return self.folder / self.algo / f"{self.env}_1"

    @property
    def entry(self) -> Entry:
        """Its hyperparameters in the zoo's file"""
        return entry_of(entries_of(self.algo), self.algo, self.env)

    @property
    def zoo_timesteps(self) -> int:
        """Its length as the zoo counts: an action that a wrapper repeats is one timestep"""
        # Of 0 the zoo would take its own number
        return max(self.steps // action_repeat(self.entry), 1)

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for a training to be this one, as JSON has it"""
        settings = {"steps": self.steps, "hyperparams": self.entry, "params": self.params}
        return dict(json.loads(json.dumps(settings, default=str)))

    @property
    def command(self) -> list[str]:
        """The training as a command line"""
        options = {
            "--algo": self.algo,
            "--env": self.env,
            "--seed": self.seed,
            "-n": self.zoo_timesteps,
            "-f": self.folder,
            "--num-threads": 1,
            "--eval-freq": max(self.zoo_timesteps // 10, 1),
            "--eval-episodes": 10,
            "--device": "cpu",
        }
        params = ["-params", *self.params] if self.params else []
        parts = [str(part) for option in options.items() for part in option]
        return [sys.executable, "-m", "rl_zoo3.train", *parts, *params]

    def is_finished(self) -> bool:
        """
        :return: Whether the whole training is there. An interrupted zoo saves its agent too, so look at its steps.
        """
        timing = self._timing()
        is_this = timing is not None and self.settings.items() <= timing.items()
        return is_this and agent_timesteps(self.run_path / f"{self.env}.zip") >= self.zoo_timesteps

    def differences(self) -> list[str]:
        """
        :return: the settings in which a finished training in its folder is another one
        """
        timing = self._timing()
        return [] if timing is None else [name for name, value in self.settings.items() if timing.get(name) != value]

    def _timing(self) -> dict[str, Any] | None:
        """
        :return: what was written at the end of the training in its folder; None if there is none
        """
        try:
            return dict(json.loads(self.timing_path.read_text()))
        except (OSError, ValueError):
            return None

    @property
    def timing_path(self) -> Path:
        """Where the duration of the training is kept"""
        return self.folder / "timing.json"


def make_runs(study: Study, folder: Path) -> list[Run]:
    """
    :param study: the study
    :param folder: its folder
    :return: its trainings, seed by seed, so that the algorithms meet the same state of the machine
    """
    return [
        Run(study.env, algo, seed, study.steps_of(algo), folder / algo / f"seed_{seed}", study.params)
        for seed in study.seeds
        for algo in study.algos
    ]


def train(runs: Sequence[Run], jobs: int) -> None:
    """
    Train those that have not finished, from the beginning.

    :param runs: the trainings
    :param jobs: how many processes at a time
    """
    pending = [run for run in runs if not run.is_finished()]
    print(f"{len(runs) - len(pending)} of {len(runs)} trainings are there, {len(pending)} to do", flush=True)
    for run in pending:
        if run.differences():
            raise SystemExit(
                f"{run.folder} holds a finished training of other {' and '.join(run.differences())}: take another "
                "--log-folder, or delete it"
            )
    running: dict[Run, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while pending or running:
            while pending and len(running) < jobs:
                run = pending.pop(0)
                shutil.rmtree(run.folder, ignore_errors=True)
                run.folder.mkdir(parents=True)
                with (run.folder / "train.log").open("wb") as log:
                    # NumPy's and PyTorch's threads would fight for the cores of parallel runs
                    process = subprocess.Popen(
                        run.command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
                    )
                running[run] = (process, time.perf_counter())
            time.sleep(0.2)
            for run, (process, start) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                seconds = time.perf_counter() - start
                run.timing_path.write_text(json.dumps({**run.settings, "train_seconds": round(seconds, 1)}))
                if process.returncode != 0 or not run.is_finished():
                    run.timing_path.unlink()
                    raise RuntimeError(
                        f"{shlex.join(run.command)} ended with status {process.returncode} and without the whole "
                        f"training, see {run.folder / 'train.log'}"
                    )
                print(f"{run.algo} seed {run.seed}: {run.steps} steps in {seconds:.0f} s", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()


def evaluate(run: Run, zip_name: str, n_episodes: int = N_EVAL_EPISODES) -> list[float]:
    """
    Play deterministically in the environment that the zoo's ``enjoy`` would make.

    :param run: a finished training
    :param zip_name: which of the agents in the run's folder
    :param n_episodes: number of episodes; episode i starts from the same state for all runs
    :return: the environment's own returns, neither shaped nor normalized
    """
    trained = TrainedRun(run.run_path, run.algo, run.env)
    returns, _ = play_episodes(trained, run.run_path / zip_name, n_episodes, EVAL_SEED)
    return returns


def interquartile_mean(returns: np.ndarray) -> float:
    """
    :param returns: returns of shape (n_seeds, n_episodes)
    :return: their mean without the lowest and the highest quarter
    """
    return float(metrics.aggregate_iqm(returns))


def _bootstrap(function: Any, *sizes: int) -> tuple[float, float]:
    """
    :param function: a statistic of as many arrays of indices, each of shape (size, 1)
    :param sizes: sizes of the populations that are resampled, independently of each other
    :return: the 95% interval of the statistic
    """
    # rliable 1.2 draws from NumPy's global generator, whatever its `random_state` says
    np.random.seed(0)  # noqa: NPY002
    populations = {"statistic": [np.arange(size)[:, None] for size in sizes]}
    _, intervals = rly.get_interval_estimates(populations, function, reps=N_BOOTSTRAP)
    low, high = intervals["statistic"][:, 0]
    return float(low), float(high)


def iqm_interval(returns: np.ndarray) -> tuple[float, float]:
    """
    Seeds and episodes are resampled as wholes: the returns of one agent, and those from one start state, belong
    together. To resample single returns would call 10 agents 1,000 independent measurements.

    :param returns: returns of shape (n_seeds, n_episodes)
    :return: 95% bootstrap interval of the interquartile mean
    """

    def statistic(seeds: np.ndarray, episodes: np.ndarray) -> np.ndarray:
        return np.array([interquartile_mean(returns[seeds, episodes.T])])

    return _bootstrap(statistic, *returns.shape)


def iqm_difference_interval(returns: np.ndarray, peer_returns: np.ndarray) -> tuple[float, float]:
    """
    :param returns: returns of shape (n_seeds, n_episodes)
    :param peer_returns: returns of the peer, of shape (any number of seeds, n_episodes), from the same start states
    :return: 95% bootstrap interval of the difference of interquartile means, own minus peer's
    """

    def statistic(seeds: np.ndarray, peer_seeds: np.ndarray, episodes: np.ndarray) -> np.ndarray:
        own = interquartile_mean(returns[seeds, episodes.T])
        return np.array([own - interquartile_mean(peer_returns[peer_seeds, episodes.T])])

    return _bootstrap(statistic, len(returns), *peer_returns.shape)


def summarize(returns: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """
    :param returns: for each algorithm, returns of shape (n_seeds, n_episodes)
    :return: for each algorithm, its figures
    """
    return {
        algo: {
            "iqm": interquartile_mean(values),
            "iqm_95": iqm_interval(values),
            "mean": float(values.mean()),
            "std": float(values.std()),
            "median": float(np.median(values)),
            "seed_means": [float(mean) for mean in values.mean(axis=1)],
        }
        for algo, values in returns.items()
    }


def compare(returns: np.ndarray, peer_returns: np.ndarray) -> dict[str, Any]:
    """
    :param returns: returns of shape (n_seeds, n_episodes)
    :param peer_returns: the peer's
    :return: the difference of interquartile means, its interval, what its lower end must exceed, and whether it does
    """
    peer_iqm = interquartile_mean(peer_returns)
    interval = iqm_difference_interval(returns, peer_returns)
    limit = -MARGIN * abs(peer_iqm)
    return {
        "difference": interquartile_mean(returns) - peer_iqm,
        "difference_95": interval,
        "limit": limit,
        "holds": interval[0] > limit,
    }


def read_report(option: str, path: Path, study: str) -> dict[str, Any]:
    """
    :param option: of the command line, for the error
    :param path: a report that this script wrote
    :param study: name of a study
    :return: the report
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        reported = report["study"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{option} {path} is no report of this script: {error!r}") from None
    if reported != study:
        raise SystemExit(f"{option} {path} is a report of the study {reported}, not of {study}")
    return report


def read_returns(report: dict[str, Any]) -> np.ndarray:
    """
    :param report: a report that this script wrote
    :return: the final returns of its first algorithm, (n_seeds, n_episodes)
    """
    return np.array([row["final"]["returns"] for row in report["runs"] if row["algo"] == report["algos"][0]])


def reusable_rows(report: dict[str, Any], runs: Sequence[Run]) -> dict[Run, dict[str, Any]]:
    """
    :param report: a report that this script wrote
    :param runs: trainings
    :return: those of them that it has, alike in length and hyperparameters, with their figures
    """
    rows = {(row["algo"], row["seed"]): row for row in report["runs"]}
    return {
        run: rows[run.algo, run.seed]
        for run in runs
        # Reports of old do not say what they were trained with
        if run.settings.items() <= rows.get((run.algo, run.seed), {}).items()
    }


def format_table(study: Study, summary: dict[str, dict[str, Any]]) -> str:
    """
    :param study: the study
    :param summary: figures from ``summarize``, with ``train_minutes`` added
    :return: a Markdown table
    """
    lines = [
        "| env | algorithm | steps | seeds | IQM [95% interval] | mean ± std | median | worst, best seed | training |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for algo, row in summary.items():
        low, high = row["iqm_95"]
        means = row["seed_means"]
        lines.append(
            f"| {study.env} | {algo} | {study.steps_of(algo):,} | {len(means)} "
            f"| {row['iqm']:.1f} [{low:.1f}, {high:.1f}] | {row['mean']:.1f} ± {row['std']:.1f} "
            f"| {row['median']:.1f} | {min(means):.1f} to {max(means):.1f} | {row['train_minutes']:.1f} min |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: the command line, by default that of the process
    :return: exit status: 0 if the study's criterion holds
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("-f", "--log-folder", type=Path, default=Path("logs/results"), help="where all files go")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="trainings at a time, one thread each")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", help="instead of the study's")
    parser.add_argument("--algos", nargs="+", help="instead of the study's")
    parser.add_argument("--steps", type=at_least(1), help="instead of the study's, for all algorithms")
    parser.add_argument("--against", type=Path, help="compare with an earlier report (JSON), the same study's")
    parser.add_argument("--reuse", type=Path, help="take the figures of equal trainings from an earlier report (JSON)")
    parser.add_argument("--params", nargs="+", default=(), help="as of rl_zoo3.train; with a log folder of its own")
    args = parser.parse_args(arguments)
    if any(param.startswith("env_wrapper:") for param in args.params):
        parser.error("argument --params: env_wrapper is not allowed, env steps are counted with that of the entry")
    peer_returns = args.against and read_returns(read_report("--against", args.against, args.study))

    overrides = {name: getattr(args, name) for name in ("seeds", "algos", "steps")}
    # What is named twice counts once
    overrides |= {name: list(dict.fromkeys(overrides[name] or ())) for name in ("seeds", "algos")}
    study = replace(STUDIES[args.study], **{name: value for name, value in overrides.items() if value})
    # Of a name that is there twice the zoo takes the last value
    study = replace(study, params=(*study.params, *args.params))
    if args.steps:
        study = replace(study, peer_steps=None)
    # Ended by `kill`, take the trainings along
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Before the long part, so that a missing package shows at once
    report: dict[str, Any] = {"study": args.study, "machine": machine(PACKAGES)}
    runs = make_runs(study, args.log_folder / args.study)
    try:
        for algo in study.algos:
            entry_of(entries_of(algo), algo, study.env)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    reused = {} if args.reuse is None else reusable_rows(read_report("--reuse", args.reuse, args.study), runs)
    if args.reuse is not None:
        print(f"{len(reused)} of {len(runs)} trainings are those of {args.reuse}", flush=True)
    train([run for run in runs if run not in reused], args.jobs)

    rows: list[dict[str, Any]] = []
    for run in runs:
        if run in reused:
            rows.append(reused[run])
            continue
        row: dict[str, Any] = {"env": run.env, "algo": run.algo, "seed": run.seed}
        row |= json.loads(run.timing_path.read_text())
        for name, zip_name in {"final": f"{run.env}.zip", "best": "best_model.zip"}.items():
            returns = evaluate(run, zip_name)
            row[name] = {"mean": np.mean(returns), "std": np.std(returns), "median": np.median(returns)}
            row[name]["returns"] = [round(value, 3) for value in returns]
        rows.append(row)
        means = f"final {row['final']['mean']:.1f}, best {row['best']['mean']:.1f}"
        print(f"{run.algo} seed {run.seed}: {means}", flush=True)

    final = {algo: np.array([r["final"]["returns"] for r in rows if r["algo"] == algo]) for algo in study.algos}
    summary = summarize(final)
    for algo, figures in summary.items():
        figures["train_minutes"] = np.mean([r["train_seconds"] for r in rows if r["algo"] == algo]) / 60
    print(f"\n{format_table(study, summary)}\n")

    report |= {
        **asdict(replace(study, seeds=list(study.seeds))),
        "command": shlex.join(
            ["python", f"scripts/{Path(__file__).name}", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "evaluation": {"episodes": N_EVAL_EPISODES, "first_seed": EVAL_SEED},
        "summary": summary,
    }
    first, *others = study.algos
    peers = {algo: final[algo] for algo in others} if peer_returns is None else {str(args.against): peer_returns}
    holds = True
    if study.bar is not None and args.against is None:
        holds = min(summary[first]["seed_means"]) >= study.bar
        print(f"Every {first} agent has a mean return of at least {study.bar:g}: {'yes' if holds else 'NO'}")
    elif peers:
        report["comparisons"] = {peer: compare(final[first], returns) for peer, returns in peers.items()}
        for peer, comparison in report["comparisons"].items():
            holds = holds and comparison["holds"]
            low, high = comparison["difference_95"]
            print(
                f"{first} - {peer}: {comparison['difference']:.2f}, 95% interval [{low:.2f}, {high:.2f}]; "
                f"its lower end lies above {comparison['limit']:.2f}: {'yes' if comparison['holds'] else 'NO'}"
            )
    report |= {"holds": holds, "runs": rows}
    path = args.log_folder / f"{args.study}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"All figures: {path}")
    return 0 if holds else 1


if __name__ == "__main__":
    # As `python -m` has it, by which the runs are trained: hyperparameters may name the user's own modules
    sys.path.insert(0, os.getcwd())
    sys.exit(main())
