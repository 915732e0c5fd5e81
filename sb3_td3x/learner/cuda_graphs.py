"""
Updates and acting on a GPU as CUDA graphs, which launch all kernels at once, without Python in between.

Updates are captured from ``Update``, and compared with it on real transitions before use.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.learner.flat_adam import FlatAdam, FusedAdam
from sb3_td3x.learner.perceptron import MlpNetworks
from sb3_td3x.learner.update import METRICS, Update

# Tolerances of the comparison with updates without graphs
_RTOL = 1e-4
_ATOL = 1e-5
_N_WARM_UP = 3


class UpdateGraphs:
    """
    An update captured for its current networks, replay buffer and hyperparameters.

    :param replay_buffer: the replay buffer; ``is_possible`` must accept both
    :param vec_normalize: the env's ``VecNormalize``, if it has one
    :raises RuntimeError: the update cannot be captured, or the graphs compute something else
    """

    def __init__(
        self, update: Update, replay_buffer: ReplayBuffer, batch_size: int, vec_normalize: VecNormalize | None
    ):
        assert isinstance(replay_buffer, PackedReplayBuffer)
        self._update = update
        self._replay_buffer = replay_buffer
        self._blocks = replay_buffer.blocks_on_device()
        self._normalizer = replay_buffer.normalizer(vec_normalize)
        self._device = update.networks.device
        # As many different rows as possible for the comparison; later those of each batch
        self._indices = th.arange(batch_size, device=self._device) % max(replay_buffer.size(), 1)
        self._sums = th.zeros(len(METRICS), device=self._device)

        kept_gradients = update.networks.keeps_gradients
        update.networks.keeps_gradients = True
        before = self._copy_state()
        try:
            self._prepare()
            with _side_stream(self._device):
                for _ in range(_N_WARM_UP):
                    self._update_once(with_actor=True)
            expected = self._run_from(before, self._update_once)
            self._restore_state(before)
            with _current_device(self._device):
                self._replays = {it: capture(functools.partial(self._update_once, it)) for it in (False, True)}
            actual = self._run_from(before, lambda with_actor: self._replays[with_actor]())
            for mine, eager in zip(actual, expected, strict=True):
                if not th.allclose(mine, eager, rtol=_RTOL, atol=_ATOL):
                    raise RuntimeError(f"their results differ by up to {(mine - eager).abs().max().item():g}")
        except RuntimeError:
            update.networks.keeps_gradients = kept_gradients
            raise
        finally:
            self._restore_state(before)
        self._settings = self._current_settings(batch_size)

    @staticmethod
    def is_possible(update: Update, replay_buffer: ReplayBuffer) -> bool:
        """Return whether the update consists of kernels on a GPU only."""
        return (
            update.networks.device.type == "cuda"
            and all(
                isinstance(it, FusedAdam) or (isinstance(it, FlatAdam) and it.has_equal_steps())
                for it in update.optimizers
            )
            and type(replay_buffer) is PackedReplayBuffer
            # False if the GPU has too little memory for the replay buffer
            and all(block.is_cuda for block in replay_buffer.blocks_on_device().values())
        )

    def is_current(
        self, update: Update, replay_buffer: ReplayBuffer, batch_size: int, vec_normalize: VecNormalize | None
    ) -> bool:
        """
        Return whether the graphs still do what the update would do.

        :param vec_normalize: the env's ``VecNormalize``, if it has one
        """
        return (
            self._update is update
            and self._replay_buffer is replay_buffer
            and self._blocks is self._replay_buffer.blocks_on_device()
            and self._normalizer is self._replay_buffer.normalizer(vec_normalize)
            and self._settings == self._current_settings(batch_size)
        )

    def run(self, with_actor: list[bool]) -> dict[str, th.Tensor]:
        """
        Launch several updates, without waiting for them.

        :param with_actor: for each update whether to update the actor and the target networks, too
        :return: means over the updates, by the names in ``METRICS``
        """
        self._prepare()
        self._sums.zero_()
        if self._update.set_priorities is not None:
            for is_due in with_actor:
                self._replays[is_due]()
        else:
            batch_size = len(self._indices)
            draws = np.reshape([self._replay_buffer.draw(batch_size) for _ in with_actor], (-1, batch_size))
            all_indices = _pinned(th.from_numpy(draws), self._device).to(self._device, non_blocking=True)
            for indices, is_due in zip(all_indices, with_actor, strict=True):
                self._indices.copy_(indices)
                self._replays[is_due]()
        counts = (len(with_actor), len(with_actor), sum(with_actor))
        totals = self._sums.clone().unbind()
        return {name: total / n for name, total, n in zip(METRICS, totals, counts, strict=True) if n > 0}

    def _update_once(self, with_actor: bool) -> None:
        """Do one update with the transitions at ``_indices``."""
        # By priority they are drawn in the graph, because each update changes priorities
        if self._update.set_priorities is not None:
            self._indices.copy_(self._replay_buffer.draw_by_priority(len(self._indices)))
        batch = self._replay_buffer.gather(self._blocks, self._indices, self._normalizer)
        for idx, metric in enumerate(self._update(batch, with_actor)):
            self._sums[idx].add_(metric)

    def _prepare(self) -> None:
        """Let the optimizers take over what changed outside of the graphs."""
        for optimizer in self._update.optimizers:
            assert not isinstance(optimizer, th.optim.Optimizer)
            optimizer.prepare()

    def _current_settings(self, batch_size: int) -> tuple[Any, ...]:
        """Return everything that becomes part of a graph."""
        policy = self._update.networks.policy
        options = [
            {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            for network in (policy.actor, policy.critic)
            for group in network.optimizer.param_groups
        ]
        normalization = () if self._normalizer is None else self._normalizer.settings
        return (self._update.hyperparameters, batch_size, options, self._update.networks.addresses(), normalization)

    def _state(self) -> list[th.Tensor]:
        """Return everything that an update changes."""
        networks = self._update.networks
        tensors = [tensor for tensors in networks.parameters.values() for tensor in tensors]
        # Statistics of BatchNorm
        tensors += networks.policy.buffers()
        tensors += [it.grad for it in networks.policy.parameters() if it.grad is not None]
        for optimizer in self._update.optimizers:
            assert not isinstance(optimizer, th.optim.Optimizer)
            tensors += optimizer.state
        return [*tensors, *self._replay_buffer.priority_state, self._sums]

    def _copy_state(self) -> tuple[dict[int, th.Tensor], list[th.Tensor]]:
        """Return copies of everything that an update changes, and the states of the random generators."""
        return {id(tensor): tensor.detach().clone() for tensor in self._state()}, _get_rng_states(self._device)

    @th.no_grad()
    def _restore_state(self, state: tuple[dict[int, th.Tensor], list[th.Tensor]]) -> None:
        """Restore the result of ``_copy_state``. Gradients and optimizer states that are new become zero."""
        copies, rng_states = state
        for tensor in self._state():
            if id(tensor) in copies:
                tensor.copy_(copies[id(tensor)])
            else:
                tensor.zero_()
        _set_rng_states(rng_states, self._device)

    def _run_from(
        self, state: tuple[dict[int, th.Tensor], list[th.Tensor]], update: Callable[[bool], None]
    ) -> list[th.Tensor]:
        """Do an update without and one with the actor from a state; return copies of everything that changed."""
        self._restore_state(state)
        for with_actor in (False, True):
            update(with_actor)
        return [tensor.detach().clone() for tensor in self._state()]


class ActingGraph:
    """
    The policy's actions in the rollout as a CUDA graph, from an observation in main memory to an action there.

    :param obs: observations of the envs, (n_envs, ...)
    """

    def __init__(self, networks: MlpNetworks, obs: np.ndarray):
        self._networks = networks
        self._shape = obs.shape
        device = networks.device
        self._obs = _pinned(th.zeros(obs.shape), device)
        self._device_obs = th.zeros(obs.shape, device=device)
        with _side_stream(device):
            actions = networks.actions(self._device_obs)
        self._actions = _pinned(th.zeros(actions.shape), device)
        with _current_device(device):
            self._replay = capture(self._act)

    @staticmethod
    def is_possible(networks: Any, obs: Any) -> bool:
        """Return whether acting consists of kernels on a GPU only."""
        return networks.device.type == "cuda" and isinstance(networks, MlpNetworks) and isinstance(obs, np.ndarray)

    def is_current(self, networks: Any, obs: np.ndarray) -> bool:
        """
        Return whether the graph still is that of the networks, for as many envs.

        :param obs: observations of the envs, (n_envs, ...)
        """
        return self._networks is networks and self._shape == obs.shape

    def scaled_actions(self, obs: np.ndarray) -> np.ndarray:
        """
        Return the policy's actions, after all updates that were launched.

        :param obs: observations of the envs, (n_envs, ...)
        :return: actions scaled to [-1, 1], (n_envs, *action_shape)
        """
        self._obs.numpy()[...] = obs
        self._replay()
        _wait_for(self._networks.device)
        shape = self._networks.policy.action_space.shape or ()
        actions: np.ndarray = self._actions.numpy().copy()
        return actions.reshape(-1, *shape)

    def _act(self) -> None:
        """Copy the observations to the GPU, and the actions back."""
        self._device_obs.copy_(self._obs, non_blocking=True)
        self._actions.copy_(self._networks.actions(self._device_obs), non_blocking=True)


def capture(function: Callable[[], None]) -> Callable[[], None]:
    """Capture a function as a CUDA graph."""
    graph = th.cuda.CUDAGraph()
    with th.cuda.graph(graph):
        function()
    replay: Callable[[], None] = graph.replay
    return replay


def _pinned(tensor: th.Tensor, device: th.device) -> th.Tensor:
    """Return a tensor in memory that a GPU reads and writes without waiting; unchanged without a GPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _wait_for(device: th.device) -> None:
    """Wait until a GPU has done all work that was launched."""
    if device.type == "cuda":
        th.cuda.current_stream(device).synchronize()


@contextlib.contextmanager
def _side_stream(device: th.device) -> Iterator[None]:
    """Run the block on another stream of a GPU, where CUDA's libraries initialize before a capture."""
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


def _get_rng_states(device: th.device) -> list[th.Tensor]:
    """Return the states of the random generators of the CPU and a GPU."""
    return [th.get_rng_state(), *([th.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_rng_states(states: list[th.Tensor], device: th.device) -> None:
    """Restore the result of ``_get_rng_states``."""
    th.set_rng_state(states[0])
    if device.type == "cuda":
        th.cuda.set_rng_state(states[1], device)
