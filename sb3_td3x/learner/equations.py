"""
The equations of TD3 as functions of tensors.

In the shapes, b is the batch size, n the number of critics and d the dimension of the action.
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


def td_target(
    rewards: th.Tensor, dones: th.Tensor, discounts: th.Tensor | float, next_q: th.Tensor, clipped_double_q: bool
) -> th.Tensor:
    """
    Compute the target of all critics: y = r + γ (1 - done) min_i Q'_i(s', ã) (Fujimoto et al. 2018, eq. 10).

    :param rewards: rewards, or sums of n discounted rewards, (b, 1)
    :param dones: 1 where s' is terminal, else 0; also 0 at time-outs, (b, 1)
    :param discounts: γ, or γ^n for n-step returns, (b, 1)
    :param next_q: values of the target critics, (n, b, 1)
    :param clipped_double_q: whether to take the minimum over the critics; if False, the first critic's value
    :return: y, (b, 1)
    """
    next_value = next_q.amin(dim=0) if clipped_double_q else next_q[0]
    return rewards + (1 - dones) * discounts * next_value


def critic_loss(q: th.Tensor, target: th.Tensor) -> th.Tensor:
    """
    Compute the critics' loss, L = Σ_i mean((Q_i(s, a) - y)²). As in SB3, there is no factor of one half.

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: L, a scalar
    """
    return (q - target).square().mean(dim=(1, 2)).sum()


def critic_loss_grad(q: th.Tensor, target: th.Tensor) -> th.Tensor:
    """
    Compute the gradient of ``critic_loss``: ∂L/∂Q_i = 2 (Q_i - y) / b.

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: the gradient, (n, b, 1)
    """
    return (q - target) * (2 / len(target))


def huber_loss(q: th.Tensor, target: th.Tensor) -> th.Tensor:
    """
    Compute the critics' loss for prioritized transitions, L = Σ_i mean(h(Q_i(s, a) - y)), where h(δ) = δ² / 2 for
    |δ| <= 1, else |δ| - 1/2 (LAP, Fujimoto et al. 2020).

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: L, a scalar
    """
    return th.nn.functional.huber_loss(q, target.expand_as(q), reduction="none").mean(dim=(1, 2)).sum()


def huber_loss_grad(q: th.Tensor, target: th.Tensor) -> th.Tensor:
    """
    Compute the gradient of ``huber_loss``: ∂L/∂Q_i = clip(Q_i - y, -1, 1) / b.

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: the gradient, (n, b, 1)
    """
    return (q - target).clamp(-1, 1) / len(target)


def actor_loss(q1: th.Tensor) -> th.Tensor:
    """
    Compute the loss of the deterministic policy gradient, L = -mean(Q_1(s, π(s))) (Fujimoto et al. 2018, algorithm 1).

    :param q1: values of the first critic for the actor's actions, (b, 1)
    :return: L, a scalar
    """
    return -q1.mean()


def actor_loss_grad(q1: th.Tensor) -> th.Tensor:
    """
    Compute the gradient of ``actor_loss``: ∂L/∂Q_1 = -1 / b.

    :param q1: values of the first critic for the actor's actions, (b, 1)
    :return: the gradient, (b, 1)
    """
    return th.full_like(q1, -1 / len(q1))


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
