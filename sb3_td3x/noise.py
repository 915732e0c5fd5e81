"""Exploration noise: the decaying scale of SB3's action noise, and its fit to the number of environments."""

from stable_baselines3.common.noise import ActionNoise, VectorizedActionNoise


def exploration_scale(timesteps: int, decay: float, min_scale: float) -> float:
    """
    Factor by which the action noise is multiplied, ``max(min_scale, decay ** timesteps)``.

    Scchy's TD3 (document 000) multiplies its noise by ``expl_noise_exp_reduce_factor`` after every action, so that the
    first action has the full noise. The closed form gives the same numbers and needs no state of its own; the floor is
    ours, because without it a factor of 0.999 has ended all exploration after some 5,000 steps.

    :param timesteps: Environment timesteps that the policy has acted for so far, warm-up not counted
        (a step of ``n`` parallel environments counts ``n``)
    :param decay: Factor per timestep, in (0, 1]; 1 keeps the noise constant
    :param min_scale: Lowest scale, in [0, 1]
    :return: The scale, in [0, 1]
    """
    return max(min_scale, decay**timesteps)


def vectorize_noise(action_noise: ActionNoise | None, n_envs: int) -> ActionNoise | None:
    """
    Fit an action noise to the number of environments, in the form that SB3's ``collect_rollouts`` expects.

    SB3 wraps a noise when training starts and saves it wrapped, so a model saved with four environments would send
    four actions to one. A noise for another number of environments is made again from its base noise, which starts
    new noise processes; so does the new environment with its episodes.

    :param action_noise: The noise, for one environment or vectorized for any number of them; None: no noise
    :param n_envs: Number of parallel environments, at least 1
    :return: The same object where it fits already (its state is kept), otherwise the base noise for one environment
        or a ``VectorizedActionNoise`` for several; None if there is no noise
    """
    base_noise = action_noise
    if isinstance(action_noise, VectorizedActionNoise):
        if action_noise.n_envs == n_envs:
            return action_noise
        base_noise = action_noise.base_noise
    if base_noise is None or n_envs == 1:
        return base_noise
    return VectorizedActionNoise(base_noise, n_envs)
