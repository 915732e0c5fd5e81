"""The package's own command line, but for the commands with a test module of their own."""

import io
from pathlib import Path

import hostile
import pytest
import torch as th
from envs import CountingEnv, tiny
from stable_baselines3 import TD3

from sb3_td3x import TD3X
from sb3_td3x.cli import main
from sb3_td3x.files.inspect import describe_agent


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
