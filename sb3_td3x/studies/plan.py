"""The plan of a study: its ``study.json``, the zoo's YAML files, and the runs to do."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from sb3_td3x.files.atomic import TEMPORARY_PATTERN, atomic_write
from sb3_td3x.studies.arms import FULL, Arm, Entry
from sb3_td3x.studies.results import (
    FORMAT,
    RUN_FILE,
    STUDY_FILE,
    env_file_name,
    failure_name,
    read_config,
    read_record,
    run_folder,
)
from sb3_td3x.zoo.runs import action_repeat

LOCK_FILE = ".lock"
# Test of the finished agents: episode i starts from seed FINAL_SEED + i, far from the seeds of trainings
FINAL_EPISODES = 100
FINAL_SEED = 100_000
# Start states at which the critic's values are compared with returns; their seeds begin at VALUE_SEED
VALUE_STATES = 10
VALUE_SEED = 200_000
EVALUATIONS = 20


@dataclass(frozen=True)
class Settings:
    """
    How the runs of an env are trained. All steps are env steps: where a wrapper repeats actions, the zoo counts fewer.

    :param eval_freq: env steps between two evaluations
    """

    timesteps: int
    eval_freq: int


@dataclass(frozen=True)
class Plan:
    """
    A whole study.

    :param kind: "ablation", "compare" or "sweep"
    :param envs: for each env, how its runs are trained
    :param eval_episodes: episodes of each evaluation during training
    :param gym_packages: modules to import that register envs
    :param trusted: whether arms may name classes that are not in the registry, such as the user's own wrappers
    """

    kind: str
    arms: Sequence[Arm]
    envs: Mapping[str, Settings]
    seeds: Sequence[int]
    eval_episodes: int = 10
    device: str = "cpu"
    num_threads: int = 1
    gym_packages: Sequence[str] = ()
    trusted: bool = False

    def config(self) -> dict[str, Any]:
        """Return the content of ``study.json``."""
        return {
            "kind": self.kind,
            "envs": list(self.envs),
            "seeds": list(self.seeds),
            "timesteps": {env: settings.timesteps for env, settings in self.envs.items()},
            "evaluation": {
                "freq": {env: settings.eval_freq for env, settings in self.envs.items()},
                "episodes": self.eval_episodes,
                "final_episodes": FINAL_EPISODES,
                "final_seed": FINAL_SEED,
                "value_states": VALUE_STATES,
                "value_seed": VALUE_SEED,
            },
            "device": self.device,
            "num_threads": self.num_threads,
            "gym_packages": list(self.gym_packages),
            "arms": {
                arm.name: {"algo": arm.algo, "description": arm.description, "hyperparams": arm.hyperparams}
                for arm in self.arms
            },
        }


@dataclass(frozen=True)
class Run:
    """
    One training and its measurements.

    :param study: folder of the study, absolute, on a filesystem that all machines share
    :param algo: name of the algorithm in the zoo
    :param timesteps: length of the training in env steps
    :param eval_freq: env steps between two evaluations
    :param action_repeat: env steps for each timestep that the zoo counts
    :param gym_packages: modules to import that register envs
    :param trusted: whether the run may name classes that are not in the registry
    """

    study: Path
    arm: str
    algo: str
    env: str
    seed: int
    timesteps: int
    eval_freq: int
    action_repeat: int
    eval_episodes: int
    device: str
    num_threads: int
    gym_packages: tuple[str, ...]
    trusted: bool = False

    @property
    def zoo_timesteps(self) -> int:
        """Length of the training as the zoo counts"""
        return max(self.timesteps // self.action_repeat, 1)

    @property
    def zoo_eval_freq(self) -> int:
        """Timesteps between two evaluations as the zoo counts"""
        return max(self.eval_freq // self.action_repeat, 1)

    @property
    def name(self) -> str:
        """Name of the run in messages"""
        return f"{self.arm}, {self.env}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the run when it is finished"""
        return run_folder(self.study, self.arm, self.algo, self.env, self.seed)

    @property
    def log_dir(self) -> Path:
        """The zoo's log folder during training, for this run alone"""
        return self.study / "unfinished" / self.arm / f"{env_file_name(self.env)}_{self.seed}"

    @property
    def unfinished(self) -> Path:
        """The folder that the zoo makes in an empty log folder"""
        return self.log_dir / self.algo / f"{env_file_name(self.env)}_1"

    @property
    def failure(self) -> Path:
        """Log of the run if it fails"""
        return self.study / "failures" / failure_name(self.arm, self.env, self.seed)

    def is_finished(self) -> bool:
        """
        Return whether the run is finished.

        :return: True if its folder has a ``run.json``
        :raises ValueError: that file is broken, or belongs to another run
        """
        return self.is_measured(self.folder)

    def is_measured(self, folder: Path) -> bool:
        """
        Return whether the ``run.json`` of this run is in a folder.

        :param folder: folder of the run, finished or not
        :return: True if the file is there
        :raises ValueError: the file is broken, or belongs to another run
        """
        path = folder / RUN_FILE
        if not path.exists():
            return False
        record = read_record(path)
        found = (record.arm, record.algo, record.env, record.seed, record.timesteps)
        expected = (self.arm, self.algo, self.env, self.seed, self.timesteps)
        if found != expected:
            raise ValueError(f"The run in {folder} is another one: its {RUN_FILE} says {found}, not {expected}")
        return True


def runs_of(plan: Plan, study: Path) -> list[Run]:
    """Return the runs of a study, seed by seed, so that a stopped study has runs of every arm."""
    return [
        Run(
            study=study.resolve(),
            arm=arm.name,
            algo=arm.algo,
            env=env,
            seed=seed,
            action_repeat=action_repeat(arm.hyperparams[env]),
            eval_episodes=plan.eval_episodes,
            device=plan.device,
            num_threads=plan.num_threads,
            gym_packages=tuple(plan.gym_packages),
            trusted=plan.trusted,
            **asdict(settings),
        )
        for seed in plan.seeds
        for env, settings in plan.envs.items()
        for arm in plan.arms
        if env in arm.hyperparams
    ]


def settings_of(entry: Entry, timesteps: int | None, eval_freq: int | None) -> Settings:
    """
    Return how to train in an env.

    :param entry: hyperparameters of the first arm in the env; all arms train for as long
    :param timesteps: length of a training in env steps; None: the entry's
    :param eval_freq: env steps between two evaluations; None: ``EVALUATIONS`` evaluations in a training
    """
    timesteps = timesteps or int(entry["n_timesteps"]) * action_repeat(entry)
    return Settings(timesteps, eval_freq or max(timesteps // EVALUATIONS, 1))


def prepare(plan: Plan, study: Path) -> None:
    """
    Write ``study.json`` and the zoo's YAML files, or add what is new to them.

    :raises ValueError: the folder holds something else, or a study with other settings; names what differs
    """
    # The same types as when it is read
    config = json.loads(json.dumps(plan.config()))
    path = study / STUDY_FILE
    if path.exists():
        config = _merged(read_config(path), config, study)
    elif study.is_dir() and not all(
        entry.name == LOCK_FILE or entry.match(TEMPORARY_PATTERN) for entry in study.iterdir()
    ):
        raise ValueError(f"{study} is no folder of a study: it is not empty, and has no {STUDY_FILE}")
    study.mkdir(parents=True, exist_ok=True)
    # First, since a folder with other files and without this one is refused
    with atomic_write(path) as file:
        file.write(json.dumps({"format": FORMAT, **config}, indent=1).encode())
    (study / "hyperparams").mkdir(exist_ok=True)
    for name, arm in config["arms"].items():
        with atomic_write(study / "hyperparams" / f"{name}.yml") as file:
            file.write(yaml.safe_dump(arm["hyperparams"], sort_keys=False).encode())


def _merged(old: dict[str, Any], new: dict[str, Any], study: Path) -> dict[str, Any]:
    """Return the settings of both, which may differ in what was added only."""
    differences = _differences(old, new)
    if differences:
        raise ValueError(
            f"{study} holds a study with other settings, and they are not mixed: {'; '.join(differences)}. Take "
            "another folder, or the same settings (seeds, envs and arms may be added)"
        )
    merged: dict[str, Any] = _union(old, new)
    if merged["kind"] == "ablation" and FULL in merged["arms"]:
        # All others are compared with the first arm
        merged["arms"] = {FULL: merged["arms"][FULL], **merged["arms"]}
    return merged


_Keys = tuple[str, ...]
# Dictionaries and lists that may be added to, by the keys above them
_OPEN: tuple[_Keys, ...] = (("timesteps",), ("evaluation", "freq"), ("arms",))
_OPEN_LISTS: tuple[_Keys, ...] = (("seeds",), ("envs",), ("gym_packages",))


def _differences(old: Any, new: Any, where: _Keys = ()) -> list[str]:
    """Return what differs, apart from what may be added."""
    # Below the name of an arm, which may be anything
    of_arm = where[2] if len(where) == 3 and where[0] == "arms" else None
    if where in _OPEN_LISTS or of_arm == "description":
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        is_open = where in _OPEN or of_arm == "hyperparams"
        keys = [key for key in old if key in new] if is_open else list({**old, **new})
        return [line for key in keys for line in _differences(old.get(key), new.get(key), (*where, str(key)))]
    return [] if old == new else [f"{'.'.join(where)} was {old!r} and is {new!r}"]


def _union(old: Any, new: Any) -> Any:
    """Return two values that differ in what was added only as one."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _union(old.get(key, new.get(key)), new.get(key, old.get(key))) for key in {**old, **new}}
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *(item for item in new if item not in old)]
    return old
