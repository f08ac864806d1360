"""Runs malformed adapters through intake and records the results."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import IntakeReport, examine
from loraplex.adapters.intake import IntakeLimits, IntakeRequest, run_intake
from loraplex.adapters.layout import BaseLayout, Projection, Slice, layout_to_json
from loraplex.adapters.rejections import REJECTIONS
from support.deltas import deltas_of_block
from support.layouts import BASE_ID
from support.mutators import AdapterFiles, mutated
from support.reference_validator import judge
from support.safetensors_files import make_lora, make_tensors

LAYOUT = BaseLayout(
    BASE_ID,
    (Projection((Slice("q_proj", 8, 8), Slice("v_proj", 8, 4))), Projection((Slice("o", 8, 8),))),
)
SHAPES = {part.name: (part.in_features, part.out_features) for part in LAYOUT.slices}
MAX_CPU_SECONDS = 10.0
"""Of one examination; an ordinary one takes milliseconds."""
OF_THE_WHOLE_FILE = {
    *("config_too_large", "malformed_config", "duplicate_key"),
    *("file_too_large", "pickle_refused", "not_safetensors", "header_too_large"),
    *("malformed_header", "too_many_tensors", "no_tensors", "invalid_tensor_name"),
    *("file_size_mismatch", "no_effect", "intake_limit"),
}
"""Reasons that no single field need be at fault for; every other one points to the field."""
GOOD_EVERY = 100

Examiner = Callable[[IntakeRequest], IntakeReport]


class Hang(Exception):
    """An examination took more processor time than any may."""


@dataclass
class Outcome:
    """What came of a series of malformed adapters."""

    tried: int = 0
    refused: int = 0
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    uncoded: list[str] = field(default_factory=list)
    """Refused with a code that is not published, or without the pointer that it should have."""
    misjudged: list[str] = field(default_factory=list)
    """Accepted though harmful or with another effect, or refused though harmless."""
    good_refused: int = 0
    """A good adapter among them that did not load."""
    codes: set[str] = field(default_factory=set)

    @property
    def is_good(self) -> bool:
        faults = (self.crashes, self.hangs, self.uncoded, self.misjudged)
        return not (any(faults) or self.good_refused)


def valid_adapter() -> AdapterFiles:
    """A small adapter of three modules with nothing wrong."""
    values = np.random.default_rng(0)
    weights = {
        part.name: (
            values.normal(size=(2, part.in_features)).astype(np.float32),
            values.normal(size=(part.out_features, 2)).astype(np.float32),
        )
        for part in LAYOUT.slices
    }
    config = b'{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}'
    return AdapterFiles(config, make_tensors(make_lora(weights)))


def examine_here(request: IntakeRequest) -> IntakeReport:
    """The examination in this process, under a limit of processor time. Raises Hang."""
    with cpu_limit(MAX_CPU_SECONDS):
        return examine(
            Path(request.config_path),
            Path(request.weights_path),
            Path(request.output_path),
            layout=LAYOUT,
            serving_dtype=request.serving_dtype,
        )


def run_malformed(
    count: int, *, seed: int = 0, examiner: Examiner = examine_here, chosen: slice = slice(None)
) -> Outcome:
    """Examine the chosen of `count` adapters, and after each hundred a good one."""
    outcome = Outcome()
    valid = valid_adapter()
    with tempfile.TemporaryDirectory() as directory:
        intake = _Intake(Path(directory), examiner, outcome)
        for name, files in [*mutated(valid, count, seed)][chosen]:
            intake.try_one(name, files)
            if outcome.tried % GOOD_EVERY == 0:
                intake.try_good(valid)
        intake.try_good(valid)
    return outcome


class _Intake:
    """A folder in which one adapter after the other is examined."""

    def __init__(self, folder: Path, examiner: Examiner, outcome: Outcome) -> None:
        self._folder = folder
        self._examiner = examiner
        self._outcome = outcome
        (folder / "layout").write_text(layout_to_json(LAYOUT))
        self._request = IntakeRequest(
            config_path=str(folder / "config"),
            weights_path=str(folder / "weights"),
            output_path=str(folder / "block"),
            layout_path=str(folder / "layout"),
            serving_dtype="float32",
            limits=IntakeLimits(wall_seconds=60.0),
        )

    def try_one(self, name: str, files: AdapterFiles) -> None:
        self._outcome.tried += 1
        try:
            self._examine(files)
        except AdapterRejected as exc:
            self._take_refusal(name, files, exc)
        except Hang:
            self._outcome.hangs.append(name)
        except Exception as exc:  # a crash is what is counted here
            self._outcome.crashes.append(f"{name}: {exc!r}")
        else:
            if not self._is_right(files):
                self._outcome.misjudged.append(f"{name}: accepted")
        if {path.name for path in self._folder.iterdir()} - {
            "config",
            "weights",
            "layout",
            "block",
        }:
            self._outcome.crashes.append(f"{name}: left files behind")

    def try_good(self, valid: AdapterFiles) -> None:
        try:
            self._examine(valid)
        except Exception:  # whatever the reason
            self._outcome.good_refused += 1

    def _examine(self, files: AdapterFiles) -> IntakeReport:
        (self._folder / "config").write_bytes(files.config)
        (self._folder / "weights").write_bytes(files.weights)
        (self._folder / "block").unlink(missing_ok=True)
        return self._examiner(self._request)

    def _take_refusal(self, name: str, files: AdapterFiles, error: AdapterRejected) -> None:
        outcome = self._outcome
        outcome.refused += 1
        outcome.codes.add(error.reason)
        if error.reason == "intake_limit" and "longer" in str(error):
            outcome.hangs.append(name)
        if error.reason == "intake_failed":
            outcome.crashes.append(f"{name}: {error}")
        if not is_published(error):
            outcome.uncoded.append(f"{name}: {error.reason} {error.pointer} {error}")
        if judge(files, SHAPES) is not None:
            outcome.misjudged.append(f"{name}: refused as {error.reason}: {error}")

    def _is_right(self, files: AdapterFiles) -> bool:
        """Whether it may be accepted, and what was accepted is what PEFT would compute."""
        expected = judge(files, SHAPES)
        if expected is None:
            return False
        found = deltas_of_block(self._folder / "block", LAYOUT)
        return found.keys() == expected.deltas.keys() and all(
            np.allclose(found[module], delta.numpy(), rtol=1e-6, atol=0)
            for module, delta in expected.deltas.items()
        )


def is_published(error: AdapterRejected) -> bool:
    """Whether a caller can act on it: a known code, a safe text, the field at fault."""
    texts = [str(error), error.pointer or ""]
    is_safe = all(text.isascii() and (text.isprintable() or not text) for text in texts)
    is_short = all(len(text) < 1000 for text in texts)
    has_pointer = bool(error.pointer) or error.reason in OF_THE_WHOLE_FILE
    return error.reason in REJECTIONS and is_safe and is_short and has_pointer


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise Hang in the main thread after so much processor time."""

    def on_alarm(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, on_alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def examine_in_child(request: IntakeRequest) -> IntakeReport:
    """As a push does it."""
    return run_intake(request)
