"""Exploration noise: the decaying scale of SB3's action noise, and its form for several environments."""

from stable_baselines3.common.noise import ActionNoise, VectorizedActionNoise


def exploration_scale(timesteps: int, decay: float, min_scale: float) -> float:
    """
    Return the factor for the action noise, ``max(min_scale, decay ** timesteps)``.

    Document 000 multiplies its noise by ``expl_noise_exp_reduce_factor`` after every action. The closed form gives the
    same numbers without a state. The lower bound is our addition: without it, a factor of 0.999 ends exploration after
    about 5,000 steps.

    :param timesteps: Environment timesteps taken by the policy so far, without the warm-up. A step of ``n`` parallel
        environments counts ``n``
    :param decay: Factor per timestep, in (0, 1]; 1 keeps the noise constant
    :param min_scale: Lower bound, in [0, 1]
    :return: The scale, in [0, 1]
    """
    return max(min_scale, decay**timesteps)


def vectorize_noise(action_noise: ActionNoise | None, n_envs: int) -> ActionNoise | None:
    """
    Convert an action noise to the number of environments, in the form that SB3's ``collect_rollouts`` expects.

    SB3 vectorizes the noise when training starts and saves it in this form, so an agent saved with four environments
    would draw four actions for one. A noise for another number of environments is rebuilt from its base noise, which
    starts new noise processes.

    :param action_noise: Noise for one environment, or vectorized for any number of environments; None for no noise
    :param n_envs: Number of parallel environments, at least 1
    :return: The same object if it already fits; otherwise the base noise for one environment, or a
        ``VectorizedActionNoise`` for several. None for no noise
    """
    base_noise = action_noise
    if isinstance(action_noise, VectorizedActionNoise):
        if action_noise.n_envs == n_envs:
            return action_noise
        base_noise = action_noise.base_noise
    if base_noise is None or n_envs == 1:
        return base_noise
    return VectorizedActionNoise(base_noise, n_envs)
