"""
Feed changed files to the readers of agents, replay buffers, statistics and settings, and see that they are either read
or refused: by ``ValueError`` alone, soon, and without running anything.

    python scripts/fuzz_archive.py --runs 100000 --seed 0
"""

import argparse
import base64
import collections
import copy
import io
import json
import pathlib
import pickle
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.files.agent import AgentFile, check_attributes, check_name, is_pickled, read_agent, read_attributes
from sb3_td3x.files.atomic import refusing
from sb3_td3x.files.inspect import describe_agent
from sb3_td3x.files.pickles import read_pickle
from sb3_td3x.files.records import PICKLE_PATHS, from_pickle
from sb3_td3x.files.replay import read_replay_buffer
from sb3_td3x.files.sealed_zip import VERSION_MEMBER, write_sealed_zip
from sb3_td3x.files.tensors import describe_state, load_state
from sb3_td3x.zoo.play import load_vec_normalize, read_zoo_yaml

# One input may take so long, in seconds of the processor
TIME_LIMIT = 10.0

STRANGE_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**64, 10**400, 0.5, 1e308, float("nan"), "", "x", "../x", "<f4", "|O", "lin_1"),
    *(
        [],
        {},
        [[]],
        [None],
        {"a": 1},
        {":plain:": "x"},
        {":plain:": "array"},
        {":pickled:": "x"},
        {":serialized:": "x"},
    ),
    *({":plain:": "tuple", "items": [1]}, {":plain:": "object", "path": "os.system", "state": {}}),
    *({":plain:": "class", "path": "torch.optim.adam.Adam"}, {":plain:": "float", "value": "inf"}),
]
# Written into pickles: calls of what is not allowed, opcodes that are not, and what asks for memory
STRANGE_BYTES = [
    *(b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"R", b"b", b"o", b"i", b"\x82\x01", b"P1\n", b"Q", b"."),
    *(b"0", b"2", b"(", b"t", b"}", b"]", b"u", b"e", b"r\xff\xff\xff\x7f", b"\x96\xff\xff\xff\xff\xff\xff\xff\x0f"),
    *(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0f", b"\x8b\xff\xff\xff\x7f", b"K\x01", b"\x85", b"\x81", b"\x94", b"h\x00"),
]


class Space(gym.Env[np.ndarray, np.ndarray]):
    """Nothing happens here."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


def seeds(rng: random.Random) -> dict[str, list[bytes]]:
    """
    :param rng: not used for anything but the agents' seeds
    :return: whole files by what reads them
    """
    kwargs: dict[str, Any] = {
        "policy_kwargs": {"net_arch": [2]},
        "buffer_size": 20,
        "learning_starts": 5,
        "batch_size": 2,
        "device": "cpu",
        "seed": rng.randrange(1000),
        "action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1)),
    }
    agents: list[bytes] = []
    replay_buffers: list[bytes] = []
    for cls in (TD3X, TD3):
        model = cls("MlpPolicy", Space(), **kwargs).learn(10)
        for save, files in ((model.save, agents), (model.save_replay_buffer, replay_buffers)):
            file = io.BytesIO()
            save(file)
            files.append(file.getvalue())
    statistics = pickle.dumps(VecNormalize(DummyVecEnv([Space])))
    settings = (
        b"!!python/object/apply:collections.OrderedDict\n- - - env\n    - A-v0\n  - - a\n    - !!python/tuple [1]\n"
    )
    parts = [members_of(content) for content in agents]
    own_data, sb3_data = (part["data"] for part in parts)
    pickled = [value for value in json.loads(sb3_data).values() if is_pickled(value)]
    return {
        "agent": agents,
        "replay buffer": replay_buffers,
        "statistics": [statistics],
        "settings": [settings],
        "attributes": [own_data],
        "pickle": [base64.b64decode(value[":serialized:"]) for value in pickled],
        "state": [content for part in parts for name, content in part.items() if name.endswith(".pth")],
    }


def members_of(content: bytes) -> dict[str, bytes]:
    """
    :param content: a zip file
    :return: its members
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """
    :param content: any bytes
    :param rng: what decides
    :return: the same with a few changes
    """
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not changed:
            break
        position, kind = rng.randrange(len(changed)), rng.randrange(6)
        if kind <= 1:
            changed[position] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 3:
            changed[position:position] = rng.choice(STRANGE_BYTES)
        elif kind == 4:
            del changed[position : position + rng.choice((1, 2, 8, len(changed)))]
        else:
            other = rng.randrange(len(changed))
            changed[position : position + 8] = changed[other : other + 8]
    return bytes(changed)


def change_json(content: bytes, rng: random.Random) -> bytes:
    """
    :param content: JSON
    :param rng: what decides
    :return: the same with other values in places, also in pickles that it holds
    """
    data = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not data:
            break
        node, key = data, rng.choice(list(data))
        while isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
            node = node[key]
            key = rng.randrange(len(node)) if isinstance(node, list) else rng.choice(list(node))
        if key == ":serialized:" and isinstance(node[key], str) and len(node[key]) % 4 == 0:
            pickled = change_bytes(base64.b64decode(node[key]), rng)
            node[key] = base64.b64encode(pickled).decode()
        elif isinstance(node[key], int | float) and rng.random() < 0.3:
            node[key] = -node[key] if rng.random() < 0.5 else node[key] * rng.choice((2, 10**6, 10**18))
        else:
            node[key] = copy.deepcopy(rng.choice(STRANGE_VALUES))
        if rng.random() < 0.1 and isinstance(node, dict):
            node.pop(rng.choice(list(node)))
    return json.dumps(data).encode()


def change_zip(content: bytes, rng: random.Random) -> bytes:
    """
    :param content: a zip file
    :param rng: what decides
    :return: the same with changed members, and with the checksum that it should have if it had one
    """
    members = members_of(content)
    name = rng.choice(sorted(members))
    if members[name].startswith(b"{\n  ") and rng.random() < 0.9:
        members[name] = change_json(members[name], rng)
    elif members[name].startswith(b"PK") and rng.random() < 0.8:
        members[name] = change_zip(members[name], rng)
    elif rng.random() < 0.05:
        del members[name]
    elif rng.random() < 0.05:
        members[rng.choice(["../x", "x", "a/b", "b.pth", name + "x"])] = members[name]
    else:
        members[name] = change_bytes(members[name], rng)
    file = io.BytesIO()
    if VERSION_MEMBER in members:
        with write_sealed_zip(file, "zip", "0") as archive:
            for member, it in members.items():
                if member != VERSION_MEMBER:
                    archive.writestr(member, it)
    else:
        with zipfile.ZipFile(file, "w", rng.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))) as archive:
            for member, it in members.items():
                archive.writestr(member, it)
    return file.getvalue()


def change(content: bytes, rng: random.Random) -> bytes:
    """
    :param content: a whole file
    :param rng: what decides
    :return: a changed one
    """
    if rng.random() < 0.85 and content.startswith(b"PK"):
        return change_zip(content, rng)
    if rng.random() < 0.95 and content.startswith(b'{\n  "'):
        return change_json(content, rng)
    return change_bytes(content, rng)


def readers(folder: pathlib.Path) -> dict[str, Callable[[bytes], Any]]:
    """
    :param folder: for files
    :return: what reads a file, by what it holds
    """
    model = TD3X("MlpPolicy", Space(), buffer_size=20, policy_kwargs={"net_arch": [2]}, device="cpu")

    def read_file(read: Callable[[pathlib.Path], Any]) -> Callable[[bytes], Any]:
        def from_bytes(content: bytes) -> Any:
            path = folder / "input"
            path.write_bytes(content)
            return read(path)

        return from_bytes

    def read_agent_in_a_way(content: bytes) -> None:
        way = len(content) % 8
        if way == 0:
            describe_agent(io.BytesIO(content))
        elif way == 1:
            TD3X.load(io.BytesIO(content), env=DummyVecEnv([Space]), device="cpu", buffer_size=1)
        else:
            read_agent(io.BytesIO(content), TD3X, "cpu")

    def read_agent_attributes(content: bytes) -> None:
        with refusing("The file"):
            data = json.loads(content)
        agent = AgentFile("The file", data, {}, {name: b"" for name, value in data.items() if is_pickled(value)})
        for name in data:
            check_name(name, TD3X, "The file")
        check_attributes(read_attributes(agent, ["action_noise"], False), "The file")

    def read_pickled(content: bytes) -> None:
        with refusing("The file"):
            from_pickle(read_pickle(io.BytesIO(content), "The file", PICKLE_PATHS))

    def read_state(content: bytes) -> None:
        description = describe_state(content, "The file")
        if len(content) % 4 == 0:
            load_state(content, "cpu", "The file", description)

    return {
        "attributes": read_agent_attributes,
        "pickle": read_pickled,
        "state": read_state,
        "agent": read_agent_in_a_way,
        "replay buffer": lambda content: read_replay_buffer(io.BytesIO(content), model, True, False),
        "statistics": read_file(lambda path: load_vec_normalize(path, DummyVecEnv([Space]))),
        "settings": read_file(read_zoo_yaml),
    }


class TookTooLongError(BaseException):
    """No ``Exception``, which readers would turn into a refusal."""


def stop(*_: Any) -> None:
    """Handler of the alarm."""
    raise TookTooLongError(f"took more than {TIME_LIMIT} s")


def guard(event: str, args: tuple[Any, ...]) -> None:
    """
    Audit hook: end the process where something is run that no reader runs.

    :param event: what happens
    :param args: details
    """
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "marshal.loads", "os.mkdir"):
        print(f"RAN {event} {args}", file=sys.stderr)
        traceback.print_stack()
        raise SystemExit(2)


def main() -> int:
    """
    :return: exit code: 0 if every input was read or refused
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="number of inputs")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    args = parser.parse_args()

    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = random.Random(args.seed)
    counts: collections.Counter[str] = collections.Counter()
    failures, slowest, start = 0, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files, read = seeds(rng), readers(pathlib.Path(folder))
        for kind, contents in files.items():
            for content in contents:
                read[kind](content)
        signal.signal(signal.SIGVTALRM, stop)
        sys.addaudithook(guard)
        kinds = rng.choices(list(files), weights=(4, 3, 2, 1, 6, 6, 4), k=args.runs)
        for number, kind in enumerate(kinds):
            content = change(rng.choice(files[kind]), rng)
            before = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT)
            try:
                read[kind](content)
                counts[f"{kind}: read"] += 1
            except ValueError as error:
                counts[f"{kind}: refused"] += 1
                if re.search("[\n\r]", str(error)):
                    counts["errors of several lines"] += 1
            except (Exception, TookTooLongError) as error:
                failures += 1
                print(f"FAILURE {number}, {kind}: {type(error).__name__}: {error}", file=sys.stderr)
                if failures <= 20:
                    traceback.print_exc()
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            slowest = max(slowest, time.process_time() - before)
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")
    print(f"{args.runs} inputs, {failures} failures, {time.monotonic() - start:.0f} s, slowest {slowest:.2f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
