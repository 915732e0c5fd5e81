"""Trainings that survive interruptions."""

from sb3_td3x.checkpoint.callback import ResumableCheckpoint

__all__ = ["ResumableCheckpoint"]
