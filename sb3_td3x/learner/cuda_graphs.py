"""
Updates on a GPU as CUDA graphs, which launch all kernels of an update at once, without Python in between.

The graphs are captured from ``Update``. Before use they are compared with it on real transitions. If the capture or the
comparison fails, the updates continue without graphs, after one warning.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.learner.flat_adam import FlatAdam
from sb3_td3x.learner.perceptron import MlpNetworks
from sb3_td3x.learner.update import METRICS, Update

# Tolerances of the comparison with updates without graphs
_RTOL = 1e-4
_ATOL = 1e-5
_N_WARM_UP = 3


class UpdateGraphs:
    """
    An update captured for its present networks, replay buffer and hyperparameters.

    :param update: the update
    :param replay_buffer: the replay buffer; ``is_possible`` must accept both
    :param batch_size: number of transitions in each update
    :raises RuntimeError: the update cannot be captured, or the graphs compute something else
    """

    def __init__(self, update: Update, replay_buffer: PackedReplayBuffer, batch_size: int):
        self._update = update
        self._replay_buffer = replay_buffer
        self._settings = _settings(update, batch_size)
        self._rows = replay_buffer.rows_on_device()
        # As many different rows as possible for the comparison; later those of each batch
        self._indices = th.arange(batch_size, device=self._rows.device) % max(replay_buffer.size(), 1)
        self._sums = th.zeros(len(METRICS), device=self._rows.device)

        self._prepare()
        before = self._copy_state()
        with _side_stream(self._rows.device):
            for _ in range(_N_WARM_UP):
                self._update_once(with_actor=True)
        expected = self._run_from(before, self._update_once)
        self._restore_state(before)
        with _current_device(self._rows.device):
            self._replays = {with_actor: capture(self._update_once, with_actor) for with_actor in (False, True)}
        actual = self._run_from(before, lambda with_actor: self._replays[with_actor]())
        self._restore_state(before)
        for mine, eager in zip(actual, expected, strict=True):
            if not th.allclose(mine, eager, rtol=_RTOL, atol=_ATOL):
                raise RuntimeError(f"their results differ by up to {(mine - eager).abs().max().item():g}")

    @staticmethod
    def is_possible(update: Update, replay_buffer: ReplayBuffer) -> bool:
        """
        Return whether the update consists of kernels on a GPU only.

        :param update: the update
        :param replay_buffer: the agent's replay buffer
        """
        networks = update.networks
        return (
            networks.policy.device.type == "cuda"
            and isinstance(networks, MlpNetworks)
            and all(isinstance(it, FlatAdam) and it.has_equal_steps() for it in _optimizers(update))
            and type(replay_buffer) is PackedReplayBuffer
            # False if the GPU has too little memory for the replay buffer
            and replay_buffer.rows_on_device().is_cuda
        )

    def is_current(self, update: Update, replay_buffer: ReplayBuffer, batch_size: int) -> bool:
        """
        Return whether the graphs still do what the update would do.

        :param update: the agent's update
        :param replay_buffer: the agent's replay buffer
        :param batch_size: number of transitions in each update
        """
        return (
            self._update is update
            and self._replay_buffer is replay_buffer
            and self._rows is self._replay_buffer.rows_on_device()
            and self._settings == _settings(update, batch_size)
        )

    def run(self, with_actor: list[bool]) -> dict[str, float]:
        """
        Do several updates.

        :param with_actor: for each update whether to update the actor and the target networks, too
        :return: means over the updates, by the names in ``METRICS``
        """
        self._prepare()
        self._replay_buffer.rows_on_device()
        draws = np.stack([self._replay_buffer.draw(len(self._indices)) for _ in with_actor])
        all_indices = th.from_numpy(draws).to(self._indices.device, non_blocking=True)
        self._sums.zero_()
        for indices, is_due in zip(all_indices, with_actor, strict=True):
            self._indices.copy_(indices)
            self._replays[is_due]()
        counts = (len(with_actor), len(with_actor), sum(with_actor))
        return {
            name: total / count
            for name, total, count in zip(METRICS, self._sums.tolist(), counts, strict=True)
            if count > 0
        }

    def _update_once(self, with_actor: bool) -> None:
        """Do one update with the transitions at ``_indices``."""
        batch = self._replay_buffer.gather(self._rows, self._indices)
        for idx, metric in enumerate(self._update(batch, with_actor)):
            self._sums[idx].add_(metric)

    def _prepare(self) -> None:
        """Let the optimizers take over what changed outside of the graphs."""
        for optimizer in _optimizers(self._update):
            optimizer.prepare()

    def _state(self) -> list[th.Tensor]:
        """Return everything that an update changes."""
        tensors = [tensor for tensors in self._update.networks.parameters.values() for tensor in tensors]
        for optimizer in _optimizers(self._update):
            tensors += optimizer.state
        return [*tensors, self._sums]

    def _copy_state(self) -> tuple[list[th.Tensor], th.Tensor]:
        """Return copies of everything that an update changes, and the state of the random generator."""
        return [tensor.clone() for tensor in self._state()], _get_rng_state(self._rows.device)

    def _restore_state(self, state: tuple[list[th.Tensor], th.Tensor]) -> None:
        """Restore the result of ``_copy_state``."""
        tensors, rng_state = state
        for tensor, copy in zip(self._state(), tensors, strict=True):
            tensor.copy_(copy)
        _set_rng_state(rng_state, self._rows.device)

    def _run_from(self, state: tuple[list[th.Tensor], th.Tensor], update: Callable[[bool], None]) -> list[th.Tensor]:
        """Do an update without and one with the actor from a state; return copies of everything that changed."""
        self._restore_state(state)
        for with_actor in (False, True):
            update(with_actor)
        return self._copy_state()[0]


def capture(update: Callable[[bool], None], with_actor: bool) -> Callable[[], None]:
    """
    Capture an update as a CUDA graph.

    :param update: does an update
    :param with_actor: its argument
    :return: a function that replays the graph
    """
    graph = th.cuda.CUDAGraph()
    with th.cuda.graph(graph):
        update(with_actor)
    replay: Callable[[], None] = graph.replay
    return replay


class UpdateGraphCache:
    """The graphs of an agent, captured again when something changes that is part of them."""

    def __init__(self) -> None:
        self._graphs: UpdateGraphs | None = None
        self._failed = False

    def get(self, update: Update, replay_buffer: ReplayBuffer, batch_size: int) -> UpdateGraphs | None:
        """
        Return the update as graphs; None where that is not possible, after one warning if the capture failed.

        :param update: the agent's update
        :param replay_buffer: the agent's replay buffer
        :param batch_size: number of transitions in each update
        """
        if self._failed or not UpdateGraphs.is_possible(update, replay_buffer):
            return None
        if self._graphs is None or not self._graphs.is_current(update, replay_buffer, batch_size):
            assert isinstance(replay_buffer, PackedReplayBuffer)
            try:
                self._graphs = UpdateGraphs(update, replay_buffer, batch_size)
            except RuntimeError as error:
                self._failed = True
                warnings.warn(
                    f"The updates could not be captured as CUDA graphs, they continue without: {error}", stacklevel=2
                )
                return None
        return self._graphs


def _optimizers(update: Update) -> list[Any]:
    """Return the optimizers of an update, each a ``FlatAdam`` if it can be captured."""
    return [update.networks.critic_optimizer, update.networks.actor_optimizer]


def _settings(update: Update, batch_size: int) -> tuple[Any, ...]:
    """Return all numbers that become part of a graph."""
    policy = update.networks.policy
    options = [
        {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        for network in (policy.actor, policy.critic)
        for group in network.optimizer.param_groups
    ]
    return (*update.hyperparameters, batch_size, options)


@contextlib.contextmanager
def _side_stream(device: th.device) -> Iterator[None]:
    """Run the block on another stream of a GPU, where CUDA's libraries initialise before a capture."""
    if device.type != "cuda":
        yield
        return
    stream = th.cuda.Stream(device)
    stream.wait_stream(th.cuda.current_stream(device))
    with th.cuda.stream(stream):
        yield
    th.cuda.current_stream(device).wait_stream(stream)


def _current_device(device: th.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, because a capture uses its streams."""
    return th.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _get_rng_state(device: th.device) -> th.Tensor:
    """Return the state of a device's random generator."""
    return th.cuda.get_rng_state(device) if device.type == "cuda" else th.get_rng_state()


def _set_rng_state(state: th.Tensor, device: th.device) -> None:
    """Restore the result of ``_get_rng_state``."""
    if device.type == "cuda":
        th.cuda.set_rng_state(state, device)
    else:
        th.set_rng_state(state)
