"""
The arms of a study: which hyperparameters each trains with, in the format of the zoo's YAML files.

The ablation's are those of document 002 (all of TD3, and without each of its six tricks), DDPG (document 001), and the
two additions of TD3X, noise decay and reward shaping, on where the env's entry has them off and off where it has them
on.
"""

import difflib
import inspect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from stable_baselines3.common.base_class import BaseAlgorithm

import _sb3_td3x_autoload as autoload
from sb3_td3x.studies.records import RESERVED
from sb3_td3x.validation import check_number
from sb3_td3x.zoo.register import ALGO, hyperparams_path

Entry = dict[str, Any]

FULL = "full"
# What the zoo itself takes out of an entry; everything else goes to the algorithm's constructor
_ZOO_KEYS = (
    *("n_timesteps", "n_envs", "normalize", "env_wrapper", "vec_env_wrapper", "frame_stack", "callback"),
    *("env_kwargs", "monitor_kwargs", "noise_type", "noise_std"),
)
# Arguments of the constructor that the zoo gives itself
_OF_THE_ZOO = ("self", "env", "seed", "verbose", "device", "tensorboard_log", "_init_setup_model")
# The zoo's and SB3's wrappers that repeat each action, and the argument that says how often, by default 4 times
_REPEATING = {
    "rl_zoo3.wrappers.FrameSkip": "skip",
    "stable_baselines3.common.atari_wrappers.MaxAndSkipEnv": "skip",
    "stable_baselines3.common.atari_wrappers.AtariWrapper": "frame_skip",
}
_DEFAULT_SKIP = 4
# They end a training early, where all of a study are to be of one length
_STOPPING = (
    "sb3_td3x.callbacks.StopWhenSolved",
    "stable_baselines3.common.callbacks.StopTrainingOnMaxEpisodes",
)
# They say nothing without exploration noise
_NOISE_KEYS = ("noise_type", "noise_std", "action_noise_decay", "action_noise_min_scale")
# Where the entry has no decay: the noise halves this many times in a training, down to a floor
DECAY_HALVINGS = 5
DECAY_MIN_SCALE = 0.1
# Where the entry has no shaping, and for envs in which a fall costs -100 only; as for BipedalWalkerHardcore at first
FALL_SHAPING = [
    {"sb3_td3x.shaping.FallPenalty": {"threshold": -90.0, "penalty": -1.0}},
    {"sb3_td3x.shaping.RewardScale": {"scale": 5.0}},
]
FALL_ENVS = "BipedalWalker"


@dataclass(frozen=True)
class Arm:
    """
    One of the alternatives that a study compares.

    :param name: its name, which is also that of its folder
    :param algo: name of the algorithm in the zoo
    :param description: what it is, in a few words
    :param hyperparams: for each env, the entry of the zoo's YAML
    """

    name: str
    algo: str
    description: str
    hyperparams: dict[str, Entry]


@dataclass(frozen=True)
class Trick:
    """
    One of TD3's tricks (document 002), and how to do without it.

    :param arm: name of the arm without it
    :param description: what that arm is, in a few words
    :param changes: hyperparameters without it
    :param policy_kwargs: arguments of the policy without it
    :param removed: hyperparameters that the arm does not have
    """

    arm: str
    description: str
    changes: Mapping[str, Any]
    policy_kwargs: Mapping[str, Any]
    removed: Sequence[str] = ()

    def without(self, entry: Entry) -> Entry:
        """
        :param entry: hyperparameters of an env
        :return: those without the trick
        """
        kept = {key: value for key, value in entry.items() if key not in self.removed}
        return with_policy_kwargs({**kept, **self.changes}, self.policy_kwargs)


# In the order of document 002
TRICKS = (
    Trick("stochastic-policy", "without deterministic policy", {}, {"stochastic_actor": True}, _NOISE_KEYS),
    Trick("no-replay", "without replay", {"buffer_size": 1, "batch_size": 1}, {}),
    # With a delay the target networks would lag behind
    Trick("no-targets", "without target networks", {"tau": 1.0, "policy_delay": 1}, {}),
    Trick("no-smoothing", "without target policy smoothing", {"target_policy_noise": 0.0}, {}),
    Trick("no-delay", "without delayed policy updates", {"policy_delay": 1}, {}),
    Trick("no-clipping", "without clipped double Q", {"clipped_double_q": False}, {}),
)
DDPG = Trick("ddpg", "DDPG (document 001)", {"policy_delay": 1, "target_policy_noise": 0.0}, {"n_critics": 1})


def zoo_algorithms() -> dict[str, type[BaseAlgorithm]]:
    """
    :return: the zoo's algorithms by name, td3x among them
    """
    autoload.install(force=True)
    from rl_zoo3 import ALGOS

    return dict(ALGOS)


def check_choice(what: str, value: Any, allowed: Iterable[str]) -> str:
    """
    :param what: what is named, for the error
    :param value: a name
    :param allowed: the names that exist
    :return: the name
    :raises ValueError: it is none of them; names the closest
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
    :param path: a YAML file in the zoo's format
    :return: the hyperparameters of each env
    :raises ValueError: it is no such file
    """
    content = _read_yaml(path)
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise ValueError(f"{path} has not the format of the zoo's files: expected names with hyperparameters below")
    return content


def _read_yaml(path: Path) -> Any:
    """
    :param path: a YAML file
    :return: what it holds
    :raises ValueError: it cannot be read
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML file that can be read: {' '.join(str(error).split())}") from None


def entries_of(algo: str) -> Path:
    """
    :param algo: name of an algorithm in the zoo
    :return: the YAML file with its hyperparameters
    :raises ValueError: there is none
    """
    import rl_zoo3

    check_choice("The algorithm", algo, zoo_algorithms())
    if algo == ALGO:
        return hyperparams_path()
    # As in the zoo: inside the package where installed, else at the root of the repository
    package = Path(rl_zoo3.__file__).parent
    for folder in (package, package.parent):
        path = folder / "hyperparams" / f"{algo}.yml"
        if path.is_file():
            return path
    raise ValueError(f"The zoo has no hyperparameters for {algo}: {package / 'hyperparams' / f'{algo}.yml'} is missing")


def entry_of(path: Path, algo: str, env: str) -> Entry:
    """
    :param path: a YAML file in the zoo's format
    :param algo: name of the algorithm
    :param env: id of an env
    :return: what the zoo would train with
    :raises ValueError: the file has neither the env nor a default, or a hyperparameter that the algorithm does not have
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
    :param hyperparams: names and values
    :param algo: name of the algorithm
    :param where: where they stand, for the error
    :raises ValueError: the algorithm has none of this name, with the closest; or a number is text, as 1e-3 is in YAML
    """
    arguments = [it for it in inspect.signature(zoo_algorithms()[algo].__init__).parameters if it not in _OF_THE_ZOO]
    for name, value in hyperparams.items():
        check_choice(f"{where}: the hyperparameter", name, [*arguments, *_ZOO_KEYS])
        if isinstance(value, str) and _is_number(value):
            raise ValueError(
                f"{where}: {name}={value!r} is not allowed, expected a number and not text: in YAML 1.0e-3, since 1e-3 "
                "is text there"
            )


def _is_number(text: str) -> bool:
    """
    :param text: a text
    :return: whether it is that of a number
    """
    try:
        float(text)
    except ValueError:
        return False
    return True


def action_repeat(entry: Mapping[str, Any]) -> int:
    """
    :param entry: hyperparameters of an env
    :return: env steps for each timestep that the zoo counts, that is for each decision of the agent
    """
    wrappers = entry.get("env_wrapper") or []
    repeat = 1
    for wrapper in wrappers if isinstance(wrappers, list) else [wrappers]:
        for name, kwargs in wrapper.items() if isinstance(wrapper, dict) else [(wrapper, {})]:
            if name in _REPEATING:
                repeat *= int((kwargs or {}).get(_REPEATING[name], _DEFAULT_SKIP))
    return repeat


def with_policy_kwargs(entry: Entry, changes: Mapping[str, Any]) -> Entry:
    """
    :param entry: hyperparameters; ``policy_kwargs`` as a dictionary, or as text that the zoo evaluates
    :param changes: arguments of the policy that change
    :return: hyperparameters with the changes
    """
    if not changes:
        return entry
    present = entry.get("policy_kwargs") or {}
    if isinstance(present, str):
        # It may name classes that only the zoo knows
        return {**entry, "policy_kwargs": f"dict({present}, {', '.join(f'{k}={v!r}' for k, v in changes.items())})"}
    return {**entry, "policy_kwargs": {**present, **changes}}


def without_tricks(entry: Entry, tricks: Sequence[Trick]) -> Entry:
    """
    :param entry: hyperparameters of an env
    :param tricks: what to do without
    :return: hyperparameters without them
    """
    policy_kwargs: dict[str, Any] = {}
    for trick in tricks:
        entry = Trick(trick.arm, trick.description, trick.changes, {}, trick.removed).without(entry)
        policy_kwargs.update(trick.policy_kwargs)
    return with_policy_kwargs(entry, policy_kwargs)


def switched_decay(entry: Entry, timesteps: int) -> tuple[str, Entry] | None:
    """
    :param entry: hyperparameters of an env
    :param timesteps: length of the training as the zoo counts
    :return: name of the arm, and the hyperparameters without decay, or with it if they have none; None: no noise
    """
    if entry.get("noise_type") is None:
        return None
    if entry.get("action_noise_decay", 1.0) != 1.0:
        removed = ("action_noise_decay", "action_noise_min_scale")
        return "no-decay", {key: value for key, value in entry.items() if key not in removed}
    decay = round(0.5 ** (DECAY_HALVINGS / max(timesteps, 1)), 12)
    return "decay", {**entry, "action_noise_decay": decay, "action_noise_min_scale": DECAY_MIN_SCALE}


def switched_shaping(entry: Entry, env: str) -> tuple[str, Entry] | None:
    """
    :param entry: hyperparameters of an env
    :param env: its id
    :return: name of the arm, and the hyperparameters without shaping, or with it if they have none; None: nothing is
        known that would make sense
    """
    if entry.get("reward_shaping") is not None:
        return "no-shaping", {key: value for key, value in entry.items() if key != "reward_shaping"}
    return ("shaping", {**entry, "reward_shaping": FALL_SHAPING}) if env.startswith(FALL_ENVS) else None


def ablation_arms(
    envs: Sequence[str],
    timesteps: int | None = None,
    conf_file: Path | None = None,
    all_64: bool = False,
    names: Sequence[str] | None = None,
) -> list[Arm]:
    """
    :param envs: ids of the envs
    :param timesteps: length of the trainings in env steps; None: that of each env's entry
    :param conf_file: YAML file with the hyperparameters of td3x; None: the package's own
    :param all_64: whether to take every combination of the six tricks
    :param names: the arms to take; None: all
    :return: the arms; one that equals another in an env is left out there, with a printed line
    :raises ValueError: an arm or an env is unknown, or an env has none of the arms
    """
    path = conf_file or hyperparams_path()
    arms: dict[str, Arm] = {}

    def add(name: str, description: str, env: str, entry: Entry) -> None:
        arms.setdefault(name, Arm(name, ALGO, description, {})).hyperparams[env] = entry

    for env in envs:
        entry = entry_of(path, ALGO, env)
        add(FULL, "all of TD3", env, entry)
        for count in range(1, len(TRICKS) + 1) if all_64 else (1,):
            for tricks in itertools.combinations(TRICKS, count):
                name = "+".join(trick.arm for trick in tricks)
                add(name, ", ".join(trick.description for trick in tricks), env, without_tricks(entry, tricks))
        add(DDPG.arm, DDPG.description, env, DDPG.without(entry))
        decisions = int(entry["n_timesteps"]) if timesteps is None else timesteps // action_repeat(entry)
        for what, switched in (
            ("noise decay", switched_decay(entry, decisions)),
            ("reward shaping", switched_shaping(entry, env)),
        ):
            if switched is None:
                print(f"{env}: no arm for {what}, it has none, and no setting is known that would make sense")
            else:
                add(switched[0], f"{'without' if switched[0].startswith('no-') else 'with'} {what}", env, switched[1])
    if names is not None:
        for name in names:
            check_choice("The arm", name, arms)
        for env in envs:
            known = [name for name, arm in arms.items() if env in arm.hyperparams]
            if not set(names) & set(known):
                raise ValueError(f"{env} has none of the arms {', '.join(names)}: expected one of {', '.join(known)}")
        arms = {name: arm for name, arm in arms.items() if name in names}
    return without_equals(without_stops(list(arms.values())))


def comparison_arms(algos: Sequence[str], envs: Sequence[str]) -> list[Arm]:
    """
    :param algos: names of algorithms in the zoo
    :param envs: ids of the envs
    :return: an arm for each algorithm, with its own hyperparameters
    :raises ValueError: an algorithm is unknown, or its file has no entry for an env
    """
    arms = []
    for algo in algos:
        path = entries_of(algo)
        arms.append(Arm(algo, algo, f"the zoo's {algo}", {env: entry_of(path, algo, env) for env in envs}))
    return without_stops(arms)


def sweep_arms(file: Path, envs: Sequence[str], conf_file: Path | None = None) -> list[Arm]:
    """
    :param file: YAML file: the name of each arm, and below it the hyperparameters that change, null for those that go;
        ``algo`` names another algorithm than td3x
    :param envs: ids of the envs
    :param conf_file: YAML file with the hyperparameters of td3x; None: the package's own
    :return: the arms; one that equals another in an env is left out there, with a printed line
    :raises ValueError: the file or what it names is not valid
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
        hyperparams = {}
        for env in envs:
            entry = {**entry_of(path, algo, env), **changes}
            hyperparams[env] = {key: value for key, value in entry.items() if changes.get(key, value) is not None}
        described = ", ".join(f"{key}: {value}" for key, value in changes.items()) or "as the zoo's entry"
        arms.append(Arm(check_arm_name(name), algo, described, hyperparams))
    return without_equals(without_stops(arms))


def check_arm_name(name: Any) -> str:
    """
    :param name: name of an arm
    :return: it
    :raises ValueError: it cannot be the name of a folder beside a study's others
    """
    if not isinstance(name, str) or name in RESERVED or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}", name):
        raise ValueError(
            f"The arm {name!r} is not allowed, expected letters, digits, '_', '.', '+' or '-', and none of "
            f"{', '.join(RESERVED)}"
        )
    return name


def without_stops(arms: Sequence[Arm]) -> list[Arm]:
    """
    :param arms: arms
    :return: those without callbacks that end a training early, each with a printed line: all runs of an env are to be
        of one length
    :raises ValueError: there is no name of a callback
    """
    lines: dict[str, None] = {}
    kept = []
    for arm in arms:
        hyperparams = {}
        for env, entry in arm.hyperparams.items():
            callbacks = entry.get("callback") or []
            callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
            if not all(isinstance(item, str | dict) for item in callbacks):
                raise ValueError(
                    f"The arm {arm.name}: callback={entry['callback']!r} is not allowed, expected names, or "
                    "dictionaries of names and arguments"
                )
            # As for wrappers: a name, or a dictionary of names and arguments
            others = [item for item in callbacks if not set([item] if isinstance(item, str) else item) & set(_STOPPING)]
            if len(others) < len(callbacks):
                lines[f"{env}: callbacks that end a training early are left out, all runs are of one length"] = None
                entry = {**entry, "callback": others}
            hyperparams[env] = entry
        kept.append(Arm(arm.name, arm.algo, arm.description, hyperparams))
    for line in lines:
        print(line)
    return kept


def without_equals(arms: Sequence[Arm]) -> list[Arm]:
    """
    :param arms: arms
    :return: those without what equals an earlier arm in an env, each with a printed line
    """
    kept: list[Arm] = []
    for arm in arms:
        hyperparams = {}
        for env, entry in arm.hyperparams.items():
            same = [other.name for other in kept if other.algo == arm.algo and other.hyperparams.get(env) == entry]
            if same:
                print(f"{env}: {arm.name} is left out, it is the same as {same[0]}")
            else:
                hyperparams[env] = entry
        if hyperparams:
            kept.append(Arm(arm.name, arm.algo, arm.description, hyperparams))
    return kept
