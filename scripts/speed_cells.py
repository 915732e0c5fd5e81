"""What ``benchmark_speed.py`` measures: trainings of one size each, and series of sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

# Bytes of a BipedalWalker transition: two observations, action, reward, done and time-out, all float32
TRANSITION_BYTES = 4 * (2 * 24 + 4 + 3)
# Of a worker without its replay buffer: interpreter, PyTorch, JAX
WORKER_BYTES = 10**9
CAR_RACING = "CarRacing-v3"
PEER_NAMES = {"td3x": "TD3X", "sb3": "SB3", "sbx": "SBX", "floor": "floor"}


@dataclass(frozen=True)
class Cell:
    """
    One size of training, the same for all peers.

    :param name: its name
    :param env: id of the environment
    :param net_arch: hidden units of the actor and of each critic
    :param batch_size: transitions in an update
    :param n_envs: number of environments, stepped in turn in the worker's process
    :param train_freq: vector steps in a rollout
    :param gradient_steps: updates after each rollout
    :param buffer_size: transitions in the replay buffer, which is full from the start
    :param policy: the policy model
    :param peers: what is compared; "floor" has the steps of the environments and the updates' matrix products alone
    :param updates_only: whether updates alone are measured, instead of the whole training loop
    """

    name: str
    env: str
    net_arch: tuple[int, ...]
    batch_size: int
    n_envs: int = 1
    train_freq: int = 1
    gradient_steps: int = 1
    buffer_size: int = 1_000_000
    policy: str = "MlpPolicy"
    peers: tuple[str, ...] = ("td3x", "sb3", "sbx", "floor")
    updates_only: bool = False

    @property
    def least_steps(self) -> int:
        """The steps of a segment are a multiple of it: whole rollouts, and actor and critics alike often"""
        return 2 if self.updates_only else self.n_envs * self.train_freq


BIPEDAL = Cell("bipedal-256", "BipedalWalker-v3", (256, 256), 256)

CELLS = {
    cell.name: cell
    for cell in (
        BIPEDAL,
        replace(BIPEDAL, name="bipedal-400", net_arch=(400, 300)),
        replace(BIPEDAL, name="bipedal-400-small", net_arch=(400, 300), batch_size=100),
        Cell("pendulum-64", "Pendulum-v1", (64, 64), 64),
        replace(BIPEDAL, name="bipedal-8envs", n_envs=8, train_freq=8, gradient_steps=64),
        # Frames take 56 kB a transition
        Cell("carracing", CAR_RACING, (256, 256), 256, buffer_size=10_000, policy="CnnPolicy", peers=("td3x", "sb3")),
        # What a training does besides updates: the floor takes the envs' steps alone
        replace(BIPEDAL, name="rollout", gradient_steps=0),
        replace(BIPEDAL, name="update", peers=("td3x", "floor"), updates_only=True),
    )
}
# One of each kind but images; the loops without their floor, which is as much work as a peer
QUICK_CELLS = (
    *(replace(CELLS[name], peers=("td3x", "sb3", "sbx")) for name in ("bipedal-256", "pendulum-64", "bipedal-8envs")),
    CELLS["update"],
)

# Cost against size: one thing changes, the rest is as in the first cell
SWEEPS: Mapping[str, Mapping[int, Cell]] = {
    "width": {n: replace(BIPEDAL, name=f"width-{n}", net_arch=(n, n)) for n in (64, 128, 256, 512, 1024)},
    "batch": {n: replace(BIPEDAL, name=f"batch-{n}", batch_size=n) for n in (32, 128, 512, 2048, 8192)},
    # One update for each env step
    "envs": {n: replace(BIPEDAL, name=f"envs-{n}", n_envs=n, gradient_steps=n) for n in (1, 4, 16, 64)},
    "replay": {n: replace(BIPEDAL, name=f"replay-{n}", buffer_size=n) for n in (10**5, 10**6, 10**7)},
}


def needed_bytes(cell: Cell, peers: Sequence[str]) -> int:
    """
    :param cell: a cell with BipedalWalker's transitions
    :param peers: names of its peers
    :return: about how much memory their workers take, which are there at the same time
    """
    return len(peers) * (cell.buffer_size * TRANSITION_BYTES + WORKER_BYTES)


def missing_package(peer: str, env: str | None = None) -> str | None:
    """
    :param peer: name of a peer
    :param env: id of the environment
    :return: a package that they need and that is not installed
    """
    needed = []
    if peer == "sbx":
        needed.append(("sbx", "sbx-rl"))
    if env == CAR_RACING:
        needed.append(("cv2", "opencv-python-headless"))
    return next((package for module, package in needed if find_spec(module) is None), None)
