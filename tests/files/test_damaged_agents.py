"""Files that are damaged or hold another algorithm's agent are refused in one sentence."""

import io
import pathlib
import zipfile
from collections.abc import Callable

import pytest
from envs import tiny_agent, zip_of
from noises import normal_noise
from sb3_contrib import TQC, CrossQ
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_td3x import TD3X


def no_zip(good: bytes) -> bytes:
    return b"gamma: 0.99\n" * 1000


def without(*names: str) -> Callable[[bytes], bytes]:
    """Remove members of a zip."""

    def change(good: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                if name not in names:
                    new.writestr(name, old.read(name))
        return file.getvalue()

    return change


def with_content(name: str, content: bytes) -> Callable[[bytes], bytes]:
    """Change the content of a member of a zip."""

    def change(good: bytes) -> bytes:
        file = io.BytesIO(without(name)(good))
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(name, content)
        return file.getvalue()

    return change


def flipped(name: str, compressed: bool) -> Callable[[bytes], bytes]:
    """Change some bytes of a member, as a failing disk does."""

    def change(good: bytes) -> bytes:
        file = io.BytesIO()
        compression = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(file, "w", compression) as new:
            for old_name in old.namelist():
                new.writestr(old_name, old.read(old_name))
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(name)
        damaged = bytearray(file.getvalue())
        start = info.header_offset + 30 + len(name)
        if compressed:
            # The decompression itself fails, before any checksum is compared
            damaged[start] = 0xFF
        else:
            damaged[start + info.file_size // 2] ^= 0xFF
        return bytes(damaged)

    return change


def first(percent: int) -> Callable[[bytes], bytes]:
    """Cut a zip short."""
    return lambda good: good[: len(good) * percent // 100]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "no zip": no_zip,
    "a zip of nothing": without(
        *("data", "policy.pth", "actor.optimizer.pth", "critic.optimizer.pth"), "pytorch_variables.pth"
    ),
    **{f"first {percent}%": first(percent) for percent in (1, 10, 50, 90, 99)},
    "first 3 bytes": lambda good: good[:3],
    "last byte missing": lambda good: good[:-1],
    "last 30 bytes missing": lambda good: good[:-30],
    "first 100 bytes missing": lambda good: good[100:],
    "zeros at the end": lambda good: good[: len(good) // 2] + bytes(len(good) - len(good) // 2),
    "without data": without("data"),
    "without policy": without("policy.pth"),
    "without an optimizer": without("critic.optimizer.pth"),
    "data empty": with_content("data", b""),
    "data no json": with_content("data", b"\x80\x00gamma"),
    "data a json list": with_content("data", b"[1, 2]"),
    "data a json number": with_content("data", b"1"),
    "data of something else": with_content("data", b'{"gamma": 0.99}'),
    "policy empty": with_content("policy.pth", b""),
    "policy no state": with_content("policy.pth", b"nothing"),
    "flipped data": flipped("data", compressed=False),
    "flipped policy": flipped("policy.pth", compressed=False),
    "flipped compressed data": flipped("data", compressed=True),
    "flipped compressed policy": flipped("policy.pth", compressed=True),
}


@pytest.fixture(scope="module")
def saved() -> bytes:
    """Return the zip of a tiny agent."""
    return zip_of(tiny_agent(action_noise=normal_noise()).learn(20)).getvalue()


def assert_one_clear_sentence(error: BaseException, name: str) -> None:
    """Check that an error is one line with the file's name, and shows no other traceback."""
    message = str(error)
    assert name in message
    assert "\n" not in message
    assert len(message) < 400
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_in_one_sentence(saved: bytes, tmp_path: pathlib.Path, damage: str) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(DAMAGES[damage](saved))
    model = tiny_agent()
    for load in (TD3X.load, model.set_parameters):
        for source in (path, str(tmp_path / "agent"), io.BytesIO(path.read_bytes())):
            with pytest.raises(ValueError, match=r"zip|agent|damaged") as error:
                load(source)
            assert_one_clear_sentence(error.value, "he file" if isinstance(source, io.BytesIO) else str(source))


@pytest.mark.parametrize("damage", ["without data", "without policy", "data of something else"])
def test_incomplete_zip_is_not_called_another_algorithm_s(saved: bytes, tmp_path: pathlib.Path, damage: str) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(DAMAGES[damage](saved))
    with pytest.raises(ValueError, match="agent") as error:
        TD3X.load(path)
    assert "another algorithm" not in str(error.value)


def test_missing_file(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "missing.zip", str(tmp_path / "no" / "folder.zip")):
        for load in (TD3X.load, tiny_agent().set_parameters):
            with pytest.raises(FileNotFoundError) as error:
                load(path)
            # As it was given, but for the suffix
            assert error.value.filename == f"{str(path).removesuffix('.zip')}.zip"


def test_folder_is_no_agent(tmp_path: pathlib.Path) -> None:
    with pytest.raises((IsADirectoryError, PermissionError, ValueError), match=tmp_path.name):
        TD3X.load(tmp_path)


OTHER_ALGORITHMS: dict[str, Callable[[], BaseAlgorithm]] = {
    "PPO": lambda: PPO("MlpPolicy", "Pendulum-v1", n_steps=8, batch_size=8, device="cpu"),
    "SAC": lambda: SAC("MlpPolicy", "Pendulum-v1", buffer_size=1, device="cpu"),
    "DQN": lambda: DQN("MlpPolicy", "CartPole-v1", buffer_size=1, device="cpu"),
    "TQC": lambda: TQC("MlpPolicy", "Pendulum-v1", buffer_size=1, device="cpu"),
    "CrossQ": lambda: CrossQ("MlpPolicy", "Pendulum-v1", buffer_size=1, device="cpu"),
}


@pytest.mark.parametrize("algorithm", OTHER_ALGORITHMS)
def test_zip_of_another_algorithm_is_refused_in_one_sentence(tmp_path: pathlib.Path, algorithm: str) -> None:
    path = tmp_path / "agent.zip"
    OTHER_ALGORITHMS[algorithm]().save(path)
    for load in (TD3X.load, tiny_agent("Pendulum-v1").set_parameters):
        with pytest.raises(ValueError, match=r"saved by another algorithm.*TD3X.*TD3.*DDPG") as error:
            load(path)
        assert_one_clear_sentence(error.value, str(path))
