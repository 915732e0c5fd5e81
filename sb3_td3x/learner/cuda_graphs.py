"""
Updates on a GPU as CUDA graphs: all kernels of an update are launched at once, without Python in between.

The graphs are captured from the same functions that update without them. Before they are used they are compared with
those on real transitions; where that or the capture fails, there is a warning and the updates go on without graphs.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.learner.flat_adam import FlatAdam
from sb3_td3x.learner.perceptron import MlpNetworks

if TYPE_CHECKING:
    from sb3_td3x.td3x import TD3X

# How near to the updates without graphs those with them must be
_RTOL = 1e-4
_ATOL = 1e-5
_N_WARM_UP = 3


class UpdateGraphs:
    """
    The updates of an agent, captured for its present networks, replay buffer and hyperparameters.

    :param model: the agent, one that ``is_possible`` accepts
    :param batch_size: transitions in each update
    :raises RuntimeError: they cannot be captured, or do not compute what the updates without graphs do
    """

    def __init__(self, model: "TD3X", batch_size: int):
        self._model = model
        self._settings = _settings(model, batch_size)
        assert isinstance(model.replay_buffer, PackedReplayBuffer)
        self._replay_buffer = model.replay_buffer
        self._rows = self._replay_buffer.rows_on_device()
        # At first as different as possible, to be compared; then those of each batch
        self._indices = th.arange(batch_size, device=self._rows.device) % max(self._replay_buffer.size(), 1)
        # Of the critics' losses, their values, and the actor's losses
        self._sums = th.zeros(3, device=self._rows.device)
        self._networks = model._networks
        self._optimizers = (self._networks.critic_optimizer, self._networks.actor_optimizer)

        self._prepare()
        before = self._copy_state()
        with _side_stream(self._rows.device):
            for _ in range(_N_WARM_UP):
                self._update(with_actor=True)
        expected = self._run_from(before, self._update)
        self._restore_state(before)
        with _current_device(self._rows.device):
            self._replays = {with_actor: capture(self._update, with_actor) for with_actor in (False, True)}
        actual = self._run_from(before, lambda with_actor: self._replays[with_actor]())
        self._restore_state(before)
        for mine, eager in zip(actual, expected, strict=True):
            if not th.allclose(mine, eager, rtol=_RTOL, atol=_ATOL):
                raise RuntimeError(f"their results differ by up to {(mine - eager).abs().max().item():g}")

    @staticmethod
    def is_possible(model: "TD3X") -> bool:
        """
        :param model: an agent
        :return: whether its updates consist of kernels on a GPU alone
        """
        networks = model._networks
        return (
            model.device.type == "cuda"
            and isinstance(networks, MlpNetworks)
            and isinstance(networks.critic_optimizer, FlatAdam)
            and isinstance(networks.actor_optimizer, FlatAdam)
            and networks.critic_optimizer.has_equal_steps()
            and networks.actor_optimizer.has_equal_steps()
            and type(model.replay_buffer) is PackedReplayBuffer
            and model._vec_normalize_env is None
            # Not where the GPU has too little memory for it
            and model.replay_buffer.rows_on_device().is_cuda
        )

    def is_current(self, batch_size: int) -> bool:
        """
        :param batch_size: transitions in each update
        :return: whether what was captured still is what the agent would do
        """
        return (
            self._networks is self._model._networks
            and self._replay_buffer is self._model.replay_buffer
            and self._rows is self._replay_buffer.rows_on_device()
            and self._settings == _settings(self._model, batch_size)
        )

    def run(self, gradient_steps: int) -> dict[str, float]:
        """
        :param gradient_steps: number of updates of the critics
        :return: means over the updates: ``critic_loss``, ``q_mean``, and ``actor_loss`` if the actor was updated
        """
        self._prepare()
        self._replay_buffer.rows_on_device()
        draws = np.stack([self._replay_buffer.draw(len(self._indices)) for _ in range(gradient_steps)])
        all_indices = th.from_numpy(draws).to(self._indices.device, non_blocking=True)
        self._sums.zero_()
        n_actor_updates = 0
        for indices in all_indices:
            self._indices.copy_(indices)
            with_actor = self._model.count_update()
            self._replays[with_actor]()
            n_actor_updates += with_actor
        critic_loss, q_mean, actor_loss = self._sums.tolist()
        means = {"critic_loss": critic_loss / gradient_steps, "q_mean": q_mean / gradient_steps}
        if n_actor_updates > 0:
            means["actor_loss"] = actor_loss / n_actor_updates
        return means

    def _update(self, with_actor: bool) -> None:
        """
        One update, from the transitions that ``_indices`` names.

        :param with_actor: whether the actor and the targets are updated, too
        """
        batch = self._replay_buffer.gather(self._rows, self._indices)
        for idx, metric in enumerate(self._model.update(batch, with_actor)):
            self._sums[idx].add_(metric)

    def _prepare(self) -> None:
        """Let the optimizers follow what changed outside of the graphs."""
        for optimizer in self._optimizers:
            assert isinstance(optimizer, FlatAdam)
            optimizer.prepare()

    def _state(self) -> list[th.Tensor]:
        """
        :return: all that an update changes
        """
        tensors = [tensor for tensors in self._networks.parameters.values() for tensor in tensors]
        for optimizer in self._optimizers:
            assert isinstance(optimizer, FlatAdam)
            tensors += optimizer.state
        return [*tensors, self._sums]

    def _copy_state(self) -> tuple[list[th.Tensor], th.Tensor]:
        """
        :return: copies of all that an update changes, and the state of the random generator
        """
        return [tensor.clone() for tensor in self._state()], _get_rng_state(self._rows.device)

    def _restore_state(self, state: tuple[list[th.Tensor], th.Tensor]) -> None:
        """
        :param state: what ``_copy_state`` returned
        """
        tensors, rng_state = state
        for tensor, copy in zip(self._state(), tensors, strict=True):
            tensor.copy_(copy)
        _set_rng_state(rng_state, self._rows.device)

    def _run_from(self, state: tuple[list[th.Tensor], th.Tensor], update: Callable[[bool], None]) -> list[th.Tensor]:
        """
        :param state: what ``_copy_state`` returned
        :param update: makes an update, with the actor's or without
        :return: copies of all that is changed by one update of each kind
        """
        self._restore_state(state)
        for with_actor in (False, True):
            update(with_actor)
        return self._copy_state()[0]


def capture(update: Callable[[bool], None], with_actor: bool) -> Callable[[], None]:
    """
    :param update: makes an update, with the actor's or without
    :param with_actor: which of the two
    :return: the same as a CUDA graph
    """
    graph = th.cuda.CUDAGraph()
    with th.cuda.graph(graph):
        update(with_actor)
    replay: Callable[[], None] = graph.replay
    return replay


class UpdateGraphCache:
    """The graphs of an agent, captured anew when something changes that they have built in."""

    def __init__(self) -> None:
        self._graphs: UpdateGraphs | None = None
        self._failed = False

    def get(self, model: "TD3X", batch_size: int) -> UpdateGraphs | None:
        """
        :param model: the agent
        :param batch_size: transitions in each update
        :return: its updates as graphs; None where that is not possible, with one warning where it should have been
        """
        if self._failed or not UpdateGraphs.is_possible(model):
            return None
        if self._graphs is None or not self._graphs.is_current(batch_size):
            try:
                self._graphs = UpdateGraphs(model, batch_size)
            except RuntimeError as error:
                self._failed = True
                warnings.warn(
                    f"The updates could not be captured as CUDA graphs, they go on without: {error}", stacklevel=2
                )
                return None
        return self._graphs


def _settings(model: "TD3X", batch_size: int) -> tuple[Any, ...]:
    """
    :param model: an agent
    :param batch_size: transitions in each update
    :return: all numbers that a graph has built in
    """
    options = [
        {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        for network in (model.actor, model.critic)
        for group in network.optimizer.param_groups
    ]
    hyperparameters = (model.gamma, model.tau, model.target_policy_noise, model.target_noise_clip)
    return (*hyperparameters, model.clipped_double_q, batch_size, options)


@contextlib.contextmanager
def _side_stream(device: th.device) -> Iterator[None]:
    """
    Where CUDA's libraries set themselves up before a capture.

    :param device: a GPU; nothing happens on the CPU
    """
    if device.type != "cuda":
        yield
        return
    stream = th.cuda.Stream(device)
    stream.wait_stream(th.cuda.current_stream(device))
    with th.cuda.stream(stream):
        yield
    th.cuda.current_stream(device).wait_stream(stream)


def _current_device(device: th.device) -> contextlib.AbstractContextManager[Any]:
    """
    :param device: a GPU, on whose streams a capture takes place; nothing happens on the CPU
    """
    return th.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _get_rng_state(device: th.device) -> th.Tensor:
    """
    :param device: a device
    :return: the state of its random generator
    """
    return th.cuda.get_rng_state(device) if device.type == "cuda" else th.get_rng_state()


def _set_rng_state(state: th.Tensor, device: th.device) -> None:
    """
    :param state: what ``_get_rng_state`` returned
    :param device: the device
    """
    if device.type == "cuda":
        th.cuda.set_rng_state(state, device)
    else:
        th.set_rng_state(state)
