"""
What ``speed.py`` measures: trainings of one size each. To add a cell, add a line to ``CELLS``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

CAR_RACING = "CarRacing-v3"


@dataclass(frozen=True)
class Cell:
    """
    One size of training, the same for all peers.

    :param net_arch: hidden units of the actor and of each critic
    :param buffer_size: transitions in the replay buffer, which is full from the start
    :param peers: names of what is compared; "floor" is the steps of the envs and the matrix products of the
        updates only
    :param updates_only: whether to measure updates only instead of the whole training loop
    :param processes: whether each env runs in a separate process
    :param normalize: whether ``VecNormalize`` normalizes observations and rewards
    :param arguments: more arguments of the algorithm, such as ``{"n_steps": 3}``
    :param policy_kwargs: more arguments of the policy, such as ``{"layer_norm": True}``
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
    processes: bool = False
    normalize: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def least_steps(self) -> int:
        """Steps of a segment are a multiple of this: whole rollouts, and as many updates with the actor as without"""
        return 2 if self.updates_only else self.n_envs * self.train_freq


PEERS = ("td3x", "sb3", "sbx")
BIPEDAL = Cell("bipedal-256", "BipedalWalker-v3", (256, 256), 256)
HALF_CHEETAH = Cell("halfcheetah", "HalfCheetah-v5", (256, 256), 256, peers=PEERS)

CELLS = {
    cell.name: cell
    for cell in (
        BIPEDAL,
        replace(BIPEDAL, name="bipedal-400", net_arch=(400, 300)),
        replace(BIPEDAL, name="bipedal-400-small", net_arch=(400, 300), batch_size=100),
        Cell("pendulum-64", "Pendulum-v1", (64, 64), 64),
        replace(BIPEDAL, name="bipedal-8envs", n_envs=8, train_freq=8, gradient_steps=64),
        # A transition of frames takes 56 kB. SBX's TD3 has no policy for images
        Cell("carracing", CAR_RACING, (256, 256), 256, buffer_size=10_000, policy="CnnPolicy", peers=("td3x", "sb3")),
        # MuJoCo's observations are float64
        HALF_CHEETAH,
        replace(HALF_CHEETAH, name="halfcheetah-normalized", normalize=True),
        replace(HALF_CHEETAH, name="halfcheetah-quantiles", policy_kwargs={"n_quantiles": 25}, peers=("td3x",)),
        replace(BIPEDAL, name="bipedal-normalized", normalize=True, peers=PEERS),
        replace(BIPEDAL, name="bipedal-3-steps", arguments={"n_steps": 3}, peers=PEERS),
        # SB3's TD3 has no layer normalization
        replace(BIPEDAL, name="bipedal-layer-norm", policy_kwargs={"layer_norm": True}, peers=("td3x", "sbx")),
        replace(BIPEDAL, name="bipedal-16-processes", n_envs=16, gradient_steps=16, processes=True, peers=PEERS),
        # What a training does besides updates; the floor is the steps of the envs only
        replace(BIPEDAL, name="rollout", gradient_steps=0),
        replace(BIPEDAL, name="update", peers=("td3x", "floor"), updates_only=True),
    )
}
# One cell of each kind but images; without the floor of the loops, which takes as long as a peer
QUICK_CELLS = (
    *(replace(CELLS[name], peers=PEERS) for name in ("bipedal-256", "pendulum-64", "bipedal-8envs")),
    CELLS["update"],
)
