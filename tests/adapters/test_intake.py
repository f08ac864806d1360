from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters import intake
from loraplex.adapters.block import read_block_header
from loraplex.adapters.confinement import MAX_OPEN_FILES
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import examine
from loraplex.adapters.intake import IntakeLimits, IntakeRequest, run_intake
from loraplex.adapters.layout import (
    BaseLayout,
    Projection,
    Slice,
    SliceKind,
    layout_from_json,
    layout_to_json,
)
from support.layouts import BASE_ID, layout_of
from support.models import make_adapter, read_adapter_config
from support.safetensors_files import make_lora, write_adapter

LAYOUT = BaseLayout(
    BASE_ID,
    (Projection((Slice("q_proj", 8, 8), Slice("v_proj", 8, 4))), Projection((Slice("o", 8, 8),))),
    {"lm_head": "the head carries no adapters"},
)
TRAINED = {"q_proj": (np.ones((2, 8), np.float32), np.ones((8, 2), np.float32))}


def make_request(
    folder: Path, adapter: Path | None = None, layout: BaseLayout = LAYOUT
) -> IntakeRequest:
    adapter = adapter or write_adapter(folder / "adapter", make_lora(TRAINED))
    (folder / "layout.json").write_text(layout_to_json(layout))
    return IntakeRequest(
        config_path=str(adapter / "adapter_config.json"),
        weights_path=str(adapter / "adapter_model.safetensors"),
        output_path=str(folder / "block"),
        layout_path=str(folder / "layout.json"),
        serving_dtype="float32",
    )


def refusal(request: IntakeRequest) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        run_intake(request)
    assert not Path(request.output_path).exists()
    return caught.value


def test_layout_survives_its_json() -> None:
    assert layout_from_json(layout_to_json(LAYOUT)) == LAYOUT


def test_child_reports_exactly_what_the_examination_finds(tiny_base: Path, tmp_path: Path) -> None:
    layout = layout_of(tiny_base)
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=1)
    config = read_adapter_config(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {"x": 3}}))
    request = make_request(tmp_path, adapter, layout)
    report = run_intake(request)
    assert report == examine(
        Path(request.config_path),
        Path(request.weights_path),
        tmp_path / "expected",
        layout=layout,
        serving_dtype="float32",
    )
    assert [warning.code for warning in report.warnings] == ["pattern_unmatched"]
    assert (tmp_path / "block").read_bytes() == (tmp_path / "expected").read_bytes()
    assert read_block_header(tmp_path / "block").digest == report.digest


def test_whole_matrices_and_features_cross_the_process(tmp_path: Path) -> None:
    layout = BaseLayout(BASE_ID, (Projection((Slice("embed_tokens", 9, 8, SliceKind.EMBEDDING),)),))
    tensors = {"base_model.model.embed_tokens.weight": np.ones((9, 8), np.float32)}
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=["embed_tokens"])
    request = make_request(tmp_path, adapter, layout)
    assert refusal(request).reason == "full_matrix_not_allowed"
    report = run_intake(dataclasses.replace(request, max_full_matrix_bytes=1 << 10))
    assert report.features == ("full_matrix",)


def test_rejection_crosses_the_process_with_reason_message_and_pointer(tmp_path: Path) -> None:
    foreign = {"k_proj": (np.ones((2, 8), np.float32), np.ones((8, 2), np.float32))}
    adapter = write_adapter(tmp_path / "adapter", make_lora(foreign))
    error = refusal(make_request(tmp_path, adapter))
    assert error.reason == "wrong_base"
    assert error.pointer == "base_model.model.k_proj.lora_A.weight"
    assert "k_proj" in str(error)


def test_declared_base_is_checked_in_the_child(tmp_path: Path) -> None:
    request = dataclasses.replace(make_request(tmp_path), declared_base_id="sha256:other")
    assert refusal(request).reason == "base_mismatch"


def test_file_over_the_limit_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_run_child", lambda request: pytest.fail("a child was started"))
    request = make_request(tmp_path)
    size = Path(request.weights_path).stat().st_size
    limits = IntakeLimits(max_file_bytes=size - 1)
    assert refusal(dataclasses.replace(request, limits=limits)).reason == "file_too_large"


def test_stalled_child_is_killed_with_its_group(tmp_path: Path) -> None:
    request = make_request(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # opening it for reading waits for a writer that never comes
    error = refusal(
        dataclasses.replace(request, config_path=str(fifo), limits=IntakeLimits(wall_seconds=1.0))
    )
    assert error.reason == "intake_limit"


def test_memory_limit_is_a_rejection(tmp_path: Path) -> None:
    wide = BaseLayout(BASE_ID, (Projection((Slice("q_proj", 1 << 18, 8),)),))
    trained = {"q_proj": (np.ones((2, 1 << 18), np.float32), np.ones((8, 2), np.float32))}
    adapter = write_adapter(tmp_path / "adapter", make_lora(trained))
    request = make_request(tmp_path, adapter, wide)
    assert run_intake(request).num_modules == 1
    Path(request.output_path).unlink()
    limits = IntakeLimits(memory_bytes=1 << 20)
    assert refusal(dataclasses.replace(request, limits=limits)).reason == "intake_limit"


def test_failing_child_is_a_rejection_whose_note_is_for_the_operator(tmp_path: Path) -> None:
    request = make_request(tmp_path)
    Path(request.layout_path).unlink()
    error = refusal(request)
    assert error.reason == "intake_failed"
    assert "FileNotFoundError" in error.__notes__[0]
    assert "FileNotFoundError" not in str(error)


@pytest.mark.parametrize("sent", [signal.SIGXCPU, signal.SIGKILL, signal.SIGSEGV])
def test_death_by_signal_is_a_rejection(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suicide = f"import os; os.kill(os.getpid(), {int(sent)})"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: start([sys.executable, "-c", suicide], **options),
    )
    expected = "intake_failed" if sent == signal.SIGSEGV else "intake_limit"
    assert refusal(make_request(tmp_path)).reason == expected


@pytest.mark.parametrize("answer", ["", "{}", "[]", '{"rejection": null, "report": {}}', "x" * 99])
def test_answer_that_is_none_is_a_rejection(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_run_child", lambda request: answer.encode())
    assert refusal(make_request(tmp_path)).reason == "intake_failed"


CONFINED = """
import json, os, resource, socket, sys
from loraplex.adapters.confinement import ProcessLimits, confine
before = os.readlink("/proc/self/ns/net")
confine(ProcessLimits(memory_bytes=1 << 30, cpu_seconds=7, file_bytes=1 << 20))
kinds = ["AS", "CPU", "FSIZE", "NOFILE", "CORE"]
connection = socket.socket()
print(json.dumps({
    "limits": [resource.getrlimit(getattr(resource, "RLIMIT_" + kind)) for kind in kinds],
    "has_own_network": os.readlink("/proc/self/ns/net") != before,
    "connected": connection.connect_ex(("127.0.0.1", int(sys.argv[1]))) == 0,
    "environment": sorted(os.environ),
    "open_files": sorted(os.listdir("/proc/self/fd")),
}))
"""


def test_confined_process_has_limits_and_no_network_where_the_kernel_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LORAPLEX_SECRET", "do not inherit")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        output = subprocess.check_output(
            [sys.executable, "-P", "-c", CONFINED, str(port)], env=intake._environment()
        )
    found = json.loads(output)
    assert found["limits"] == [
        [1 << 30, 1 << 30],
        [7, 8],
        [1 << 20, 1 << 20],
        [MAX_OPEN_FILES, MAX_OPEN_FILES],
        [0, 0],
    ]
    assert found["connected"] is not found["has_own_network"]
    assert "LORAPLEX_SECRET" not in found["environment"]


@pytest.mark.parametrize("module", ["intake", "fetcher"])
def test_starts_without_heavy_libraries(module: str) -> None:
    script = f"import loraplex.adapters.{module}, sys; print(*sys.modules)"
    loaded = subprocess.check_output(
        [sys.executable, "-P", "-c", script], env=intake._environment(), text=True
    ).split()
    assert f"loraplex.adapters.{module}" in loaded
    assert not {"torch", "boto3", "pydantic", "safetensors", "transformers"}.intersection(loaded)
