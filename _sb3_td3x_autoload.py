"""
Make TD3X known to RL Zoo in every Python process, without importing anything before the zoo itself does.

RL Zoo has no entry point for plugins: its command lines read a dictionary of algorithms as soon as they are imported.
``sb3_td3x.pth`` (and ``sb3_td3x.start`` from Python 3.15 on, see PEP 829) therefore calls ``install()`` when Python
starts. It puts a finder in front of the import system, which waits for three modules of the zoo and, right after one of
them has been executed, hands it to ``sb3_td3x.zoo.register``.

This module runs at each start of Python: it imports only what Python has loaded anyway. The environment variable
``SB3_TD3X_AUTOLOAD=0`` turns it off.
"""

import os
import sys

TYPE_CHECKING = False  # `typing` itself would be too slow to import here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

ENVIRONMENT_VARIABLE = "SB3_TD3X_AUTOLOAD"

# Modules of the zoo, and the function of ``sb3_td3x.zoo.register`` that takes each of them
HOOKS = {
    "rl_zoo3.utils": "register_algorithm",
    "rl_zoo3.hyperparams_opt": "register_search_space",
    "rl_zoo3.exp_manager": "patch_experiment_manager",
}


class ZooFinder:
    """Finds the modules in ``HOOKS`` as the other finders do, and registers TD3X after they were executed."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = HookedLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class HookedLoader:
    """
    A loader that registers TD3X once the module was executed, and leaves no trace of itself in the module.

    :param loader: the module's own loader
    """

    def __init__(self, loader: "Loader"):
        self.loader = loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self.loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        module.__spec__.loader = module.__loader__ = self.loader  # type: ignore[union-attr]
        self.loader.exec_module(module)
        register(module)


def register(module: "ModuleType") -> None:
    """
    Hand a module of the zoo to ``sb3_td3x.zoo.register``. A failure is told once and never stops the zoo.

    :param module: a module named in ``HOOKS``
    """
    if not is_installed():  # turned off by a failure before
        return
    try:
        from sb3_td3x.zoo import register as zoo

        getattr(zoo, HOOKS[module.__name__])(module)
    except Exception as error:
        uninstall()
        warn(error)


def is_installed() -> bool:
    """
    :return: True where the finder stands on ``sys.meta_path``
    """
    return any(isinstance(finder, ZooFinder) for finder in sys.meta_path)


def install(force: bool = False) -> None:
    """
    Register TD3X with the zoo, now and as its modules are imported. Calling it again changes nothing.

    :param force: install even if the environment variable turns it off
    """
    try:
        if is_installed() or (os.environ.get(ENVIRONMENT_VARIABLE) == "0" and not force):
            return
        sys.meta_path.insert(0, ZooFinder())
        for name in HOOKS:
            if name in sys.modules:
                register(sys.modules[name])
    except Exception as error:
        warn(error)


def uninstall() -> None:
    """Take the finder off ``sys.meta_path``; what was registered before stays."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ZooFinder)]


def warn(error: Exception) -> None:
    """
    :param error: what kept TD3X from being registered
    """
    import warnings

    message = (
        f"TD3X could not be registered with RL Zoo ({type(error).__name__}: {error}). "
        f"Nothing else is affected; {ENVIRONMENT_VARIABLE}=0 turns the attempt off."
    )
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # `python -W error`: still no reason to stop a program that may not use TD3X at all
        print(message, file=sys.stderr)
