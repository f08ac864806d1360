"""A tenant tunes an adapter on the demo's base in int8 while other tenants are served.

    make tune-demo          or: make tune-demo JSON=FILE

The tenant uploads examples and creates jobs with the unmodified `openai` client. While the first
job trains, other tenants ask their adapters: phases with the job running and phases with it paused
take turns, so that both have the same noise of the machine. A second job learns wrong answers.
`loraplex eval` then compares both versions and the base on questions that no training data has. An
alias whose gate has these questions is to move to both versions, and the second is tried as a
canary. Prints one JSON object; exits with 1 and names the bars that are missed, unless

- the first version gives at least 90 % of the right answers, the base less than 10 %,
- the second version gives fewer than the first,
- the gate lets the first version pass and refuses the second,
- the canary ends by itself,
- the 99th percentile of the neighbours' inter-token latency is at most 1.25 times as long while
  the job trains.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.neighbours import Neighbours
from benchmarks.patience import await_true
from benchmarks.tenant_command import TenantCommand
from benchmarks.trainers import trainers_of
from benchmarks.tune_rollout import Rollout
from benchmarks.tune_task import golden_lines, training_lines, wrong_lines
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob
from openai.types.fine_tuning.job_create_params import Method

from loraplex.api.cli.demo import SERVE_OPTIONS
from loraplex.api.demo.recipe import BASE_NAME
from loraplex.api.demo.scenario import push_all
from loraplex.api.local.installation import Installation
from loraplex.api.local.server import LocalServer, leave_on_sigterm, running_server
from support.tuning_jobs import ENDED, upload

TENANT = "initech"
ADAPTER = "reports"
NUM_EXAMPLES, NUM_EPOCHS = 1_600, 2
NUM_WRONG_EXAMPLES = 480
LEARNING_RATE_MULTIPLIER = 15
"""A small base needs a high rate: 3e-3, that of the demo's own adapters."""
NUM_CASES = 100
JOB_SECONDS = 1_800.0
STOP_SECONDS = 600.0
LEAST_OF_CANDIDATE, MOST_OF_BASE, MOST_OF_RATIO = 0.9, 0.1, 1.25


@dataclass(frozen=True)
class Phases:
    """How long the neighbours ask, and how often."""

    num_pairs: int
    seconds: float
    """Of one phase. More than 33, a phase has a turn of the trainer."""


def main(arguments: list[str] | None = None) -> int:
    """Print the report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    parser.add_argument("--pairs", type=int, default=3, help="phases with the job, and without")
    parser.add_argument("--seconds", type=float, default=45.0, help="of one phase")
    chosen = parser.parse_args(arguments)
    leave_on_sigterm()
    with TemporaryDirectory(prefix="loraplex-tune-demo-") as folder:
        report = _run(Path(folder), Phases(chosen.pairs, chosen.seconds))
    text = json.dumps(report, indent=2)
    print(text)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")
    missed = missed_bars(report)
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


def missed_bars(report: dict[str, Any]) -> list[str]:
    """What is not as it is promised."""
    golden, ratio = report["golden"], report["neighbours_itl_ratio"]
    is_met = {
        f"the candidate's share is {golden['candidate']}": golden["candidate"]
        >= LEAST_OF_CANDIDATE,
        f"the base's share is {golden['base']}": golden["base"] < MOST_OF_BASE,
        f"the worse version's share is {golden['worse']}": golden["worse"] < golden["candidate"],
        f"the neighbours' latency is {ratio} times as long": ratio <= MOST_OF_RATIO,
        f"the gate's results are {report['gate']}": report["gate"]
        == {"good": "passed", "worse": "refused"},
        "the canary was not rolled back": report["canary_rolled_back"],
        "the job did no step in a phase": all(
            phase["steps"] > 0 for phase in report["phases"] if phase["is_training"]
        ),
    }
    return [text for text, is_good in is_met.items() if not is_good]


def _run(folder: Path, phases: Phases) -> dict[str, Any]:
    data_dir = folder / "data"
    options = [*SERVE_OPTIONS, "--tuning", "--data-dir", str(data_dir)]
    with running_server(options, port=None, log=folder / "serve.log") as server:
        installation = Installation(data_dir, server.url, show=_say).with_operator()
        pushed = push_all(installation)
        tenant = installation.create_tenant(TENANT)
        with OpenAI(base_url=f"{server.url}/v1", api_key=tenant.api_key) as client:
            tuning = Tuning(client, server)
            job = tuning.create(training_lines(NUM_EXAMPLES), num_epochs=NUM_EPOCHS)
            found = tuning.measure(job.id, Neighbours(server.url, pushed), phases)
            good = tuning.result(job.id)
            worse = tuning.result(tuning.create(wrong_lines(NUM_WRONG_EXAMPLES), num_epochs=1).id)
            command = TenantCommand(installation, tenant)
            golden = Golden(folder, command)
            shares = golden.shares(str(worse.fine_tuned_model), against=str(good.fine_tuned_model))
            released = _release(golden, Rollout(command, client, ADAPTER))
        return {
            "job": good.id,
            "tokens": good.trained_tokens,
            "seconds_of_job": (good.finished_at or 0) - good.created_at,
            "golden": {
                "candidate": shares[str(good.fine_tuned_model)],
                "base": shares[BASE_NAME],
                "worse": shares[str(worse.fine_tuned_model)],
            },
            **released,
            **found,
        }


def _release(golden: Golden, rollout: Rollout) -> dict[str, Any]:
    """What the gate and the watch of a canary did with both versions."""
    rollout.close_gate(golden.file)
    gate = {"good": rollout.release(1), "worse": rollout.release(2)}
    reason = rollout.try_canary(2)
    return {"gate": gate, "canary_rolled_back": reason is not None, "canary_reason": reason}


class Tuning:
    """The tenant's jobs."""

    def __init__(self, client: OpenAI, server: LocalServer) -> None:
        self._client = client
        self._server = server

    def create(self, examples: bytes, *, num_epochs: int) -> FineTuningJob:
        """A job that trains the next version of the adapter with these examples."""
        method: Method = {
            "type": "supervised",
            "supervised": {
                "hyperparameters": {
                    "n_epochs": num_epochs,
                    "learning_rate_multiplier": LEARNING_RATE_MULTIPLIER,
                }
            },
        }
        job = self._client.fine_tuning.jobs.create(
            model=BASE_NAME,
            training_file=upload(self._client, examples),
            suffix=ADAPTER,
            seed=1,
            method=method,
        )
        _say(f"{job.id} was created")
        return job

    def result(self, job_id: str) -> FineTuningJob:
        """The job when it has succeeded."""
        await_true(lambda: self._job(job_id).status in ENDED, JOB_SECONDS)
        job = self._job(job_id)
        assert job.status == "succeeded", job.error
        _say(f"{job.fine_tuned_model} is ready: {job.trained_tokens} tokens were trained")
        return job

    def measure(self, job_id: str, neighbours: Neighbours, phases: Phases) -> dict[str, Any]:
        """The neighbours' latency while the job is paused and while it trains, in turns. Afterwards
        it trains."""
        neighbours.ask(1.0)  # so that every adapter is on the device
        found = []
        for _ in range(phases.num_pairs):
            self._pause(job_id)
            found.append(self._phase(job_id, neighbours, phases.seconds, is_training=False))
            self._client.fine_tuning.jobs.resume(job_id)
            self._await_steps(job_id)
            found.append(self._phase(job_id, neighbours, phases.seconds, is_training=True))
        ratios = [
            beside["itl_p99_ms"] / alone["itl_p99_ms"]
            for alone, beside in zip(found[::2], found[1::2], strict=True)
        ]
        return {
            "neighbours_itl_ratio": round(median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "phases": found,
        }

    def _phase(
        self, job_id: str, neighbours: Neighbours, seconds: float, *, is_training: bool
    ) -> dict[str, Any]:
        _say(f"measuring the neighbours {'with' if is_training else 'without'} the job")
        before = self._step(job_id)
        gaps = neighbours.ask(seconds)
        time.sleep(1.5)  # the job's steps are reported every second
        *_, p99 = quantiles(gaps, n=100)
        _say(f"p99 {1e3 * p99:.1f} ms of {len(gaps)} gaps")
        return {
            "is_training": is_training,
            "steps": self._step(job_id) - before,
            "num_gaps": len(gaps),
            "itl_p50_ms": round(1e3 * median(gaps), 3),
            "itl_p99_ms": round(1e3 * p99, 3),
        }

    def _pause(self, job_id: str) -> None:
        self._client.fine_tuning.jobs.pause(job_id)
        pid = self._server.process.pid
        await_true(lambda: not trainers_of(pid), STOP_SECONDS)

    def _await_steps(self, job_id: str) -> None:
        """Return when a trainer has begun to train."""
        before = self._step(job_id)
        await_true(lambda: self._step(job_id) > before, STOP_SECONDS)

    def _step(self, job_id: str) -> int:
        step: int = (self._job(job_id).model_extra or {})["step"]
        return step

    def _job(self, job_id: str) -> FineTuningJob:
        return self._client.fine_tuning.jobs.retrieve(job_id)


class Golden:
    """The golden set, and what versions score on it."""

    def __init__(self, folder: Path, command: TenantCommand) -> None:
        self.file = folder / "golden.jsonl"
        self.file.write_bytes(golden_lines(NUM_CASES))
        self._command = command

    def shares(self, candidate: str, *, against: str) -> dict[str, float]:
        """The shares of right answers of both and of the base, by model."""
        result = self._command.run(
            *("eval", candidate, "--set", str(self.file), "--against", against, "--json")
        )
        assert result.returncode in {0, 1}, result.stderr  # 1: it is worse
        report = json.loads(result.stdout)
        scores = [case["scores"] for case in report["cases"]]
        return {model: sum(each[model] for each in scores) / len(scores) for model in scores[0]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
