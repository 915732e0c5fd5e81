"""
Reading the files of a run of RL Zoo without running code from them: its settings, and the statistics of its env.
"""

import ast
import io
import reprlib
from pathlib import Path
from typing import Any

import yaml
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.limits import MAX_STATISTICS_BYTES, MAX_YAML_ALIASES, MAX_YAML_BRACKETS, MAX_YAML_BYTES
from sb3_td3x.files.pickles import Pickled, allowed_in_pickles, from_pickle, read_pickle
from sb3_td3x.files.records import CLASSES, path_of

# End of errors about files that a user may trust
TRUST_HINT = "Trust it if it is your own (--trusted)"


class _ZooLoader(yaml.SafeLoader):
    """A safe loader that also reads the ordered dictionaries, tuples and registered classes that the zoo writes."""

    def read_pairs(self, node: Any) -> Any:
        (pairs,) = self.construct_sequence(node, deep=True)
        return dict(pairs)

    def read_tuple(self, node: Any) -> Any:
        return tuple(self.construct_sequence(node, deep=True))

    def read_class(self, path: str, node: Any) -> Any:
        if path not in CLASSES:
            raise yaml.constructor.ConstructorError(problem=f"it names {path:.100}")
        return CLASSES[path]


_PYTHON = "tag:yaml.org,2002:python/"
_ZooLoader.add_constructor(f"{_PYTHON}object/apply:collections.OrderedDict", _ZooLoader.read_pairs)
_ZooLoader.add_constructor(f"{_PYTHON}tuple", _ZooLoader.read_tuple)
_ZooLoader.add_multi_constructor(f"{_PYTHON}name:", _ZooLoader.read_class)


def read_zoo_yaml(path: Path, trusted: bool = False) -> dict[str, Any]:
    """
    Read a ``config.yml`` or ``args.yml`` that the zoo wrote.

    :param trusted: whether it may make any Python object, as in the zoo
    :raises ValueError: it is damaged, or holds an object that only a trusted file may
    """
    with refusing(str(path)):
        try:
            settings = yaml.unsafe_load(path.read_bytes()) if trusted else _load_safely(path)
        except yaml.constructor.ConstructorError as error:
            raise FileRefused(f"{path} holds an object that can run any code ({error.problem}). {TRUST_HINT}") from None
        if not isinstance(settings, dict):
            raise FileRefused(f"{path} holds {type(settings).__name__}, expected names and values")
        return dict(settings)


def _load_safely(path: Path) -> Any:
    content = _read(path, MAX_YAML_BYTES)
    n_aliases = n_brackets = 0
    for token in yaml.scan(content):
        n_aliases += isinstance(token, yaml.AliasToken)
        n_brackets += isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken)
        if n_aliases > MAX_YAML_ALIASES or n_brackets > MAX_YAML_BRACKETS:
            raise FileRefused(f"{path} has more than {MAX_YAML_ALIASES} aliases or {MAX_YAML_BRACKETS} brackets")
    return yaml.load(content, _ZooLoader)


def parse_dict(text: Any, where: str) -> dict[str, Any]:
    """
    Read a dictionary that the zoo would evaluate, such as ``dict(norm_obs=True)``, without evaluating it.

    :param text: the text, with literals as values; or a dictionary, which is returned as it is
    :param where: how to name it in an error
    :raises FileRefused: it is anything else
    """
    try:
        node = ast.parse(text, mode="eval").body if isinstance(text, str) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        value = text if node is None else ast.literal_eval(node)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        value = None
    if not isinstance(value, dict):
        raise FileRefused(f"{where} is {reprlib.repr(text)}, expected a dictionary of plain values")
    return value


def _read(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file that is not too large."""
    if path.exists() and not path.is_file():
        # A device or a pipe may have no end
        raise FileRefused(f"{path} is not a file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise FileRefused(f"{path} is too large: more than {max_bytes} bytes")
    return content


def load_vec_normalize(path: Path, venv: VecEnv) -> VecNormalize:
    """
    Read statistics that ``VecNormalize.save`` pickled, without running the pickle.

    :return: the normalized env; its statistics are not updated, and rewards stay as they are
    :raises ValueError: the file is damaged, holds something else, or statistics of other observations
    """
    name, cls = str(path), path_of(VecNormalize)
    with refusing(name):
        content = _read(path, MAX_STATISTICS_BYTES)
        pickled = read_pickle(io.BytesIO(content), name, {*allowed_in_pickles(), cls})
        if not (isinstance(pickled, Pickled) and pickled.path == cls and isinstance(pickled.state, dict)):
            raise FileRefused(f"{name} holds no VecNormalize")
        arguments = ("norm_obs", "norm_obs_keys", "clip_obs", "clip_reward", "gamma", "epsilon")
        names = [key for key in (*arguments, "obs_rms", "ret_rms") if key in pickled.state]
        state = from_pickle({key: pickled.state[key] for key in names}, len(content))
        obs_rms, ret_rms = state.pop("obs_rms", None), state.pop("ret_rms")
        env = VecNormalize(venv, training=False, norm_reward=False, **state)
        if _shapes(ret_rms) != () or (env.norm_obs and _shapes(obs_rms) != _shapes(env.obs_rms)):
            raise FileRefused(f"{name} holds statistics of other observations than the env's")
        env.ret_rms = ret_rms
        if env.norm_obs:
            env.obs_rms = obs_rms
        return env


def _shapes(statistics: Any) -> Any:
    """Return the shape of a ``RunningMeanStd``, or those of a dictionary of such."""
    if isinstance(statistics, dict):
        return {key: _shapes(entry) for key, entry in statistics.items()}
    return statistics.mean.shape
