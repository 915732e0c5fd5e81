"""
Publishing the agent of an env in the zoo's layout: the best candidate in episodes that are used for nothing else.

Of each run, which is one seed, the candidates (the last agent, ``best_model.zip``, and the agents of ``--save-freq``)
play the selection, and the winner plays the test once. The agent of the seed that is best in the selection is
published, with the returns of all seeds in ``training.json``.

What is published holds no path of this machine, and no pickle but the zoo's ``vecnormalize.pkl``. The zip has the
networks only: no replay buffer and no optimizer state. The target networks equal the networks, and the newest actor
equals the one that plays, a policy checkpoint or an average.
"""

import math
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from joblib import Parallel, delayed  # type: ignore[import-untyped]
from stable_baselines3.common.monitor import load_results

from sb3_td3x.agents.training import SELECTION_SEED, TEST_SEED, Seed, Training, best_candidate
from sb3_td3x.files.agent import save_agent
from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.measure import agent_data, play_test, read_evaluations
from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.register import ALGO
from sb3_td3x.zoo.runs import ZooRun

# Episodes of a candidate before the worse half drops out
FIRST_ROUND = 20
N_TEST_EPISODES = 100
# Envs where luck decides whether an episode succeeds, so that the test needs more episodes
LUCK_ENVS = ("BipedalWalker", "LunarLander")
N_LUCK_TEST_EPISODES = 1000
# Options of the zoo whose values it evaluates, and their names in args.yml
_EVALUATED = {
    **dict.fromkeys(("-params", "--hyperparams"), "hyperparams"),
    "--env-kwargs": "env_kwargs",
    "--eval-env-kwargs": "eval_env_kwargs",
}
# Seconds between the ends of two episodes after which the training was not running
_STANDSTILL = 1800
# The folder's name must end, so that bytes of the networks' numbers do not match by chance
_MACHINE_PATH = re.compile(rb"/(?:home|root|tmp|work|Users)[/\"'\s]")


def publish(
    folders: Sequence[Path],
    output: Path,
    cpu: str | None,
    selection_episodes: int,
    test_episodes: int | None,
    jobs: int,
    every_step: bool = False,
) -> Path:
    """
    Select, test and publish the agent of an env.

    :param folders: finished runs of td3x in one env, with the same settings and a seed each
    :param output: log folder of the zoo to publish in
    :param cpu: processor that trained; None: this machine's
    :param selection_episodes: most episodes that a candidate plays in the selection
    :param test_episodes: None: 1,000 where luck decides an episode, else 100
    :param every_step: whether the agents decide at every env step, though the training repeated actions. What is
        published does so, too
    :return: folder of the published agent, whose earlier content is replaced
    :raises ValueError: the runs do not belong together, or cannot be published
    """
    runs = [ZooRun(folder) for folder in folders]
    check_alike(runs)
    if every_step:
        for run in runs:
            run.act_at_every_step()
    env = runs[0].env_id
    test_episodes = test_episodes or episodes_of_test(env)
    seeds = [_examine(run, select(run, selection_episodes, jobs), test_episodes, cpu) for run in runs]
    seeds.sort(key=lambda seed: seed.seed)
    best = max(seeds, key=lambda seed: float(np.mean(seed.selection[seed.selected])))
    folder = output / ALGO / f"{runs[0].config_folder.name}_1"
    training = Training(env, best.seed, seeds, test_episodes)
    _write_agent(next(run for run in runs if run.args["seed"] == best.seed), training, folder)
    return folder


def episodes_of_test(env: str) -> int:
    """Return how many episodes the test of an agent has."""
    return N_LUCK_TEST_EPISODES if env.startswith(LUCK_ENVS) else N_TEST_EPISODES


def candidates(run: ZooRun) -> list[str]:
    """
    Return the file names of a run's agents, the last first: each once, and none without training.

    With ``VecNormalize`` the last agent is the only one, since the zoo keeps only the newest statistics.
    """
    earlier = [] if run.normalize_kwargs is not None else [run.best_agent, *run.saved_agents().values()]
    names: dict[tuple[int, int], str] = {}
    for path in (run.last_agent, *earlier):
        data = agent_data(path)
        if data.get("_n_updates", 0) > 0:
            names.setdefault((data["num_timesteps"], data["_n_updates"]), path.name)
    return list(names.values())


def select(run: ZooRun, n_episodes: int, jobs: int) -> dict[str, list[float]]:
    """
    Let the candidates of a run play in ever longer rounds, and drop the worse half of them after each.

    This is successive halving (Karnin et al. 2013).
    """
    names = candidates(run)
    selection: dict[str, list[float]] = {name: [] for name in names}
    n_played, n_next = 0, min(FIRST_ROUND, n_episodes)
    while True:
        # As a generator, so that each candidate is reported when it has played: there may be many
        played = Parallel(jobs, return_as="generator")
        first_seed = SELECTION_SEED + n_played
        tasks = (delayed(play_test)(run, run.folder / name, n_next - n_played, first_seed) for name in names)
        for name, returns in zip(names, played(tasks), strict=True):
            selection[name] += returns
            print(f"{run.folder.name}, {name}: {np.mean(selection[name]):.2f} in {n_next} episodes", flush=True)
        if n_next == n_episodes:
            return selection
        names = sorted(names, key=lambda name: -float(np.mean(selection[name])))[: math.ceil(len(names) / 2)]
        n_played, n_next = n_next, min(2 * n_next, n_episodes)


def _examine(run: ZooRun, selection: dict[str, list[float]], n_episodes: int, cpu: str | None) -> Seed:
    """Test the winner of a selection."""
    selected = best_candidate(selection)
    test_returns = play_test(run, run.folder / selected, n_episodes, TEST_SEED)
    print(f"{run.folder.name}: {selected} has {np.mean(test_returns):.2f} in the test", flush=True)
    trained_on = machine()
    return Seed(
        seed=run.args["seed"],
        command=portable_command((run.config_folder / "command.txt").read_text(), run.args),
        timesteps=agent_data(run.last_agent)["num_timesteps"] * run.action_repeat,
        training_seconds=round(training_seconds(run.folder), 1),
        machine={**trained_on, "cpu": cpu or trained_on["cpu"]},
        selection=selection,
        selected=selected,
        selected_timesteps=agent_data(run.folder / selected)["num_timesteps"] * run.action_repeat,
        test_returns=test_returns,
        evaluations=read_evaluations(run),
    )


def check_alike(runs: Sequence[ZooRun]) -> None:
    """
    Check that runs can be published together.

    :raises ValueError: they are not finished runs of one env that differ in their seeds only
    """
    first = runs[0]
    for run in runs:
        if run.algo != ALGO:
            raise ValueError(f"{run.folder} has algo={run.algo!r}, expected a run of {ALGO}")
        expected = run.args["n_timesteps"] if run.args["n_timesteps"] > 0 else int(run.hyperparams["n_timesteps"])
        # An interrupted zoo saves its agent too
        trained = agent_data(run.last_agent).get("num_timesteps", 0)
        if trained < expected:
            raise ValueError(f"{run.folder} has trained {trained} timesteps, expected a finished run of {expected}")
        for name in ("env", "n_timesteps"):
            if run.args[name] != first.args[name]:
                raise ValueError(
                    f"{run.folder} has {name}={run.args[name]!r}, expected {first.args[name]!r} as {first.folder}"
                )
        if without_folders(run.hyperparams) != without_folders(first.hyperparams):
            raise ValueError(f"{run.folder} has other hyperparameters than {first.folder}")
    seeds = [run.args["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"the runs have the seeds {seeds}, expected each once")


def training_seconds(folder: Path) -> float:
    """Return the seconds until the end of a training's last episode, without those that it was interrupted."""
    between_episodes = np.diff(load_results(str(folder))["t"], prepend=0.0)
    return float(between_episodes[between_episodes < _STANDSTILL].sum())


def without_folders(value: Any) -> Any:
    """Return plain lists and dictionaries, with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {key: without_folders(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(entry) for entry in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def portable_command(command: str, args: dict[str, Any]) -> str:
    """
    Return the command of a training as one would type it, quoted, and without paths of the machine.

    :param command: content of the zoo's ``command.txt``, in which nothing is quoted
    :param args: content of ``args.yml``
    """
    words = ["python", "-m", "rl_zoo3.train"]
    # The interpreter and the script come before the first option
    for option in re.split(r" (?=--?[a-zA-Z])", re.sub(r"( --[a-z-]+)=", r"\1 ", command))[1:]:
        name, *values = option.split(" ")
        if name == "-m":
            continue
        if name in _EVALUATED:
            given = without_folders(args[_EVALUATED[name]])
            values = [f"{key}:{value!r}" for key, value in given.items()]
        elif name in ("-f", "--log-folder"):
            values = ["logs"]
        words += [name, *without_folders(values)]
    return shlex.join(words)


def write_networks(source: Path, path: Path) -> None:
    """
    Write an agent as small as possible that everything can still load.

    :raises ValueError: the source is damaged, or holds something that can only be pickled
    """
    model = TD3X.load(source, device="cpu")
    model.actor.optimizer.state.clear()
    model.critic.optimizer.state.clear()
    parameters = model.get_parameters()
    policy = parameters["policy"]
    # PyTorch writes a tensor once, even if it has several names
    policy.update({f"actor.{name}": value for name, value in model.policy.playing_actor.state_dict().items()})
    for name in policy:
        if "_target." in name:
            policy[name] = policy[name.replace("_target.", ".", 1)]
    # The log folder and the last observations belong to the machine and the run
    model.tensorboard_log = None
    exclude = ["_last_obs", "_last_original_obs", "_last_episode_starts", "ep_info_buffer"]
    save_agent(path, model, exclude, parameters=parameters)
    # As everybody will load it: raises if there is a pickle in it
    TD3X.load(path, device="cpu", trusted=False)


def check_portable(folder: Path) -> None:
    """
    Check that no file names a folder of this machine.

    :raises ValueError: a file does
    """
    for path in sorted(folder.rglob("*")):
        found = _MACHINE_PATH.search(path.read_bytes()) if path.is_file() else None
        if found:
            raise ValueError(f"{path} holds the path of a machine, {found.group().decode()}...: it cannot be published")


def _write_agent(run: ZooRun, training: Training, folder: Path) -> None:
    """Write the folder of a published agent, in the place of an earlier one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    target = partial / run.config_folder.name
    target.mkdir(parents=True)
    try:
        write_networks(run.folder / training.published.selected, partial / run.last_agent.name)
        args = {**without_folders(run.args), "log_folder": "logs"}
        for name, content in {"config.yml": without_folders(run.hyperparams), "args.yml": args}.items():
            (target / name).write_text(yaml.safe_dump(content))
        (target / "command.txt").write_text(training.published.command + "\n")
        for path in (*run.folder.glob("*monitor.csv"), run.folder / "evaluations.npz"):
            if path.is_file():
                shutil.copy(path, partial)
        if run.normalize_kwargs is not None:
            shutil.copy(run.config_folder / "vecnormalize.pkl", target)
        training.write(partial)
        check_portable(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
