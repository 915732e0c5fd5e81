"""
Compare hyperparameters or algorithms over several seeds. RL Zoo trains every run.

    python -m sb3_td3x study ablation --env Pendulum-v1 BipedalWalker-v3 --seeds 1 2 3 4 5 --jobs 2
    python -m sb3_td3x study compare td3x td3 sac tqc --env Pendulum-v1
    python -m sb3_td3x study sweep my_arms.yml --env Pendulum-v1
    python -m sb3_td3x study report logs/studies/ablation

The same command continues after an interruption, and does only what is missing. With `--backend ray` the runs are
spread over a Ray cluster; the folder of the study must then be on a filesystem that all machines share, under the same
path.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from sb3_td3x.studies.arms import Arm, ablation_arms, check_choice, comparison_arms, sweep_arms
from sb3_td3x.studies.engine import BACKENDS, run_study
from sb3_td3x.studies.options import at_least
from sb3_td3x.studies.plan import Evaluation, Plan
from sb3_td3x.zoo.runs import action_repeat, check_names

ABLATION_ENVS = ("Pendulum-v1", "LunarLanderContinuous-v3", "BipedalWalker-v3")
# In a training, unless there is a frequency
EVALUATIONS = 20


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a study, or write its report.

    :param argv: arguments, by default those of the process
    :return: exit status: 0 if all runs are finished, 1 if some failed, 2 for bad input
    """
    args = _make_parser().parse_args(argv)
    try:
        if args.kind == "report":
            from sb3_td3x.studies.report import write_report

            print(write_report(args.folder))
            return 0
        plan = _make_plan(args)
        name = args.file.stem if args.kind == "sweep" else args.kind
        study = args.folder or Path("logs") / "studies" / name
        n_failed = run_study(plan, study, args.jobs, args.backend, args.trusted)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted: the same command continues", file=sys.stderr)
        return 130
    print(f"Study: {study}")
    return 1 if n_failed else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sb3_td3x study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="kind", required=True, metavar="COMMAND")
    ablation = commands.add_parser("ablation", help="TD3 without each of its tricks, and TD3X's own additions")
    ablation.add_argument("--all-64", action="store_true", help="take every combination of the six tricks")
    ablation.add_argument("--arms", nargs="+", metavar="ARM", help="take these arms only")
    compare = commands.add_parser("compare", help="algorithms of the zoo with their own hyperparameters")
    compare.add_argument("algos", nargs="+", metavar="ALGO", help="names in the zoo")
    sweep = commands.add_parser("sweep", help="arms from a file")
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
        # The seed is the number of the run's folder: the zoo takes 0 for the latest run, and -1 for a random seed
        command.add_argument("--seeds", type=at_least(1), nargs="+", default=[1, 2, 3, 4, 5], help="default: 1 to 5")
        command.add_argument(
            "--timesteps", type=at_least(1), help="length of a training in env steps; default: that of the first arm"
        )
        command.add_argument(
            "--eval-freq", type=at_least(1), help="env steps between evaluations; default: a twentieth of the training"
        )
        command.add_argument("--eval-episodes", type=at_least(1), default=10, help="of each evaluation; default: 10")
        command.add_argument("-f", "--folder", type=Path, help="folder of the study; default: logs/studies/NAME")
        command.add_argument("--jobs", type=_jobs, default=1, help="runs at a time, -1: one per processor; default: 1")
        command.add_argument("--backend", choices=BACKENDS, default="local", help="this machine, or a Ray cluster")
        command.add_argument("--device", default="cpu", help="PyTorch device; default: cpu")
        command.add_argument("--num-threads", type=at_least(1), default=1, help="PyTorch threads per run; default: 1")
        command.add_argument("--gym-packages", nargs="+", default=[], help="packages to import, which register envs")
        command.add_argument(
            "--trusted", action="store_true", help="run wrappers and hooks of your own that the hyperparameters name"
        )
    for command in (ablation, sweep):
        command.add_argument("--conf-file", type=Path, help="hyperparameters of td3x; default: those of the package")
    report = commands.add_parser("report", help="tables and pictures of a study")
    report.add_argument("folder", type=Path, help="folder of the study")
    return parser


def _jobs(text: str) -> int:
    try:
        return -1 if text == "-1" else at_least(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or -1") from None


def _make_arms(args: argparse.Namespace) -> list[Arm]:
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


def _make_plan(args: argparse.Namespace) -> Plan:
    arms = _make_arms(args)
    for arm in () if args.trusted else arms:
        for env, entry in arm.hyperparams.items():
            check_names(entry, f"The arm {arm.name} in {env}")
    timesteps = {}
    for env in args.envs:
        first = next(arm.hyperparams[env] for arm in arms if env in arm.hyperparams)
        timesteps[env] = args.timesteps or int(first["n_timesteps"]) * action_repeat(first)
    freq = {env: args.eval_freq or max(length // EVALUATIONS, 1) for env, length in timesteps.items()}
    return Plan(
        kind=args.kind,
        envs=list(timesteps),
        seeds=list(dict.fromkeys(args.seeds)),
        timesteps=timesteps,
        evaluation=Evaluation(freq, args.eval_episodes),
        arms={arm.name: arm for arm in arms},
        device=args.device,
        num_threads=args.num_threads,
        gym_packages=args.gym_packages,
    )
