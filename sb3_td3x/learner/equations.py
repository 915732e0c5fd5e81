"""
The equations of TD3 as functions of tensors.

In the shapes, b is the batch size, n the number of critics, k the number of quantiles that each of them estimates (1
for the value itself), and d the dimension of the action.
"""

import torch as th


def smooth_target_actions(actions: th.Tensor, std: float, clip: float) -> th.Tensor:
    """
    Add clipped noise to the target actions: ã = clip(π'(s') + clip(ε, -c, c), -1, 1), ε ~ N(0, σ)
    (Fujimoto et al. 2018, eq. 14).

    :param actions: actions of the target actor in the next states, scaled to [-1, 1], (b, d)
    :param std: standard deviation σ of the noise in the scaled action space; 0 turns smoothing off
    :param clip: limit c of the noise's absolute value; 0 turns smoothing off
    :return: ã, (b, d)
    """
    if std == 0 or clip == 0:
        return actions
    noise = th.randn_like(actions).mul_(std).clamp_(-clip, clip)
    return (actions + noise).clamp_(-1, 1)


def next_values(next_q: th.Tensor, clipped_double_q: bool, top_quantiles_to_drop_per_net: int) -> th.Tensor:
    """
    Combine the target critics against overestimation: min_i Q'_i(s', ã) (Fujimoto et al. 2018, eq. 10), or of quantiles
    the smallest of all critics (TQC, Kuznetsov et al. 2020, eq. 10).

    :param next_q: values or quantiles of the target critics, (n, b, k)
    :param clipped_double_q: whether to combine all critics; if False, only the first one counts
    :param top_quantiles_to_drop_per_net: number of the largest quantiles to drop, times the number of critics; in
        [0, k); not used if k = 1
    :return: Q'(s', ã), (b, 1), or its quantiles, (b, m)
    """
    if not clipped_double_q:
        next_q = next_q[:1]
    n_critics, batch_size, n_quantiles = next_q.shape
    if n_quantiles == 1:
        return next_q.amin(dim=0)
    n_kept = n_critics * (n_quantiles - top_quantiles_to_drop_per_net)
    pooled = next_q.transpose(0, 1).reshape(batch_size, -1)
    return pooled.topk(n_kept, dim=1, largest=False, sorted=False).values


def td_target(rewards: th.Tensor, dones: th.Tensor, discounts: th.Tensor | float, next_q: th.Tensor) -> th.Tensor:
    """
    Compute the target of all critics: y = r + γ (1 - done) Q'(s', ã).

    :param rewards: rewards, or sums of n discounted rewards, (b, 1)
    :param dones: 1 where s' is terminal, else 0; also 0 at time-outs, (b, 1)
    :param discounts: γ, or γ^n for n-step returns, (b, 1)
    :param next_q: Q'(s', ã), (b, 1), or its quantiles, (b, m)
    :return: y, (b, 1), or its quantiles, (b, m)
    """
    return rewards + (1 - dones) * discounts * next_q


def critic_loss(q: th.Tensor, target: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """
    Compute the critics' loss, L = Σ_i mean((Q_i(s, a) - y)²). As in SB3, there is no factor of one half.

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: L, a scalar, and its gradient ∂L/∂Q_i = 2 (Q_i - y) / b, (n, b, 1)
    """
    errors = q - target
    return errors.square().mean(dim=(1, 2)).sum(), errors * (2 / len(target))


def huber_loss(q: th.Tensor, target: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """
    Compute the critics' loss for prioritized transitions, L = Σ_i mean(h(Q_i(s, a) - y)), where h(δ) = δ² / 2 for
    |δ| <= 1, else |δ| - 1/2 (LAP, Fujimoto et al. 2020).

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: L, a scalar, and its gradient ∂L/∂Q_i = clip(Q_i - y, -1, 1) / b, (n, b, 1)
    """
    errors = q - target
    clipped = errors.clamp(-1, 1)
    # h(δ) = c (δ - c / 2) with c = clip(δ, -1, 1)
    losses = clipped * (errors - clipped / 2)
    return losses.mean(dim=(1, 2)).sum(), clipped / len(target)


def quantile_huber_loss(q: th.Tensor, target: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """
    Compute the loss of critics that estimate quantiles: L = Σ_i mean(|1(δ > 0) - τ| h(δ)) with δ = q - y for each pair
    of a quantile q of the level τ and a target y, and h as in ``huber_loss`` (TQC, Kuznetsov et al. 2020, eq. 12).

    :param q: quantiles of the critics with the levels τ = (1/2, 3/2, ..., k - 1/2) / k, (n, b, k)
    :param target: y, (b, m)
    :return: L, a scalar, and its gradient ∂L/∂q = mean_y(|1(δ > 0) - τ| clip(δ, -1, 1)) / (b k), (n, b, k)
    """
    n_quantiles = q.shape[2]
    levels = (th.arange(n_quantiles, device=q.device) + 0.5) / n_quantiles
    # In place, since memory for new tensors of this size takes longer than the arithmetic
    errors = q.unsqueeze(3) - target.unsqueeze(1)
    clipped = errors.clamp(-1, 1)
    # The weights, 1 - τ of positive and τ of negative errors, over 1 - τ
    weighted = th.nn.functional.prelu(clipped.flatten(0, 1), levels / (1 - levels)).view_as(clipped)
    grad = weighted.mean(dim=3) * (1 - levels) / q[0].numel()
    losses = weighted.mul_(errors.sub_(clipped, alpha=0.5)).mean(dim=3) * (1 - levels)
    return losses.mean(dim=(1, 2)).sum(), grad


def actor_loss(q1: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """
    Compute the loss of the deterministic policy gradient, L = -mean(Q_1(s, π(s))) (Fujimoto et al. 2018, algorithm 1).

    :param q1: values of the first critic for the actor's actions, (b, 1), or their quantiles, (b, k)
    :return: L, a scalar, and its gradient ∂L/∂Q_1 = -1 / b, for quantiles -1 / (b k), of the shape of ``q1``
    """
    return -q1.mean(), th.full_like(q1, -1 / q1.numel())


@th.no_grad()
def soft_update(params: list[th.Tensor], target_params: list[th.Tensor], tau: float) -> None:
    """
    Move the target parameters towards the parameters in place: θ' ← τ θ + (1 - τ) θ'.

    :param params: θ
    :param target_params: θ'
    :param tau: τ, in [0, 1]; 1 copies, 0 freezes the targets
    """
    if target_params:
        th._foreach_lerp_(target_params, params, tau)
