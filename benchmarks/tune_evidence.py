"""Kills trainers, servers and engines at random times while jobs train adapters on the demo's base.

    make tune-evidence          or: make tune-evidence JSON=FILE ARGS='--kills 20 --seed 120'

The first job is not disturbed. All others have its data and its seed, so they have to train the
same tokens and end in the same bytes, or fail with a code. Prints one JSON object; exits with 1 and
names the bars that are missed on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.patience import await_true
from benchmarks.trainers import trainers_of
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob
from sqlalchemy import func, select

from loraplex.api.demo.task import Style, training_requests
from loraplex.api.local.server import leave_on_sigterm
from loraplex.platform.adapters.models import Adapter, AdapterVersion
from loraplex.platform.database import Database
from loraplex.platform.models import UsageDay
from loraplex.platform.tuning.models import TuningEvent, TuningJob
from support.mortal_server import MortalServer, is_alive, mortal_server
from support.server import PRODUCT_ENGINE, Caller
from support.tuning import chat_line
from support.tuning_jobs import ENDED, upload

BASE = Path(__file__).parents[1] / "api" / "demo" / "weights" / "base"
VICTIMS = ("trainer", "server", "engine")
NUM_EPOCHS, BATCH_SIZE = 3, 2
SEED = 7
"""Of the jobs."""
SHARE_WHILE_TRAINING = 0.5
"""Of the kills that wait for steps; the others hit a trainer that has just started."""
RESUMED = "Training goes on after step"
"""How an event begins when a trainer goes on from a checkpoint."""
MOST_STEPS = 60
"""Between two kills while it trains. A checkpoint is written every 50 steps."""
SECONDS = 3600.0
"""The longest wait for a job or for a trainer."""
BARS = ("lost_jobs", "other_tokens", "other_adapters", "charged_otherwise", "surviving_trainers")


class Kills:
    """A server with one open job at a time, and what becomes of its jobs."""

    def __init__(self, mortal: MortalServer, *, num_examples: int, rng: random.Random) -> None:
        self._mortal = mortal
        self._rng = rng
        self._caller: Caller = mortal.as_server().make_caller("acme")
        self._client = OpenAI(base_url=f"{mortal.url}/v1", api_key=self._caller.key)
        self._database = Database(mortal.settings.database_url)
        requests = islice(training_requests(seed=5), num_examples)
        lines = (chat_line(each.prompt, each.answer(Style.SQL)) for each in requests)
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self._file = upload(self._client, content)
        self._jobs: list[str] = []
        self._surviving_trainers = 0

    def run(self, num_kills: int, seconds: float) -> dict[str, Any]:
        """Train undisturbed, then kill so many times and compare. `seconds`: after the start of a
        trainer, at most, of the kills that do not wait for steps."""
        undisturbed = self._new_job()
        self._await_end(undisturbed)
        victims = list(islice(cycle(VICTIMS), num_kills))
        self._rng.shuffle(victims)
        points = [self._kill_once(victim, seconds) for victim in victims]
        for job_id in self._jobs:
            self._await_end(job_id)
        report = self._compare(undisturbed)
        self._database.close()
        self._client.close()
        return {
            "kills": {victim: victims.count(victim) for victim in VICTIMS},
            "kills_after_step": points,
            "surviving_trainers": self._surviving_trainers,
            **report,
        }

    # --- kills ------------------------------------------------------------------------------------

    def _kill_once(self, victim: str, seconds: float) -> int:
        """The last step that was counted at that moment."""
        self._await_trainer()
        if self._rng.random() < SHARE_WHILE_TRAINING:
            self._await_steps(self._rng.randint(1, MOST_STEPS))
        else:
            time.sleep(self._rng.uniform(0, seconds))
        step = self._num_steps()
        trainer, engine = self._trainer_pid(), self._mortal.engine_pid()
        if victim == "server":
            self._mortal.kill()
            if trainer is not None:
                time.sleep(1.0)
                self._surviving_trainers += is_alive(trainer)
            self._mortal.start()
        elif victim == "engine":
            assert engine is not None
            os.kill(engine, signal.SIGKILL)
            await_true(lambda: not is_alive(engine), 60)
            await_true(self._mortal.is_ready, 300)
        elif trainer is not None:  # else the job has just ended
            with suppress(ProcessLookupError):
                os.kill(trainer, signal.SIGKILL)
            await_true(lambda: not is_alive(trainer), 60)
        return step

    def _await_trainer(self) -> None:
        """Return when a trainer runs, of a new job if none is open."""

        def is_there() -> bool:
            if self._job().status in ENDED:
                self._new_job()
            return self._trainer_pid() is not None

        await_true(is_there, SECONDS)

    def _await_steps(self, num_steps: int) -> None:
        """Return when the job has done so many more steps, or has ended."""
        goal = self._num_steps() + num_steps
        await_true(
            lambda: self._num_steps() >= goal or self._job().status in ENDED,
            SECONDS,
        )

    def _trainer_pid(self) -> int | None:
        return next(iter(trainers_of(self._mortal.pid)), None)

    # --- jobs -------------------------------------------------------------------------------------

    def _new_job(self) -> str:
        """Its adapter is one of its own, so its usage is told apart."""
        job = self._client.fine_tuning.jobs.create(
            model=BASE.name,
            training_file=self._file,
            suffix=f"bot-{len(self._jobs)}",
            seed=SEED,
            method={
                "type": "supervised",
                "supervised": {
                    "hyperparameters": {"n_epochs": NUM_EPOCHS, "batch_size": BATCH_SIZE}
                },
            },
        )
        self._jobs.append(job.id)
        return job.id

    def _job(self) -> FineTuningJob:
        return self._client.fine_tuning.jobs.retrieve(self._jobs[-1])

    def _num_steps(self) -> int:
        """Steps of the open job that are counted."""
        with self._database.transaction(self._caller.tenant_id, read_only=True) as session:
            return session.get_one(TuningJob, self._jobs[-1]).step

    def _await_end(self, job_id: str) -> None:
        jobs = self._client.fine_tuning.jobs
        await_true(lambda: jobs.retrieve(job_id).status in ENDED, SECONDS)

    # --- what became of them ----------------------------------------------------------------------

    def _compare(self, undisturbed: str) -> dict[str, Any]:
        """The disturbed jobs against the undisturbed one, and all against the tenant's usage."""
        jobs = [self._client.fine_tuning.jobs.retrieve(job_id) for job_id in self._jobs]
        whole = next(job for job in jobs if job.id == undisturbed)
        with self._database.transaction(self._caller.tenant_id, read_only=True) as session:
            charged = dict(
                session.execute(
                    select(UsageDay.adapter_name, func.sum(UsageDay.trained_tokens)).group_by(
                        UsageDay.adapter_name
                    )
                ).all()
            )
            digests = dict(
                session.execute(
                    select(Adapter.name, AdapterVersion.digest).join(
                        AdapterVersion, AdapterVersion.adapter_id == Adapter.id
                    )
                ).all()
            )
            resumed = session.scalar(
                select(func.count(TuningEvent.id)).where(TuningEvent.message.startswith(RESUMED))
            )
        names = {job.id: f"bot-{number}" for number, job in enumerate(jobs)}
        succeeded = [job for job in jobs if job.status == "succeeded"]
        failed = [job for job in jobs if job.status == "failed" and job.error and job.error.code]
        expected = whole.trained_tokens or 0
        return {
            "jobs": len(jobs),
            "succeeded": len(succeeded),
            "failed_with_code": len(failed),
            "lost_jobs": len(jobs) - len(succeeded) - len(failed),
            "resumed_from_checkpoints": resumed,
            "tokens_of_a_job": expected,
            "other_tokens": sum(job.trained_tokens != expected for job in succeeded)
            + sum((job.trained_tokens or 0) > expected for job in failed),
            "other_adapters": sum(
                digests[names[job.id]] != digests[names[undisturbed]] for job in succeeded
            ),
            "charged_otherwise": sum(
                charged.get(names[job.id], 0) != (job.trained_tokens or 0) for job in jobs
            ),
        }


def missed_bars(report: dict[str, Any]) -> list[str]:
    """What is not as it is promised."""
    return [f"{name} is {report[name]}" for name in BARS if report[name]]


def main(arguments: list[str] | None = None) -> int:
    """Print the report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=10.0, help="after a start, at most")
    parser.add_argument("--examples", type=int, default=150)
    chosen = parser.parse_args(arguments)
    leave_on_sigterm()
    started = time.monotonic()
    with (
        TemporaryDirectory() as home,
        mortal_server(
            BASE, Path(home) / "data", engine=PRODUCT_ENGINE, LORAPLEX_TUNING="true"
        ) as mortal,
    ):
        mortal.start()
        kills = Kills(mortal, num_examples=chosen.examples, rng=random.Random(chosen.seed))
        report = kills.run(chosen.kills, chosen.seconds)
    report["seconds"] = round(time.monotonic() - started)
    text = json.dumps(report, indent=2)
    print(text)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")
    missed = missed_bars(report)
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
