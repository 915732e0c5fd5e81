"""
Compare hyperparameters or algorithms over several seeds, each run trained by the zoo.

    python scripts/study.py ablation --env Pendulum-v1 BipedalWalker-v3 --seeds 1 2 3 4 5 --jobs 2
    python scripts/study.py compare td3x td3 sac tqc --env Pendulum-v1
    python scripts/study.py sweep my_arms.yml --env Pendulum-v1
    python scripts/study.py report logs/studies/ablation

The same command goes on after an interruption, and does only what is missing. With ``--backend ray`` the runs are
spread over a Ray cluster; the study's folder must then be on a filesystem that all its machines share, under the same
path. See docs/studies.md.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from options import at_least

from sb3_td3x.studies.arms import Arm, ablation_arms, check_choice, comparison_arms, sweep_arms
from sb3_td3x.studies.engine import BACKENDS, report_failures, run_study
from sb3_td3x.studies.plan import Plan, settings_of

ABLATION_ENVS = ("Pendulum-v1", "LunarLanderContinuous-v3", "BipedalWalker-v3")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """
    :param arguments: the command line, by default that of the process
    :return: what it says
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="kind", required=True, metavar="COMMAND")
    ablation = commands.add_parser("ablation", help="TD3 without each of its tricks, and TD3X's own additions")
    ablation.add_argument("--all-64", action="store_true", help="every combination of the six tricks")
    ablation.add_argument("--arms", nargs="+", metavar="ARM", help="these arms alone")
    compare = commands.add_parser("compare", help="algorithms of the zoo with their own hyperparameters")
    compare.add_argument("algos", nargs="+", metavar="ALGO", help="names in the zoo")
    sweep = commands.add_parser("sweep", help="arms of your own")
    sweep.add_argument("file", type=Path, help="YAML: names of arms, and below each the hyperparameters that change")
    for command in (ablation, compare, sweep):
        is_ablation = command is ablation
        command.add_argument(
            "--env",
            nargs="+",
            dest="envs",
            metavar="ENV",
            required=not is_ablation,
            default=ABLATION_ENVS,
            help=f"ids of the envs{f'; default: {chr(32).join(ABLATION_ENVS)}' if is_ablation else ''}",
        )
        # Each is the number of its run's folder: the zoo takes 0 for the latest, and a negative seed for a random one
        command.add_argument("--seeds", type=at_least(1), nargs="+", default=[1, 2, 3, 4, 5], help="default: 1 to 5")
        command.add_argument(
            "--timesteps", type=at_least(1), help="length of a training in env steps; default: of the first arm's entry"
        )
        command.add_argument(
            "--eval-freq", type=at_least(1), help="env steps between evaluations; default: a twentieth"
        )
        command.add_argument("--eval-episodes", type=at_least(1), default=10, help="of each evaluation; default: 10")
        command.add_argument("-f", "--folder", type=Path, help="of the study; default: logs/studies/NAME")
        command.add_argument("--jobs", type=_jobs, default=1, help="runs at a time, -1: one a processor; default: 1")
        command.add_argument("--backend", choices=BACKENDS, default="loky", help="joblib's; default: loky")
        command.add_argument("--device", default="cpu", help="of PyTorch; default: cpu")
        command.add_argument("--num-threads", type=at_least(1), default=1, help="of PyTorch, for each run; default: 1")
        command.add_argument("--gym-packages", nargs="+", default=[], help="packages to import, which register envs")
    for command in (ablation, sweep):
        command.add_argument("--conf-file", type=Path, help="td3x's hyperparameters; default: hyperparams/td3x.yml")
    report = commands.add_parser("report", help="tables and pictures of a study")
    report.add_argument("folder", type=Path, help="of the study")
    return parser.parse_args(arguments)


def _jobs(text: str) -> int:
    """
    :param text: an argument
    :return: it as a number
    """
    try:
        return -1 if text == "-1" else at_least(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or -1") from None


def make_arms(args: argparse.Namespace) -> list[Arm]:
    """
    :param args: the command line
    :return: the arms of the study
    :raises ValueError: an arm, env, algorithm or hyperparameter is unknown
    """
    import gymnasium as gym
    import rl_zoo3.import_envs  # noqa: F401

    for package in args.gym_packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(f"--gym-packages {package} cannot be imported: {error}") from None
    for env in args.envs:
        check_choice("The env", env, gym.registry)
    if args.kind == "ablation":
        return ablation_arms(args.envs, args.timesteps, args.conf_file, args.all_64, args.arms)
    if args.kind == "compare":
        return comparison_arms(list(dict.fromkeys(args.algos)), args.envs)
    return sweep_arms(args.file, args.envs, args.conf_file)


def make_plan(args: argparse.Namespace) -> Plan:
    """
    :param args: the command line
    :return: the study
    """
    arms = make_arms(args)
    first = {env: next(arm.hyperparams[env] for arm in arms if env in arm.hyperparams) for env in args.envs}
    return Plan(
        kind=args.kind,
        arms=arms,
        envs={env: settings_of(entry, args.timesteps, args.eval_freq) for env, entry in first.items()},
        seeds=list(dict.fromkeys(args.seeds)),
        eval_episodes=args.eval_episodes,
        device=args.device,
        num_threads=args.num_threads,
        gym_packages=args.gym_packages,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: the command line, by default that of the process
    :return: exit status: 0 if all runs are whole, 1 if some failed
    """
    args = parse(arguments)
    try:
        if args.kind == "report":
            from sb3_td3x.studies.report import write_report

            print(write_report(args.folder))
            return 0
        plan = make_plan(args)
        name = args.file.stem if args.kind == "sweep" else args.kind
        study = args.folder or Path("logs") / "studies" / name
        failed = report_failures(run_study(plan, study, args.jobs, args.backend))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on", file=sys.stderr)
        return 130
    print(f"Study: {study}")
    return 1 if failed else 0


if __name__ == "__main__":
    # As `python -m` has it, by which the runs are trained: arms may name the user's own modules
    sys.path.insert(0, os.getcwd())
    sys.exit(main())
