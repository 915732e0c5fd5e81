"""The package's command line, except for commands that have their own test modules."""

import importlib.util
import io
import os
import sys
import types
from pathlib import Path

import hostile
import pytest
import torch as th
from envs import CountingEnv, tiny
from processes import run_python
from stable_baselines3 import TD3

from sb3_td3x import TD3X, cli
from sb3_td3x.cli import main
from sb3_td3x.files.inspect import describe_agent

ROOT = Path(__file__).parents[1]


def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    assert "registered with rl_zoo3: yes" in output
    assert str(ROOT / "hyperparams/td3x.yml") in output


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    assert "usage: python -m sb3_td3x" in output
    for name in ("inspect", "play", "resume", "zoo", "study", "export", "agents"):
        assert f"\n    {name} " in output


@pytest.mark.parametrize(("name", "module"), [("study", "studies.command"), ("agents", "agents.command")])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["compare", "--env", "x", "--", "y"]], ids=str)
def test_commands_with_a_parser_of_their_own(
    name: str, module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get all arguments after their name."""
    called: list[list[str]] = []
    command = types.ModuleType(f"sb3_td3x.{module}")
    command.main = lambda argv: called.append(list(argv)) or 3  # type: ignore[attr-defined, func-returns-value]
    package = command.__name__.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, package, sys.modules.get(package, types.ModuleType(package)))
    monkeypatch.setitem(sys.modules, command.__name__, command)
    assert main([name, *arguments]) == 3
    assert called == [arguments]


@pytest.mark.parametrize("name", ["trian", "plot.all_plots"])
def test_unknown_zoo_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", name, "--algo", "td3x"]) == 2
    error = capsys.readouterr().err
    assert error == f"rl_zoo3 has no command {name!r}, expected one such as {cli.ZOO_COMMANDS}\n"


@pytest.mark.slow
def test_zoo_without_start_up_files(tmp_path: Path) -> None:
    """`python -S` processes no start-up file; train, then watch."""
    spec = importlib.util.find_spec("rl_zoo3")
    assert spec is not None
    assert spec.origin is not None
    path = os.pathsep.join([str(ROOT), str(Path(spec.origin).parents[1])])
    for command in (
        ["train", "-n", "120", "--eval-freq", "-1", "-params", "learning_starts:100"],
        ["enjoy", "-n", "200", "--no-render"],
    ):
        shared = ("--algo", "td3x", "--env", "Pendulum-v1", "-f", "logs")
        process = run_python(tmp_path, "-S", "-m", "sb3_td3x", "zoo", *command, *shared, PYTHONPATH=path)
        assert process.returncode == 0, process.stderr
    assert "Mean reward" in process.stdout
    assert (tmp_path / "logs/td3x/Pendulum-v1_1/Pendulum-v1.zip").is_file()


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TD3X("MlpPolicy", CountingEnv(), **tiny()).learn(20).save(tmp_path / "agent")
    assert main(["inspect", str(tmp_path / "agent.zip")]) == 0
    output = capsys.readouterr().out
    for line in (
        "checksum: right",
        "policy_class: sb3_td3x.policies.TD3XPolicy",
        "policy_kwargs: {'net_arch': [8]}",
        "num_timesteps: 20",
        "pickles: none",
        "  gamma: 0.99",
    ):
        assert f"{line}\n" in f"{output}\n"
    assert "  actor: " in output

    TD3("MlpPolicy", CountingEnv(), **tiny(learning_rate=lambda progress: 1e-3)).save(tmp_path / "sb3")
    assert main(["inspect", str(tmp_path / "sb3.zip")]) == 0
    output = capsys.readouterr().out
    assert "checksum: none" in output
    assert "  learning_rate: needs trusted=True: names cloudpickle" in output
    assert "  lr_schedule: not needed" in output
    assert "  policy_class: names only what is allowed" in output

    (tmp_path / "text.zip").write_text("text")
    for path in (tmp_path / "text.zip", tmp_path / "missing.zip"):
        assert main(["inspect", str(path)]) == 1
        assert path.name in capsys.readouterr().err


def test_inspect_says_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    file = io.BytesIO()
    TD3X("MlpPolicy", CountingEnv(), **tiny()).save(file)
    content = hostile.with_data(file.getvalue(), tensorboard_log="\x1b[2J", **{"\x1b[31m": "\x1b]0;"})
    policy = hostile.torch_file({"\x1b[2J.weight": th.zeros(1)})
    content = hostile.with_members(content, system_info__txt=b"\x1b[2J\r\n", policy__pth=policy)
    content = hostile.with_members(content, **{"\x1b[2J__pth": policy})
    assert "\x1b" not in describe_agent(io.BytesIO(content))
