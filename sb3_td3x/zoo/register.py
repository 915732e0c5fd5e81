"""
What the start-up hook ``_sb3_td3x_autoload`` calls: three functions that add td3x to a module of RL Zoo.

Each is called right after that module was executed, while ``rl_zoo3`` is half imported: nothing here may import it at
module level. Other algorithms are not changed.
"""

import argparse
import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.search_space import BEST_TRIAL, convert_td3x_params, sample_td3x_params

ALGO = "td3x"


def hyperparams_path(name: str = ALGO) -> Path:
    """Find a YAML file of hyperparameters: in the package where it is installed, else at the repository's root."""
    package = Path(__file__).parents[1]
    folder = package / "hyperparams"
    if not folder.is_dir():
        folder = package.parent / "hyperparams"
    return folder / f"{name}.yml"


def register_algorithm(utils: ModuleType) -> None:
    """Add the algorithm to ``rl_zoo3.utils``, and explain quoting where the zoo cannot evaluate ``-params``."""
    utils.ALGOS[ALGO] = TD3X
    utils.StoreDict.__call__ = _with_quoting_hint(utils.StoreDict.__call__)

    if "huggingface_sb3" in sys.modules:
        _mend_hub(sys.modules["huggingface_sb3"], sys.modules["huggingface_sb3.push_to_hub"])


def _mend_hub(package: Any, push_to_hub: Any) -> None:
    """Let the hub's commands of RL Zoo 2.9.2 work with newer packages. They would fail for every algorithm."""
    # Version 3.2 renamed a function that `rl_zoo3.push_to_hub` imports, and made it return an object
    if hasattr(push_to_hub, "_generate_metadata") and not hasattr(push_to_hub, "generate_metadata"):
        push_to_hub.generate_metadata = lambda *args: push_to_hub._generate_metadata(*args).to_dict()

    # `rl_zoo3.load_from_hub` expects an `HTTPError` of requests where an agent has no statistics of VecNormalize. From
    # huggingface_hub 1.0 on it is another error
    load = package.load_from_hub

    @functools.wraps(load)
    def load_from_hub(repo_id: str, filename: str) -> str:
        from huggingface_hub.errors import EntryNotFoundError
        from requests.exceptions import HTTPError

        try:
            return str(load(repo_id, filename))
        except EntryNotFoundError as error:
            raise HTTPError(str(error)) from error

    package.load_from_hub = load_from_hub


def _with_quoting_hint(store: Callable[..., None]) -> Callable[..., None]:
    """Let the zoo's action for ``key:value`` options end with a hint where a value cannot be evaluated."""

    @functools.wraps(store)
    def store_with_hint(
        self: Any, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: list[str], option: str
    ) -> None:
        try:
            store(self, parser, namespace, values, option)
        except (NameError, SyntaxError) as error:
            if getattr(namespace, "algo", None) != ALGO:
                raise
            parser.error(
                f"{option} {' '.join(values)} cannot be evaluated ({error}). Values are Python expressions, and text "
                f"needs quotes that the shell keeps: {option} \"name:'text'\""
            )

    return store_with_hint


def register_search_space(hyperparams_opt: ModuleType) -> None:
    """Add the search space to ``rl_zoo3.hyperparams_opt``."""
    hyperparams_opt.HYPERPARAMS_SAMPLER[ALGO] = sample_td3x_params
    hyperparams_opt.HYPERPARAMS_CONVERTER[ALGO] = convert_td3x_params


def patch_experiment_manager(exp_manager: ModuleType) -> None:
    """Replace methods of the ``ExperimentManager`` of ``rl_zoo3.exp_manager`` by ``manager.METHODS`` for td3x."""
    from sb3_td3x.zoo.manager import METHODS

    manager_class = exp_manager.ExperimentManager
    if getattr(manager_class, "knows_td3x", False):
        return
    manager_class.knows_td3x = True
    manager_class.__init__ = _with_our_hyperparams(manager_class.__init__)
    for name, method in METHODS.items():
        setattr(manager_class, name, _for_td3x(getattr(manager_class, name), method))
    # The zoo's commands import this module before they parse their arguments
    sys.argv[1:] = _without_best_trial(sys.argv[1:])


def _with_our_hyperparams(init: Callable[..., None]) -> Callable[..., None]:
    """Let the manager's constructor choose our YAML file where none was given."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_with_our_hyperparams(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.algo == ALGO and not signature.bind(self, *args, **kwargs).arguments.get("config"):
            self.config = str(hyperparams_path())

    return init_with_our_hyperparams


def _for_td3x(zoo_method: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method of ours instead of the zoo's if the algorithm is td3x."""

    @functools.wraps(zoo_method)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.algo != ALGO:
            return zoo_method(self, *args, **kwargs)
        return method(zoo_method, self, *args, **kwargs)

    return dispatch


def _without_best_trial(argv: list[str]) -> list[str]:
    """Replace ``--trial-id best`` of td3x by a number, since the zoo's parser takes nothing else."""
    pairs = list(itertools.pairwise(argv))
    if ("--algo", ALGO) not in pairs or ("--trial-id", "best") not in pairs:
        return argv
    idx = pairs.index(("--trial-id", "best"))
    return [*argv[: idx + 1], str(BEST_TRIAL), *argv[idx + 2 :]]
