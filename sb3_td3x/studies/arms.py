"""
The arms of a study: which hyperparameters each one trains with, in the format of the zoo's YAML files.

The arms of the ablation are TD3, TD3 without each of its six tricks, DDPG, and the two additions of TD3X: noise decay
and reward shaping, switched off where the env's entry has them, and on where it does not.
"""

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sb3_td3x.validation import check_number
from sb3_td3x.zoo.register import ALGO, hyperparams_path
from sb3_td3x.zoo.runs import action_repeat, named_in, zoo_algorithms

Entry = dict[str, Any]

FULL = "full"
# Names in the folder of a study that no arm can have
RESERVED_NAMES = ("failures", "hyperparams", "report", "study.json", "unfinished")
# Keys that the zoo takes out of an entry; all others go to the constructor of the algorithm
_ZOO_KEYS = (
    *("n_timesteps", "n_envs", "normalize", "env_wrapper", "vec_env_wrapper", "frame_stack", "callback"),
    *("env_kwargs", "monitor_kwargs", "noise_type", "noise_std"),
)
# Arguments of the constructor that the zoo sets itself
_SET_BY_ZOO = ("self", "env", "seed", "verbose", "device", "tensorboard_log", "_init_setup_model")
# Callbacks that end a training early; all trainings of a study have the same length
_STOPPING = (
    "sb3_td3x.callbacks.StopWhenSolved",
    "stable_baselines3.common.callbacks.StopTrainingOnMaxEpisodes",
)
# The arm with noise decay: the noise halves this many times in a training, down to a floor
DECAY_HALVINGS = 5
DECAY_MIN_SCALE = 0.1
# The arm with reward shaping, for envs where a fall costs 100
FALL_SHAPING = [
    {"sb3_td3x.shaping.FallPenalty": {"threshold": -90.0, "penalty": -1.0}},
    {"sb3_td3x.shaping.RewardScale": {"scale": 5.0}},
]
FALL_ENVS = "BipedalWalker"


@dataclass(frozen=True)
class Arm:
    """
    One of the alternatives that a study compares.

    :param algo: name of the algorithm in the zoo
    :param hyperparams: for each env, an entry in the format of the zoo's YAML files
    """

    name: str
    algo: str
    description: str
    hyperparams: dict[str, Entry]


@dataclass(frozen=True)
class Trick:
    """
    One of TD3's tricks, and what switches it off.

    :param arm: name of the arm without the trick
    :param description: what that arm is
    :param changes: hyperparameters and their values; None: it is taken out
    :param policy_kwargs: arguments of the policy that are added to those of the entry
    """

    arm: str
    description: str
    changes: Entry
    policy_kwargs: Entry = field(default_factory=dict)

    def switch_off(self, entry: Entry) -> Entry:
        """Return an entry without the trick."""
        return with_policy_kwargs(with_changes(entry, self.changes), self.policy_kwargs)


_NO_NOISE = dict.fromkeys(("noise_type", "noise_std", "action_noise_decay", "action_noise_min_scale"))
TRICKS = (
    Trick("stochastic-policy", "without deterministic policy", _NO_NOISE, {"stochastic_actor": True}),
    Trick("no-replay", "without replay", {"buffer_size": 1, "batch_size": 1}),
    # With a delay the target networks would lag behind
    Trick("no-targets", "without target networks", {"tau": 1.0, "policy_delay": 1}),
    Trick("no-smoothing", "without target policy smoothing", {"target_policy_noise": 0.0}),
    Trick("no-delay", "without delayed policy updates", {"policy_delay": 1}),
    Trick("no-clipping", "without clipped double Q", {"clipped_double_q": False}),
)
DDPG = Trick(
    "ddpg",
    "DDPG: one critic, no delay, no smoothing",
    {"policy_delay": 1, "target_policy_noise": 0.0},
    {"n_critics": 1},
)


def check_choice(what: str, value: Any, allowed: Iterable[str]) -> str:
    """
    Check that a name exists.

    :raises ValueError: there is no such name; names the closest
    """
    names = list(allowed)
    if not isinstance(value, str):
        raise ValueError(f"{what} {value!r} is unknown: expected text")
    if value in names:
        return value
    closest = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f"did you mean {closest[0]!r}?" if closest else f"expected one of {', '.join(sorted(names))}"
    raise ValueError(f"{what} {value!r} is unknown: {hint}")


def read_entries(path: Path) -> dict[str, Entry]:
    """
    Read a YAML file of hyperparameters, in the zoo's format.

    :raises ValueError: the file cannot be read or has another format
    """
    content = _read_yaml(path)
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise ValueError(f"{path} has not the format of the zoo's files: expected names with hyperparameters below")
    return content


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML file that can be read: {' '.join(str(error).split())}") from None


def entries_of(algo: str) -> Path:
    """
    Return the zoo's YAML file of an algorithm.

    :raises ValueError: the algorithm is unknown, or has no file
    """
    import rl_zoo3

    check_choice("The algorithm", algo, zoo_algorithms())
    if algo == ALGO:
        return hyperparams_path()
    # As in the zoo: inside the installed package, or at the root of the repository
    package = Path(rl_zoo3.__file__).parent
    for folder in (package, package.parent):
        path = folder / "hyperparams" / f"{algo}.yml"
        if path.is_file():
            return path
    raise ValueError(f"The zoo has no hyperparameters for {algo}: {package / 'hyperparams' / f'{algo}.yml'} is missing")


def entry_of(path: Path, algo: str, env: str) -> Entry:
    """
    Return the entry of an env, or the default, as the zoo does.

    :raises ValueError: there is no entry, or it has a hyperparameter that is unknown or not allowed
    """
    from rl_zoo3.exp_manager import ExperimentManager

    entries = read_entries(path)
    for name in (env, *(["atari"] if ExperimentManager.is_atari(env) else []), "default"):
        if name in entries:
            check_hyperparams(entries[name], algo, f"{path}, {name}")
            if "n_timesteps" not in entries[name]:
                raise ValueError(f"{path}, {name}: n_timesteps is missing")
            check_number(f"{path}, {name}: n_timesteps", entries[name]["n_timesteps"], 1)
            return entries[name]
    raise ValueError(f"{path} has no hyperparameters for {env}, and no entry named default")


def check_hyperparams(hyperparams: Mapping[str, Any], algo: str, where: str) -> None:
    """
    Check hyperparameters before a training fails on them.

    :param where: what an error names
    :raises ValueError: the algorithm has no such hyperparameter, or a number is text, as 1e-3 is in YAML
    """
    arguments = [it for it in inspect.signature(zoo_algorithms()[algo].__init__).parameters if it not in _SET_BY_ZOO]
    for name, value in hyperparams.items():
        check_choice(f"{where}: the hyperparameter", name, [*arguments, *_ZOO_KEYS])
        if isinstance(value, str) and _is_number(value):
            raise ValueError(
                f"{where}: {name}={value!r} is not allowed, expected a number and not text: in YAML 1.0e-3, since 1e-3 "
                "is text there"
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def with_changes(entry: Entry, changes: Entry) -> Entry:
    """
    Change hyperparameters.

    :param changes: their values; None takes one out
    """
    return {name: value for name, value in {**entry, **changes}.items() if changes.get(name, value) is not None}


def with_policy_kwargs(entry: Entry, changes: Entry) -> Entry:
    """
    Change arguments of the policy.

    :param entry: hyperparameters, with ``policy_kwargs`` as a dictionary, or as text that the zoo evaluates
    """
    if not changes:
        return entry
    present = entry.get("policy_kwargs") or {}
    if isinstance(present, str):
        # The text may name classes that only the zoo imports
        return {**entry, "policy_kwargs": f"dict({present}, {', '.join(f'{k}={v!r}' for k, v in changes.items())})"}
    return {**entry, "policy_kwargs": {**present, **changes}}


def additions(entry: Entry, env: str, timesteps: int) -> Iterator[Trick]:
    """
    Yield what switches each of TD3X's additions off, or on where it is off.

    :param timesteps: length of the training as the zoo counts
    """
    if entry.get("noise_type") is not None:
        if entry.get("action_noise_decay", 1.0) != 1.0:
            yield Trick("no-decay", "without noise decay", {"action_noise_decay": None, "action_noise_min_scale": None})
        else:
            decay = round(0.5 ** (DECAY_HALVINGS / max(timesteps, 1)), 12)
            changes = {"action_noise_decay": decay, "action_noise_min_scale": DECAY_MIN_SCALE}
            yield Trick("decay", "with noise decay", changes)
    if entry.get("reward_shaping") is not None:
        yield Trick("no-shaping", "without reward shaping", {"reward_shaping": None})
    elif env.startswith(FALL_ENVS):
        yield Trick("shaping", "with reward shaping", {"reward_shaping": FALL_SHAPING})


def ablation_arms(
    envs: Sequence[str],
    timesteps: int | None = None,
    conf_file: Path | None = None,
    all_64: bool = False,
    names: Sequence[str] | None = None,
) -> list[Arm]:
    """
    Return the arms of an ablation of TD3. One that equals another in an env is left out there, with a printed line.

    :param timesteps: length of the trainings in env steps; None: that of each env's entry
    :param conf_file: YAML file with the hyperparameters of td3x; None: the package's own
    :param all_64: whether to take every combination of the six tricks
    :raises ValueError: an arm or an env is unknown, or an env has none of the arms
    """
    path = conf_file or hyperparams_path()
    arms: dict[str, Arm] = {}

    counts = range(1, len(TRICKS) + 1) if all_64 else (1,)
    combinations = [tricks for count in counts for tricks in itertools.combinations(TRICKS, count)]
    for env in envs:
        entry = entry_of(path, ALGO, env)
        decisions = int(entry["n_timesteps"]) if timesteps is None else timesteps // action_repeat(entry)
        others = [(trick,) for trick in (DDPG, *additions(entry, env, decisions))]
        for tricks in ((), *combinations, *others):
            name = "+".join(trick.arm for trick in tricks) or FULL
            description = ", ".join(trick.description for trick in tricks) or "all of TD3"
            arm = arms.setdefault(name, Arm(name, ALGO, description, {}))
            arm.hyperparams[env] = functools.reduce(lambda changed, trick: trick.switch_off(changed), tricks, entry)
    if names is not None:
        arms = _named(arms, names, envs)
    return without_equals(without_stops(list(arms.values())))


def _named(arms: Mapping[str, Arm], names: Sequence[str], envs: Sequence[str]) -> dict[str, Arm]:
    """Return the named arms, and print in which envs one of them does not exist."""
    for name in names:
        check_choice("The arm", name, arms)
    for env in envs:
        known = [name for name, arm in arms.items() if env in arm.hyperparams]
        if not set(names) & set(known):
            raise ValueError(f"{env} has none of the arms {', '.join(names)}: expected one of {', '.join(known)}")
        for name in names:
            if name not in known:
                print(f"{env} has no arm {name}")
    return {name: arm for name, arm in arms.items() if name in names}


def comparison_arms(algos: Sequence[str], envs: Sequence[str]) -> list[Arm]:
    """
    Return an arm for each algorithm, with the algorithm's own hyperparameters.

    :raises ValueError: an algorithm is unknown, or its file has no entry for an env
    """
    arms = []
    for algo in algos:
        path = entries_of(algo)
        arms.append(Arm(algo, algo, f"the zoo's {algo}", {env: entry_of(path, algo, env) for env in envs}))
    return without_stops(arms)


def sweep_arms(file: Path, envs: Sequence[str], conf_file: Path | None = None) -> list[Arm]:
    """
    Return the arms of a YAML file. One that equals another in an env is left out there, with a printed line.

    :param file: the name of each arm, and below it the hyperparameters that change, null for those to take out;
        ``algo`` names another algorithm than td3x
    :param conf_file: YAML file with the hyperparameters of td3x; None: the package's own
    :raises ValueError: the file, or a name or value in it, is not valid
    """
    content = _read_yaml(file)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{file} names no arms: expected their names, with hyperparameters below")
    arms = []
    for name, changes in content.items():
        if not isinstance(changes, dict | None):
            raise ValueError(f"{file}, {name}: {changes!r} is not allowed, expected hyperparameters and their values")
        changes = dict(changes or {})
        algo = changes.pop("algo", ALGO)
        try:
            path = conf_file if conf_file is not None and algo == ALGO else entries_of(algo)
        except ValueError as error:
            raise ValueError(f"{file}, {name}: {error}") from None
        check_hyperparams(changes, algo, f"{file}, {name}")
        if "n_timesteps" in changes:
            raise ValueError(
                f"{file}, {name}: n_timesteps is not allowed, all arms of an env train as long: --timesteps"
            )
        hyperparams = {env: with_changes(entry_of(path, algo, env), changes) for env in envs}
        description = ", ".join(f"{key}: {value}" for key, value in changes.items()) or "the zoo's entry"
        arms.append(Arm(check_arm_name(name), algo, description, hyperparams))
    return without_equals(without_stops(arms))


def check_arm_name(name: Any) -> str:
    """
    Check that an arm can have a folder of its name.

    :raises ValueError: the name is not allowed
    """
    if not isinstance(name, str) or name in RESERVED_NAMES or not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,99}", name, re.A):
        raise ValueError(
            f"The arm {name!r} is not allowed, expected letters, digits, '_', '.', '+' or '-', and none of "
            f"{', '.join(RESERVED_NAMES)}"
        )
    return name


def without_stops(arms: Sequence[Arm]) -> list[Arm]:
    """Take out callbacks that end a training early, and print the envs that had one."""
    stopped: dict[str, None] = {}
    for arm in arms:
        for env, entry in arm.hyperparams.items():
            callbacks = entry.get("callback") or []
            callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
            others = [item for item in callbacks if next(named_in([item]))[0] not in _STOPPING]
            if len(others) < len(callbacks):
                stopped[env] = None
                arm.hyperparams[env] = {**entry, "callback": others}
    for env in stopped:
        print(f"{env}: callbacks that end a training early are left out, all runs have one length")
    return list(arms)


def without_equals(arms: Sequence[Arm]) -> list[Arm]:
    """Leave an arm out of an env where it equals an earlier arm, and print it."""
    for idx, arm in enumerate(arms):
        for env, entry in list(arm.hyperparams.items()):
            for other in arms[:idx]:
                if other.algo == arm.algo and other.hyperparams.get(env) == entry:
                    print(f"{env}: {arm.name} is left out, it is the same as {other.name}")
                    del arm.hyperparams[env]
                    break
    return [arm for arm in arms if arm.hyperparams]
