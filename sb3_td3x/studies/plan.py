"""What a study consists of: its ``study.json``, the zoo's YAML files, and the runs to do."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from sb3_td3x.files.atomic import TEMPORARY_PATTERN, atomic_write
from sb3_td3x.studies.arms import FULL, Arm, Entry, action_repeat
from sb3_td3x.studies.records import FILE_NAME, FORMAT, env_file_name, read_record, run_folder

STUDY_FILE = "study.json"
LOCK_FILE = ".lock"
# Test of the finished agents: episode i starts from seed FINAL_SEED + i, far from the seeds of trainings
FINAL_EPISODES = 100
FINAL_SEED = 100_000
# Start states at which the critic's values are compared with returns; they begin at VALUE_SEED
VALUE_STATES = 10
VALUE_SEED = 200_000
EVALUATIONS = 20


@dataclass(frozen=True)
class Settings:
    """
    How the runs of an env are trained. All steps are the env's own, so that an arm whose wrapper repeats actions gets
    as many as the others.

    :param timesteps: length of a training in env steps
    :param eval_freq: env steps between two evaluations
    """

    timesteps: int
    eval_freq: int


@dataclass(frozen=True)
class Plan:
    """
    A whole study.

    :param kind: "ablation", "compare" or "sweep"
    :param arms: what it compares
    :param envs: for each env, how its runs are trained
    :param seeds: seeds of the trainings
    :param eval_episodes: episodes of each evaluation while training
    :param device: of PyTorch
    :param num_threads: of PyTorch, for each training
    :param gym_packages: modules to import that register envs
    """

    kind: str
    arms: Sequence[Arm]
    envs: Mapping[str, Settings]
    seeds: Sequence[int]
    eval_episodes: int = 10
    device: str = "cpu"
    num_threads: int = 1
    gym_packages: Sequence[str] = ()

    def config(self) -> dict[str, Any]:
        """
        :return: what ``study.json`` holds
        """
        return {
            "format": FORMAT,
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
    :param arm: name of the arm
    :param algo: name of the algorithm in the zoo
    :param env: id of the env
    :param seed: seed of the training
    :param timesteps: its length in env steps
    :param eval_freq: env steps between two evaluations
    :param action_repeat: env steps for each timestep that the zoo counts
    :param eval_episodes: episodes of each evaluation
    :param device: of PyTorch
    :param num_threads: of PyTorch
    :param gym_packages: modules to import that register envs
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
        """How to name it to a user"""
        return f"{self.arm}, {self.env}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where it is when it is finished"""
        return run_folder(self.study, self.arm, self.algo, self.env, self.seed)

    @property
    def workplace(self) -> Path:
        """The zoo's log folder while it trains, for this run alone"""
        return self.study / "unfinished" / self.arm / f"{env_file_name(self.env)}_{self.seed}"

    @property
    def unfinished(self) -> Path:
        """The folder that the zoo makes in an empty log folder"""
        return self.workplace / self.algo / f"{env_file_name(self.env)}_1"

    @property
    def failure(self) -> Path:
        """Where the output of a failed run goes"""
        return self.study / "failures" / f"{self.arm}-{env_file_name(self.env)}-{self.seed}.log"

    def is_finished(self) -> bool:
        """
        :return: whether it is whole
        :raises ValueError: its ``run.json`` is broken, or of another run; names the folder
        """
        return self.is_measured(self.folder)

    def is_measured(self, folder: Path) -> bool:
        """
        :param folder: where it is, finished or not
        :return: whether its ``run.json`` is there
        :raises ValueError: that is broken, or of another run; names the folder
        """
        path = folder / FILE_NAME
        if not path.exists():
            return False
        record = read_record(path)
        found = (record.arm, record.algo, record.env, record.seed, record.timesteps)
        expected = (self.arm, self.algo, self.env, self.seed, self.timesteps)
        if found != expected:
            raise ValueError(f"The run in {folder} is another one: its {FILE_NAME} says {found}, not {expected}")
        return True


def runs_of(plan: Plan, study: Path) -> list[Run]:
    """
    :param plan: a study
    :param study: its folder
    :return: its runs, seed by seed, so that a study that was stopped has something of each arm
    """
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
            **asdict(settings),
        )
        for seed in plan.seeds
        for env, settings in plan.envs.items()
        for arm in plan.arms
        if env in arm.hyperparams
    ]


def settings_of(entry: Entry, timesteps: int | None, eval_freq: int | None) -> Settings:
    """
    :param entry: hyperparameters of the first arm in an env: all arms train alike
    :param timesteps: length of a training in env steps; None: the entry's
    :param eval_freq: env steps between two evaluations; None: ``EVALUATIONS`` of them
    :return: how to train in the env
    """
    timesteps = timesteps or int(entry["n_timesteps"]) * action_repeat(entry)
    return Settings(timesteps, eval_freq or max(timesteps // EVALUATIONS, 1))


def prepare(plan: Plan, study: Path) -> None:
    """
    Write ``study.json`` and the zoo's YAML files, or add what is new to them.

    :param plan: the study
    :param study: its folder
    :raises ValueError: the folder holds another study; names what differs
    """
    # As it would be read
    config = json.loads(json.dumps(plan.config()))
    path = study / STUDY_FILE
    if path.exists():
        config = _merged(_read_config(path), config, study)
    elif study.is_dir() and not all(
        entry.name == LOCK_FILE or entry.match(TEMPORARY_PATTERN) for entry in study.iterdir()
    ):
        raise ValueError(f"{study} is no folder of a study: it is not empty, and has no {STUDY_FILE}")
    study.mkdir(parents=True, exist_ok=True)
    # First: a folder with anything else and without it is refused, and the others are written at each start
    with atomic_write(path) as file:
        file.write(json.dumps(config, indent=1).encode())
    (study / "hyperparams").mkdir(exist_ok=True)
    for name, arm in config["arms"].items():
        with atomic_write(study / "hyperparams" / f"{name}.yml") as file:
            file.write(yaml.safe_dump(arm["hyperparams"], sort_keys=False).encode())


def _read_config(path: Path) -> dict[str, Any]:
    """
    :param path: a ``study.json``
    :return: what it holds
    :raises ValueError: it is damaged, or of another format
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["format"] != FORMAT:
            raise ValueError(f"format {config['format']!r}, expected {FORMAT}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is broken: {error}") from None
    return dict(config)


def _merged(old: dict[str, Any], new: dict[str, Any], study: Path) -> dict[str, Any]:
    """
    :param old: what the study was started with
    :param new: what it shall be now
    :param study: its folder
    :return: both: seeds, envs and arms may be added
    :raises ValueError: anything else differs
    """
    differences = _differences(old, new)
    if differences:
        raise ValueError(
            f"{study} holds a study with other settings, and they are not mixed: {'; '.join(differences)}. Take "
            "another folder, or the same settings (seeds, envs and arms may be added)"
        )
    merged = _union(old, new)
    assert isinstance(merged, dict)
    if merged["kind"] == "ablation" and FULL in merged["arms"]:
        # The others are compared with the first one
        merged["arms"] = {FULL: merged["arms"][FULL], **merged["arms"]}
    return merged


_Keys = tuple[str, ...]
# Names and values below these keys may be added to
_OPEN: tuple[_Keys, ...] = (("timesteps",), ("evaluation", "freq"), ("arms",))
_OPEN_LISTS: tuple[_Keys, ...] = (("seeds",), ("envs",), ("gym_packages",))


def _differences(old: Any, new: Any, where: _Keys = ()) -> list[str]:
    """
    :param old: a value of the study's settings
    :param new: the new one
    :param where: the keys below which it stands
    :return: what differs, apart from what may be added
    """
    # Of an arm, whose name may be anything
    of_arm = where[2] if len(where) == 3 and where[0] == "arms" else None
    if where in _OPEN_LISTS or of_arm == "description":
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        is_open = where in _OPEN or of_arm == "hyperparams"
        keys = [key for key in old if key in new] if is_open else list({**old, **new})
        return [line for key in keys for line in _differences(old.get(key), new.get(key), (*where, str(key)))]
    return [] if old == new else [f"{'.'.join(where)} was {old!r} and is {new!r}"]


def _union(old: Any, new: Any) -> Any:
    """
    :param old: a value of the study's settings
    :param new: the new one, which differs in what may be added only
    :return: both
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _union(old.get(key, new.get(key)), new.get(key, old.get(key))) for key in {**old, **new}}
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *(item for item in new if item not in old)]
    return old
