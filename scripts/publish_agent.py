"""
Publish the agent of an environment in the zoo's layout: the best of its candidates by episodes that are for that alone.

    python scripts/publish_agent.py logs/td3x/Pendulum-v1_1 logs/td3x/Pendulum-v1_2 ...

Takes the finished runs of ``rl_zoo3.train --algo td3x`` of one environment, one for each seed, all of them trained with
the same settings. Of each run the candidates (the final agent, ``best_model.zip``, checkpoints
``rl_model_*_steps.zip``) play the selection's episodes, and the best one the test's, once. The agent of the seed that
was best at the selection goes to ``rl-trained-agents/td3x/ENV_1/``, with the figures of all seeds in ``training.json``.
Run it on the machine that trained, or say ``--cpu``.

With ``--add`` the runs are further seeds of the agent that is published: its seeds stay, and so does the agent where no
new one is better at the selection.

With ``--first-round N`` the selection is successive halving (Karnin et al. 2013): all candidates play N episodes, the
worse half drops out, the others play on until they have twice as many, and so on up to ``--selection-episodes``.

What is published holds no pickle and no path of this machine. The zip has the networks alone: no replay buffer, Adam
starts anew if it is trained further, and the target networks are those that they follow.
"""

import argparse
import math
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from agent_folders import (
    AGENTS_FOLDER,
    ALGO,
    N_SELECTION_EPISODES,
    N_TEST_EPISODES,
    PACKAGES,
    SELECTION_SEED,
    TEST_SEED,
    Seed,
    Training,
    best_candidate,
    evaluate,
)
from joblib import Parallel, delayed  # type: ignore[import-untyped]
from options import at_least
from stable_baselines3.common.monitor import load_results

from sb3_td3x import TD3X
from sb3_td3x.files.agent import open_agent
from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.measure import TrainedRun, agent_timesteps, read_evaluations
from sb3_td3x.zoo.play import config_folder, read_zoo_yaml

# Options of the zoo whose values are evaluated, and their names in args.yml
_EVALUATED = {
    **dict.fromkeys(("-params", "--hyperparams"), "hyperparams"),
    "--env-kwargs": "env_kwargs",
    "--eval-env-kwargs": "eval_env_kwargs",
}
# So long between the ends of two episodes, in seconds, that the training was not running: an episode and an evaluation
# take some minutes at most
_STANDSTILL = 1800
# Followed by what ends a name, lest it be found by chance among the networks' numbers
_MACHINE_PATH = re.compile(rb"/(?:home|root|tmp|work|Users)[/\"'\s]")


@dataclass(frozen=True)
class Run:
    """
    A finished training.

    :param folder: the zoo's folder of it
    """

    folder: Path

    @cached_property
    def config_folder(self) -> Path:
        """The subfolder with its configuration, named after the env"""
        return config_folder(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its hyperparameters"""
        return read_zoo_yaml(self.config_folder / "config.yml")

    @cached_property
    def args(self) -> dict[str, Any]:
        """The zoo's options"""
        return read_zoo_yaml(self.config_folder / "args.yml")

    @property
    def trained(self) -> TrainedRun:
        """The files of its agents"""
        return TrainedRun(self.folder, ALGO, self.args["env"])

    @property
    def command(self) -> str:
        """What trained it"""
        return portable_command((self.config_folder / "command.txt").read_text(), self.args)

    def check(self) -> None:
        """
        :raises ValueError: this is another algorithm's run, it has not finished, or cannot be published
        """
        if self.args.get("algo") != ALGO:
            raise ValueError(f"{self.folder} has algo={self.args.get('algo')!r}, expected a run of {ALGO}")
        asked = self.args["n_timesteps"] if self.args["n_timesteps"] > 0 else int(self.config["n_timesteps"])
        # An interrupted zoo saves its agent too
        trained = agent_timesteps(self.trained.last_agent)
        if trained < asked:
            raise ValueError(f"{self.folder} has trained {trained} timesteps, expected a finished run of {asked}")
        if found := _MACHINE_PATH.search(self.command.encode()):
            raise ValueError(
                f"{self.folder} was trained by `{self.command}`, with a path of a machine, {found.group()!r}"
            )

    def candidates(self) -> list[str]:
        """
        :return: names of the agents' files, the final one first; of files that hold the same agent one
        """
        trained = self.trained
        names: dict[tuple[int, int], str] = {}
        for path in (trained.last_agent, trained.best_agent, *trained.saved_agents().values()):
            if path.is_file():
                data = open_agent(path).data
                names.setdefault((data["num_timesteps"], data["_n_updates"]), path.name)
        return list(names.values())


def training_seconds(folder: Path) -> float:
    """
    :param folder: of a run, with its ``Monitor``'s files
    :return: wall-clock time of the training until the end of its last episode, in seconds, without the time for which
        it stood still before it was resumed
    """
    between_episodes = np.diff(load_results(str(folder))["t"], prepend=0.0)
    return float(between_episodes[between_episodes < _STANDSTILL].sum())


def without_folders(value: Any) -> Any:
    """
    :param value: part of a configuration
    :return: the same as plain lists and dictionaries, with absolute paths cut to their last part
    """
    if isinstance(value, dict):
        return {key: without_folders(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(entry) for entry in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def portable_command(command: str, args: dict[str, Any]) -> str:
    """
    :param command: the zoo's ``command.txt``, in which nothing is quoted
    :param args: its ``args.yml``
    :return: the command to type, from any folder
    """
    words = re.sub(r"( --[a-z-]+)=", r"\1 ", command).split(" ")
    if "-m" in words:
        words = words[words.index("-m") :]
    elif Path(words[1]).name == "rl_zoo3":
        # The zoo's command of that name
        words = ["-m", f"rl_zoo3.{words[2]}", *words[3:]]
    else:
        words = words[1:]
    options: list[list[str]] = []
    for word in words:
        if re.match(r"--?[a-zA-Z]", word) or not options:
            options.append([])
        options[-1].append(word)
    result = ["python"]
    for name, *values in options:
        if name in _EVALUATED:
            given = without_folders(args[_EVALUATED[name]])
            values = [f"{key}:{value!r}" for key, value in given.items()]
        elif name in ("-f", "--log-folder"):
            values = ["logs"]
        result += [name, *without_folders(values)]
    return shlex.join(result)


def select(run: Run, n_episodes: int, n_first: int, n_jobs: int) -> dict[str, list[float]]:
    """
    :param run: a finished training
    :param n_episodes: episodes of the candidates that do not drop out
    :param n_first: episodes before the worse half drops out
    :param n_jobs: number of processes
    :return: of each candidate the returns of its episodes
    """
    names = run.candidates()
    selection: dict[str, list[float]] = {name: [] for name in names}
    n_played, n_next = 0, min(n_first, n_episodes)
    while True:
        # As a generator, so that each is reported when it has been played: there may be many, for half an hour
        played = Parallel(n_jobs, return_as="generator")
        first_seed = SELECTION_SEED + n_played
        tasks = (delayed(evaluate)(run.folder, name, n_next - n_played, first_seed) for name in names)
        for name, returns in zip(names, played(tasks), strict=True):
            selection[name] += returns
            print(f"{run.folder.name}, {name}: {np.mean(selection[name]):.2f} in {n_next} episodes", flush=True)
        if n_next == n_episodes:
            return selection
        names = sorted(names, key=lambda name: -float(np.mean(selection[name])))[: math.ceil(len(names) / 2)]
        n_played, n_next = n_next, min(2 * n_next, n_episodes)


def examine(run: Run, selection: dict[str, list[float]], n_test: int, cpu: str | None) -> Seed:
    """
    :param run: a finished training
    :param selection: the returns of its candidates
    :param n_test: number of episodes of the test
    :param cpu: processor that trained; None: this machine's
    :return: what there is to say of it
    """
    selected = best_candidate(selection)
    test_returns = evaluate(run.folder, selected, n_test, TEST_SEED)
    mean, std = np.mean(test_returns), np.std(test_returns)
    print(f"{run.folder.name}: {selected} has {mean:.2f} ± {std:.2f} at the test", flush=True)
    trained_on = machine(PACKAGES)
    return Seed(
        seed=run.args["seed"],
        command=run.command,
        timesteps=agent_timesteps(run.trained.last_agent) * run.trained.action_repeat,
        training_seconds=round(training_seconds(run.folder), 1),
        machine={**trained_on, "cpu": cpu or trained_on["cpu"]},
        selection=selection,
        selected=selected,
        selected_timesteps=agent_timesteps(run.folder / selected) * run.trained.action_repeat,
        test_returns=test_returns,
        evaluations=asdict(read_evaluations(run.trained)),
    )


def write_networks(source: Path, path: Path) -> None:
    """
    Write an agent as small as it can be and still be loaded by everything that loads agents.

    :param source: its file
    :param path: where it goes
    :raises ValueError: the file is damaged, or something in it can only be pickled
    """
    model = TD3X.load(source, device="cpu")
    model.actor.optimizer.state.clear()
    model.critic.optimizer.state.clear()
    for network, target in ((model.actor, model.actor_target), (model.critic, model.critic_target)):
        for parameter, target_parameter in zip(network.parameters(), target.parameters(), strict=True):
            # PyTorch writes memory that two tensors share once
            target_parameter.data = parameter.data
    # Where it logged to and what it saw last are of the machine and the run
    model.tensorboard_log = None
    model.save(path, exclude=["_last_obs", "_last_original_obs", "_last_episode_starts", "ep_info_buffer"])
    # As everybody will load it: raises if there is a pickle in it
    TD3X.load(path, device="cpu", trusted=False)


def check_portable(folder: Path) -> None:
    """
    :param folder: a folder to publish
    :raises ValueError: a file in it names a folder of this machine
    """
    for path in sorted(folder.rglob("*")):
        found = _MACHINE_PATH.search(path.read_bytes()) if path.is_file() else None
        if found:
            raise ValueError(f"{path} holds the path of a machine, {found.group().decode()}...: it cannot be published")


def publish(run: Run, training: Training, folder: Path) -> None:
    """
    :param run: the run whose agent is published
    :param training: the figures of all seeds
    :param folder: where it goes; what is there is replaced
    """
    env_name = run.config_folder.name
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    target = partial / env_name
    target.mkdir(parents=True)
    try:
        write_networks(run.folder / training.published.selected, partial / run.trained.last_agent.name)
        args = {**without_folders(run.args), "log_folder": "logs"}
        for name, content in {"config.yml": without_folders(run.config), "args.yml": args}.items():
            (target / name).write_text(yaml.safe_dump(content))
        (target / "command.txt").write_text(training.published.command + "\n")
        for path in (*run.folder.glob("*monitor.csv"), run.folder / "evaluations.npz"):
            if path.is_file():
                shutil.copy(path, partial)
        if run.config.get("normalize"):
            # The evaluation has read it without running it; the zoo unpickles it
            shutil.copy(run.config_folder / "vecnormalize.pkl", target)
        training.write(partial)
        check_portable(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_alike(runs: Sequence[Run], published: Path | None = None) -> None:
    """
    :param runs: what shall be published together
    :param published: folder of a published agent whose seeds they join
    :raises ValueError: they are not finished runs of one env that differ in their seeds alone
    """
    first = runs[0] if published is None else Run(published)
    for run in runs:
        run.check()
        for name in ("env", "n_timesteps"):
            if run.args[name] != first.args[name]:
                raise ValueError(
                    f"{run.folder} has {name}={run.args[name]!r}, expected {first.args[name]!r} as {first.folder}"
                )
        if without_folders(run.config) != without_folders(first.config):
            raise ValueError(f"{run.folder} has other hyperparameters than {first.folder}")
    seeds = [] if published is None else [seed.seed for seed in Training.read(published).seeds]
    seeds += [run.args["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"the runs have the seeds {seeds}, expected each once")


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: the command line, by default that of the process
    :return: exit status
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_FOLDER", help="all seeds of one environment")
    parser.add_argument("-o", "--output", type=Path, default=AGENTS_FOLDER, help="the zoo's log folder that it goes to")
    parser.add_argument("--add", action="store_true", help="to the seeds of the agent that is published")
    parser.add_argument("--cpu", help="processor that trained, where it was another machine")
    parser.add_argument("--selection-episodes", type=at_least(1), default=N_SELECTION_EPISODES)
    parser.add_argument("--first-round", type=at_least(1), metavar="N", help="episodes before the worse half drops out")
    parser.add_argument("--test-episodes", type=at_least(1), default=N_TEST_EPISODES)
    parser.add_argument("--jobs", type=at_least(1), default=1, help="number of processes that play the selection")
    args = parser.parse_args(arguments)
    first_round = args.selection_episodes if args.first_round is None else args.first_round
    runs = [Run(folder) for folder in args.runs]
    try:
        folder = args.output / ALGO / f"{runs[0].config_folder.name}_1"
        check_alike(runs, folder if args.add else None)
        earlier = Training.read(folder).seeds if args.add else []
        for seed in earlier:
            played = len(seed.selection[seed.selected]), len(seed.test_returns)
            if played != (args.selection_episodes, args.test_episodes):
                raise ValueError(
                    f"--selection-episodes {args.selection_episodes} --test-episodes {args.test_episodes}: expected "
                    f"{played[0]} and {played[1]}, as for seed {seed.seed} in {folder}"
                )
        selections = [select(run, args.selection_episodes, first_round, args.jobs) for run in runs]
        seeds = [
            examine(run, selection, args.test_episodes, args.cpu)
            for run, selection in zip(runs, selections, strict=True)
        ]
        seeds = sorted([*earlier, *seeds], key=lambda seed: seed.seed)
        best = max(seeds, key=lambda seed: float(np.mean(seed.selection[seed.selected])))
        training = Training(runs[0].args["env"], best.seed, seeds)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if best in earlier:
            training.write(folder)
        else:
            publish(next(run for run in runs if run.args["seed"] == best.seed), training, folder)
    except (ValueError, OSError) as error:
        raise SystemExit(f"publish_agent: {error}") from None
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    print(f"{folder}: seed {training.published_seed}, {size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
