"""The source distribution and the wheel, and installing and uninstalling them."""

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from sb3_td3x import __version__

ROOT = Path(__file__).parent.parent
WHEEL = f"sb3_td3x-{__version__}-py3-none-any.whl"
STARTUP_FILES = {"sb3_td3x.pth", "sb3_td3x.start"}

# Run in a single worker, because the tests share one build
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]


def test_setup_cfg_lists_every_package() -> None:
    """Setuptools does not find packages by itself if there is a ``package_dir``."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "sb3_td3x").rglob("__init__.py")}
    found = {".".join(folder.parts) for folder in folders}
    # sb3_td3x.hyperparams is a folder at the root of the repository
    assert set(config["options"]["packages"].split()) == found | {"sb3_td3x.hyperparams"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    process = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "SB3_TD3X_AUTOLOAD": "", "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository, so that nothing is built inside it."""
    folder = tmp_path_factory.mktemp("source") / "td3x"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", ".lowest", ".*_cache", "__pycache__", "*.egg-info", "build", "logs"
    )
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def dist(source: Path) -> Path:
    """Build the source distribution, and the wheel from it."""
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    return source / "dist"


class Environment:
    """
    A virtual environment that can import the packages of the current one, but processes none of their start-up files.

    :param folder: Its folder
    """

    def __init__(self, folder: Path):
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        scripts = "Scripts" if os.name == "nt" else "bin"
        self.folder = folder
        self.python = folder / scripts / "python"
        self.site_packages = Path(self("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (self.site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def __call__(self, *arguments: str | Path, **environment: str) -> str:
        return run(self.python, *arguments, cwd=self.folder, **environment)

    def pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.folder)

    def install(self, *arguments: str | Path) -> None:
        # --ignore-installed, so that pip does not uninstall packages of the current environment
        self.pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", *arguments)

    def files(self) -> set[Path]:
        return {path.relative_to(self.folder) for path in self.folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def test_sdist(dist: Path):
    with tarfile.open(dist / f"sb3_td3x-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "Makefile", "_sb3_td3x_autoload.py", "constraints.txt", "hyperparams/td3x.yml"}
    assert names >= {"sb3_td3x/py.typed", "sb3_td3x/td3x.py", "setup.py", "tests/test_packaging.py", *STARTUP_FILES}
    assert names >= {
        "CITATION.cff",
        "examples/first_agent.ipynb",
        "scripts/benchmark/speed.py",
        "docs/explanation/algorithm.md",
        ".ci/run",
    }
    # Output of studies
    assert not [name for name in names if name.startswith(("docs/ablation", "docs/benchmarks/", "docs/results"))]


def test_wheel(dist: Path):
    with zipfile.ZipFile(dist / WHEEL) as archive:
        names = set(archive.namelist())
        record = archive.read(f"sb3_td3x-{__version__}.dist-info/RECORD").decode()
        for name in STARTUP_FILES:
            assert archive.read(name) == (ROOT / name).read_bytes()
    installed = {name for name in names if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sb3_td3x").rglob("*.py")}
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sb3_td3x" / "studies" / "data").iterdir()}
    data.add("sb3_td3x/studies/report.md.jinja")
    assert "sb3_td3x/studies/data/zoo_curves.json" in data
    hyperparams = {f"sb3_td3x/hyperparams/{path.name}" for path in (ROOT / "hyperparams").glob("*.yml")}
    assert "sb3_td3x/hyperparams/td3x.yml" in hyperparams
    assert installed == modules | data | hyperparams | STARTUP_FILES | {"sb3_td3x/py.typed", "_sb3_td3x_autoload.py"}
    assert {line.partition(",")[0] for line in record.splitlines()} == names


@pytest.mark.parametrize("kind", ["wheel", "editable", "strict editable"])
def test_install_and_uninstall(kind: str, source: Path, dist: Path, environment: Environment):
    before = environment.files()
    if kind == "wheel":
        environment.install(dist / WHEEL)
    elif kind == "editable":
        environment.install("--editable", source)
    else:
        environment.install("--config-settings=editable_mode=strict", "--editable", source)
    assert {path.name for path in environment.site_packages.iterdir()} >= STARTUP_FILES

    # Starting Python imports nothing but the autoload module
    loaded = environment(
        "-c", "import sys; print(*(name for name in ('torch', 'numpy', 'rl_zoo3', 'sb3_td3x') if name in sys.modules))"
    )
    assert loaded.strip() == ""

    status = environment("-m", "sb3_td3x")
    assert f"sb3_td3x {__version__}, " in status
    assert "registered with rl_zoo3: yes" in status
    assert "autoload: active" in status
    assert str(environment.site_packages / "sb3_td3x.pth") in status
    hyperparams = Path(status.partition("hyperparameters: ")[2].splitlines()[0])
    assert hyperparams.read_bytes() == (ROOT / "hyperparams/td3x.yml").read_bytes()
    # From outside the clone: the zoo's command, and ours
    run_folder = "logs/td3x/Pendulum-v1_1"
    shared = ("--algo", "td3x", "--env", "Pendulum-v1", "-f", "logs")
    small = ("-n", "150", "--save-freq", "100", "--eval-freq", "-1", "-params", "learning_starts:100")
    environment("-m", "rl_zoo3.train", *shared, *small)
    td3x = environment.python.with_name("td3x")
    assert "num_timesteps: 150" in run(td3x, "inspect", f"{run_folder}/Pendulum-v1.zip", cwd=environment.folder)
    assert "return so far" in run(td3x, "play", run_folder, "-n", "10", cwd=environment.folder)
    assert "Resuming from" in run(td3x, "resume", run_folder, cwd=environment.folder)
    run(td3x, "zoo", "enjoy", *shared, "-n", "10", "--no-render", cwd=environment.folder)
    shutil.rmtree(environment.folder / "logs")

    if kind == "wheel":
        assert hyperparams.is_relative_to(environment.site_packages)
        assert "td3x" in environment("-m", "rl_zoo3.train", "--help")
        assert "td3x" not in environment("-m", "rl_zoo3.train", "--help", SB3_TD3X_AUTOLOAD="0")

    environment.pip("uninstall", "--yes", "sb3-td3x")
    assert environment.files() == before
