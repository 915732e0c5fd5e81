"""Prioritized sampling from the replay buffer."""

import math

import numpy as np
import torch as th


class Priorities:
    """
    The priorities of a replay buffer's rows: max(|δ|, 1)^α for the TD error δ of a row's last update, and the highest
    so far for a row without one (LAP, Fujimoto et al. 2020, https://arxiv.org/abs/2007.06049).

    They are the leaves of a tree of sums with three levels, so that draws and changes look at few of them.

    :param values: one priority for each row; 0: never drawn
    :param maximum: the highest so far
    :param alpha: α, > 0
    :param device: PyTorch device of the tree
    """

    def __init__(self, values: np.ndarray, maximum: float, alpha: float, device: th.device):
        self.alpha = alpha
        self.maximum = th.tensor(maximum, device=device)
        self._n_rows = values.size
        self._width = max(2, math.ceil(values.size ** (1 / 3)))
        # Priorities are in float32, so that their sums in float64 hardly depend on the order
        shapes = ((1, self._width), (self._width, self._width), (self._width**2, self._width))
        self._levels = [th.zeros(shape, dtype=th.float64, device=device) for shape in shapes]
        self.fill(0, values.size, th.from_numpy(values).flatten())

    @property
    def state(self) -> list[th.Tensor]:
        """All that changes"""
        return [*self._levels, self.maximum]

    def values(self) -> np.ndarray:
        """Return the priorities of all rows, (n_rows,)."""
        values: np.ndarray = self._levels[2].view(-1)[: self._n_rows].cpu().numpy()
        return values

    def draw(self, batch_size: int) -> th.Tensor:
        """
        Draw rows with replacement, each with a probability proportional to its priority.

        :return: the rows, (batch_size,)
        """
        randoms = th.rand(len(self._levels), batch_size, 1, dtype=th.float64, device=self.maximum.device)
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
        self._levels[2].view(-1).index_put_((rows,), priorities.double())
        for level in (1, 0):
            rows = rows // self._width
            sums = self._levels[level + 1].index_select(0, rows).sum(dim=1)
            self._levels[level].view(-1).index_put_((rows,), sums)

    def fill(self, start: int, end: int, priorities: th.Tensor | float) -> None:
        """
        Set the priorities of the rows from ``start`` up to ``end``.

        :param priorities: one for all rows, or (end - start,)
        """
        self._levels[2].view(-1)[start:end] = priorities
        for level in (1, 0):
            start, end = start // self._width, (end - 1) // self._width + 1
            th.sum(self._levels[level + 1][start:end], dim=1, out=self._levels[level].view(-1)[start:end])
