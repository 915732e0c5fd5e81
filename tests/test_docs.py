"""The documentation: Python runs, YAML is read, commands are parsed by their own parsers, and tables are whole."""

import argparse
import configparser
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from rl_zoo3.utils import get_callback_list

from sb3_td3x.shaping import make_reward_shaping
from sb3_td3x.studies.arms import check_hyperparams, sweep_arms
from sb3_td3x.zoo import register

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "build" not in page.relative_to(ROOT).parts]
# A fenced block, perhaps after the comment that it is not run
BLOCK = re.compile(r"^(<!-- not run: .*? -->\n\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A command with arguments within a sentence or a table; without arguments, it is only the name of a command
INLINE = re.compile(r"`((?:python (?:-m |scripts/)|td3x )[^`]* (?:-|\S*[/A-Z])[^`]*)`")
# Trainings are cut to this many steps
STEPS = 150


class ParsedError(Exception):
    """The arguments were accepted."""


def blocks(page: Path, language: str) -> Iterator[str]:
    for not_run, name, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name == language and not not_run:
            yield code


def commands() -> Iterator[Any]:
    for page in PAGES:
        for code in blocks(page, "bash"):
            for line in code.replace("\\\n", " ").splitlines():
                line = re.sub(r"\$\{?\w+\}?", "1", line)
                for command in re.findall(r"(?:\bpython (?:-m |scripts/)|^td3x )[^#|&;>]*", line):
                    yield pytest.param(command.strip(), id=f"{page.relative_to(ROOT)}: {command.strip()}")
        for command in INLINE.findall(page.read_text(encoding="utf-8")):
            command = " ".join(command.split())
            yield pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}")


YAML_BLOCKS = [pytest.param(code, id=str(page.relative_to(ROOT))) for page in PAGES for code in blocks(page, "yaml")]
PYTHON_PAGES = [
    pytest.param(code, id=str(page.relative_to(ROOT))) for page in PAGES if (code := "\n".join(blocks(page, "python")))
]


@pytest.mark.slow
@pytest.mark.parametrize("code", PYTHON_PAGES)
def test_python_runs(code: str, tmp_path: Path) -> None:
    """All blocks of a page are one script."""
    for module in ("onnxruntime", "minari"):
        if f"import {module}" in code:
            pytest.importorskip(module)
    code = re.sub(r"(\.learn\()[\d_]+", rf"\g<1>{STEPS}", code)
    (tmp_path / "page.py").write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import:RuntimeWarning")
@pytest.mark.parametrize("command", [*commands()])
def test_commands_are_parsed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def parse_args(parser: Any, args: Any = None, namespace: Any = None) -> NoReturn:
        parsed, unknown = parse_known_args(parser, args, namespace)
        assert not unknown
        check_hyperparams(getattr(parsed, "hyperparams", None) or {}, getattr(parsed, "algo", "td3x"), command)
        raise ParsedError

    first, *arguments = shlex.split(command)
    module = "sb3_td3x"
    if first == "python":
        first, *arguments = arguments
        module = arguments.pop(0) if first == "-m" else ""
    if module.split(".")[0] not in ("rl_zoo3", "sb3_td3x", ""):
        pytest.skip("not a command of the zoo or of ours")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    # This happens when a process imports the zoo for the first time
    monkeypatch.setattr(sys, "argv", register._without_best_trial([first, *arguments]))
    if not module:
        monkeypatch.syspath_prepend(str(ROOT / first.rpartition("/")[0]))
    with pytest.raises(ParsedError):
        runpy.run_module(module, run_name="__main__") if module else runpy.run_path(
            str(ROOT / first), run_name="__main__"
        )


@pytest.mark.parametrize("code", YAML_BLOCKS)
def test_yaml_is_read(code: str, tmp_path: Path) -> None:
    content = yaml.safe_load(code)
    if content.keys() <= {"reward_shaping", "callback"}:
        make_reward_shaping(content.get("reward_shaping"))
        get_callback_list(content)
    else:
        (tmp_path / "arms.yml").write_text(code)
        assert {arm.name for arm in sweep_arms(tmp_path / "arms.yml", ["Pendulum-v1"])} == content.keys()


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_rows_of_a_table_are_as_long_as_its_header(page: Path) -> None:
    """Else the page shows no table."""
    for table in re.findall(r"(?:^ *\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        header, *rows = [line.replace(r"\|", "").count("|") for line in table.splitlines()]
        assert rows == [header] * len(rows), table


def test_extras() -> None:
    """The pages name extras that exist, and the table of get-started.md names all of them."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    installed = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert {name for names in installed for name in names.split(",")} <= extras
    assert set(re.findall(r"\bextra `(\w+)`", text)) <= extras
    table = (ROOT / "docs/get-started.md").read_text(encoding="utf-8").partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == extras
