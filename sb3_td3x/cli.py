"""The command line: ``python -m sb3_td3x``, or the console command ``td3x``."""

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym

import _sb3_td3x_autoload as autoload
import sb3_td3x
from sb3_td3x.studies.options import at_least

STARTUP_FILES = ("sb3_td3x.pth", "sb3_td3x.start")
# What one sentence explains
FILE_ERRORS = (ImportError, OSError, ValueError, gym.error.Error)
ZOO_COMMANDS = "train, enjoy, record_video or plots.all_plots"
# Commands with a parser of their own: the module whose `main` runs them, and their help
DELEGATED = {
    "study": ("sb3_td3x.studies.command", "train many runs, compare them and write a report"),
    "agents": ("sb3_td3x.agents.command", "publish, evaluate, plot and animate trained agents"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in DELEGATED:
        command = importlib.import_module(DELEGATED[argv[0]][0])
        return int(command.main(argv[1:]))
    args = _make_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except args.errors as error:
        _print_error(error)
        return 1


def _print_error(error: Exception) -> None:
    """Print an error without control characters, which a stranger's file may hold."""
    print("".join(char if char.isprintable() else " " for char in str(error)), file=sys.stderr)


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; the delegated ones stand in its help alone."""
    parser = argparse.ArgumentParser(
        prog="td3x" if Path(sys.argv[0]).stem == "td3x" else "python -m sb3_td3x",
        description="Without a command: print version, registration with RL Zoo, and paths.",
    )
    parser.set_defaults(run=_print_status, errors=())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    trusted = argparse.ArgumentParser(add_help=False)
    trusted.add_argument(
        "--trusted", action="store_true", help="the folder is your own: import what it names, unpickle what it holds"
    )
    run_folder = argparse.ArgumentParser(add_help=False)
    run_folder.add_argument("folder", type=Path, help="the folder of the run, such as logs/td3x/Pendulum-v1_1")

    inspect = commands.add_parser(
        "inspect", help="show what an agent's file contains", description="No code that the file holds is run."
    )
    inspect.add_argument("file", type=Path, help="a zip file of TD3X, or of SB3's TD3 or DDPG")
    inspect.set_defaults(run=_inspect_agent, errors=FILE_ERRORS)

    play = commands.add_parser(
        "play",
        parents=[run_folder, trusted],
        help="play the agent of a run of the zoo",
        description="Unlike rl_zoo3.enjoy, this does not run code that the folder holds, unless it is trusted.",
    )
    play.add_argument("-n", "--n-timesteps", type=at_least(1), default=1000, help="number of decisions (default: 1000)")
    play.add_argument("--render", action="store_true", help="show the env on the screen")
    play.add_argument("--seed", type=at_least(0), default=0, help="seed of the env (default: 0)")
    mode = play.add_mutually_exclusive_group()
    mode.add_argument("--deterministic", dest="deterministic", action="store_true", default=True)
    mode.add_argument("--stochastic", dest="deterministic", action="store_false")
    play.add_argument("--best", action="store_true", help="play the best agent of the evaluations, not the last one")
    play.add_argument(
        "--every-step", action="store_true", help="decide at every env step, also if the training repeated actions"
    )
    play.add_argument("--gym-packages", nargs="+", default=[], help="packages to import, which register envs")
    play.set_defaults(run=_play_folder, errors=FILE_ERRORS)

    export = commands.add_parser(
        "export",
        help="write an agent's actor to an ONNX file",
        description="No code that the agent's files hold is run.",
    )
    export.add_argument("agent", type=Path, help="a zip file of TD3X, or of SB3's TD3 or DDPG")
    export.add_argument("actor", type=Path, help="the ONNX file to write")
    export.add_argument(
        "--vec-normalize",
        type=Path,
        metavar="FILE",
        help="statistics of VecNormalize that the agent was trained with; default: those in its run folder, if any",
    )
    export.set_defaults(run=_export_actor, errors=FILE_ERRORS)

    resume = commands.add_parser(
        "resume",
        parents=[run_folder, trusted],
        help="resume an interrupted run of the zoo",
        description="Train from the newest whole checkpoint of a run, with its own settings, in its own folder, until "
        "its number of timesteps. A run has checkpoints if it is trained with --save-freq, or with a "
        "ResumableCheckpoint among the callbacks of its YAML file. A run with code of your own (hooks, callbacks, "
        "wrappers, --gym-packages) needs --trusted.",
    )
    resume.set_defaults(run=_resume_folder)

    zoo = commands.add_parser(
        "zoo",
        help="run a command of the zoo with td3x registered, also where start-up files are disabled",
        description="`zoo train ...` is `python -m rl_zoo3.train ...`, with td3x registered in any case.",
    )
    zoo.add_argument("name", help=f"a command of the zoo, such as {ZOO_COMMANDS}")
    zoo.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    zoo.set_defaults(run=_run_zoo)

    for name, (_, text) in DELEGATED.items():
        commands.add_parser(name, help=text)
    return parser


def _print_status(args: argparse.Namespace) -> None:
    """Print what is installed, and whether the zoo knows td3x."""
    # Before anything here registers td3x: what a command of the zoo would see
    active = autoload.is_installed()
    import rl_zoo3

    from sb3_td3x.zoo.register import ALGO, hyperparams_path

    registered = rl_zoo3.ALGOS.get(ALGO) is sb3_td3x.TD3X
    folders = [Path(folder) for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    startup_files = [folder / name for folder in folders for name in STARTUP_FILES if (folder / name).is_file()]

    print(f"sb3_td3x {sb3_td3x.__version__}, Python {sys.version.split()[0]}, rl_zoo3 {rl_zoo3.__version__}")
    print(f"registered with rl_zoo3: {'yes' if registered else 'no'}")
    print(f"autoload: {'active' if active else 'not active'}")
    print(f"start-up files: {', '.join(map(str, startup_files)) or 'none found'}")
    print(f"package: {Path(__file__).parent}")
    print(f"hyperparameters: {hyperparams_path()}")
    if not registered:
        print("\n`python -m sb3_td3x zoo train --algo td3x ...` registers td3x without start-up files.")


def _inspect_agent(args: argparse.Namespace) -> None:
    """Describe an agent's file."""
    from sb3_td3x.files.inspect import describe_agent

    print(describe_agent(args.file))


def _play_folder(args: argparse.Namespace) -> None:
    """Play the agent of a run."""
    from sb3_td3x.zoo.play import play

    for package in args.gym_packages:
        importlib.import_module(package)
    options = (args.n_timesteps, args.render, args.seed, args.deterministic, args.best, args.every_step)
    play(args.folder, *options, args.trusted)


def _export_actor(args: argparse.Namespace) -> None:
    """Export the actor of a file."""
    from sb3_td3x.export import export_file

    statistics = export_file(args.agent, args.actor, args.vec_normalize)
    print(f"{args.actor}{'' if statistics is None else f', which normalizes observations by {statistics}'}")


def _resume_folder(args: argparse.Namespace) -> int:
    """Resume a run."""
    autoload.install(force=True)
    from sb3_td3x.zoo.resume import UnusableRunError, resume_run

    try:
        resume_run(args.folder, args.trusted)
    except UnusableRunError as error:
        _print_error(error)
        return 2
    return 0


def _run_zoo(args: argparse.Namespace) -> int:
    """Run a command of the zoo."""
    autoload.install(force=True)
    # For the commands that the zoo's record_training starts
    os.environ.pop(autoload.ENVIRONMENT_VARIABLE, None)
    try:
        is_known = find_spec(f"rl_zoo3.{args.name}") is not None
    except ModuleNotFoundError:
        is_known = False
    if not is_known:
        print(f"rl_zoo3 has no command {args.name!r}, expected one such as {ZOO_COMMANDS}", file=sys.stderr)
        return 2
    sys.argv[1:] = args.arguments
    runpy.run_module(f"rl_zoo3.{args.name}", run_name="__main__", alter_sys=True)
    return 0
