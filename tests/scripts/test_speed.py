"""The figures of scripts/benchmark/speed.py, computed by hand, and a tiny run of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import gymnasium as gym
import numpy as np
import peers
import pytest
import speed
from floor import UpdateProducts
from stable_baselines3.common.buffers import ReplayBuffer
from torch.utils.flop_counter import FlopCounterMode

from sb3_td3x import TD3X

ROOT = Path(__file__).parents[2]


def make_result(**changes: Any) -> dict[str, Any]:
    """Return two repetitions; in the second the machine was half as fast: TD3X takes 100 steps/s, then 50."""
    result: dict[str, Any] = {
        "cell": {"name": "pendulum-64"},
        "segments": {
            "td3x": [{"steps": 100, "seconds": 1.0}, {"steps": 100, "seconds": 2.0}],
            "sb3": [{"steps": 100, "seconds": 2.0}, {"steps": 100, "seconds": 5.0}],
        },
        "replay_bytes": {"td3x": 40_000_000, "sb3": 50_000_000},
    }
    return speed.summarize({**result, **changes})


def test_ratios_are_those_of_each_repetition() -> None:
    result = make_result()
    assert result["per_second"] == {"td3x": 75.0, "sb3": 35.0}
    # 100 / 50 and 50 / 20, not 75 / 35
    assert result["ratios"] == {"sb3": {"median": 2.25, "min": 2.0, "max": 2.5}}


def test_ratio_to_the_floor_is_that_of_times() -> None:
    segments = {"td3x": [{"steps": 100, "seconds": 1.2}], "floor": [{"steps": 100, "seconds": 1.0}]}
    assert make_result(segments=segments)["ratios"]["floor"]["median"] == pytest.approx(1.2)


def test_no_ratios_without_td3x() -> None:
    assert make_result(segments={"sb3": [{"steps": 100, "seconds": 1.0}]})["ratios"] == {}


def test_table() -> None:
    floor = {"floor": [{"steps": 100, "seconds": 0.5}, {"steps": 100, "seconds": 1.0}]}
    header, _, *rows = speed.format_table([make_result(segments=make_result()["segments"] | floor)]).splitlines()
    assert header == (
        "| cell | TD3X/s | SB3/s | SBX/s | floor/s | TD3X / SB3 | TD3X / SBX | TD3X time / floor time | "
        "TD3X replay MB | SB3 replay MB | SBX replay MB |"
    )
    assert rows == ["| pendulum-64 | 75 | 35 | - | 150 | 2.25 (2.00 to 2.50) | - | 2.00 (2.00 to 2.00) | 40 | 50 | - |"]


def test_each_peer_is_first_in_turn() -> None:
    orders = [speed.rotate(["td3x", "sb3", "sbx"], rep) for rep in range(4)]
    assert orders[1] == ["sb3", "sbx", "td3x"]
    assert [order[0] for order in orders] == ["td3x", "sb3", "sbx", "td3x"]


def test_segments_are_whole_rollouts_of_the_asked_length() -> None:
    class Steady(speed.Worker):
        def __init__(self, speed: float):
            self.speed = speed

        def measure(self, steps: int) -> dict[str, float]:
            return {"steps": steps, "seconds": steps / self.speed}

    cell = cells.CELLS["bipedal-8envs"]
    # The slowest takes 500 steps in 5 s: 8 rollouts of 64 steps
    assert speed.steps_per_segment({"td3x": Steady(1000), "sb3": Steady(100)}, cell, 5.0) == 512
    assert speed.steps_per_segment({"sb3": Steady(1)}, cell, 5.0) == 64


def count_flops(function: Callable[[], object]) -> int:
    """Count the floating-point operations of the matrix products in a function."""
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("batch_size", [1, 37])
def test_the_floor_has_the_products_of_an_update(batch_size: int) -> None:
    model = TD3X("MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [19, 13]}, learning_starts=2, device="cpu")
    model.learn(2)
    floor = UpdateProducts(obs_dim=3, action_dim=1, net_arch=[19, 13], batch_size=batch_size)
    flops = count_flops(lambda: model.train(gradient_steps=4, batch_size=batch_size))
    assert count_flops(lambda: floor.run(4)) == flops > 0
    # Of two updates the first leaves the actor alone, in one call or in two
    first, second = (count_flops(lambda: floor.run(1)) for _ in range(2))
    assert first < flops / 4 < second
    assert first + second == flops / 2


def test_the_floor_of_a_training_loop_steps_the_envs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cells.Cell("two-envs", "Pendulum-v1", (8,), 4, n_envs=2, train_freq=3, gradient_steps=5)
    floor = peers.Floor(cell, "float32")
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(floor.env, "step", lambda actions: calls.append(actions.shape))
    monkeypatch.setattr(floor.products, "run", lambda n_updates: calls.append((n_updates,)))
    # 8 steps are two rollouts of 6, as SB3 does it
    assert floor.advance(8) == 12
    assert calls == 2 * [(2, 1), (2, 1), (2, 1), (5,)]


def test_a_filled_replay_buffer_gives_its_batches_from_everywhere() -> None:
    env = gym.make("Pendulum-v1")
    model = TD3X("MlpPolicy", env, buffer_size=2_500, device="cpu")
    expected = ReplayBuffer(2_500, model.observation_space, model.action_space)
    for buffer in (model.replay_buffer, expected):
        peers.fill(buffer)
        assert buffer.size() == 2_500
        assert (buffer.observations != 0).all()
        assert not buffer.dones.any()
    np.testing.assert_array_equal(model.replay_buffer.observations, expected.observations)
    # Two observations of 3, action, reward, done and time-out
    assert peers.replay_bytes(model.replay_buffer) == peers.replay_bytes(expected) == 2_500 * 10 * 4


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/benchmark/speed.py"), "--cells", "pendulum-64", "--threads", "1"]
    options = ["--peers", "td3x", "sb3", "--reps", "2", "--steps", "20", "--overlap", "--out", str(tmp_path)]
    process = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[2].startswith("| pendulum-64 | ")
    report = json.loads((tmp_path / "cells-cpu-float32.json").read_text())
    (cell,) = report["cells"]
    assert [len(cell["segments"][peer]) for peer in ("td3x", "sb3")] == [2, 2]
    assert all(segment["steps"] == 20 for segments in cell["segments"].values() for segment in segments)
    assert cell["replay_bytes"]["td3x"] <= cell["replay_bytes"]["sb3"]
    assert report["threads"] == 1
    assert report["overlap_updates"] is True
    assert report["machine"]["versions"]["sb3-td3x"]


@pytest.mark.parametrize("text", ["nan", "-1", "0", "long"])
def test_seconds_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--seconds", text])
    assert f"--seconds: {text!r} is not allowed, expected a whole number of at least 1" in capsys.readouterr().err
