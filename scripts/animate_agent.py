"""
A published agent as a GIF: one episode at the env's speed, with its actions and rewards.

    python scripts/animate_agent.py BipedalWalkerHardcore-v3        # docs/results/BipedalWalkerHardcore-v3.gif
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_folders import AGENTS_FOLDER, PICTURES, Training, find_agents
from options import at_least

from sb3_td3x.animation import record_episode
from sb3_td3x.zoo.play import config_folder, load_player, make_env


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: the command line, by default that of the process
    :return: exit status
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", help="the agent's environment")
    parser.add_argument("-f", "--folder", type=Path, default=AGENTS_FOLDER, help="the zoo's log folder of the agents")
    # Not one of the seeds that decide which agent is published, nor of those that say how good it is
    parser.add_argument("--seed", type=at_least(0), default=100_000, help="seed of the episode (default: %(default)s)")
    parser.add_argument(
        "--every", type=at_least(1), help="shows each so-many-th step (default: so that there are 125 frames)"
    )
    parser.add_argument("--width", type=at_least(100), default=400, help="in pixels (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=PICTURES, help="where the GIF goes")
    args = parser.parse_args(arguments)
    folders = {Training.read(folder).env: folder for folder in find_agents(args.folder)}
    if args.env not in folders:
        parser.error(f"env {args.env} has no agent in {args.folder}, expected one of {', '.join(sorted(folders))}")
    folder = folders[args.env]
    args.output.mkdir(parents=True, exist_ok=True)
    env = make_env(config_folder(folder), seed=args.seed)
    recording = record_episode(load_player(folder / f"{args.env}.zip"), env, seed=args.seed, width=args.width)
    env.close()
    path = args.output / f"{args.env}.gif"
    recording.save_gif(path, args.every, args.width)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {recording}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
