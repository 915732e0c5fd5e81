"""Command line: what is installed, agents' files read safely, and RL Zoo's commands where start-up is disabled."""

import argparse
import difflib
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import _sb3_td3x_autoload as autoload
import sb3_td3x

STARTUP_FILES = ("sb3_td3x.pth", "sb3_td3x.start")


def main(argv: list[str] | None = None) -> int:
    """
    :param argv: arguments, by default those of the process
    :return: exit code
    """
    parser = argparse.ArgumentParser(
        prog="python -m sb3_td3x", description="Without a command: print version, registration with RL Zoo, and paths."
    )
    parser.set_defaults(run=print_status)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_inspect_command(commands)
    add_play_command(commands)
    add_zoo_command(commands)
    add_resume_command(commands)

    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def print_status(args: argparse.Namespace) -> int:
    """
    :param args: not used
    :return: exit code
    """
    # What a zoo command would see in this environment, so before anything here could change it
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
    return 0


def add_inspect_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """
    :param commands: where to add the command
    """
    parser = commands.add_parser(
        "inspect", help="tell what is in an agent's file", description="Nothing that is in the file is run."
    )
    parser.add_argument("file", type=Path, help="a zip file of TD3X, or of SB3's TD3 or DDPG")
    parser.set_defaults(run=inspect_agent)


def inspect_agent(args: argparse.Namespace) -> int:
    """
    :param args: ``file``
    :return: exit code
    """
    from sb3_td3x.files.inspect import describe_agent

    try:
        print(describe_agent(args.file))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def add_play_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """
    :param commands: where to add the command
    """
    parser = commands.add_parser(
        "play",
        help="play the folder of a zoo's run without running code from it",
        description="Like `rl_zoo3.enjoy`, which runs what strangers may have put into the folder; this does not.",
    )
    parser.add_argument("folder", type=Path, help="the run's folder, such as logs/td3x/Pendulum-v1_1")
    parser.add_argument("-n", "--n-timesteps", type=int, default=1000, help="number of decisions")
    parser.add_argument("--render", action="store_true", help="show the env on the screen")
    parser.add_argument("--seed", type=int, default=0, help="random generator seed")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--deterministic", dest="deterministic", action="store_true", default=True)
    mode.add_argument("--stochastic", dest="deterministic", action="store_false")
    parser.add_argument("--best", action="store_true", help="the best agent of the evaluations, not the last")
    parser.add_argument("--gym-packages", nargs="+", default=[], help="packages to import, which register envs")
    parser.set_defaults(run=play_folder)


def play_folder(args: argparse.Namespace) -> int:
    """
    :param args: ``folder``, and how to play it
    :return: exit code
    """
    import gymnasium as gym

    from sb3_td3x.validation import check_integer
    from sb3_td3x.zoo.play import play

    try:
        check_integer("n_timesteps", args.n_timesteps, low=1)
        check_integer("seed", args.seed, low=0)
        for package in args.gym_packages:
            importlib.import_module(package)
        play(args.folder, args.n_timesteps, args.render, args.seed, args.deterministic, args.best)
    except (ImportError, OSError, ValueError, gym.error.Error) as error:
        # A stranger's folder may put there what a terminal obeys
        print("".join(char if char.isprintable() else " " for char in str(error)), file=sys.stderr)
        return 1
    return 0


def add_zoo_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """
    :param commands: where to add the command
    """
    parser = commands.add_parser(
        "zoo",
        help="run a command of RL Zoo with td3x registered, also where start-up files are disabled",
        description="`zoo train ...` is `python -m rl_zoo3.train ...`, with td3x registered in any case.",
    )
    parser.add_argument("name", help="a command of the zoo, such as train, enjoy, record_video or plots.all_plots")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run_zoo)


def run_zoo(args: argparse.Namespace) -> int:
    """
    :param args: ``name`` of the zoo's command and its ``arguments``
    :return: exit code
    """
    autoload.install(force=True)
    # For the commands that the zoo's record_training starts
    os.environ.pop(autoload.ENVIRONMENT_VARIABLE, None)
    names = zoo_commands()
    if args.name not in names:
        closest = difflib.get_close_matches(args.name, names, n=1)
        hint = f"did you mean {closest[0]}?" if closest else f"it has {', '.join(names)}."
        print(f"rl_zoo3 has no command {args.name!r}: {hint}", file=sys.stderr)
        return 2
    sys.argv[1:] = args.arguments
    runpy.run_module(f"rl_zoo3.{args.name}", run_name="__main__", alter_sys=True)
    return 0


def add_resume_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """
    :param commands: where to add the command
    """
    parser = commands.add_parser(
        "resume",
        help="go on with an interrupted run of the zoo",
        description="Goes on from the newest whole checkpoint of a run, with the run's own settings, in its own "
        "folder, until its number of timesteps. It needs --save-freq, or a ResumableCheckpoint in the YAML's "
        "callbacks. As in all of the zoo, the settings of a folder may execute code: resume none that you do not "
        "trust.",
    )
    parser.add_argument("folder", type=Path, help="the folder of the run, such as logs/td3x/Pendulum-v1_1")
    parser.set_defaults(run=run_resume)


def run_resume(args: argparse.Namespace) -> int:
    """
    :param args: ``folder`` of the run
    :return: exit code
    """
    autoload.install(force=True)
    from sb3_td3x.zoo.resume import UnusableRunError, resume_run

    try:
        resume_run(args.folder)
    except UnusableRunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def zoo_commands() -> list[str]:
    """
    :return: the zoo's modules that are meant to be run, without the package's name
    """
    spec = find_spec("rl_zoo3")  # finds the package without importing it
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    scripts = [path for path in package.rglob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(package).with_suffix("").parts) for path in scripts)
