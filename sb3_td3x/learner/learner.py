"""What an agent learns and acts with: its networks as they are now, with CUDA graphs on a GPU."""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.learner.cuda_graphs import ActingGraph, UpdateGraphs
from sb3_td3x.learner.update import Update


class Learner:
    """The update of an agent and its graphs, made again when something changes that they were made from."""

    def __init__(self) -> None:
        self._update: Update | None = None
        self.update_graphs: UpdateGraphs | None = None
        self.acting_graph: ActingGraph | None = None
        self._capture_failed = False
        # Means over the last updates, not yet read from the device
        self._losses: dict[str, th.Tensor] = {}

    def __reduce__(self) -> Any:
        # The update shares memory with the networks, so a copy of the agent makes its own
        return Learner, ()

    def current_update(self, policy: TD3Policy, precision: str) -> Update:
        """
        Return the update of the policy as it is now: a user may have replaced it or parts of it.

        :param precision: precision of the matrix products: ``"float32"`` or ``"bfloat16"``
        """
        if self._update is None or not self._update.is_current(policy):
            self._update = Update(policy, precision)
        return self._update

    def train(
        self,
        update: Update,
        replay_buffer: ReplayBuffer,
        batch_size: int,
        vec_normalize: VecNormalize | None,
        with_actor: Iterable[bool],
    ) -> None:
        """
        Do several updates, and keep their losses for ``read_losses``.

        :param vec_normalize: the env's ``VecNormalize``, if it has one
        :param with_actor: for each update whether to update the actor and the target networks, too
        """
        update.set_priorities = None
        if isinstance(replay_buffer, PackedReplayBuffer) and replay_buffer.prioritized_replay_alpha > 0:
            update.set_priorities = replay_buffer.update_priorities
        graphs = self._current_graphs(update, replay_buffer, batch_size, vec_normalize)
        if graphs is None:
            losses = update.run(lambda: replay_buffer.sample(batch_size, env=vec_normalize), with_actor)
        else:
            losses = graphs.run(list(with_actor))
        # Without a delayed update, the last actor loss stays
        self._losses.update(losses)

    def read_losses(self) -> dict[str, float]:
        """Return the losses since the last call, by their names in logs. This waits for a GPU."""
        losses, self._losses = self._losses, {}
        return dict(zip(losses, th.stack([*losses.values()]).tolist(), strict=True)) if losses else {}

    def scaled_actions(self, update: Update, obs: Any) -> np.ndarray:
        """
        Return the policy's actions for the rollout; a stochastic policy samples them.

        :param obs: observations of the envs, (n_envs, ...), or a dictionary of such arrays
        :return: actions scaled to [-1, 1], (n_envs, *action_shape)
        """
        networks: Any = update.networks
        if self._capture_failed or not ActingGraph.is_possible(networks, obs):
            actions: np.ndarray = networks.scaled_actions(obs)
            return actions
        if self.acting_graph is None or not self.acting_graph.is_current(networks, obs):
            self.acting_graph = ActingGraph(networks, obs)
        return self.acting_graph.scaled_actions(obs)

    def _current_graphs(
        self, update: Update, replay_buffer: ReplayBuffer, batch_size: int, vec_normalize: VecNormalize | None
    ) -> UpdateGraphs | None:
        """Return the update as graphs; None where that is not possible, after one warning if the capture failed."""
        if self._capture_failed or not UpdateGraphs.is_possible(update, replay_buffer):
            return None
        arguments = (update, replay_buffer, batch_size, vec_normalize)
        if self.update_graphs is None or not self.update_graphs.is_current(*arguments):
            try:
                self.update_graphs = UpdateGraphs(*arguments)
            except RuntimeError as error:
                self._capture_failed = True
                warnings.warn(
                    f"The updates could not be captured as CUDA graphs, they continue without: {error}", stacklevel=4
                )
                return None
        return self.update_graphs
