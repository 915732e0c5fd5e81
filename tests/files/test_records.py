"""Attributes as records: what comes back from them, and which classes files may name."""

import json
import math
import pathlib
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
from torch import nn

from sb3_td3x import MlpPolicy, shaping
from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.files import records
from sb3_td3x.files.records import NotARecordError, from_record, register_object, to_record
from sb3_td3x.schedules import SimpleLinearSchedule
from sb3_td3x.shaping import FallPenalty, RewardScale, ShapingBatch, ShapingChain, check_built_in


def through_json(value: Any) -> Any:
    return from_record(json.loads(json.dumps(to_record(value), allow_nan=False)))


def statistics() -> RunningMeanStd:
    rms = RunningMeanStd(shape=(3,))
    rms.update(np.arange(12.0).reshape(4, 3))
    return rms


def space_with_generator() -> spaces.Space:
    space = spaces.Box(-1, np.inf, (3,))
    space.seed(7)
    return space


VALUES: list[Any] = [
    *(None, True, -3, 2**70, 0.1, math.inf, -math.inf, "text", [], {}, [1, [2.5, None]], {"a": {"b": [1]}}),
    *((), (1, (2, "x")), deque([1, 2], maxlen=5), OrderedDict(b=1, a=2), pathlib.Path("logs/x")),
    *(np.arange(6, dtype=np.int8).reshape(2, 3), np.zeros((0, 2)), np.array(1.5), np.float32(0.1), np.bool_(True)),
    *(np.dtype(np.float32), np.dtype(">i4"), np.asfortranarray(np.ones((2, 3)))),
    *(nn.Tanh, th.optim.AdamW, MlpPolicy, PackedReplayBuffer, np.float32, float),
    *(space_with_generator(), spaces.Box(0, 255, (2, 2), np.uint8), spaces.Box(-np.inf, np.inf, (2,), np.int64)),
    *(spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)),
    spaces.Dict({"b": spaces.Box(0, 1), "a": spaces.Discrete(2)}),
    *(NormalActionNoise(np.zeros(2), np.ones(2)), OrnsteinUhlenbeckActionNoise(np.zeros(2), np.ones(2))),
    VectorizedActionNoise(OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1)), 3),
    *(ConstantSchedule(1e-3), LinearSchedule(1.0, 0.0, 0.5), FloatSchedule(SimpleLinearSchedule(1e-3))),
    *(FallPenalty(warmup=9), RewardScale(2.0), ShapingChain([FallPenalty(), RewardScale(2.0)])),
    *(TrainFreq(2, TrainFrequencyUnit.STEP), GoalSelectionStrategy.FUTURE, statistics()),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {value!r:.40}")
def test_value_comes_back_the_same(value: Any) -> None:
    loaded = through_json(value)
    assert type(loaded) is type(value)
    np.testing.assert_equal(vars_of(loaded), vars_of(value))


def vars_of(value: Any) -> Any:
    """Everything in a value that can be compared."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, deque):
        return list(value), value.maxlen
    if isinstance(value, ShapingChain | FloatSchedule | VectorizedActionNoise | spaces.Space):
        return {name: repr(vars_of(it)) for name, it in vars(value).items()}
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else value


def test_nan_comes_back() -> None:
    assert math.isnan(through_json([math.nan])[0])


@pytest.mark.parametrize(
    "value",
    [lambda: None, object(), {1: 2}, {"__type__": "tuple"}, b"bytes", np.array([None]), type("Own", (nn.ReLU,), {})],
    ids=lambda value: type(value).__name__,
)
def test_what_only_a_pickle_can_hold(value: Any) -> None:
    for nested in (value, [value], {"x": (value,)}):
        with pytest.raises(NotARecordError):
            to_record(nested)


def test_value_that_holds_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(RecursionError):
        to_record(value)


def test_object_with_a_further_attribute() -> None:
    """It would be lost."""
    hook: Any = RewardScale(2.0)
    hook.note = "mine"
    with pytest.raises(NotARecordError):
        to_record(hook)


@pytest.mark.parametrize(
    "record",
    [
        {"__type__": "nonsense"},
        {"__type__": []},
        {"__type__": "class", "name": "subprocess.Popen"},
        {"__type__": "object", "name": "os.mkdir", "attributes": {}},
        {"__type__": "object", "name": "sb3_td3x.FallPenalty", "attributes": {}},
        {"__type__": "object", "name": "sb3_td3x.RewardScale", "attributes": {"scale": "x"}},
        {"__type__": "object", "name": "sb3_td3x.RewardScale", "attributes": {"scale": -1}},
        {"__type__": "object", "name": "sb3_td3x.RewardScale", "attributes": []},
        {"__type__": "array", "dtype": "|O", "shape": [1], "data": ""},
        {"__type__": "array", "dtype": "<f4", "shape": [2**40], "data": ""},
        {"__type__": "array", "dtype": "<f4", "shape": [-1], "data": ""},
        {"__type__": "array", "dtype": "<f4", "shape": [2], "data": "%"},
        {"__type__": "generator", "state": {"bit_generator": "MT19937", "state": {"pos": 2**31}}},
        {"__type__": "float", "value": "1"},
        {"__type__": "tuple"},
    ],
    ids=str,
)
def test_hostile_record_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match=r"it holds|not on the list|reshape|base64|PCG64"):
        from_record(record)


# The registry


def test_names_in_files() -> None:
    """They stay the same when a module moves, and SB3's are those in SB3's own files."""
    assert to_record(MlpPolicy)["name"] == "sb3_td3x.TD3XPolicy"
    assert to_record(FallPenalty())["name"] == "sb3_td3x.FallPenalty"
    assert to_record(nn.ReLU)["name"] == "torch.nn.modules.activation.ReLU"
    assert to_record(ConstantSchedule(1.0))["name"] == "stable_baselines3.common.utils.ConstantSchedule"


def test_zoo_s_schedule_is_read_without_the_zoo() -> None:
    from rl_zoo3.utils import SimpleLinearSchedule as ZooSchedule

    loaded = through_json(ZooSchedule(1e-3))
    assert isinstance(loaded, SimpleLinearSchedule)
    assert loaded.initial_value == 1e-3


def test_new_hook_is_one_edit_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a built-in hook, shaping.py would hold just these lines: nothing else names the class."""
    monkeypatch.setattr(records, "OBJECTS", dict(records.OBJECTS))

    @register_object("power")
    class RewardPower(shaping.RewardShaping):
        __module__ = "sb3_td3x.shaping"

        def __init__(self, power: float) -> None:
            self.power = power

        def __call__(self, batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
            return batch.rewards**self.power, batch.terminations

    monkeypatch.setattr(shaping, "RewardPower", RewardPower, raising=False)

    assert through_json(RewardPower(2.0)).power == 2
    assert isinstance(through_json(ShapingChain([RewardPower(2.0)])).hooks[0], RewardPower)
    # By its path, as in YAML
    spec = {"sb3_td3x.shaping.RewardPower": {"power": 2.0}}
    check_built_in(spec)
    assert isinstance(shaping.make_reward_shaping(spec), RewardPower)
    with pytest.raises(ValueError, match=r"did you mean 'sb3_td3x\.shaping\.RewardPower'"):
        shaping.make_reward_shaping("sb3_td3x.shaping.RewardPowr")
