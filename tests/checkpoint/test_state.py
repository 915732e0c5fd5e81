"""The state of callbacks in checkpoints."""

from pathlib import Path

import numpy as np
import pytest
from callbacks import At
from checkpoints import counting_agent, fail, resume_and_train, saved_timesteps
from envs import counting_vec_env
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback

from sb3_td3x.callbacks import StopWhenSolved
from sb3_td3x.checkpoint import ResumableCheckpoint


def evaluation(folder: Path, n_eval_episodes: int = 1) -> EvalCallback:
    return EvalCallback(
        counting_vec_env(1), eval_freq=10, n_eval_episodes=n_eval_episodes, verbose=0, log_path=str(folder)
    )


def evaluated_at(folder: Path) -> list[int]:
    """Return the timesteps of the evaluations on disk."""
    timesteps: list[int] = np.load(folder / "evaluations.npz")["timesteps"].tolist()
    return timesteps


def test_callbacks_continue(tmp_path: Path) -> None:
    """evaluations.npz holds each evaluation once."""

    def callbacks() -> list[BaseCallback]:
        return [evaluation(tmp_path, 2), StopWhenSolved(1e6, window=5)]

    folder = tmp_path / "checkpoints"
    with pytest.raises(LookupError):
        # The last checkpoint is older than the last evaluation
        counting_agent().learn(
            60, [ResumableCheckpoint(folder, 25, exact=True), CallbackList(callbacks()), At(35, fail)]
        )
    assert evaluated_at(tmp_path) == [10, 20, 30]

    evaluator, solved = resumed = callbacks()
    resume_and_train(folder, counting_vec_env(1), 38, CallbackList(resumed), save_freq=25, exact=True)
    assert isinstance(solved, StopWhenSolved)
    assert evaluator.n_calls == 38
    assert evaluated_at(tmp_path) == [10, 20, 30]
    assert len(solved.returns) == solved.returns.maxlen == 5


@pytest.mark.parametrize("stopped_at", [15, 20])
@pytest.mark.parametrize("is_seen", [True, False])
def test_callbacks_forget_a_step_that_was_not_stored(stopped_at: int, is_seen: bool, tmp_path: Path) -> None:
    """A callback that saw the step sees it again. Otherwise all later evaluations would come a step early."""
    folder = tmp_path / "checkpoints"
    callbacks = [CallbackList([evaluation(tmp_path)]), At(stopped_at, fail)]
    with pytest.raises(LookupError):
        counting_agent().learn(
            40, [ResumableCheckpoint(folder, 1000), *(callbacks if is_seen else reversed(callbacks))]
        )
    assert saved_timesteps(folder) == stopped_at - 1
    assert evaluated_at(tmp_path) == ([10, 20] if is_seen and stopped_at == 20 else [10])

    resumed = evaluation(tmp_path)
    resume_and_train(folder, counting_vec_env(1), 40, CallbackList([resumed]))
    assert resumed.n_calls == 40
    assert evaluated_at(tmp_path) == [10, 20, 30, 40]
    results = np.load(tmp_path / "evaluations.npz")
    assert len(results["results"]) == len(results["ep_lengths"]) == 4
