"""The replay buffer compared with SB3's."""

import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import CountingEnv, tiny_agent
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x.buffers import PackedReplayBuffer

ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
SMALL_MEMORY_ONLY = {"optimize_memory_usage": True}
SMALL_MEMORY = {**SMALL_MEMORY_ONLY, "handle_timeout_termination": False}
OBS, ACTION = spaces.Box(-1, 1, (5,)), spaces.Box(-1, 1, (2,))
SPACES: dict[str, spaces.Space] = {
    "float32": OBS,
    "float64": spaces.Box(-1, 1, (5,), np.float64),
    "float16": spaces.Box(-1, 1, (5,), np.float16),
    "matrix": spaces.Box(-1, 1, (2, 3)),
    "int64": spaces.Box(-100, 100, (3,), np.int64),
    "bytes": spaces.Box(0, 255, (3,), np.uint8),
    "image": spaces.Box(0, 255, (4, 6, 5), np.uint8),
    "discrete": spaces.Discrete(7),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        {
            "image": spaces.Box(0, 255, (4, 6, 5), np.uint8),
            "vector": spaces.Box(-1, 1, (5,), np.float64),
            "matrix": spaces.Box(-1, 1, (2, 3)),
            "number": spaces.Discrete(3),
        }
    ),
}


def make_buffer(
    cls: type[ReplayBuffer], size: int = 20, n_envs: int = 1, space: spaces.Space = OBS, **kwargs: Any
) -> Any:
    return cls(size, space, ACTION, "cpu", n_envs, **kwargs)


def observations(space: spaces.Space, n_envs: int, rng: np.random.Generator) -> Any:
    """Draw an observation of each of several envs."""
    if isinstance(space, spaces.Dict):
        return {key: observations(part, n_envs, rng) for key, part in space.spaces.items()}
    space.seed(int(rng.integers(2**31)))
    return np.stack([space.sample() for _ in range(n_envs)])


def fill(buffer: ReplayBuffer, steps: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        obs, next_obs = (observations(buffer.observation_space, buffer.n_envs, rng) for _ in range(2))
        dones = rng.random(buffer.n_envs) < 0.4
        infos = [{"TimeLimit.truncated": True} if done and rng.random() < 0.5 else {} for done in dones]
        action, reward = rng.uniform(-1, 1, (buffer.n_envs, 2)), rng.normal(size=buffer.n_envs)
        buffer.add(obs, next_obs, action, reward, dones, infos)


def parts(value: Any) -> dict[str, Any]:
    """Return a dictionary of arrays unchanged, and a single array as a dictionary."""
    return value if isinstance(value, dict) else {"": value}


def assert_same_batches(expected: Any, actual: Any, tolerance: float = 0.0) -> None:
    """Assert that batches are equal after the cast to float32, which the networks need."""
    for name, value in expected._asdict().items():
        if value is None:
            continue
        for key, part in parts(value).items():
            own = parts(getattr(actual, name))[key]
            assert own.shape == part.shape, (name, key)
            assert own.dtype == (th.uint8 if part.dtype == th.uint8 else th.float32), (name, key)
            th.testing.assert_close(own.float(), part.float(), rtol=tolerance, atol=tolerance, msg=f"{name} {key}")


def batches(buffer: Any, env: VecNormalize | None = None) -> list[Any]:
    set_random_seed(0)
    return [buffer.sample(16, env=env) for _ in range(3)]


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("steps", [4, 20, 33])
@pytest.mark.parametrize("kwargs", [{}, {"handle_timeout_termination": False}, SMALL_MEMORY])
@pytest.mark.parametrize("space", SPACES)
def test_same_contents_and_batches_as_sb3(space: str, n_envs: int, steps: int, kwargs: dict[str, Any]) -> None:
    """With a partly filled buffer, a full one, and one that overwrites the oldest transitions."""
    if space == "dict" and kwargs == SMALL_MEMORY:
        pytest.skip("SB3 has no such replay buffer")
    cls = DictReplayBuffer if space == "dict" else ReplayBuffer
    sb3, packed = (make_buffer(it, 20 * n_envs, n_envs, SPACES[space], **kwargs) for it in (cls, PackedReplayBuffer))
    for buffer in (sb3, packed):
        fill(buffer, steps)
    assert (packed.pos, packed.full, packed.size()) == (sb3.pos, sb3.full, sb3.size())
    for name in ARRAYS:
        assert hasattr(packed, name) == hasattr(sb3, name)
        for key, array in parts(getattr(sb3, name, {})).items():
            expected = array.astype(np.float32) if array.dtype != np.uint8 else array
            np.testing.assert_array_equal(parts(getattr(packed, name))[key], expected, err_msg=f"{name} {key}")
    for expected, actual in zip(batches(sb3), batches(packed), strict=True):
        assert_same_batches(expected, actual)


@given(
    n_steps=st.integers(2, 9),
    steps=st.integers(1, 30),
    n_envs=st.integers(1, 3),
    gamma=st.sampled_from([0.9, 0.99, 1.0]),
    timeouts=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_same_n_step_returns_as_sb3(n_steps: int, steps: int, n_envs: int, gamma: float, timeouts: bool) -> None:
    """Across the end of the arrays, terminations, time-outs and the newest step."""
    kwargs = {"n_steps": n_steps, "gamma": gamma, "handle_timeout_termination": timeouts}
    sb3, packed = (make_buffer(cls, 12 * n_envs, n_envs, **kwargs) for cls in (NStepReplayBuffer, PackedReplayBuffer))
    for buffer in (sb3, packed):
        fill(buffer, steps)
    for expected, actual in zip(batches(sb3), batches(packed), strict=True):
        assert_same_batches(expected, actual, 1e-6)


@pytest.mark.parametrize("steps", [4, 33])
def test_n_step_returns_of_dictionaries_and_memory_optimized_buffers(steps: int) -> None:
    """SB3 supports neither, so compare with the n-step returns of vectors."""
    kwargs = {"n_steps": 3, "handle_timeout_termination": False}
    plain, once = (make_buffer(PackedReplayBuffer, 20, 1, **kwargs, **extra) for extra in ({}, SMALL_MEMORY_ONLY))
    dictionary = make_buffer(PackedReplayBuffer, 20, 1, spaces.Dict({"a": OBS}), **kwargs)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(1, 5))
    for _ in range(steps):
        next_obs, rest = rng.normal(size=(1, 5)), (np.zeros((1, 2)), rng.normal(size=1), rng.random(1) < 0.2, [{}])
        plain.add(obs, next_obs, *rest)
        once.add(obs, next_obs, *rest)
        dictionary.add({"a": obs}, {"a": next_obs}, *rest)
        obs = next_obs
    indices = th.arange(min(steps, 20))
    if steps > 20:
        # The oldest step contains the newest observation
        indices = indices[indices != once.pos]
    expected, actual, of_dictionary = (it.gather(it.blocks_on_device(), indices) for it in (plain, once, dictionary))
    assert_same_batches(expected, actual)
    assert th.equal(of_dictionary.observations["a"], expected.observations)
    assert th.equal(of_dictionary.next_observations["a"], expected.next_observations)
    assert th.equal(of_dictionary.rewards, expected.rewards)


def normalized_env(space: spaces.Space, **kwargs: Any) -> VecNormalize:
    """Make an env with statistics of large values with a small standard deviation."""
    env = CountingEnv(action_space=ACTION)
    env.observation_space = space
    env.reset = lambda **_: (space.sample(), {})
    vec_normalize = VecNormalize(DummyVecEnv([lambda: env]), **kwargs)
    statistics: list[RunningMeanStd] = [vec_normalize.ret_rms, *parts(getattr(vec_normalize, "obs_rms", {})).values()]
    for rms in statistics:
        rms.mean, rms.var = np.full_like(rms.mean, 1e4), np.full_like(rms.var, 1e-4)
    return vec_normalize


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize(
    ("space", "kwargs"),
    [
        (spaces.Box(-np.inf, np.inf, (3,), np.float64), {}),
        (spaces.Box(-np.inf, np.inf, (3,), np.float32), {}),
        (spaces.Box(-np.inf, np.inf, (3,), np.float64), {"norm_reward": False, "clip_obs": 0.5}),
        (spaces.Box(-np.inf, np.inf, (3,), np.float64), {"norm_obs": False, "clip_reward": 0.5}),
        (spaces.Box(0, 255, (4, 6, 5), np.uint8), {}),
        (spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float64), "b": OBS}), {"norm_obs_keys": ["a"]}),
    ],
)
def test_same_batches_as_sb3_with_vec_normalize(space: spaces.Space, kwargs: dict[str, Any], n_steps: int) -> None:
    """Means of 1e4 and deviations of 1e-2 need float64, in which SB3 normalizes."""
    env = normalized_env(space, **kwargs)
    model = tiny_agent(env, "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy", n_steps=n_steps)
    packed = model.replay_buffer
    if isinstance(space, spaces.Dict) and n_steps > 1:
        pytest.skip("SB3 has no such replay buffer")
    cls = DictReplayBuffer if isinstance(space, spaces.Dict) else ReplayBuffer if n_steps == 1 else NStepReplayBuffer
    sb3 = make_buffer(cls, 1000, 1, space, **({"n_steps": n_steps, "gamma": 0.99} if n_steps > 1 else {}))
    for buffer in (sb3, packed):
        rng = np.random.default_rng(0)
        for _ in range(30):
            obs, next_obs = (
                {key: 1e4 + 0.02 * rng.normal(size=part.shape) for key, part in parts_of(space).items()} for _ in "ab"
            )
            step = [obs, next_obs] if isinstance(space, spaces.Dict) else [obs[""], next_obs[""]]
            if space.dtype == np.uint8:
                step = [rng.integers(0, 256, space.shape or ()) for _ in "ab"]
            buffer.add(*step, np.zeros((1, 2)), rng.normal(size=1), rng.random(1) < 0.2, [{}])
    for expected, actual in zip(batches(sb3, env), batches(packed, env), strict=True):
        assert_same_batches(expected, actual, 1e-5)


def parts_of(space: spaces.Space) -> dict[str, spaces.Space]:
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}


def test_batches_are_normalized_with_the_current_statistics() -> None:
    env = normalized_env(spaces.Box(-np.inf, np.inf, (3,), np.float64))
    buffer = make_buffer(PackedReplayBuffer, 10, 1, env.observation_space)
    buffer.add(np.full((1, 3), 2.0), np.zeros((1, 3)), np.zeros((1, 2)), np.ones(1), np.zeros(1), [{}])
    for mean in (1.0, 0.5):
        env.obs_rms.mean[:] = mean
        env.obs_rms.var[:] = 1 - env.epsilon
        np.testing.assert_allclose(buffer.sample(1, env=env).observations.numpy(), 2 - mean, rtol=1e-6)


def test_infos_with_an_array_of_time_outs() -> None:
    """SB3's replay buffer accepts them."""
    flags = np.array([[True, False], [False, True]])
    for cls in (ReplayBuffer, PackedReplayBuffer):
        buffer = make_buffer(cls, 20, 2)
        obs = np.zeros((2, 2, 5))
        infos = [[{"TimeLimit.truncated": row}] for row in flags]
        buffer.extend(obs, obs, np.zeros((2, 2, 2)), np.zeros((2, 2)), np.zeros((2, 2)), infos)
        np.testing.assert_array_equal(buffer.timeouts[:2], flags)


@pytest.mark.parametrize("kwargs", [{}, SMALL_MEMORY])
def test_memory_equals_that_of_sb3(kwargs: dict[str, Any]) -> None:
    packed, sb3 = make_buffer(PackedReplayBuffer, 1000, **kwargs), make_buffer(ReplayBuffer, 1000, **kwargs)
    size = sum(block.nbytes for block in packed.blocks.values())
    assert size == sum(getattr(sb3, name).nbytes for name in ARRAYS if hasattr(sb3, name))


def test_memory_for_halfcheetah() -> None:
    """SB3 stores its observations in float64."""
    space = spaces.Box(-np.inf, np.inf, (17,), np.float64)
    own, sb3 = (cls(1000, space, spaces.Box(-1, 1, (6,)), "cpu") for cls in (PackedReplayBuffer, ReplayBuffer))
    assert sum(block.nbytes for block in own.blocks.values()) == 172 * 1000
    assert 0.57 * sum(getattr(sb3, name).nbytes for name in ARRAYS) >= 172 * 1000


def as_on_a_gpu(buffer: PackedReplayBuffer) -> PackedReplayBuffer:
    """Give a buffer on the CPU a copy of its data, as it has on a GPU."""
    buffer.blocks_on_device()
    buffer._device_blocks = {name: th.zeros_like(block) for name, block in buffer._host_blocks.items()}
    return buffer


def assert_copy_is_current(buffer: PackedReplayBuffer) -> None:
    blocks = buffer.blocks_on_device()
    assert blocks is not buffer._host_blocks
    for name, block in blocks.items():
        assert th.equal(block, buffer._host_blocks[name]), name


@pytest.mark.parametrize("space", ["float64", "dict"])
@pytest.mark.parametrize("kwargs", [{}, SMALL_MEMORY])
def test_copy_on_a_device_is_updated(kwargs: dict[str, Any], space: str) -> None:
    """After transitions were added, up to several times around the buffer, and after arrays were assigned."""
    buffer = as_on_a_gpu(make_buffer(PackedReplayBuffer, 12, 2, SPACES[space], **kwargs))
    for steps in (1, 0, 4, 3, 5, 20, 2):
        fill(buffer, steps)
        assert_copy_is_current(buffer)
    buffer.rewards = np.full((6, 2), 3.0)
    assert (buffer.sample(4).rewards == 3).all()
    buffer.rewards[:] = 4
    buffer.mark_changed()
    assert (buffer.sample(4).rewards == 4).all()
    assert pickle.loads(pickle.dumps(buffer))._device_blocks is None


@pytest.mark.parametrize("kwargs", [{}, SMALL_MEMORY])
@pytest.mark.parametrize("steps", [1, 6, 9])
def test_copy_on_a_device_is_updated_for_interrupted_episodes(kwargs: dict[str, Any], steps: int) -> None:
    """SB3 and checkpoints mark their end in the arrays after the step was copied to the device."""
    buffer = as_on_a_gpu(make_buffer(PackedReplayBuffer, 12, 2, **kwargs))
    fill(buffer, steps)
    buffer.blocks_on_device()
    buffer.dones[buffer.pos - 1] = True
    fill(buffer, 1)
    assert_copy_is_current(buffer)


def test_data_stays_on_the_host_if_the_device_has_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise th.cuda.OutOfMemoryError

    buffer = make_buffer(PackedReplayBuffer)
    fill(buffer, 6)
    expected = buffer.sample(4)
    buffer._device_blocks = None
    buffer.device = th.device("meta")
    monkeypatch.setattr(th, "zeros_like", fail)
    with pytest.warns(UserWarning, match="does not fit into the memory of meta"):
        batch = buffer.sample(4)
    assert [(part.shape, part.device.type) for part in batch[:5]] == [(part.shape, "meta") for part in expected[:5]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.sample(4)


def test_warns_of_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.warns(UserWarning, match=r"will take 0\.00 GB of memory"):
        make_buffer(PackedReplayBuffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_buffer(PackedReplayBuffer, 5)


def test_memory_optimized_buffer_refuses_timeouts() -> None:
    with pytest.raises(ValueError, match=r"handle_timeout_termination=True is not allowed"):
        make_buffer(PackedReplayBuffer, optimize_memory_usage=True)


def test_arrays_stay_views_of_the_rows() -> None:
    """After they were written to, assigned, and unpickled."""
    buffer = make_buffer(PackedReplayBuffer)
    fill(buffer, 4)
    buffer.rewards[0] = 7
    buffer.observations = np.full((20, 1, 5), 2.0)
    loaded = pickle.loads(pickle.dumps(buffer))
    assert len(pickle.dumps(buffer)) < 1.5 * buffer.blocks["rows"].nbytes + 5000
    for each in (buffer, loaded):
        batch = each.sample(64)
        assert (batch.observations == 2).all()
        assert 7 in batch.rewards
    loaded.rewards[:] = 9
    assert (loaded.sample(4).rewards == 9).all()
    assert buffer.rewards[0] == 7


@pytest.mark.parametrize("space", ["float32", "float64", "image", "discrete", "dict"])
@pytest.mark.parametrize("kwargs", [{}, {"n_steps": 3, "gamma": 0.9}, SMALL_MEMORY], ids=["plain", "n-step", "small"])
def test_conversion_to_sb3(space: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    """SB3's agent loads the converted buffer, and draws the same batches."""
    packed = make_buffer(PackedReplayBuffer, 20, 2, SPACES[space], **kwargs)
    fill(packed, 13)
    if space == "dict" and kwargs:
        with pytest.raises(ValueError, match="SB3 stores Dict observations without n-step returns"):
            packed.to_sb3()
        return
    save_to_pkl(tmp_path / "buffer.pkl", packed.to_sb3())
    sb3 = load_from_pkl(tmp_path / "buffer.pkl")
    assert type(sb3).__module__.startswith("stable_baselines3.")
    for expected, actual in zip(batches(sb3), batches(packed), strict=True):
        assert_same_batches(expected, actual, 1e-6)
