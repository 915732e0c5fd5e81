"""TD3X: Twin Delayed DDPG (Fujimoto et al. 2018) for users of Stable-Baselines3 and RL Zoo."""

import math
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, Schedule
from stable_baselines3.common.utils import update_learning_rate
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x import sb3_compat
from sb3_td3x.assessment import Assessment
from sb3_td3x.buffers import (
    can_be_sampled,
    check_replay_buffer_arguments,
    check_shaping,
    check_terminations_can_be_stored,
    end_open_episodes,
    make_replay_buffer,
)
from sb3_td3x.checkpoint.guard import guarded_training
from sb3_td3x.checkpoint.resume import Resumed
from sb3_td3x.files.replay import is_known_buffer
from sb3_td3x.learner.equations import soft_update
from sb3_td3x.learner.learner import Learner
from sb3_td3x.learner.update import Hyperparameters, Update
from sb3_td3x.noise import exploration_scale, vectorize_noise
from sb3_td3x.normalization import check_renormalizable, renormalize
from sb3_td3x.policies import (
    CnnPolicy,
    MlpPolicy,
    MultiInputPolicy,
    PolicyNetwork,
    TD3XPolicy,
    is_stochastic,
)
from sb3_td3x.rollout import EnvStep, OverlappingVecEnv, check_unnormalized_shapes, complete_step, shape_step
from sb3_td3x.saving import SavableAlgorithm
from sb3_td3x.schedules import learning_rate_at, make_schedule
from sb3_td3x.shaping import RewardShaping, check_built_in, make_reward_shaping
from sb3_td3x.validation import (
    KnownArguments,
    check_action_space,
    check_arguments,
    check_device,
    check_finite,
    check_integer,
)

SelfTD3X = TypeVar("SelfTD3X", bound="TD3X")


class TD3X(KnownArguments, SavableAlgorithm):
    """
    Twin Delayed DDPG (TD3)
    Addressing Function Approximation Error in Actor-Critic Methods (Fujimoto et al. 2018),
    https://arxiv.org/abs/1802.09477

    SB3's ``TD3`` with decaying exploration noise, a reward shaping hook, a separate learning rate for the critics, and
    checks of all arguments and data. Arguments shared with SB3 mean the same.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, ...)
    :param env: The environment to learn from (if registered in Gym, can be str)
    :param learning_rate: learning rate of the actor, and of the critics unless ``qf_learning_rate`` is given, >= 0:
        a number, a function of the current progress remaining (from 1 to 0),
        or a string such as ``lin_7e-4`` for a linear schedule from 7e-4 to 0
    :param buffer_size: size of the replay buffer, in transitions
    :param learning_starts: number of env timesteps with random actions and without updates at the start
    :param batch_size: Minibatch size for each gradient update
    :param tau: the soft update coefficient ("Polyak update"), in [0, 1]; 0 freezes the target networks, 1 removes them
        (then set ``policy_delay=1``, or they lag behind)
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
    :param n_steps: When > 1, use n-step returns. Only without a custom ``replay_buffer_class``.
    :param policy_delay: Update the actor and the target networks once every ``policy_delay`` updates of the critics.
        The count continues across calls of ``train()`` and after loading.
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
    :param action_noise_decay: multiply the exploration noise by ``action_noise_decay ** t``, where t counts the env
        timesteps taken by the policy, of all envs together; in (0, 1], 1: no decay
    :param action_noise_min_scale: lower bound of that factor, in [0, 1]
    :param reward_shaping: rewards and terminations to learn from instead of the env's, see ``sb3_td3x.shaping``:
        an object, a function, or as in YAML ``{"sb3_td3x.shaping.RewardScale": {"scale": 0.1}}``, or a list of these.
        Episode statistics and evaluations stay raw.
    :param clipped_double_q: Whether the target is the minimum over the target critics. If False, it is the first one's
        value, and the others are still trained
    :param top_quantiles_to_drop_per_net: with ``n_quantiles`` among the ``policy_kwargs``: the target is the smallest
        quantiles of all target critics (TQC, Kuznetsov et al. 2020), without this number of the largest ones for each
        critic, in [0, n_quantiles)
    :param precision: ``"float32"``, or on GPUs ``"bfloat16"`` for matrix products of the updates in bfloat16, with
        parameters and optimizers in float32. On a CPU the updates are in float32 in any case, with a warning.
    :param overlap_updates: Whether to do the updates that follow a rollout during its last env step, after its action
        is chosen. The newest policy acts in any case, but the updates draw from what was stored one step earlier.
        Saves time with a GPU and with ``SubprocVecEnv``. Not with ``train_freq`` in episodes.
    :param prioritized_replay_alpha: exponent α of prioritized sampling, in [0, 1]: a transition with TD error δ is
        drawn with a probability proportional to ``max(|δ|, 1)^α``, and the critics' loss is Huber's (LAP, Fujimoto et
        al. 2020, with α = 0.4). 0: uniform sampling and squared errors. Not with ``replay_buffer_class``.
    :param policy_checkpoint_episodes: policy checkpoints (TD7, Fujimoto et al. 2023, with 20): play the policy with the
        highest so far of the lowest returns in this many whole training episodes, in one episode during the first
        three quarters of a training. Updates wait until it is decided. ``predict``, evaluations and ``to_sb3`` use the
        checkpoint, which ``save`` includes; the training continues with the newest policy. 0: the newest policy plays.
        Not with ``overlap_updates``; with observations normalized by ``VecNormalize`` only if the features extractor
        is ``FlattenExtractor``.
    :param actor_average_tau: play a moving average of the actor's parameters (weight averaging, Nikishin et al. 2018),
        θ' ← τ θ + (1 - τ) θ' with this τ in each update of the critics, in [0, 1]: 1e-4 averages over some 10,000
        updates. ``predict``, evaluations and ``to_sb3`` use the average, which ``save`` includes; the training itself
        is the same as without. 0: the newest policy plays. Not with ``policy_checkpoint_episodes``.
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
    actor = PolicyNetwork()
    actor_target = PolicyNetwork()
    critic = PolicyNetwork()
    critic_target = PolicyNetwork()

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
        overlap_updates: bool = False,
        prioritized_replay_alpha: float = 0.0,
        policy_checkpoint_episodes: int = 0,
        top_quantiles_to_drop_per_net: int = 2,
        actor_average_tau: float = 0.0,
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
        check_device(device)
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
        self.overlap_updates = overlap_updates
        self.prioritized_replay_alpha = prioritized_replay_alpha
        self.policy_checkpoint_episodes = policy_checkpoint_episodes
        self.top_quantiles_to_drop_per_net = top_quantiles_to_drop_per_net
        self.actor_average_tau = actor_average_tau
        # t of the noise decay; counts during the whole life of the agent
        self._exploration_timesteps = 0
        # Env timesteps of the last rollout, for the logged ratio of updates
        self._rollout_timesteps = 0
        self._learner = Learner()
        self._assessment = Assessment()
        # The statistics of `VecNormalize` that the policy checkpoint is for
        self._checkpoint_statistics: RunningMeanStd | None = None
        # Whether the updates of this rollout were done during its last step
        self._is_updated = False
        self._overlapping_env: OverlappingVecEnv | None = None
        # The value of `reward_shaping`, and the hook that was built from it
        self._built_shaping: tuple[Any, RewardShaping | None] | None = None
        # The checkpoint that it was resumed from, until the next `learn`
        self._resumed: Resumed | None = None

        if _init_setup_model:
            self._setup_model()
            self._replay_buffer = make_replay_buffer(self)
            self._check_shaping()

    # The algorithm

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """
        Sample the replay buffer and update the networks.

        :param gradient_steps: number of updates of the critics
        :param batch_size: number of transitions in each update
        """
        if self._is_updated:
            self._is_updated = False
            return
        if self._rollout_timesteps > 0:
            self._logger.record("train/updates_per_env_step", gradient_steps / self._rollout_timesteps)
        if self.policy_checkpoint_episodes > 0:
            n_episodes = self.policy_checkpoint_episodes if self._current_progress_remaining <= 0.25 else 1
            is_best, gradient_steps = self._assessment.decide(gradient_steps, n_episodes)
            if is_best:
                self.policy.keep_actor()
                self._checkpoint_statistics = None
                self._logger.record("train/checkpoint_return", self._assessment.best_return)
            self._renormalize_checkpoint()
            if gradient_steps == 0:
                return
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)
        self._update_learning_rates()
        update = self._current_update()
        update.hyperparameters = Hyperparameters(
            self.gamma,
            self.tau,
            self.target_policy_noise,
            self.target_noise_clip,
            self.clipped_double_q,
            self.top_quantiles_to_drop_per_net,
        )
        with_actor = self._count_updates(gradient_steps)
        self._learner.train(update, self.replay_buffer, batch_size, self._vec_normalize_env, with_actor)
        if self.actor_average_tau > 0:
            self._average_actor(gradient_steps)
        self._logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _average_actor(self, n_updates: int) -> None:
        """Move the actor that plays towards the newest one, and copy running statistics, as for the target networks."""
        average, tau = self.policy.playing_actor, 1 - (1 - self.actor_average_tau) ** n_updates
        soft_update([*self.actor.parameters()], [*average.parameters()], tau)
        for newest, own in zip(self.actor.buffers(), average.buffers(), strict=True):
            own.copy_(newest)

    def _renormalize_checkpoint(self) -> None:
        """Let the policy checkpoint act as before while the statistics of ``VecNormalize`` change."""
        env = self._vec_normalize_env
        if env is None or not env.norm_obs:
            return
        old, new = self._checkpoint_statistics, cast(RunningMeanStd, env.obs_rms)
        # Not at each env step: it takes time, and a thousandth more observations change the statistics little
        if old is not None and new.count > 1.001 * old.count:
            renormalize(self.policy.playing_actor, old, new, env.epsilon)
            old = None
        self._checkpoint_statistics = old or deepcopy(new)

    @property
    def logger(self) -> Logger:
        """The logger. The last updates' losses are recorded first: whoever asks may write the log."""
        for name, value in self._learner.read_losses().items():
            self._logger.record(f"train/{name}", value)
        return self._logger

    def _count_updates(self, number: int) -> Iterator[bool]:
        """Count updates one by one; yield whether the delayed update of the actor and the targets is due."""
        for _ in range(number):
            self._n_updates += 1
            yield self._n_updates % self.policy_delay == 0

    def _current_update(self) -> Update:
        """Return the update of the policy as it is now."""
        return self._learner.current_update(self.policy, self.precision)

    def _update_learning_rates(self) -> None:
        """Set the optimizers' learning rates to the values of the schedules."""
        # The last rollout may end after the last timestep
        progress_remaining = max(self._current_progress_remaining, 0.0)
        for name, schedule, network in (
            ("learning_rate", self.lr_schedule, self.actor),
            ("qf_learning_rate", self.qf_lr_schedule or self.lr_schedule, self.critic),
        ):
            learning_rate = learning_rate_at(name, schedule, progress_remaining)
            update_learning_rate(network.optimizer, learning_rate)
            self._logger.record(f"train/{name}", learning_rate)

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Sample random actions during the warm-up, then the policy's actions plus the decaying exploration noise.

        :return: actions for the envs, and the same actions scaled to [-1, 1] for the replay buffer,
            (n_envs, *action_shape)
        """
        is_warm_up = self.num_timesteps < learning_starts
        if is_warm_up:
            actions = np.array([self.action_space.sample() for _ in range(n_envs)])
            scaled_actions = self.policy.scale_action(actions)
        else:
            assert self._last_obs is not None, "self._last_obs was not set"
            # As in SB3, a subclass's own `predict` acts in the rollout
            if getattr(self.predict, "__func__", None) is TD3X.predict:
                scaled_actions = self._learner.scaled_actions(self._current_update(), self._last_obs)
            else:
                scaled_actions = self.policy.scale_action(self.predict(self._last_obs, deterministic=False)[0])
            # The share of actions at the bounds, where tanh has hardly any gradient
            saturated = np.count_nonzero(np.abs(scaled_actions) > 0.99) / scaled_actions.size
            self._logger.record_mean("rollout/saturated_actions", saturated)
        if action_noise is not None and not is_stochastic(self.policy):
            scaled_actions = np.clip(scaled_actions + self.action_noise_scale * action_noise(), -1, 1)
        check_finite("action", scaled_actions, self.num_timesteps)
        if not is_warm_up:
            self._exploration_timesteps += n_envs
        return self.policy.unscale_action(scaled_actions), scaled_actions

    @property
    def action_noise_scale(self) -> float:
        """The current factor of the exploration noise, from 1 down to ``action_noise_min_scale``."""
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
        Check, shape and store one transition of each env: unnormalized observations, scaled actions.

        :param new_obs: next observations; for a finished env the first of the next episode
        :param infos: the envs' infos, with the last observations of finished episodes
        """
        original_obs: Any = new_obs
        if self._vec_normalize_env is None:
            self._last_original_obs = self._last_obs
        else:
            original_obs = self._vec_normalize_env.get_original_obs()
            reward = self._vec_normalize_env.get_original_reward()
        if self.policy_checkpoint_episodes > 0:
            assert self._last_episode_starts is not None
            # Not the warm-up's
            if self.num_timesteps - self.n_envs >= self.learning_starts:
                self._assessment.add(reward, self._last_episode_starts, dones)
            self._last_episode_starts = dones
        actions = buffer_action if self._shaping is None else self.policy.unscale_action(buffer_action)
        step = EnvStep(self._last_original_obs, actions, reward, original_obs, dones, infos)
        step = complete_step(step, self._vec_normalize_env, self.num_timesteps)
        if self._shaping is not None:
            step = shape_step(self._shaping, step, self.gamma, self.num_timesteps)
            if step.dones is not dones:
                check_terminations_can_be_stored(replay_buffer, self._shaping)
            self._logger.record_mean("rollout/shaped_reward_mean", float(step.rewards.mean()))
        obs, next_obs = step.observations, step.next_observations
        # SB3's Dict buffers write into the dictionaries that they get
        if isinstance(next_obs, dict):
            obs, next_obs = dict(obs), dict(next_obs)
        replay_buffer.add(obs, next_obs, buffer_action, step.rewards, step.dones, step.infos)
        self._last_obs = new_obs
        self._last_original_obs = original_obs

    def collect_rollouts(self, env: VecEnv, *args: Any, **kwargs: Any) -> RolloutReturn:
        """
        Collect experiences as SB3 does, and count the env timesteps of the rollout. With ``overlap_updates``, update
        during its last env step.

        If an error or a callback interrupts the rollout, its last step is not stored. Then the next ``learn`` begins
        new episodes, except with a user's own replay buffer class, which continues as in SB3.
        """
        if self.overlap_updates:
            if self._overlapping_env is None or self._overlapping_env.venv is not env:
                self._overlapping_env = OverlappingVecEnv(env, self._update_during_step)
            env = self._overlapping_env
            env.n_steps_left = self.train_freq.frequency  # type: ignore[union-attr]
        is_whole = False
        try:
            rollout = super().collect_rollouts(env, *args, **kwargs)
            is_whole = rollout.continue_training
        finally:
            if not is_whole:
                self._is_updated = False
            if not is_whole and is_known_buffer(self._replay_buffer):
                self._last_obs = None
        self._rollout_timesteps = rollout.episode_timesteps
        return rollout

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        # Only deterministic actions are those of the policy checkpoint or the average
        return super().predict(observation, state, episode_start, deterministic or not is_stochastic(self.policy))

    def _update_during_step(self) -> None:
        """Do the updates of a rollout during its last env step, unless nothing can be sampled yet."""
        self._rollout_timesteps = self.train_freq.frequency * self.n_envs  # type: ignore[union-attr]
        num_timesteps = self.num_timesteps + self.n_envs
        gradient_steps = self.gradient_steps if self.gradient_steps >= 0 else self._rollout_timesteps
        if gradient_steps > 0 and num_timesteps > self.learning_starts and can_be_sampled(self.replay_buffer):
            # The learning rates are those of the end of the step
            self._update_current_progress_remaining(num_timesteps, self._total_timesteps)
            self.train(gradient_steps, self.batch_size)
            self._is_updated = True

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
        Return a trained model. If the callbacks include a ``sb3_td3x.checkpoint.ResumableCheckpoint``, a training that
        ends by an error or a signal is saved first.

        :param total_timesteps: The total number of samples (env steps) to train on
        :param callback: callback(s) called at every step with state of the algorithm.
        :param log_interval: log every so many episodes
        :param tb_log_name: the name of the run for TensorBoard logging
        :param reset_num_timesteps: whether or not to reset the current timestep number (used in logging)
        :param progress_bar: Display a progress bar using tqdm and rich.
        :return: the trained model
        """
        # Infinity is for a callback that stops. Negative numbers remain if a resumed training is past its end
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
        Set up as SB3 does. Also fit the noise to the number of envs, end stored episodes that the envs' reset ends, and
        check the first observations.
        """
        assert self.env is not None, "You must set the environment before calling learn()"
        self.action_noise = vectorize_noise(self.action_noise, self.env.num_envs)
        self._check_shaping()
        if self.policy_checkpoint_episodes > 0 and self._vec_normalize_env is not None:
            check_renormalizable(self.policy.playing_actor, self._vec_normalize_env)
        if (reset_num_timesteps or self._last_obs is None) and is_known_buffer(self._replay_buffer):
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
        check_arguments(self)
        check_replay_buffer_arguments(self)
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self._convert_train_freq()
        self.policy = self.policy_class(  # type: ignore[assignment]
            self.observation_space, self.action_space, self.lr_schedule, **self.policy_kwargs
        ).to(self.device)
        self._create_aliases()
        for name in ("policy_checkpoint_episodes", "actor_average_tau"):
            if getattr(self, name) > 0:
                if not isinstance(self.policy, TD3XPolicy):
                    raise ValueError(
                        f"{name}={getattr(self, name)} is not allowed with policy={self.policy_class.__name__}, "
                        "expected a TD3XPolicy"
                    )
                self.policy.keep_actor()
        if is_stochastic(self.policy) and self.action_noise is not None:
            warnings.warn("action_noise is not used: the policy is stochastic (stochastic_actor=True)", stacklevel=2)

    def _create_aliases(self) -> None:
        """Do nothing, for users of SB3's method: the networks of the agent always are those of ``policy``."""

    def _setup_lr_schedule(self) -> None:
        """Turn numbers and strings into schedules."""
        self.lr_schedule = make_schedule("learning_rate", self.learning_rate)
        self.qf_lr_schedule: Schedule | None = None
        if self.qf_learning_rate is not None:
            self.qf_lr_schedule = make_schedule("qf_learning_rate", self.qf_learning_rate)

    @property
    def _shaping(self) -> RewardShaping | None:
        """The shaping hook, built at its first use: an agent that only plays does not need its hook's module."""
        if self._built_shaping is not None and self._built_shaping[0] is self.reward_shaping:
            return self._built_shaping[1]
        if self.reward_shaping is self._untrusted_reward_shaping:
            check_built_in(self.reward_shaping)
        shaping = make_reward_shaping(self.reward_shaping)
        if isinstance(self.reward_shaping, dict) and not all(isinstance(key, str) for key in self.reward_shaping):
            # SB3's zip files need strings as keys
            self.reward_shaping = shaping
        self._built_shaping = (self.reward_shaping, shaping)
        return shaping

    def _check_shaping(self) -> None:
        """Check that the replay buffer can store what the shaping hook returns."""
        if self._shaping is not None:
            check_shaping(self, self._shaping)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_overlapping_env": None}
