"""What ``inspect`` shows of an agent's file."""

import subprocess
import sys
from pathlib import Path

from envs import tiny_agent
from noises import normal_noise

from sb3_td3x.files.inspect import describe_agent
from sb3_td3x.schedules import SimpleLinearSchedule
from sb3_td3x.shaping import FallPenalty


def test_fresh_process_knows_all_registered_classes(tmp_path: Path) -> None:
    path = tmp_path / "agent.zip"
    tiny_agent(
        action_noise=normal_noise(), learning_rate=SimpleLinearSchedule(0.001), reward_shaping=FallPenalty()
    ).save(path)
    process = subprocess.run(
        [sys.executable, "-m", "sb3_td3x", "inspect", str(path)], capture_output=True, text=True, check=True
    )
    lines = process.stdout.splitlines()
    assert process.stdout.rstrip("\n") == describe_agent(path)
    assert "  reward_shaping: FallPenalty(threshold=-100.0, penalty=-1.0" in process.stdout
    assert "  learning_rate: SimpleLinearSchedule(initial_value=0.001)" in lines
    assert "pickles: none" in lines
    assert not any(line.endswith(": pickled") for line in lines)


def test_own_attributes_are_shown_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "agent.zip"
    model = tiny_agent()
    model.own = lambda: None  # type: ignore[attr-defined]
    model.save(path)
    text = describe_agent(path)
    assert "  own: pickled" in text
    assert "pickles: 1" in text
    assert "own: needs trusted=True: names " in text
