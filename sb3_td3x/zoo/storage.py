"""
The storage of an Optuna study that several workers share: what RL Zoo's plain URL or path lacks for workers that are
killed. Imported where a study is about to be opened, because it imports Optuna.
"""

import os
import random
import time
import warnings
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy.exc import DBAPIError

from sb3_td3x.validation import check_integer

# Seconds between two signs of life of a worker: 1,000 workers then write 17 rows a second, which a database does not
# notice. All workers of a study must have the same.
HEARTBEAT_SECONDS = 60
HEARTBEAT_VARIABLE = "SB3_TD3X_HEARTBEAT_SECONDS"
# A worker counts as dead after so many missed signs: more than a restart of the database or a stalled network takes
MISSED_HEARTBEATS = 5
# A trial that kills whoever runs it, by its memory for instance, is given up after so many more attempts
MAX_RETRIES = 3
# Seconds to wait for a turn to write in an SQLite file: with Python's 5 a slow disk ended one of four workers
SQLITE_TIMEOUT = 60
# Workers that open an empty database in the same moment get in each other's way while they create its tables
OPENING_ATTEMPTS = 10


class HeartbeatStorage(RDBStorage):
    """Optuna's storage in a database, as RL Zoo takes it, with heartbeats that outlive a failure of the database."""

    def record_heartbeat(self, trial_id: int) -> None:
        """
        :param trial_id: the running trial's id
        """
        try:
            super().record_heartbeat(trial_id)
        except StorageInternalError as error:
            # In a thread of Optuna, which would end here for the rest of the trial
            warnings.warn(f"No heartbeat of the trial could be written: {error.__cause__}", stacklevel=2)

    def endswith(self, suffix: str) -> bool:
        """
        RL Zoo takes its storage for a string, and asks it whether it is the path of a journal.

        :param suffix: not used
        :return: that it is none
        """
        return False


def open_storage(storage: str, study_name: str) -> str | HeartbeatStorage:
    """
    :param storage: what ``--storage`` was given: a database's URL, or the path of a journal, which ends in ``.log``
    :param study_name: name of the study, which may not exist yet
    :return: what to give to the zoo instead: storage with heartbeats, where the trials of workers that died since are
        failed and queued again; or, for a journal, which cannot have heartbeats, its absolute path
    """
    if storage.endswith(".log"):
        # Optuna's lock is a symbolic link to the journal. With a relative path it leads nowhere, and then a lock that a
        # killed worker left behind is never broken: all others wait forever.
        return os.path.abspath(storage)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        opened = _connect(storage, heartbeat_seconds())
        try:
            study = optuna.load_study(study_name=study_name, storage=opened)
        except KeyError:
            return opened
        # Optuna does this before each trial. But the zoo counts running trials towards --max-total-trials before the
        # first one: a worker that is started to replace a dead one would find enough of them, and end.
        optuna.storages.fail_stale_trials(study)
    return opened


def heartbeat_seconds() -> int:
    """
    :return: seconds between two heartbeats, from the environment variable if it is set
    """
    text = os.environ.get(HEARTBEAT_VARIABLE)
    if text is None:
        return HEARTBEAT_SECONDS
    return check_integer(HEARTBEAT_VARIABLE, int(text) if text.isdecimal() else text, low=1)


def _connect(url: str, interval: int) -> HeartbeatStorage:
    """
    :param url: the database's URL
    :param interval: seconds between two heartbeats
    :return: storage in it, whose tables exist
    """
    # A server allows few connections (PostgreSQL 100): each worker keeps one, and opens others only while its threads
    # need them at the same moment. `pool_pre_ping` replaces one that died while the agent trained.
    engine_kwargs: dict[str, Any] = {"pool_size": 1, "max_overflow": -1, "pool_pre_ping": True}
    if url.startswith("sqlite"):
        engine_kwargs = {"connect_args": {"timeout": SQLITE_TIMEOUT}}
    attempt = 1
    while True:
        try:
            return HeartbeatStorage(
                url,
                engine_kwargs,
                heartbeat_interval=interval,
                grace_period=MISSED_HEARTBEATS * interval,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES),
            )
        except (DBAPIError, StorageInternalError):
            if attempt == OPENING_ATTEMPTS:
                raise
            attempt += 1
            time.sleep(random.random())
