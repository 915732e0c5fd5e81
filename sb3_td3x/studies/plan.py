"""The plan of a study, which is the content of its ``study.json``, and the runs to do."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sb3_td3x.files.atomic import TEMPORARY_PATTERN, atomic_write
from sb3_td3x.studies.arms import FULL, Arm
from sb3_td3x.zoo.runs import action_repeat

FORMAT = 1
STUDY_FILE = "study.json"
LOCK_FILE = ".lock"

_Keys = tuple[str, ...]
# Dictionaries and lists that may be added to, by the keys above them
_OPEN: tuple[_Keys, ...] = (("timesteps",), ("evaluation", "freq"), ("arms",))
_OPEN_LISTS: tuple[_Keys, ...] = (("seeds",), ("envs",), ("gym_packages",))


@dataclass(frozen=True)
class Evaluation:
    """
    How agents are evaluated.

    :param freq: for each env, env steps between two evaluations during training
    :param episodes: episodes of each of them
    :param final_episodes: episodes of the test of the finished agents
    :param final_seed: episode i of the test starts from this seed + i, far from the seeds of trainings
    :param value_states: start states at which the critic's values are compared with returns
    :param value_seed: seed of the first of these states
    """

    freq: dict[str, int]
    episodes: int = 10
    final_episodes: int = 100
    final_seed: int = 100_000
    value_states: int = 10
    value_seed: int = 200_000


@dataclass(frozen=True)
class Plan:
    """
    A whole study. All steps are env steps: where a wrapper repeats actions, the zoo counts fewer.

    :param kind: "ablation", "compare" or "sweep"
    :param timesteps: for each env, the length of its trainings
    :param arms: arms by name; the others are compared with the first
    :param gym_packages: modules to import that register envs
    """

    kind: str
    envs: list[str]
    seeds: list[int]
    timesteps: dict[str, int]
    evaluation: Evaluation
    arms: dict[str, Arm]
    device: str = "cpu"
    num_threads: int = 1
    gym_packages: list[str] = field(default_factory=list)

    def runs(self, study: Path, trusted: bool = False) -> Iterator["Run"]:
        """
        Yield the runs, seed by seed, so that a stopped study has runs of every arm.

        :param study: folder of the study
        :param trusted: whether arms may name classes that are not in the registry, such as the user's own wrappers
        """
        for seed in self.seeds:
            for env in self.envs:
                for name, arm in self.arms.items():
                    if env in arm.hyperparams:
                        yield Run(study.resolve(), name, env, seed, self, trusted)


@dataclass(frozen=True)
class Run:
    """
    One training and its measurements.

    :param study: folder of the study, absolute, on a filesystem that all machines share
    :param trusted: whether the run may name classes that are not in the registry
    """

    study: Path
    arm: str
    env: str
    seed: int
    plan: Plan = field(compare=False, repr=False)
    trusted: bool = field(default=False, compare=False)

    @property
    def algo(self) -> str:
        """Name of the algorithm in the zoo"""
        return self.plan.arms[self.arm].algo

    @property
    def timesteps(self) -> int:
        """Length of the training in env steps"""
        return self.plan.timesteps[self.env]

    def zoo_steps(self, steps: int) -> int:
        """Convert env steps to the timesteps that the zoo counts, at least one."""
        return max(steps // action_repeat(self.plan.arms[self.arm].hyperparams[self.env]), 1)

    @property
    def name(self) -> str:
        """Name of the run in messages"""
        return f"{self.arm}, {self.env}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the run when it is finished, named as the zoo names runs, with the seed as the run's number"""
        return self.study / self.arm / self.algo / f"{env_file_name(self.env)}_{self.seed}"

    @property
    def log_dir(self) -> Path:
        """The zoo's log folder during training, for this run alone"""
        return self.study / "unfinished" / self.arm / self.folder.name

    @property
    def unfinished(self) -> Path:
        """The folder that the zoo makes in an empty log folder"""
        return self.log_dir / self.algo / f"{env_file_name(self.env)}_1"

    @property
    def failure(self) -> Path:
        """Log of the run if it fails"""
        return self.study / "failures" / f"{self.arm}-{env_file_name(self.env)}-{self.seed}.log"


def env_file_name(env: str) -> str:
    """Return the id of an env as part of a file name, as in the zoo."""
    return env.replace("/", "-")


def read_plan(study: Path) -> Plan:
    """
    Read the plan of a study.

    :raises ValueError: ``study.json`` is missing, damaged, or has another format
    """
    path = study / STUDY_FILE
    if not path.is_file():
        raise ValueError(f"{study} is no folder of a study: it has no {STUDY_FILE}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (found := content.pop("format")) != FORMAT:
            raise ValueError(f"format {found!r}, expected {FORMAT}")
        for name in ("arms", "envs", "seeds"):
            if not content[name]:
                raise ValueError(f"{name} is empty")
        content["evaluation"] = Evaluation(**content["evaluation"])
        content["arms"] = {name: Arm(**{"name": name, **arm}) for name, arm in content["arms"].items()}
        return Plan(**content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is broken: {reason}") from None


def prepare(plan: Plan, study: Path) -> None:
    """
    Write ``study.json`` and the zoo's YAML files, or add what is new to them.

    :raises ValueError: the folder holds something else, or a study with other settings; names what differs
    """
    path = study / STUDY_FILE
    # The same types as when it is read
    content = json.loads(json.dumps(asdict(plan)))
    if path.exists():
        differences: list[str] = []
        content = _merged(asdict(read_plan(study)), content, (), differences)
        if differences:
            raise ValueError(
                f"{study} holds a study with other settings, and they are not mixed: {'; '.join(differences)}. Take "
                "another folder, or the same settings (seeds, envs and arms may be added)"
            )
        if plan.kind == "ablation" and FULL in content["arms"]:
            # All others are compared with the first arm
            content["arms"] = {FULL: content["arms"][FULL], **content["arms"]}
    elif study.is_dir() and not all(
        entry.name == LOCK_FILE or entry.match(TEMPORARY_PATTERN) for entry in study.iterdir()
    ):
        raise ValueError(f"{study} is no folder of a study: it is not empty, and has no {STUDY_FILE}")
    study.mkdir(parents=True, exist_ok=True)
    # First, since a folder with other files and without this one is refused
    with atomic_write(path) as file:
        file.write(json.dumps({"format": FORMAT, **content}, indent=1).encode())
    (study / "hyperparams").mkdir(exist_ok=True)
    for name, arm in content["arms"].items():
        with atomic_write(study / "hyperparams" / f"{name}.yml") as file:
            file.write(yaml.safe_dump(arm["hyperparams"], sort_keys=False).encode())


def _merged(old: Any, new: Any, where: _Keys, differences: list[str]) -> Any:
    """Return two values as one, and note what differs, apart from what may be added."""
    # Below the name of an arm, which may be anything
    of_arm = where[2] if len(where) == 3 and where[0] == "arms" else None
    if where in _OPEN_LISTS:
        return [*old, *(item for item in new if item not in old)]
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {}
        for key in {**old, **new}:
            old_value, new_value = old.get(key), new.get(key)
            if where in _OPEN or of_arm == "hyperparams":
                old_value, new_value = old.get(key, new_value), new.get(key, old_value)
            merged[key] = _merged(old_value, new_value, (*where, key), differences)
        return merged
    if old != new and of_arm != "description":
        differences.append(f"{'.'.join(where)} was {old!r} and is {new!r}")
    return old
