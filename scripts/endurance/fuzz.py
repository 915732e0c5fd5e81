"""
Change files at random, and check that each reader reads or refuses them: with a ``ValueError`` of one line, in limited
time and memory, and without running anything::

    python scripts/endurance/fuzz.py --runs 20000 --seed 0
"""

import argparse
import base64
import copy
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3 import TD3
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.files.inspect import describe_agent
from sb3_td3x.files.sealed_zip import VERSION_MEMBER, write_sealed_zip
from sb3_td3x.zoo.run_files import load_vec_normalize, read_zoo_yaml

# For one file: seconds of the processor, and bytes of memory
TIME_LIMIT = 5.0
MEMORY_LIMIT = 10**9

STRANGE_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**64, 10**400, 0.5, 1e308, float("nan"), "", "x", "../x", "<f4", "|O", "lin_1"),
    *([], {}, [[]], [None], {"a": 1}, {"__type__": "x"}, {"__type__": "array"}, {":serialized:": "x"}),
    *({"__type__": "tuple", "items": [1]}, {"__type__": "object", "name": "os.system", "attributes": {}}),
    *({"__type__": "class", "name": "torch.optim.adam.Adam"}, {"__type__": "float", "value": "inf"}),
]
# For pickles: calls of other functions, operations that are not allowed, and operations that ask for memory
STRANGE_BYTES = [
    *(b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"R", b"b", b"o", b"i", b"\x82\x01", b"P1\n", b"Q", b"."),
    *(b"0", b"2", b"(", b"t", b"}", b"]", b"u", b"e", b"r\xff\xff\xff\x7f", b"\x96\xff\xff\xff\xff\xff\xff\xff\x0f"),
    *(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0f", b"\x8b\xff\xff\xff\x7f", b"K\x01", b"\x85", b"\x81", b"\x94", b"h\x00"),
]
SETTINGS = b"!!python/object/apply:collections.OrderedDict\n- - - env\n    - A-v0\n  - - a\n    - !!python/tuple [1]\n"


# Changing files


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change a few bytes."""
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
    """Replace a few values in JSON, also in the pickles that SB3 stores there."""
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
    """Change a member of a zip file. If the file had a checksum, the result has the right one."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
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
    is_sealed = VERSION_MEMBER in members
    compression = rng.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))
    with write_sealed_zip(file, "zip") if is_sealed else zipfile.ZipFile(file, "w", compression) as archive:
        for member, it in members.items():
            if member != VERSION_MEMBER:
                archive.writestr(member, it)
    return file.getvalue()


def change(content: bytes, rng: random.Random) -> bytes:
    """Change a file of any kind."""
    is_zip = content.startswith(b"PK") and rng.random() < 0.9
    return change_zip(content, rng) if is_zip else change_bytes(content, rng)


# Files and their readers


class Case(NamedTuple):
    """A file that is changed, and what reads it."""

    kind: str
    path: Path
    read: Callable[[Path], Any]


def make_cases(folder: Path) -> list[Case]:
    """Write files of all kinds to an empty folder."""
    env = DummyVecEnv([lambda: gym.make("Pendulum-v1")])
    kwargs: dict[str, Any] = {
        "policy_kwargs": {"net_arch": [2]},
        "buffer_size": 20,
        "learning_starts": 5,
        "batch_size": 2,
        "device": "cpu",
        "seed": 0,
        "action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1)),
    }
    model = TD3X("MlpPolicy", env, **kwargs)
    agent_readers: list[Callable[[Path], Any]] = [
        lambda path: TD3X.load(path, device="cpu"),
        lambda path: TD3X.load(path, env=env, device="cpu"),
        lambda path: model.set_parameters(path, device="cpu"),
        describe_agent,
    ]
    cases: list[Case] = []
    for cls in (TD3X, TD3):
        trained = cls("MlpPolicy", env, **kwargs).learn(10)
        agent, replay_buffer = folder / f"{cls.__name__}.zip", folder / f"{cls.__name__}.pkl"
        trained.save(agent)
        trained.save_replay_buffer(replay_buffer)
        cases += [Case("agent", agent, read) for read in agent_readers]
        cases.append(Case("replay buffer", replay_buffer, model.load_replay_buffer))
    statistics, settings, checkpoints = folder / "vecnormalize.pkl", folder / "config.yml", folder / "checkpoints"
    VecNormalize(env).save(str(statistics))
    settings.write_bytes(SETTINGS)
    cases.append(Case("statistics", statistics, lambda path: load_vec_normalize(path, env)))
    cases.append(Case("settings", settings, read_zoo_yaml))
    TD3X("MlpPolicy", env, **kwargs).learn(30, ResumableCheckpoint(checkpoints, 10, verbose=0))
    for path in checkpoints.rglob("*.zip"):
        cases.append(Case("checkpoint", path, lambda _: TD3X.resume(checkpoints, env, device="cpu")))
    return cases


# Checking the readers


class TookTooLongError(BaseException):
    """Not an ``Exception``, which readers would turn into a refusal."""


def stop(*_: Any) -> None:
    """Handle the alarm."""
    raise TookTooLongError(f"took more than {TIME_LIMIT} s")


def forbid_running(event: str, args: tuple[Any, ...]) -> None:
    """End the process if something is run that no reader runs. An audit hook."""
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "marshal.loads", "os.mkdir"):
        print(f"RAN {event} {args}", file=sys.stderr)
        traceback.print_stack()
        raise SystemExit(2)


def read_or_refuse(case: Case, content: bytes) -> str:
    """
    Read a changed file.

    :raises Exception: the reader did anything else
    """
    case.path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT)
    result = "read"
    try:
        case.read(case.path)
    except ValueError as error:
        result = "refused"
        if len(str(error).splitlines()) != 1:
            raise RuntimeError("the error does not have one line") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    # In units of 1024 bytes
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > MEMORY_LIMIT // 1024:
        raise MemoryError("took too much memory")
    return result


def main() -> int:
    """Feed changed files to the readers, and return the number of files that were neither read nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000, help="number of changed files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes")
    args = parser.parse_args()

    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = random.Random(args.seed)
    counts: Counter[str] = Counter()
    failures, slowest, start = 0, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cases = make_cases(Path(folder))
        originals = {case.path: case.path.read_bytes() for case in cases}
        # Import everything that the readers need, because imports are forbidden from here on
        for case in cases:
            case.read(case.path)
        signal.signal(signal.SIGVTALRM, stop)
        sys.addaudithook(forbid_running)
        for number, case in enumerate(rng.choices(cases, k=args.runs)):
            before = time.process_time()
            try:
                counts[f"{case.kind}: {read_or_refuse(case, change(originals[case.path], rng))}"] += 1
            except (Exception, TookTooLongError):
                failures += 1
                print(f"FAILURE {number}, {case.path.name}", file=sys.stderr)
                if failures <= 20:
                    traceback.print_exc()
            slowest = max(slowest, time.process_time() - before)
            # The other files of a checkpoint stay as they are
            case.path.write_bytes(originals[case.path])
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")
    print(f"{args.runs} files, {failures} failures, {time.monotonic() - start:.0f} s, slowest {slowest:.2f} s")
    return failures


if __name__ == "__main__":
    sys.exit(main() > 0)
