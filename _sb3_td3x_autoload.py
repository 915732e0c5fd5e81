"""
Register TD3X with RL Zoo in every Python process, without importing anything before the zoo itself does.

RL Zoo has no entry point for plugins: its commands read a dictionary of algorithms as soon as they are imported.
Therefore ``sb3_td3x.pth`` (from Python 3.15 on ``sb3_td3x.start``, see PEP 829) calls ``install()`` when Python starts.
This puts a finder in front of the import system. When one of three modules of the zoo has been executed, it is handed
to ``sb3_td3x.zoo.register``.

Because this module runs at every start of Python, it imports only what Python has loaded anyway. The environment
variable ``SB3_TD3X_AUTOLOAD=0`` turns it off.
"""

import os
import sys

TYPE_CHECKING = False  # importing `typing` would take too long here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ENVIRONMENT_VARIABLE = "SB3_TD3X_AUTOLOAD"

# Modules of the zoo, and the function of ``sb3_td3x.zoo.register`` that takes each of them
HOOKS = {
    "rl_zoo3.utils": "register_algorithm",
    "rl_zoo3.hyperparams_opt": "register_search_space",
    "rl_zoo3.exp_manager": "patch_experiment_manager",
}


class ZooFinder:
    """Finds the modules in ``HOOKS`` by the other finders, and lets their loaders register TD3X."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname not in HOOKS:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            execute(module)
            # That of a zip file loads other modules, too
            if module.__name__ == fullname:
                register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register(module: "ModuleType") -> None:
    """Hand a module of the zoo to ``sb3_td3x.zoo.register``. A failure gives one warning and never stops the zoo."""
    if not is_installed():  # an earlier failure has turned it off
        return
    try:
        from sb3_td3x.zoo import register as zoo

        getattr(zoo, HOOKS[module.__name__])(module)
    except Exception as error:
        uninstall()
        warn(error)


def is_installed() -> bool:
    """Tell whether the finder is in ``sys.meta_path``."""
    return any(isinstance(finder, ZooFinder) for finder in sys.meta_path)


def install(force: bool = False) -> None:
    """
    Register TD3X with the modules of the zoo that are imported already, and with others when they are imported.

    Calling this again changes nothing.

    :param force: whether to install even if the environment variable turns it off
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
    """Remove the finder from ``sys.meta_path``; registrations so far stay."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ZooFinder)]


def warn(error: Exception) -> None:
    """Warn that TD3X is not registered."""
    import warnings

    message = (
        f"TD3X could not be registered with RL Zoo ({type(error).__name__}: {error}). "
        f"Nothing else is affected; {ENVIRONMENT_VARIABLE}=0 turns the attempt off."
    )
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # `python -W error` must not stop a program that may not even use TD3X
        print(message, file=sys.stderr)
