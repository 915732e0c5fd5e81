"""
Publish agents, play their tests, and show how they learned and what they do.

    python -m sb3_td3x agents publish logs/td3x/Pendulum-v1_1 logs/td3x/Pendulum-v1_2
    python -m sb3_td3x agents evaluate -o agents.json       plays the published agents, and prints a table
    python -m sb3_td3x agents evaluate --check              exit status 1 if an agent is worse than recorded
    python -m sb3_td3x agents plot                          learning curves
    python -m sb3_td3x agents animate logs/td3x/Pendulum-v1_1
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sb3_td3x.agents.training import AGENTS_FOLDER, Training
from sb3_td3x.studies.options import at_least


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command on agents.

    :param argv: arguments, by default those of the process
    :return: exit status: 0, 1 if an agent is worse than recorded, 2 for bad input
    """
    args = _make_parser().parse_args(argv)
    try:
        for package in args.gym_packages:
            importlib.import_module(package)
        run = {"publish": _publish, "evaluate": _evaluate, "plot": _plot, "animate": _animate}[args.command]
        return run(args)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sb3_td3x agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    publish = commands.add_parser(
        "publish",
        help="select the best agent of several seeds, test it, and write it without paths of the machine",
        description="Takes finished runs of `rl_zoo3.train --algo td3x` in one env, with the same settings and a seed "
        "each. Run it on the machine that trained, or give --cpu.",
    )
    publish.add_argument("runs", type=Path, nargs="+", metavar="RUN_FOLDER", help="all seeds of one env")
    publish.add_argument("-o", "--output", type=Path, default=AGENTS_FOLDER, help="log folder (default: %(default)s)")
    publish.add_argument("--cpu", help="processor that trained, if it was another machine")
    publish.add_argument(
        "--selection-episodes",
        type=at_least(1),
        default=200,
        help="most episodes of a candidate (default: %(default)s)",
    )
    publish.add_argument(
        "--test-episodes", type=at_least(1), help="default: 1,000 in BipedalWalker and LunarLander, else 100"
    )
    publish.add_argument("--jobs", type=at_least(1), default=1, help="processes that play the selection")
    publish.add_argument(
        "--every-step", action="store_true", help="let the agents decide at every env step, also after FrameSkip"
    )
    evaluate = commands.add_parser("evaluate", help="play the test of published agents, and print a table")
    evaluate.add_argument("--env", nargs="+", dest="envs", metavar="ENV", help="these agents only")
    evaluate.add_argument("--episodes", type=at_least(1), help="default: the test of each agent's training.json")
    evaluate.add_argument(
        "--n-envs", type=at_least(1), default=10, help="copies of the env side by side (default: %(default)s)"
    )
    evaluate.add_argument("--check", action="store_true", help="exit status 1 if an agent is worse than recorded")
    evaluate.add_argument("-o", "--output", type=Path, help="JSON file for all figures")
    plot = commands.add_parser("plot", help="learning curves of published agents")
    plot.add_argument("-o", "--output", type=Path, default=Path(), help="folder for the pictures")
    for command in (evaluate, plot):
        command.add_argument("-f", "--folder", type=Path, default=AGENTS_FOLDER, help="log folder with the agents")
    animate = commands.add_parser("animate", help="an episode of an agent as a GIF")
    animate.add_argument("folder", type=Path, help="folder of a run, such as logs/td3x/Pendulum-v1_1")
    animate.add_argument("-o", "--output", type=Path, help="GIF file (default: ENV.gif)")
    animate.add_argument("--best", action="store_true", help="the best agent of the evaluations, not the last")
    animate.add_argument("--seed", type=at_least(0), default=100_000, help="of the episode (default: %(default)s)")
    animate.add_argument("--every", type=at_least(1), help="show each Nth step (default: about 125 frames)")
    animate.add_argument("--width", type=at_least(100), default=400, help="in pixels (default: %(default)s)")
    animate.add_argument("--trusted", action="store_true", help="the run is your own and may execute code")
    for command in (publish, evaluate, plot, animate):
        command.add_argument("--gym-packages", nargs="+", default=[], help="packages to import, which register envs")
    return parser


def _publish(args: argparse.Namespace) -> int:
    from sb3_td3x.agents.publish import publish

    folder = publish(
        args.runs, args.output, args.cpu, args.selection_episodes, args.test_episodes, args.jobs, args.every_step
    )
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    print(f"{folder}: seed {Training.read(folder).published_seed}, {size / 2**20:.2f} MiB")
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from sb3_td3x.agents.evaluate import evaluate

    not_worse = evaluate(args.folder, args.episodes, args.n_envs, args.envs, args.output)
    return 1 if args.check and not not_worse else 0


def _plot(args: argparse.Namespace) -> int:
    from sb3_td3x.agents.plot import plot

    for path in plot(args.folder, args.output):
        print(path)
    return 0


def _animate(args: argparse.Namespace) -> int:
    # The env renders to arrays only. SDL would look for a display, and print an error where there is none
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    from sb3_td3x.animation import record_episode
    from sb3_td3x.zoo.runs import ZooRun

    run = ZooRun(args.folder, args.trusted)
    env = run.make_env(seed=args.seed)
    try:
        model = run.load_agent(run.best_agent if args.best else run.last_agent, env)
        recording = record_episode(model, env, seed=args.seed, width=args.width)
    finally:
        env.close()
    path = args.output or Path(f"{run.config_folder.name}.gif")
    recording.save_gif(path, args.every, args.width)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {recording}")
    return 0
