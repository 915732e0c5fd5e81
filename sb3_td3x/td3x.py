"""TD3X: Twin Delayed DDPG (Fujimoto et al. 2018) for users of Stable-Baselines3 and RL Zoo."""

import inspect
import math
import os
import pathlib
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import recursive_setattr
from stable_baselines3.common.type_aliases import (
    GymEnv,
    MaybeCallback,
    ReplayBufferSamples,
    RolloutReturn,
    Schedule,
)
from stable_baselines3.common.utils import (
    check_for_correct_spaces,
    get_parameters_by_name,
    get_system_info,
    update_learning_rate,
)

from sb3_td3x import sb3_compat
from sb3_td3x.buffers import (
    KNOWN_CLASSES,
    check_replay_buffer_arguments,
    check_terminations_can_be_stored,
    end_open_episodes,
    make_replay_buffer,
)
from sb3_td3x.checkpoint.callback import Resumed, guarded_training, resume
from sb3_td3x.files.agent import (
    VARIABLES,
    attributes_to_save,
    read_agent,
    read_parameters,
    variables_to_save,
    write_agent,
)
from sb3_td3x.files.atomic import SavePath
from sb3_td3x.files.replay import read_replay_buffer, write_replay_buffer
from sb3_td3x.learner.cuda_graphs import UpdateGraphCache
from sb3_td3x.learner.perceptron import (
    PRECISIONS,
    AutogradNetworks,
    MlpNetworks,
    has_bfloat16_instructions,
    make_networks,
)
from sb3_td3x.noise import exploration_scale, vectorize_noise
from sb3_td3x.policies import (
    Actor,
    CnnPolicy,
    CriticEnsemble,
    MlpPolicy,
    MultiInputPolicy,
    SeparateCritics,
    TD3XPolicy,
    copy_state,
    own_optimizer_state,
    sb3_optimizer_state,
    with_own_kernels,
)
from sb3_td3x.rollout import EnvStep, shape_step, with_last_observations
from sb3_td3x.schedules import learning_rate_at, make_schedule
from sb3_td3x.shaping import RewardShaping, check_built_in, make_reward_shaping
from sb3_td3x.validation import (
    check_action_noise,
    check_action_space,
    check_bool,
    check_finite,
    check_integer,
    check_known,
    check_net_arch,
    check_number,
    check_train_freq,
    check_unnormalized_shapes,
)

SelfTD3X = TypeVar("SelfTD3X", bound="TD3X")

_NOT_TO_CHANGE_AT_LOADING = {"self", "policy", "_init_setup_model"}

# The update, as functions of tensors. b = batch size, n = number of critics, d = dimension of the action


def smooth_target_actions(actions: th.Tensor, std: float, clip: float) -> th.Tensor:
    """
    Target policy smoothing: ã = clip(π'(s') + clip(ε, -c, c), -1, 1), ε ~ N(0, σ) (Fujimoto et al. 2018, eq. 14).

    :param actions: actions of the target actor in the next states, scaled to [-1, 1], (b, d)
    :param std: σ, standard deviation of the noise in the scaled action space; 0: no smoothing
    :param clip: c, limit of its absolute value; 0: no smoothing
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
    The target of all critics: y = r + γ (1 - done) min_i Q'_i(s', ã) (Fujimoto et al. 2018, eq. 10).

    :param rewards: rewards, or sums of n of them, (b, 1)
    :param dones: 1 where s' is terminal, 0 elsewhere, also at time-outs, (b, 1)
    :param discounts: γ, or γ^n for n-step returns, (b, 1)
    :param next_q: values of the target critics, (n, b, 1)
    :param clipped_double_q: whether the minimum over the critics is taken; False: the first critic alone
        (document 002, trick 6)
    :return: y, (b, 1)
    """
    next_value = next_q.amin(dim=0) if clipped_double_q else next_q[0]
    return rewards + (1 - dones) * discounts * next_value


def critic_loss(q: th.Tensor, target: th.Tensor) -> th.Tensor:
    """
    L = Σ_i mean((Q_i(s, a) - y)²), the sum over the critics without the half of some texts, as in SB3.

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: L, a scalar
    """
    return (q - target).square().mean(dim=(1, 2)).sum()


def critic_loss_grad(q: th.Tensor, target: th.Tensor) -> th.Tensor:
    """
    ∂L/∂Q_i = 2 (Q_i - y) / b of ``critic_loss``.

    :param q: values of the critics, (n, b, 1)
    :param target: y, (b, 1)
    :return: the gradient, (n, b, 1)
    """
    return (q - target) * (2 / len(target))


def actor_loss(q1: th.Tensor) -> th.Tensor:
    """
    The deterministic policy gradient's loss, L = -mean(Q_1(s, π(s))) (Fujimoto et al. 2018, algorithm 1).

    :param q1: values of the first critic for the actor's actions, (b, 1)
    :return: L, a scalar
    """
    return -q1.mean()


def actor_loss_grad(q1: th.Tensor) -> th.Tensor:
    """
    ∂L/∂Q_1 = -1 / b of ``actor_loss``.

    :param q1: values of the first critic for the actor's actions, (b, 1)
    :return: the gradient, (b, 1)
    """
    return th.full_like(q1, -1 / len(q1))


@th.no_grad()
def soft_update(params: list[th.Tensor], target_params: list[th.Tensor], tau: float) -> None:
    """
    θ' ← τ θ + (1 - τ) θ', in place.

    :param params: θ
    :param target_params: θ'
    :param tau: τ, in (0, 1]; 1 copies
    """
    if target_params:
        th._foreach_lerp_(target_params, params, tau)


def _is_stochastic(policy: BasePolicy) -> bool:
    """
    :param policy: a policy, maybe of a class of the user's own
    :return: whether it explores by itself, without noise
    """
    return bool(getattr(policy, "stochastic_actor", False))


class _PolicyNetwork:
    """A network of the agent's present policy, under the name that it has there."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: "TD3X | None", owner: type) -> Any:
        if model is None:
            return self
        return getattr(model.policy, self.name)

    def __set__(self, model: "TD3X", network: th.nn.Module) -> None:
        setattr(model.policy, self.name, network)


class TD3X(OffPolicyAlgorithm):
    """
    Twin Delayed DDPG (TD3)
    Addressing Function Approximation Error in Actor-Critic Methods (Fujimoto et al. 2018),
    https://arxiv.org/abs/1802.09477

    SB3's ``TD3`` with exponentially decayed exploration noise, a reward shaping hook, a learning rate of its own
    for the critics, and checks of all arguments and data. Arguments shared with SB3 mean the same.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, ...)
    :param env: The environment to learn from (if registered in Gym, can be str)
    :param learning_rate: learning rate of the actor, and of the critics unless ``qf_learning_rate`` is given, >= 0;
        a number, a function of the current progress remaining (from 1 to 0),
        or a string such as ``lin_7e-4``: from 7e-4 linearly to 0
    :param buffer_size: size of the replay buffer, in transitions
    :param learning_starts: how many env timesteps of random actions before learning starts, without updates
    :param batch_size: Minibatch size for each gradient update
    :param tau: the soft update coefficient ("Polyak update"), in (0, 1]; 1: no target networks
        (then also ``policy_delay=1``, else they lag behind)
    :param gamma: the discount factor, in [0, 1]
    :param train_freq: Update the model every ``train_freq`` steps. Alternatively pass a tuple of frequency and unit
        like ``(5, "step")`` or ``(2, "episode")``.
    :param gradient_steps: How many updates of the critics to do after each rollout (see ``train_freq``);
        -1: as many as env steps (of all envs together) in the rollout
    :param action_noise: the exploration noise, in the scaled action space [-1, 1] (None: no exploration)
    :param replay_buffer_class: Replay buffer class to use (for instance ``HerReplayBuffer``).
        If ``None``, it will be automatically selected.
    :param replay_buffer_kwargs: Keyword arguments to pass to the replay buffer on creation.
    :param optimize_memory_usage: Enable a memory efficient variant of the replay buffer at a cost of more complexity;
        needs ``replay_buffer_kwargs=dict(handle_timeout_termination=False)``
    :param n_steps: When > 1, use n-step returns. Only without a custom ``replay_buffer_class``,
        and not with Dict observations.
    :param policy_delay: The actor and all target networks are updated once every ``policy_delay`` updates
        of the critics. The count goes on across calls of ``train()`` and after loading.
    :param target_policy_noise: Standard deviation of Gaussian noise added to target policy (smoothing noise),
        in the scaled action space; 0: no smoothing
    :param target_noise_clip: Limit for absolute value of target policy smoothing noise.
    :param stats_window_size: Window size for the rollout logging, specifying the number of episodes to average
        the reported success rate, mean episode length, and mean reward over
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation, see ``TD3XPolicy``
    :param verbose: Verbosity level: 0 for no output, 1 for info messages (such as device or wrappers used), 2 for
        debug messages
    :param seed: Seed for the pseudo random generators
    :param device: Device (cpu, cuda, ...) on which the code should be run.
        Setting it to auto, the code will be run on the GPU if possible.
    :param qf_learning_rate: learning rate of the critics, as ``learning_rate``; None: the same
    :param action_noise_decay: the exploration noise is multiplied by ``action_noise_decay ** t`` (document 000),
        t the env timesteps taken by the policy, of all envs together; in (0, 1], 1: no decay
    :param action_noise_min_scale: lower bound of that factor, in [0, 1]
    :param reward_shaping: what to learn from instead of the env's rewards and terminations, see ``sb3_td3x.shaping``;
        an object, a function, or as in YAML ``{"sb3_td3x.shaping.RewardScale": {"scale": 0.1}}``, or a list of these.
        Episode statistics and evaluations stay raw.
    :param clipped_double_q: Whether the target is the minimum over the target critics; False: the first one alone,
        the others are still trained (document 002, trick 6)
    :param precision: ``"float32"``, or ``"bfloat16"``: the matrix products of the updates in bfloat16, on float32
        parameters and optimizers. Faster on processors with instructions for it, slower on others (with a warning),
        which get the same numbers by rounding; networks that are not plain MLPs have PyTorch's automatic mixed
        precision, which is very slow there.
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: an argument is out of range; names it, its value and what is allowed
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy: TD3XPolicy
    action_space: spaces.Box
    _networks: AutogradNetworks | MlpNetworks
    _replay_buffer: ReplayBuffer | None
    actor: Actor = _PolicyNetwork()  # type: ignore[assignment]
    actor_target: Actor = _PolicyNetwork()  # type: ignore[assignment]
    critic: CriticEnsemble | SeparateCritics = _PolicyNetwork()  # type: ignore[assignment]
    critic_target: CriticEnsemble | SeparateCritics = _PolicyNetwork()  # type: ignore[assignment]

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | str | None,
        learning_rate: float | str | Schedule = 1e-3,
        buffer_size: int = 1_000_000,  # 1e6
        learning_starts: int = 100,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: ActionNoise | None = None,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        policy_delay: int = 2,
        target_policy_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        qf_learning_rate: float | str | Schedule | None = None,
        action_noise_decay: float = 1.0,
        action_noise_min_scale: float = 0.0,
        reward_shaping: Any = None,
        clipped_double_q: bool = True,
        precision: str = "float32",
        _init_setup_model: bool = True,
    ):
        if not isinstance(policy, str | type):
            raise ValueError(f"policy={policy!r} is not allowed, expected a name such as 'MlpPolicy', or a class")
        if env is not None:
            env = maybe_make_env(env, verbose)
            if not hasattr(env, "action_space"):
                raise ValueError(f"env={env!r} is not allowed, expected an env or the id of one")
            check_action_space(env.action_space)
        elif _init_setup_model:
            raise ValueError("env=None is not allowed, expected an env or the id of one")
        super().__init__(
            policy if isinstance(policy, str) else sb3_compat.OWN_POLICIES.get(policy, policy),
            env,  # type: ignore[arg-type]
            learning_rate,  # type: ignore[arg-type]
            buffer_size,
            learning_starts,
            batch_size,
            tau,
            gamma,
            train_freq,
            gradient_steps,
            action_noise=action_noise,
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=replay_buffer_kwargs,
            optimize_memory_usage=optimize_memory_usage,
            n_steps=n_steps,
            policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            seed=seed,
            sde_support=False,
            supported_action_spaces=(spaces.Box,),
            support_multi_env=True,
        )
        self.policy_delay = policy_delay
        self.target_policy_noise = target_policy_noise
        self.target_noise_clip = target_noise_clip
        self.qf_learning_rate = qf_learning_rate
        self.action_noise_decay = action_noise_decay
        self.action_noise_min_scale = action_noise_min_scale
        self.reward_shaping = reward_shaping
        self.clipped_double_q = clipped_double_q
        self.precision = precision
        # t of the noise decay: env timesteps taken by the policy, in the whole life of the agent
        self._exploration_timesteps = 0
        # Env timesteps of the last rollout, for the logged ratio of updates
        self._rollout_timesteps = 0
        self._shaping: RewardShaping | None = None
        # What it was built from; a user may change the argument
        self._shaping_source: Any = None
        # The checkpoint that it goes on from, until its next `learn`
        self._resumed: Resumed | None = None
        # A hook that a file names, which is not to be imported
        self._untrusted_reward_shaping: Any = None

        if _init_setup_model:
            self._setup_model()
            self._setup_shaping()
            self.replay_buffer = make_replay_buffer(self)

    # The algorithm

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """
        Sample the replay buffer and update the networks.

        :param gradient_steps: number of updates of the critics
        :param batch_size: transitions in each update
        """
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)
        self._update_learning_rates()
        self._refresh_networks()
        graphs = self._update_graphs.get(self, batch_size)
        if graphs is not None and gradient_steps > 0:
            means = graphs.run(gradient_steps)
        else:
            means = self._run_updates(gradient_steps, batch_size)

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if self._rollout_timesteps > 0:
            self.logger.record("train/updates_per_env_step", gradient_steps / self._rollout_timesteps)
        for name, mean in means.items():
            self.logger.record(f"train/{name}", mean)

    def _run_updates(self, gradient_steps: int, batch_size: int) -> dict[str, float]:
        """
        :param gradient_steps: number of updates of the critics
        :param batch_size: transitions in each update
        :return: means over the updates: ``critic_loss``, ``q_mean``, and ``actor_loss`` if the actor was updated
        """
        metrics: dict[str, list[th.Tensor]] = {"critic_loss": [], "q_mean": [], "actor_loss": []}
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            for values, value in zip(metrics.values(), self.update(batch, self.count_update()), strict=False):
                values.append(value)
        # Read once and after all updates, so that none of them waits for a GPU
        scalars = [value for values in metrics.values() for value in values]
        numbers = iter(th.stack(scalars).tolist() if scalars else [])
        return {name: sum(islice(numbers, len(values))) / len(values) for name, values in metrics.items() if values}

    def count_update(self) -> bool:
        """
        :return: Whether this update is one of those, one in ``policy_delay``, that update the actor and the targets
        """
        self._n_updates += 1
        return self._n_updates % self.policy_delay == 0

    def update(self, batch: ReplayBufferSamples, with_actor: bool) -> list[th.Tensor]:
        """
        One update (Fujimoto et al. 2018, algorithm 1).

        :param batch: transitions
        :param with_actor: whether the actor and the targets are updated, too
        :return: the critics' loss, the mean of their values, and the actor's loss if it was updated
        """
        with self._networks.converted(batch) as batch:
            metrics = [*self._update_critics(batch)]
            if with_actor:
                metrics.append(self._update_actor(batch.observations))
                self._update_targets()
        return metrics

    def _refresh_networks(self) -> None:
        """Follow changes from outside: another policy, replaced layers, frozen or replaced parameters."""
        if self._networks.policy is not self.policy or not self._networks.is_current():
            self._connect_networks()

    def _update_learning_rates(self) -> None:
        """Set the learning rates to their schedules' values."""
        # The last rollout may end after the last timestep
        progress_remaining = max(self._current_progress_remaining, 0.0)
        for name, schedule, network in (
            ("learning_rate", self.lr_schedule, self.actor),
            ("qf_learning_rate", self.qf_lr_schedule or self.lr_schedule, self.critic),
        ):
            learning_rate = learning_rate_at(name, schedule, progress_remaining)
            update_learning_rate(network.optimizer, learning_rate)
            self.logger.record(f"train/{name}", learning_rate)

    def _update_critics(self, batch: ReplayBufferSamples) -> tuple[th.Tensor, th.Tensor]:
        """
        One update of all critics.

        :param batch: transitions
        :return: their loss, and the mean of their values
        """
        next_actions = smooth_target_actions(
            self._networks.target_actions(batch.next_observations), self.target_policy_noise, self.target_noise_clip
        )
        next_q = self._networks.target_q_values(batch.next_observations, next_actions)
        # Only n-step buffers give discounts
        discounts = self.gamma if batch.discounts is None else batch.discounts
        target = td_target(batch.rewards, batch.dones, discounts, next_q, self.clipped_double_q)

        q = self._networks.q_values(batch.observations, batch.actions)
        self._networks.backward_critics(q, critic_loss_grad(q.detach(), target))
        self._networks.critic_optimizer.step()
        return critic_loss(q.detach(), target), q.detach().mean()

    def _update_actor(self, observations: th.Tensor) -> th.Tensor:
        """
        One update of the actor.

        :param observations: observations of a batch
        :return: its loss
        """
        q1 = self._networks.q1_of_policy(observations)
        self._networks.backward_actor(q1, actor_loss_grad(q1))
        self._networks.actor_optimizer.step()
        return actor_loss(q1.detach())

    def _update_targets(self) -> None:
        """Move all target networks towards the networks; running statistics are copied (SB3 issue 996)."""
        for network in ("critic", "actor"):
            soft_update(self._networks.parameters[network], self._networks.parameters[f"{network}_target"], self.tau)
            soft_update(self._running_stats[network], self._running_stats[f"{network}_target"], 1.0)

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Random actions at first, then the policy's plus the decayed exploration noise (document 000).

        :param learning_starts: Number of env timesteps of random actions
        :param action_noise: the exploration noise, before decay
        :param n_envs: number of envs
        :return: actions for the envs, and the same scaled to [-1, 1] for the replay buffer, (n_envs, *action_shape)
        """
        warm_up = self.num_timesteps < learning_starts
        if warm_up:
            actions = np.array([self.action_space.sample() for _ in range(n_envs)])
            scaled_actions = self.policy.scale_action(actions)
        else:
            assert self._last_obs is not None, "self._last_obs was not set"
            # A callback may have changed the policy since the last updates
            self._refresh_networks()
            # A subclass's own `predict` acts in the rollout too, as in SB3
            if getattr(self.predict, "__func__", None) is OffPolicyAlgorithm.predict:
                scaled_actions = self._networks.scaled_actions(self._last_obs)
            else:
                scaled_actions = self.policy.scale_action(self.predict(self._last_obs, deterministic=False)[0])
        if action_noise is not None and not _is_stochastic(self.policy):
            scaled_actions = np.clip(scaled_actions + self.action_noise_scale * action_noise(), -1, 1)
        check_finite("action", scaled_actions, self.num_timesteps)
        if not warm_up:
            self._exploration_timesteps += n_envs
        return self.policy.unscale_action(scaled_actions), scaled_actions

    @property
    def action_noise_scale(self) -> float:
        """The factor of the exploration noise now, from 1 down to ``action_noise_min_scale``."""
        return exploration_scale(self._exploration_timesteps, self.action_noise_decay, self.action_noise_min_scale)

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Check, shape and store one transition of each env: unnormalised observations, scaled actions.

        :param replay_buffer: Replay buffer object where to store the transition.
        :param buffer_action: scaled actions
        :param new_obs: next observations; of a finished env the first of the next episode
        :param reward: rewards
        :param dones: whether the episode ended, by termination or time-out
        :param infos: the envs' infos, with the last observations of finished episodes
        """
        if self._vec_normalize_env is not None:
            original_obs: Any = self._vec_normalize_env.get_original_obs()
            reward = self._vec_normalize_env.get_original_reward()
        else:
            self._last_original_obs, original_obs = self._last_obs, new_obs

        if dones.any():
            check_finite("observation after the reset", original_obs, self.num_timesteps, np.flatnonzero(dones))
        next_obs = with_last_observations(original_obs, dones, infos, self._vec_normalize_env)
        check_finite("observation", next_obs, self.num_timesteps)
        check_finite("reward", reward, self.num_timesteps)
        last_obs: Any = self._last_original_obs
        if self._shaping is not None:
            actions = self.policy.unscale_action(buffer_action)
            step = EnvStep(last_obs, actions, reward, next_obs, dones, infos)
            reward, dones, infos = shape_step(self._shaping, step, self.gamma, self.num_timesteps)
            if dones is not step.dones:
                check_terminations_can_be_stored(self, self._shaping)
            self.logger.record_mean("rollout/shaped_reward_mean", float(reward.mean()))
        # SB3's buffers for dictionaries put other arrays into those that they are given
        if isinstance(next_obs, dict):
            last_obs, next_obs = dict(last_obs), dict(next_obs)
        replay_buffer.add(last_obs, next_obs, buffer_action, reward, dones, infos)
        self._last_obs = new_obs
        self._last_original_obs = original_obs

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> RolloutReturn:
        """
        As in SB3; notes how many env timesteps were taken. If it is broken off, by an error or a callback, the step
        before is not stored, and so the next ``learn`` begins with new episodes. With a replay buffer of a user's own,
        whose open episodes cannot be ended, it goes on, as in SB3.
        """
        is_whole = False
        try:
            rollout = super().collect_rollouts(*args, **kwargs)
            is_whole = rollout.continue_training
        finally:
            if not is_whole and type(self._replay_buffer) in KNOWN_CLASSES:
                self._last_obs = None
        self._rollout_timesteps = rollout.episode_timesteps
        return rollout

    def dump_logs(self) -> None:
        """Write log data."""
        if self.action_noise is not None:
            self.logger.record("rollout/action_noise_scale", self.action_noise_scale)
        super().dump_logs()

    def learn(
        self: SelfTD3X,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 4,
        tb_log_name: str = "TD3X",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfTD3X:
        """
        Return a trained model. If an error or a signal ends the training, it is saved first where
        ``sb3_td3x.checkpoint.ResumableCheckpoint`` is among the callbacks.

        :param total_timesteps: The total number of samples (env steps) to train on
        :param callback: callback(s) called at every step with state of the algorithm.
        :param log_interval: log every so many episodes
        :param tb_log_name: the name of the run for TensorBoard logging
        :param reset_num_timesteps: whether or not to reset the current timestep number (used in logging)
        :param progress_bar: Display a progress bar using tqdm and rich.
        :return: the trained model
        """
        # Infinity is for a callback that stops; less than 0 is what remains of a training that went past its end
        if total_timesteps != math.inf:
            total_timesteps = check_integer("total_timesteps", total_timesteps, low=None)
        with guarded_training(self, callback):
            return super().learn(
                total_timesteps=total_timesteps,
                callback=callback,
                log_interval=log_interval,  # type: ignore[arg-type]
                tb_log_name=tb_log_name,
                reset_num_timesteps=reset_num_timesteps,
                progress_bar=progress_bar,
            )

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        """
        As in SB3; fits the noise to the number of envs, also after loading, checks the first observations, and where
        the envs are reset, lets no stored episode go on into the next one.
        """
        assert self.env is not None, "You must set the environment before calling learn()"
        self.action_noise = vectorize_noise(self.action_noise, self.env.num_envs)
        if self._shaping is None or self._shaping_source is not self.reward_shaping:
            self._setup_shaping()
        if self._shaping is not None and self._shaping.changes_terminations:
            # A replay buffer may have been loaded since
            check_terminations_can_be_stored(self, self._shaping)
        if (reset_num_timesteps or self._last_obs is None) and type(self._replay_buffer) in KNOWN_CLASSES:
            end_open_episodes(self.replay_buffer)
        total_timesteps, callback = super()._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )
        first_obs: Any = self._last_obs if self._vec_normalize_env is None else self._last_original_obs
        check_unnormalized_shapes(first_obs, self.observation_space)
        check_finite("observation after the reset", first_obs, self.num_timesteps)
        return total_timesteps, callback

    # Building the model

    def _setup_model(self) -> None:
        """Check all arguments, create networks and optimizers. Called by ``load`` as well."""
        self._check_arguments()
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self._convert_train_freq()
        self.policy = self.policy_class(  # type: ignore[assignment]
            self.observation_space, self.action_space, self.lr_schedule, **self.policy_kwargs
        ).to(self.device)
        self._create_aliases()
        self._connect_networks()
        if self.precision == "bfloat16" and not has_bfloat16_instructions(self.device):
            warnings.warn(
                "precision='bfloat16' will be slower than 'float32': this processor has no instructions for it",
                stacklevel=2,
            )
        self._update_graphs = UpdateGraphCache()
        if _is_stochastic(self.policy) and self.action_noise is not None:
            warnings.warn("action_noise is not used: the policy is stochastic (stochastic_actor=True)", stacklevel=2)

    def _create_aliases(self) -> None:
        """As in SB3, for those who replace the policy: the networks are those of ``self.policy`` at any time."""

    def _connect_networks(self) -> None:
        """Find what the updates and the rollouts work on."""
        networks: dict[str, th.nn.Module] = {
            "actor": self.actor,
            "actor_target": self.actor_target,
            "critic": self.critic,
            "critic_target": self.critic_target,
        }
        # Of batch normalisation
        self._running_stats = {name: list(get_parameters_by_name(net, ["running_"])) for name, net in networks.items()}
        self._networks = make_networks(self.policy, self.precision)

    def _setup_lr_schedule(self) -> None:
        """Turn numbers and strings into schedules."""
        self.lr_schedule = make_schedule("learning_rate", self.learning_rate)
        self.qf_lr_schedule: Schedule | None = None
        if self.qf_learning_rate is not None:
            self.qf_lr_schedule = make_schedule("qf_learning_rate", self.qf_learning_rate)

    def _check_arguments(self) -> None:
        """Raise a ``ValueError`` that names the first argument that is not allowed."""
        check_action_space(self.action_space)
        if self.seed is not None:
            self.seed = check_integer("seed", self.seed, low=0)
        if not isinstance(self.policy_kwargs, dict):
            raise ValueError(f"policy_kwargs={self.policy_kwargs!r} is not allowed, expected a dictionary or None")
        check_net_arch("net_arch", self.policy_kwargs.get("net_arch"))
        if not isinstance(self.tensorboard_log, str | os.PathLike | None):
            raise ValueError(f"tensorboard_log={self.tensorboard_log!r} is not allowed, expected a path or None")
        self.buffer_size = check_integer("buffer_size", self.buffer_size, low=1)
        self.learning_starts = check_integer("learning_starts", self.learning_starts, low=0)
        self.batch_size = check_integer("batch_size", self.batch_size, low=1)
        self.tau = check_number("tau", self.tau, 0, 1, low_open=True)
        self.gamma = check_number("gamma", self.gamma, 0, 1)
        self.gradient_steps = check_integer("gradient_steps", self.gradient_steps, low=-1)
        self.n_steps = check_integer("n_steps", self.n_steps, low=1)
        self.policy_delay = check_integer("policy_delay", self.policy_delay, low=1)
        self.target_policy_noise = check_number("target_policy_noise", self.target_policy_noise, 0)
        self.target_noise_clip = check_number("target_noise_clip", self.target_noise_clip, 0)
        self._stats_window_size = check_integer("stats_window_size", self._stats_window_size, low=1)
        self.action_noise_decay = check_number("action_noise_decay", self.action_noise_decay, 0, 1, low_open=True)
        self.action_noise_min_scale = check_number("action_noise_min_scale", self.action_noise_min_scale, 0, 1)
        self.clipped_double_q = check_bool("clipped_double_q", self.clipped_double_q)
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is not allowed, expected one of {', '.join(PRECISIONS)}")
        self.train_freq = check_train_freq("train_freq", self.train_freq, self.n_envs)  # type: ignore[assignment]
        if self.action_noise is not None:
            check_action_noise("action_noise", self.action_noise, self.action_space)
        check_replay_buffer_arguments(self)

    def _setup_shaping(self) -> None:
        """
        Build the shaping hook. Not at loading but at the first ``learn`` after it:
        an agent that only plays does not need the module that its hook came from.
        """
        if self.reward_shaping is self._untrusted_reward_shaping:
            check_built_in(self.reward_shaping)
        shaping = make_reward_shaping(self.reward_shaping)
        buffer_class = self.replay_buffer_class or ReplayBuffer
        if shaping is not None and issubclass(buffer_class, HerReplayBuffer):
            raise ValueError(
                f"reward_shaping={self.reward_shaping!r} is not allowed with {buffer_class.__name__}, "
                "which computes rewards anew from the goals"
            )
        if shaping is not None and shaping.changes_terminations:
            check_terminations_can_be_stored(self, shaping)
        if isinstance(self.reward_shaping, dict) and not all(isinstance(key, str) for key in self.reward_shaping):
            # SB3's zip takes a dictionary with names as keys only
            self.reward_shaping = shaping
        self._shaping, self._shaping_source = shaping, self.reward_shaping

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """
        The replay buffer. Made at construction, but after loading at its first use:
        an agent that only plays needs no memory for it.
        """
        if self._replay_buffer is None:
            self._replay_buffer = make_replay_buffer(self)
        return self._replay_buffer

    @replay_buffer.setter
    def replay_buffer(self, replay_buffer: ReplayBuffer | None) -> None:
        self._replay_buffer = replay_buffer

    # Saving and loading

    def __getstate__(self) -> dict[str, Any]:
        # What is derived from the networks cannot be pickled
        return {name: value for name, value in vars(self).items() if name not in ("_networks", "_update_graphs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "policy" in state:
            self._connect_networks()
            self._update_graphs = UpdateGraphCache()

    def save(self, path: SavePath, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """
        Save all the attributes of the object and the model parameters in a zip-file with a checksum. At any moment
        of a kill or a full disk the old file is there or the new one, whole.

        :param path: path to the file (or a file-like) where the agent should be saved
        :param exclude: name of parameters that should be excluded in addition to the default ones
        :param include: name of parameters that might be excluded but should be included anyway
        :raises ValueError: ``replay_buffer`` is among them, which has a file of its own
        """
        attributes = attributes_to_save(self, exclude, include)
        write_agent(path, attributes, self.get_parameters(), variables_to_save(self))

    def save_replay_buffer(self, path: SavePath) -> None:
        """
        Save the replay buffer, as a whole or not at all: arrays with a checksum. One of a user's own class is pickled.

        :param path: Path to the file (or a file-like) where the replay buffer should be saved
        """
        write_replay_buffer(path, self.replay_buffer)

    def load_replay_buffer(self, path: SavePath, truncate_last_traj: bool = True, trusted: bool = False) -> None:
        """
        Load a replay buffer that was saved by TD3X or by SB3.

        :param path: Path to the file (or a file-like)
        :param truncate_last_traj: When using ``HerReplayBuffer``, whether the last trajectory is taken as finished
        :param trusted: whether to unpickle a buffer of a class that is not SB3's, which can run any code
        :raises ValueError: the file is damaged or needs to be trusted, the transitions are not those of this agent's
            envs, or for other n-step returns; the agent's own replay buffer stays
        """
        self.replay_buffer = read_replay_buffer(path, self, truncate_last_traj, trusted)

    @classmethod
    def load(
        cls: type[SelfTD3X],
        path: SavePath,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        trusted: bool = False,
        **kwargs: Any,
    ) -> SelfTD3X:
        """
        Load an agent saved by TD3X, or by SB3's ``TD3`` or ``DDPG``, whose training goes on where it stopped,
        optimizers included. No code that the file holds is run, unless it is trusted.

        :param path: path to the file (or a file-like) where to load the agent from
        :param env: the new environment to run the loaded model on (can be None if you only need prediction)
        :param device: Device on which the code should run.
        :param custom_objects: Dictionary of objects to replace upon loading
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param force_reset: Force call to ``reset()`` before training
        :param trusted: whether to unpickle what only a pickle can hold, such as a class or function of the user's
            own, and to import the hook that the file names; a stranger's file can run any code by that
        :param kwargs: arguments of the constructor to change when loading
        :return: new model instance with loaded parameters
        :raises ValueError: the file is damaged, another algorithm's or needs to be trusted, an argument is unknown
            or not allowed, or the env's spaces are not those of the agent
        """
        if print_system_info:
            print("== CURRENT SYSTEM INFO ==")
            get_system_info()
        data, params = read_agent(path, cls, device, custom_objects, kwargs, trusted, print_system_info)
        data = sb3_compat.to_own_attributes(data)
        check_known("load", kwargs, {*inspect.signature(cls.__init__).parameters, *data} - _NOT_TO_CHANGE_AT_LOADING)
        if "stats_window_size" in kwargs:
            kwargs["_stats_window_size"] = kwargs.pop("stats_window_size")
        if kwargs.get("policy_kwargs", data["policy_kwargs"]) != data["policy_kwargs"]:
            raise ValueError(
                f"policy_kwargs={kwargs['policy_kwargs']!r} is not allowed, expected those of the saved agent, "
                f"{data['policy_kwargs']!r}"
            )
        if env is not None:
            env = cls._wrap_env(env, data["verbose"])
            check_for_correct_spaces(env, data["observation_space"], data["action_space"])
            data["n_envs"] = env.num_envs
            if force_reset:
                data["_last_obs"] = None
        model = cls(policy=data["policy_class"], env=env, device=device, _init_setup_model=False)
        model.__dict__.update(data)
        model.__dict__.update(kwargs)
        if not (trusted or "reward_shaping" in {**(custom_objects or {}), **kwargs}):
            model._untrusted_reward_shaping = model.reward_shaping
        model._setup_model()
        variables = params.pop(VARIABLES, None) or {}
        model.set_parameters(params, exact_match=True, device=device)
        for name in model._get_torch_save_params()[1]:
            if variables.get(name) is not None:
                recursive_setattr(model, f"{name}.data", variables[name].data)
        if "reward_shaping" in kwargs:
            model._setup_shaping()
        return model

    @classmethod
    def resume(
        cls: type[SelfTD3X],
        directory: str | pathlib.Path,
        env: GymEnv | str,
        device: th.device | str = "auto",
        **kwargs: Any,
    ) -> SelfTD3X:
        """
        Go on from the newest whole checkpoint of a ``sb3_td3x.checkpoint.ResumableCheckpoint``::

            model = TD3X.resume("checkpoints", env)
            callback = ResumableCheckpoint("checkpoints")
            model.learn(total_timesteps - model.num_timesteps, callback, reset_num_timesteps=False)

        :param directory: the folder of the checkpoints
        :param env: the envs, made as those of the run were, or the id of one; they begin new episodes
        :param device: Device on which the code should run.
        :param kwargs: further arguments of ``load``
        :return: the agent with its replay buffer, counters and random generators
        :raises ValueError: there is no whole checkpoint, or the envs or arguments do not fit it
        """
        return resume(cls, directory, maybe_make_env(env, verbose=0), device, **kwargs)

    def to_sb3(self) -> TD3:
        """
        The agent as SB3's ``TD3``, for use where sb3_td3x is not installed: same networks, optimizers and counters.
        What SB3's TD3 has no argument for is left behind, with a warning: shaping, noise decay,
        the critics' own learning rate, ``clipped_double_q=False``.

        :return: an SB3 TD3 that predicts the same
        :raises ValueError: the networks have options that SB3's have not
        """
        return sb3_compat.to_sb3(self)

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """
        Return the parameters of the agent, in SB3's layout: those of each critic by itself.

        :return: Mapping from names of the objects to PyTorch state-dicts.
        """
        params = super().get_parameters()
        if isinstance(self.critic, CriticEnsemble):
            params["critic.optimizer"] = sb3_optimizer_state(self.critic)
        return params

    def set_parameters(
        self,
        load_path_or_dict: SavePath | dict[str, Any],
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        """
        Load parameters from a given zip-file or a nested dictionary containing parameters for
        different modules (see ``get_parameters``).

        :param load_path_or_dict: Location of the saved data (path or file-like, see ``save``), or a nested
            dictionary containing nn.Module parameters used by the policy, in SB3's layout
        :param exact_match: If True, the given parameters should include parameters for each
            module and each of their parameters, otherwise raises an Exception.
        :param device: Device on which the code should run.
        """
        if isinstance(load_path_or_dict, dict):
            params = dict(load_path_or_dict)
        else:
            params = read_parameters(load_path_or_dict, self.get_parameters(), device)
        if "critic.optimizer" in params and isinstance(self.critic, CriticEnsemble):
            params["critic.optimizer"] = own_optimizer_state(self.critic, params["critic.optimizer"])
        for name, network in (("actor.optimizer", self.actor), ("critic.optimizer", self.critic)):
            if name in params:
                # A copy: optimizers that share their state would count each other's steps
                params[name] = copy_state(with_own_kernels(network.optimizer, params[name]))
        super().set_parameters(params, exact_match=exact_match, device=device)

    def _excluded_save_params(self) -> list[str]:
        return [
            *super()._excluded_save_params(),
            "_networks",
            "_update_graphs",
            "_running_stats",
            # Rebuilt from the arguments
            "lr_schedule",
            "qf_lr_schedule",
            "_shaping",
            "_shaping_source",
            "_untrusted_reward_shaping",
            "_replay_buffer",
            "_resumed",
        ]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "actor.optimizer", "critic.optimizer"], []
