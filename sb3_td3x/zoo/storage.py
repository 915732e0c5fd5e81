"""
Storages of Optuna studies: one that several workers share although some are killed, and reading a stored trial.

This module imports Optuna, so import it where a study is about to be opened.
"""

import os
import random
import time
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sb3_td3x.validation import check_integer
from sb3_td3x.zoo.search_space import BEST_TRIAL

# Seconds between two heartbeats of a worker, the same for all workers of a study. 1,000 workers then write 17 rows a
# second, which a database does not notice.
HEARTBEAT_SECONDS = 60
HEARTBEAT_VARIABLE = "SB3_TD3X_HEARTBEAT_SECONDS"
# A worker counts as dead after this many missed heartbeats: longer than a restart of the database or a stalled network
MISSED_HEARTBEATS = 5
# A trial that kills its workers, by its memory for instance, is given up after this many more attempts
MAX_RETRIES = 3
# Seconds to wait for a turn to write to an SQLite file. With Python's default of 5 a slow disk ended one of 4 workers.
SQLITE_TIMEOUT = 60
# Workers that open an empty database at the same moment get in each other's way while they create its tables
OPENING_ATTEMPTS = 10
# How many trials or studies an error names
_MAX_NAMED = 10


class HeartbeatStorage(RDBStorage):
    """Optuna's storage in a database, as RL Zoo takes it, with heartbeats that outlive a failure of the database."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Record a heartbeat, or warn: an error would end Optuna's heartbeat thread for the rest of the trial."""
        try:
            super().record_heartbeat(trial_id)
        except StorageInternalError as error:
            warnings.warn(f"No heartbeat of the trial could be written: {error.__cause__}", stacklevel=2)

    def endswith(self, suffix: str) -> bool:
        """Return False: RL Zoo takes its storage for a string, and asks whether it is the path of a journal."""
        return False


def open_storage(storage: str, study_name: str) -> str | HeartbeatStorage:
    """
    Open the storage of a study for a worker, with heartbeats if it is a database.

    Trials of workers that have died since are failed and queued again. A journal cannot have heartbeats.

    :param storage: the value of ``--storage``: a database's URL, or the path of a journal, which ends in ``.log``
    :return: what the zoo takes instead: the storage, or the absolute path of a journal
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
    """Return the seconds between two heartbeats, from the environment variable if it is set."""
    text = os.environ.get(HEARTBEAT_VARIABLE)
    if text is None:
        return HEARTBEAT_SECONDS
    return check_integer(HEARTBEAT_VARIABLE, int(text) if text.isdecimal() else text, low=1)


def _connect(url: str, interval: int) -> HeartbeatStorage:
    """Open a database with heartbeats, and create its tables where it has none."""
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


def read_trial(storage: str, study_name: str, trial_id: int) -> tuple[int, dict[str, Any]]:
    """
    Read the parameters of a completed trial.

    :param trial_id: number of the trial; ``BEST_TRIAL``: the one with the highest value
    :raises ValueError: there is no such storage, study or completed trial; names those that exist
    """
    existing = _open_existing(storage)
    names = optuna.get_all_study_names(existing)
    if study_name not in names:
        raise ValueError(f"--study-name {study_name}: {storage} has no such study; its studies are: {_listed(names)}")
    trials = optuna.load_study(study_name=study_name, storage=existing).get_trials(deepcopy=False)
    completed = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    best_first = sorted(completed, key=lambda trial: -(trial.value or 0.0))
    for trial in best_first:
        if trial_id in (trial.number, BEST_TRIAL):
            return trial.number, dict(trial.params)
    states = {trial.number: trial.state.name for trial in trials}
    if trial_id in states:
        problem = f"The trial {trial_id} of the study {study_name} has the state {states[trial_id]}"
    else:
        problem = f"The study {study_name} has no {'best trial' if trial_id == BEST_TRIAL else f'trial {trial_id}'}"
    numbers = [trial.number for trial in best_first]
    raise ValueError(f"{problem}; its completed trials are, the best first: {_listed(numbers)}")


def _open_existing(storage: str) -> BaseStorage:
    """Open a storage without creating its file."""
    try:
        is_journal = storage.endswith(".log")
        path = storage if is_journal else make_url(storage).database
        is_file = is_journal or storage.startswith("sqlite")
        if is_file and path is not None and not Path(path).is_file():
            raise ValueError(f"--storage {storage}: there is no such file")
        return JournalStorage(JournalFileBackend(storage)) if is_journal else RDBStorage(storage)
    except (SQLAlchemyError, ImportError, StorageInternalError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--storage {storage} cannot be opened: {reason:.200}") from None


def _listed(names: list[Any]) -> str:
    """List the first names for an error."""
    listed = ", ".join(map(str, names[:_MAX_NAMED])) or "none"
    return listed if len(names) <= _MAX_NAMED else f"{listed}, and {len(names) - _MAX_NAMED} more"
