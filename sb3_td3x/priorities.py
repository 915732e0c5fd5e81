"""Prioritized sampling from the replay buffer."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch as th

# Levels of the tree: more would take more calls, fewer would take larger sums
N_LEVELS = 4


class Priorities:
    """
    The priorities of a replay buffer's rows: max(|δ|, 1)^α for the TD error δ of a row's last update, and the highest
    so far for a row without one (LAP, Fujimoto et al. 2020, https://arxiv.org/abs/2007.06049).

    They are the leaves of a tree of sums, so that draws and changes look at few of them.

    :param values: one priority for each row; 0: never drawn
    :param maximum: the highest so far
    :param alpha: α, > 0
    :param device: PyTorch device of the tree
    """

    def __init__(self, values: np.ndarray, maximum: float, alpha: float, device: th.device):
        self.alpha = alpha
        self.maximum = th.tensor(maximum, device=device)
        self._n_rows = values.size
        # Children of each node
        self._width = max(2, math.ceil(values.size ** (1 / N_LEVELS)))
        # Priorities are in float32, so that their sums in float64 hardly depend on the order
        shapes = [(self._width**level, self._width) for level in range(N_LEVELS)]
        self._levels = [th.zeros(shape, dtype=th.float64, device=device) for shape in shapes]
        self.fill(0, values.size, th.from_numpy(values).flatten())

    @property
    def state(self) -> list[th.Tensor]:
        """All that changes"""
        return [*self._levels, self.maximum]

    def values(self) -> np.ndarray:
        """Return the priorities of all rows, (n_rows,)."""
        values: np.ndarray = self._levels[-1].view(-1)[: self._n_rows].cpu().numpy()
        return values

    def draw(self, batch_size: int) -> th.Tensor:
        """
        Draw rows with replacement, each with a probability proportional to its priority.

        :return: the rows, (batch_size,)
        """
        randoms = th.rand(N_LEVELS, batch_size, 1, dtype=th.float64, device=self.maximum.device)
        nodes = th.zeros(batch_size, dtype=th.int64, device=self.maximum.device)
        for level, random in zip(self._levels, randoms, strict=True):
            sums = level.index_select(0, nodes).cumsum(dim=1)
            children = th.searchsorted(sums, random * sums[:, -1:], right=True).squeeze(1)
            # After rounding up, or with NaN
            nodes = nodes * self._width + children.clamp_(max=self._width - 1)
        return nodes.clamp_(max=self._n_rows - 1)

    def update(self, rows: th.Tensor, td_errors: th.Tensor) -> None:
        """
        Change priorities after an update.

        :param rows: the rows of the batch, (b,)
        :param td_errors: δ, the largest of all critics, (b,)
        """
        priorities = td_errors.abs().clamp(min=1).pow(self.alpha)
        th.maximum(self.maximum, priorities.amax(), out=self.maximum)
        self._levels[-1].view(-1).index_put_((rows,), priorities.double())
        for level, above in self._pairs():
            rows = rows // self._width
            above.view(-1).index_put_((rows,), level.index_select(0, rows).sum(dim=1))

    def fill(self, start: int, end: int, priorities: th.Tensor | float) -> None:
        """
        Set the priorities of the rows from ``start`` up to ``end``.

        :param priorities: one for all rows, or (end - start,)
        """
        self._levels[-1].view(-1)[start:end] = priorities
        for level, above in self._pairs():
            start, end = start // self._width, (end - 1) // self._width + 1
            th.sum(level[start:end], dim=1, out=above.view(-1)[start:end])

    def _pairs(self) -> Iterator[tuple[th.Tensor, th.Tensor]]:
        """Yield each level with the one above it, from the leaves up."""
        return itertools.pairwise(reversed(self._levels))
