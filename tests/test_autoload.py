"""The import hook that registers TD3X with the zoo. Most tests use stand-ins for both, in separate processes."""

import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ZOO = """
calls = []
def register_algorithm(module): calls.append(module.__name__); module.ALGOS["td3x"] = "TD3X"
def register_search_space(module): calls.append(module.__name__)
def patch_experiment_manager(module): calls.append(module.__name__)
"""


@pytest.fixture
def site_dir(tmp_path: Path) -> Path:
    """Make a folder like site-packages, with the autoload files and stand-ins for ``rl_zoo3`` and ``sb3_td3x``."""
    for name in ("_sb3_td3x_autoload.py", "sb3_td3x.pth", "sb3_td3x.start"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "rl_zoo3").mkdir()
    (tmp_path / "rl_zoo3/__init__.py").touch()
    (tmp_path / "rl_zoo3/utils.py").write_text("ALGOS = {'td3': 'TD3'}\n")
    (tmp_path / "rl_zoo3/hyperparams_opt.py").touch()
    (tmp_path / "rl_zoo3/exp_manager.py").touch()
    (tmp_path / "sb3_td3x").mkdir()
    (tmp_path / "sb3_td3x/__init__.py").touch()
    (tmp_path / "sb3_td3x/zoo").mkdir()
    (tmp_path / "sb3_td3x/zoo/__init__.py").touch()
    (tmp_path / "sb3_td3x/zoo/register.py").write_text(ZOO)
    return tmp_path


def run_python(folder: Path, code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python process that imports from ``folder`` but processes no start-up files."""
    process = subprocess.run(
        [sys.executable, "-S", *options, "-c", code],
        env={**os.environ, "SB3_TD3X_AUTOLOAD": "", "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process


def test_start_up_files():
    """Both files call the same function: the ``.pth`` file for Python up to 3.14, the ``.start`` file from 3.15."""
    assert (ROOT / "sb3_td3x.pth").read_text() == "import _sb3_td3x_autoload; _sb3_td3x_autoload.install()\n"
    entry_point = (ROOT / "sb3_td3x.start").read_text()
    assert entry_point == "_sb3_td3x_autoload:install\n"
    assert pkgutil.resolve_name(entry_point.strip()) is pkgutil.resolve_name("_sb3_td3x_autoload.install")


def test_pth_registers_with_each_module_after_its_import(site_dir: Path):
    code = """
import os, site
site.addsitedir(os.getcwd())
import sys
assert "rl_zoo3" not in sys.modules and "sb3_td3x" not in sys.modules
import rl_zoo3.utils, rl_zoo3.hyperparams_opt, rl_zoo3.exp_manager
from sb3_td3x.zoo import register as zoo
print(rl_zoo3.utils.ALGOS, zoo.calls)
for module in (rl_zoo3.utils, rl_zoo3.exp_manager):
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
"""
    process = run_python(site_dir, code)
    calls = ["rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager"]
    assert process.stdout.strip() == f"{ {'td3': 'TD3', 'td3x': 'TD3X'} } {calls}"
    assert process.stderr == ""


def test_start_up_imports_nothing(site_dir: Path):
    # `import site` imports what Python imports at start-up, but does not process start-up files
    code = """
import site, sys
before = set(sys.modules)
import _sb3_td3x_autoload
_sb3_td3x_autoload.install()
print(sorted(set(sys.modules) - before))
"""
    assert run_python(site_dir, code).stdout.strip() == "['_sb3_td3x_autoload']"


def test_install_works_twice_and_after_the_zoo_was_imported(site_dir: Path):
    code = """
import rl_zoo3.utils
import _sb3_td3x_autoload as autoload
autoload.install()
autoload.install()
import sys
print(sum(isinstance(finder, autoload.ZooFinder) for finder in sys.meta_path), rl_zoo3.utils.ALGOS["td3x"])
import rl_zoo3.exp_manager
from sb3_td3x.zoo import register as zoo
print(zoo.calls)
"""
    assert run_python(site_dir, code).stdout.splitlines() == ["1 TD3X", "['rl_zoo3.utils', 'rl_zoo3.exp_manager']"]


def test_an_environment_variable_turns_it_off(site_dir: Path):
    code = """
import _sb3_td3x_autoload as autoload
autoload.install()
import rl_zoo3.utils
print(autoload.is_installed(), "td3x" in rl_zoo3.utils.ALGOS)
autoload.install(force=True)
print(autoload.is_installed(), "td3x" in rl_zoo3.utils.ALGOS)
"""
    process = run_python(site_dir, code, SB3_TD3X_AUTOLOAD="0")
    assert process.stdout.splitlines() == ["False False", "True True"]


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["default", "warnings are errors"])
@pytest.mark.parametrize("fault", ["raise OSError('no library')", "def register_algorithm(module): 1 / 0"])
def test_a_failure_warns_once_and_does_not_stop_the_zoo(site_dir: Path, fault: str, options: tuple[str, ...]):
    (site_dir / "sb3_td3x/zoo/register.py").write_text(fault)
    code = """
import _sb3_td3x_autoload as autoload
autoload.install()
import rl_zoo3.utils, rl_zoo3.hyperparams_opt, rl_zoo3.exp_manager
print(rl_zoo3.utils.ALGOS, autoload.is_installed())
"""
    process = run_python(site_dir, code, *options)
    assert process.stdout.strip() == "{'td3': 'TD3'} False"
    assert process.stderr.count("could not be registered") == 1
    assert "no library" in process.stderr or "division by zero" in process.stderr


def test_a_pth_file_without_its_module_does_not_stop_python(site_dir: Path):
    """Python itself reports the error and continues."""
    (site_dir / "_sb3_td3x_autoload.py").unlink()
    assert run_python(site_dir, "import os, site; site.addsitedir(os.getcwd()); print('on')").stdout.strip() == "on"


def test_errors_of_the_zoo_are_not_changed(site_dir: Path):
    (site_dir / "rl_zoo3/utils.py").write_text("import no_such_module")
    code = """
import _sb3_td3x_autoload as autoload
autoload.install()
try:
    import rl_zoo3.utils
except ModuleNotFoundError as error:
    print(error.name)
"""
    process = run_python(site_dir, code)
    assert process.stdout.strip() == "no_such_module"
    assert process.stderr == ""


def test_other_algorithms_are_unchanged():
    """TD3X only adds td3x to the zoo's dictionaries."""
    code = """
import json, sys
import _sb3_td3x_autoload as autoload
if len(sys.argv) > 1:
    autoload.install(force=True)
from rl_zoo3 import exp_manager, hyperparams_opt, utils
tables = (utils.ALGOS, hyperparams_opt.HYPERPARAMS_SAMPLER, hyperparams_opt.HYPERPARAMS_CONVERTER)
names = lambda table: {key: f"{value.__module__}.{value.__qualname__}" for key, value in table.items()}
print(json.dumps([names(table) for table in tables]))
"""
    tables = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code, *arguments],
                env={**os.environ, "SB3_TD3X_AUTOLOAD": "0"},
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            ).stdout
        )
        for arguments in ([], ["install"])
    ]
    for without, with_td3x in zip(*tables, strict=True):
        assert "td3x" not in without
        assert with_td3x.pop("td3x").startswith("sb3_td3x.")
        assert list(with_td3x.items()) == list(without.items())
