"""Studies that several workers share, some of which are killed, in PostgreSQL, SQLite and journals."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from postgresql import postgresql_server
from rl_zoo3 import exp_manager
from rl_zoo3.exp_manager import ExperimentManager

from sb3_td3x.zoo import storage as tuning_storage
from sb3_td3x.zoo.search_space import BEST_TRIAL, convert_td3x_params
from sb3_td3x.zoo.storage import HEARTBEAT_VARIABLE, HeartbeatStorage, open_storage, read_trial

# One pytest worker for the whole module: its tests share a server
pytestmark = pytest.mark.xdist_group("tuning_storage")

STUDY = "s"
# Seconds for one command. Most take about five, but many times that on a busy machine
TIMEOUT = 400
HEARTBEAT = 1
GRACE = tuning_storage.MISSED_HEARTBEATS * HEARTBEAT

# Eight workers that open an empty database at the same moment, forked after Optuna is imported
OPEN_TOGETHER = """
import os, sys, time
import optuna
from sb3_td3x.zoo.storage import open_storage

optuna.logging.set_verbosity(optuna.logging.ERROR)
start = time.time() + 1
children = []
for _ in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        time.sleep(max(0, start - time.time()))
        study = optuna.create_study(storage=open_storage(sys.argv[1], "s"), study_name="s", load_if_exists=True)
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
        os._exit(0)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql_server() as url:
        yield url


@pytest.fixture
def database(server: str) -> Iterator[str]:
    """Create an empty database."""
    engine = sqlalchemy.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("CREATE DATABASE study"))
        yield server.replace("/postgres?", "/study?")
        connection.execute(sqlalchemy.text("DROP DATABASE study WITH (FORCE)"))
    engine.dispose()


def read_trials(storage: Any) -> list[FrozenTrial]:
    """Read the trials of a study that may not exist yet."""
    try:
        return optuna.load_study(study_name=STUDY, storage=storage).trials
    except KeyError:
        return []


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + TIMEOUT
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return result


class Folder:
    """
    A folder in which a user types commands.

    :param path: the folder
    :param storage: the study's
    """

    def __init__(self, path: Path, storage: str) -> None:
        self.path = path
        self.storage = storage

    def environment(self) -> dict[str, str]:
        variables = {HEARTBEAT_VARIABLE: str(HEARTBEAT), "OMP_NUM_THREADS": "1", "SB3_TD3X_AUTOLOAD": ""}
        return {**os.environ, **variables}

    def zoo_command(self, *options: str) -> list[str]:
        """Return a training command of the zoo that uses the study."""
        return [
            *(sys.executable, "-m", "rl_zoo3.train", "--algo", "td3x", "--env", "Pendulum-v1", "--num-threads", "1"),
            *("--storage", self.storage, "--study-name", STUDY, "--eval-episodes", "1", *options),
            *("-params", "learning_starts:100"),
        ]

    @contextmanager
    def worker(self, steps: int, trials: int) -> Iterator[subprocess.Popen[str]]:
        """Start a worker that tunes until the study has so many trials, and kill it at the end of the block."""
        process = subprocess.Popen(
            self.zoo_command(
                *("-optimize", "-n", str(steps), "--max-total-trials", str(trials), "--no-optim-plots"),
                *("--sampler", "random", "--pruner", "none"),
            ),
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def run(self, *command: str) -> str:
        """Run a command that must succeed, and return what it prints."""
        process = subprocess.run(
            command, cwd=self.path, env=self.environment(), capture_output=True, text=True, timeout=TIMEOUT
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout


def ends_well(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output


def wait_for_whole_trial(storage: Callable[[], Any], number: int) -> None:
    """Wait until a running trial has all its parameters, so that its worker is training."""

    def is_training() -> bool:
        trials = read_trials(storage())
        # The sampler sets it right before training
        return len(trials) > number and "batch_size" in trials[number].user_attrs

    wait_for(is_training, f"trial {number} never began to train")


def check_whole(trials: list[FrozenTrial], asked_for: int, workers: int) -> None:
    """Check that no trial is missing and none is there twice."""
    assert [trial.number for trial in trials] == list(range(len(trials)))
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    # Workers that finish at the same moment count the same trials, and each starts another
    assert asked_for <= len(done) < asked_for + workers
    assert len({tuple(trial.params.items()) for trial in done}) == len(done)
    assert all(trial.value is not None for trial in done)


@pytest.mark.slow
class TestZooWorkers:
    def test_killed_worker_of_a_database(self, database: str, tmp_path: Path) -> None:
        folder = Folder(tmp_path, database)
        with ExitStack() as stack:
            # Its trial is too long to end before the worker is killed
            victim = stack.enter_context(folder.worker(steps=10**6, trials=5))
            wait_for_whole_trial(lambda: database, 0)
            others = [stack.enter_context(folder.worker(steps=110, trials=5)) for _ in range(2)]
            wait_for(lambda: len(read_trials(database)) > 1, "no other worker began a trial")
            victim.kill()
            for other in others:
                ends_well(other)
        time.sleep(GRACE + HEARTBEAT)
        # Does the failed trial again, if the others ended before the victim counted as dead
        with folder.worker(steps=110, trials=5) as replacement:
            ends_well(replacement)

        trials = read_trials(database)
        check_whole(trials, asked_for=5, workers=2)
        (failed,) = (trial for trial in trials if trial.state != TrialState.COMPLETE)
        assert (failed.number, failed.state) == (0, TrialState.FAIL)
        (retried,) = (trial for trial in trials if trial.system_attrs.get("failed_trial") == 0)
        assert retried.params == failed.params

        folder.run(*folder.zoo_command("-n", "110", "--eval-freq", "-1", "--trial-id", str(retried.number)))
        (config,) = tmp_path.glob("logs/td3x/Pendulum-v1_*/Pendulum-v1/config.yml")
        saved = dict(yaml.load(config.read_text(), Loader=yaml.UnsafeLoader))
        assert saved.items() >= {**convert_td3x_params(retried.params), "learning_starts": 100}.items()

    def test_killed_worker_of_a_journal(self, tmp_path: Path) -> None:
        """Its trial stays running until the command of docs/guides/tuning.md clears it."""
        journal = "logs/td3x.log"
        folder = Folder(tmp_path, journal)

        def storage() -> JournalStorage:
            (tmp_path / "logs").mkdir(exist_ok=True)
            return JournalStorage(JournalFileBackend(str(tmp_path / journal)))

        with folder.worker(steps=10**6, trials=4) as victim, folder.worker(steps=110, trials=4) as other:
            wait_for_whole_trial(storage, 1)
            victim.kill()
            ends_well(other)
        trials = read_trials(storage())
        (stuck,) = (trial for trial in trials if trial.state == TrialState.RUNNING)

        here = ("--storage", str(tmp_path / journal), "--study-name", STUDY)
        optuna_program = str(Path(sys.executable).parent / "optuna")
        output = folder.run(optuna_program, "trials", *here, "-f", "value")
        assert [line.split()[0] for line in output.splitlines() if "RUNNING" in line] == [str(stuck.number)]
        folder.run(optuna_program, "tell", *here, "--state", "fail", "--trial-number", str(stuck.number))
        with folder.worker(steps=110, trials=4) as replacement:
            ends_well(replacement)

        trials = read_trials(storage())
        assert [trial.number for trial in trials if trial.state != TrialState.COMPLETE] == [stuck.number]
        assert trials[stuck.number].state == TrialState.FAIL
        check_whole(trials, asked_for=4, workers=1)


def test_workers_open_an_empty_database_together(database: str, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", OPEN_TOGETHER, database], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert process.stdout == f"{[0] * 8}\n", process.stderr
    assert [trial.state for trial in read_trials(database)] == [TrialState.COMPLETE] * 16


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


class TestOpening:
    def test_trials_of_dead_workers_are_tried_again(self, sqlite: str) -> None:
        """They are tried again as often as allowed; trials of living workers are left alone."""
        storage = open_storage(sqlite, STUDY)
        assert isinstance(storage, HeartbeatStorage)
        study = optuna.create_study(storage=storage, study_name=STUDY)
        alive = study.ask()
        for _ in range(1 + tuning_storage.MAX_RETRIES):
            trial = study.ask()
            trial.suggest_float("x", 0, 1)
            for each in (alive, trial):
                storage.record_heartbeat(each._trial_id)
            with storage.engine.begin() as connection:
                connection.execute(
                    sqlalchemy.text(
                        "UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00' WHERE trial_id = :id"
                    ),
                    {"id": trial._trial_id},
                )
            open_storage(sqlite, STUDY)
        trials = read_trials(sqlite)
        assert [trial.state for trial in trials] == [TrialState.RUNNING] + [TrialState.FAIL] * 4
        assert len({trial.params["x"] for trial in trials[1:]}) == 1

    def test_path_of_a_journal_is_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Optuna breaks the lock of a killed worker by the age of the file that the lock links to."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "logs").mkdir()
        path = open_storage("logs/td3x.log", STUDY)
        assert path == str(tmp_path / "logs/td3x.log")
        JournalFileBackend(path)._lock.acquire()
        assert (tmp_path / "logs/td3x.log.lock").stat().st_size == 0

    @pytest.mark.parametrize("value", ["0", "-1", "1.5", "often", ""])
    def test_bad_interval(self, value: str, sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(HEARTBEAT_VARIABLE, value)
        with pytest.raises(ValueError, match=f"^{HEARTBEAT_VARIABLE}=.* is not allowed, expected an integer >= 1"):
            open_storage(sqlite, STUDY)

    def test_interval(self, sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(HEARTBEAT_VARIABLE, "7")
        storage = open_storage(sqlite, STUDY)
        assert isinstance(storage, HeartbeatStorage)
        assert (storage.heartbeat_interval, storage.grace_period) == (7, 35)


def test_heartbeats_go_on_after_a_failure_of_the_database(sqlite: str) -> None:
    storage = open_storage(sqlite, STUDY)
    assert isinstance(storage, HeartbeatStorage)
    study = optuna.create_study(storage=storage, study_name=STUDY)
    trial_id = study.ask()._trial_id
    with storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text("ALTER TABLE trial_heartbeats RENAME TO away"))
    with pytest.warns(UserWarning, match="No heartbeat of the trial could be written: .*no such table"):
        storage.record_heartbeat(trial_id)
    with storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text("ALTER TABLE away RENAME TO trial_heartbeats"))
    storage.record_heartbeat(trial_id)


@pytest.mark.parametrize(
    ("algo", "storage", "expected"),
    [
        ("td3x", "sqlite:///study.db", HeartbeatStorage),
        ("td3x", "study.log", JournalStorage),
        ("td3", "sqlite:///study.db", str),
    ],
)
def test_what_the_zoo_opens(
    algo: str, storage: str, expected: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Studies of other algorithms get the plain URL."""
    monkeypatch.chdir(tmp_path)
    opened: list[Any] = []

    class StopError(Exception):
        pass

    def create_study(storage: Any, **kwargs: Any) -> None:
        opened.append(storage)
        raise StopError

    monkeypatch.setattr(exp_manager.optuna, "create_study", create_study)
    manager = ExperimentManager.__new__(ExperimentManager)
    manager.__dict__.update(algo=algo, storage=storage, study_name=STUDY, verbose=0, seed=0, tensorboard_log=None)
    manager.__dict__.update(sampler="random", pruner="none")
    with pytest.raises(StopError):
        manager.hyperparameters_optimization()
    assert [type(each) for each in opened] == [expected]
    assert manager.storage == storage


class TestReading:
    """Reading the trial of ``--trial-id``."""

    @pytest.fixture(params=["study.log", "sqlite:///study.db"])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """Make a study with a trial in each state, and another study."""
        monkeypatch.chdir(tmp_path)
        name: str = request.param
        opened: Any = JournalStorage(JournalFileBackend(name)) if name.endswith(".log") else name
        optuna.create_study(storage=opened, study_name="other")
        study = optuna.create_study(storage=opened, study_name=STUDY, direction="maximize")
        results: tuple[tuple[TrialState | None, float | None], ...] = (
            *((TrialState.COMPLETE, 1.0), (TrialState.PRUNED, None), (TrialState.FAIL, None)),
            *((TrialState.COMPLETE, 5.0), (TrialState.COMPLETE, -3.0), (None, None)),
        )
        for state, value in results:
            trial = study.ask()
            trial.suggest_int("x", 0, 10**6)
            if state is not None:
                study.tell(trial, value, state=state)
        return name

    def test_parameters(self, storage: str) -> None:
        opened = JournalStorage(JournalFileBackend(storage)) if storage.endswith(".log") else storage
        trials = read_trials(opened)
        assert read_trial(storage, STUDY, 4) == (4, trials[4].params)
        assert read_trial(storage, STUDY, 0) == (0, trials[0].params)
        assert read_trial(storage, STUDY, BEST_TRIAL) == (3, trials[3].params)

    @pytest.mark.parametrize(
        ("study", "trial", "problem"),
        [
            ("S", 0, "--study-name S: .* has no such study; its studies are: other, s"),
            (STUDY, 7, "The study s has no trial 7"),
            (STUDY, 1, "The trial 1 of the study s has the state PRUNED"),
            (STUDY, 2, "The trial 2 of the study s has the state FAIL"),
            (STUDY, 5, "The trial 5 of the study s has the state RUNNING"),
        ],
    )
    def test_no_such_trial(self, study: str, trial: int, problem: str, storage: str) -> None:
        completed = "; its completed trials are, the best first: 3, 0, 4" if study == STUDY else ""
        with pytest.raises(ValueError, match=f"^{problem}{completed}$"):
            read_trial(storage, study, trial)

    def test_study_without_a_completed_trial(self, storage: str) -> None:
        with pytest.raises(ValueError, match=r"^The study other has no best trial; .* the best first: none$"):
            read_trial(storage, "other", BEST_TRIAL)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("missing.log", "--storage missing.log: there is no such file"),
            ("sqlite:///missing.db", "--storage sqlite:///missing.db: there is no such file"),
            ("logs/study.lgo", "--storage logs/study.lgo cannot be opened: .*URL"),
            ("nosuch://host/study", "--storage nosuch://host/study cannot be opened: "),
        ],
    )
    def test_no_such_storage(self, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=message) as error:
            read_trial(name, STUDY, 0)
        assert "\n" not in str(error.value)
        assert list(tmp_path.iterdir()) == []
