from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters import intake
from loraplex.adapters.block import read_block_header
from loraplex.adapters.child import PYTHON, child_environment
from loraplex.adapters.confinement import MAX_OPEN_FILES
from loraplex.adapters.errors import AdapterRejected, IntakeUnavailable
from loraplex.adapters.examination import examine
from loraplex.adapters.intake import IntakeLimits, IntakeRequest, run_intake
from loraplex.adapters.landlock import landlock_version
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


def test_a_child_that_waits_is_killed_with_its_group_and_is_not_the_adapters_fault(
    tmp_path: Path,
) -> None:
    request = make_request(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # opening it for reading waits for a writer that never comes
    unavailability(
        dataclasses.replace(request, config_path=str(fifo), limits=IntakeLimits(wall_seconds=1.0))
    )


def test_memory_limit_is_a_rejection(tmp_path: Path) -> None:
    wide = BaseLayout(BASE_ID, (Projection((Slice("q_proj", 1 << 18, 8),)),))
    trained = {"q_proj": (np.ones((2, 1 << 18), np.float32), np.ones((8, 2), np.float32))}
    adapter = write_adapter(tmp_path / "adapter", make_lora(trained))
    request = make_request(tmp_path, adapter, wide)
    assert run_intake(request).num_modules == 1
    Path(request.output_path).unlink()
    limits = IntakeLimits(memory_bytes=1 << 20)
    assert refusal(dataclasses.replace(request, limits=limits)).reason == "intake_limit"


def unavailability(request: IntakeRequest) -> IntakeUnavailable:
    with pytest.raises(IntakeUnavailable) as caught:
        run_intake(request)
    assert not Path(request.output_path).exists()
    return caught.value


def test_what_the_server_lacks_is_its_own_failure_with_a_note_for_the_operator(
    tmp_path: Path,
) -> None:
    request = make_request(tmp_path)
    Path(request.layout_path).unlink()
    error = unavailability(request)
    assert "FileNotFoundError" in error.__notes__[0]
    assert "FileNotFoundError" not in str(error)


def test_a_fault_of_ours_that_the_bytes_lead_to_is_noted_once_for_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "from loraplex.adapters import intake; intake.examine = None; intake.main()"
    deaths = children(monkeypatch, ["-c", script])
    error = refusal(make_request(tmp_path))
    assert error.reason == "intake_failed"
    assert "TypeError" in error.__notes__[0]
    assert len(deaths) == 1


def children(monkeypatch: pytest.MonkeyPatch, *lives: list[str]) -> list[int]:
    """Have the examining processes run these arguments of Python, the last one for ever.

    What is returned counts the processes.
    """
    start = subprocess.Popen
    started: list[int] = []

    def start_next(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        life = lives[min(len(started), len(lives) - 1)]
        started.append(1)
        return start([*PYTHON, *life], **options)

    monkeypatch.setattr(subprocess, "Popen", start_next)
    return started


def death(sent: signal.Signals) -> list[str]:
    return ["-c", f"import os; os.kill(os.getpid(), {int(sent)})"]


def test_a_child_at_the_limit_of_processor_time_is_a_rejection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spin = "from loraplex.adapters import intake\n"
    spin += "def examine(*args, **options):\n    while True: pass\n"
    spin += "intake.examine = examine; intake.main()"
    started = children(monkeypatch, ["-c", spin])
    limits = IntakeLimits(cpu_seconds=1)
    assert refusal(dataclasses.replace(make_request(tmp_path), limits=limits)).reason == (
        "intake_limit"
    )
    assert len(started) == 1, "it would only take as long again"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_child_that_died_once_is_run_again(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = children(monkeypatch, death(sent), ["-m", "loraplex.adapters.intake"])
    assert run_intake(make_request(tmp_path)).num_modules == 1
    assert len(started) == 2


def test_a_child_that_is_killed_twice_says_nothing_about_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = children(monkeypatch, death(signal.SIGKILL))
    unavailability(make_request(tmp_path))
    assert len(started) == 2


def test_a_child_that_crashes_twice_on_the_same_bytes_rejects_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children(monkeypatch, death(signal.SIGSEGV))
    assert refusal(make_request(tmp_path)).reason == "intake_failed"


def test_a_child_that_cannot_be_started_says_nothing_about_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.adapters.child.PYTHON", (str(tmp_path / "nothing"),))
    unavailability(make_request(tmp_path))


@pytest.mark.parametrize("answer", ["", "{}", "[]", '{"rejection": null, "report": {}}', "x" * 99])
def test_answer_that_is_none_is_a_rejection(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_run_child", lambda request: answer.encode())
    assert refusal(make_request(tmp_path)).reason == "intake_failed"


LANDLOCK_WITH_TCP = 4

CONFINED = """
import json, os, resource, socket, sys
from pathlib import Path
from loraplex.adapters.confinement import ProcessLimits, confine
before = os.readlink("/proc/self/ns/net")
output, other = Path("output").absolute(), Path("other").absolute()
limits = ProcessLimits(memory_bytes=1 << 30, cpu_seconds=7, file_bytes=1 << 20)
(output / "block").touch()
confine(limits, read=[Path("input").absolute()], write=[output / "block"])

def works(change):
    try:
        change()
    except OSError:
        return False
    return True

kinds = ["AS", "CPU", "FSIZE", "NOFILE", "CORE"]
connection = socket.socket()
print(json.dumps({
    "limits": [resource.getrlimit(getattr(resource, "RLIMIT_" + kind)) for kind in kinds],
    "has_own_network": os.readlink("/proc/self/ns/net") != before,
    "connected": connection.connect_ex(("127.0.0.1", int(sys.argv[1]))) == 0,
    "made_its_output": works(lambda: (output / "block").write_bytes(b"x")),
    "wrote_beyond_the_limit": works(lambda: (output / "block").write_bytes(bytes((1 << 20) + 1))),
    "read_its_input": Path("input").read_text(),
    "changed_others": [
        works(lambda: (other / "new").write_bytes(b"x")),
        works(lambda: (other / "old").write_bytes(b"x")),
        works(lambda: (other / "old").open("r+").close()),
        works((other / "old").unlink),
        works((other / "folder").mkdir),
        works(lambda: (other / "link").symlink_to("/etc")),
        works(lambda: (other / "old").rename(output / "old")),
        works((output / "folder").mkdir),
        works((output / "new").touch),
    ],
    "read_others": [
        works((other / "old").read_bytes),
        works(lambda: os.listdir(other)),
        works(Path("/etc/passwd").read_bytes),
        works(Path(f"/proc/{os.getppid()}/environ").read_bytes),
    ],
    "environment": sorted(os.environ),
}))
"""


def test_confined_process_has_limits_and_no_network_or_other_files_where_the_kernel_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("output", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other" / "old").write_text("precious")
    (tmp_path / "input").write_text("given")
    monkeypatch.setenv("LORAPLEX_SECRET", "do not inherit")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        output = subprocess.check_output(
            [*PYTHON, "-c", CONFINED, str(port)],
            env=child_environment(),
            cwd=tmp_path,
        )
    found = json.loads(output)
    assert found["limits"] == [
        [1 << 30, 1 << 30],
        [7, 8],
        [1 << 20, 1 << 20],
        [MAX_OPEN_FILES, MAX_OPEN_FILES],
        [0, 0],
    ]
    is_cut_off = found["has_own_network"] or landlock_version() >= LANDLOCK_WITH_TCP
    assert found["connected"] is not is_cut_off
    assert found["made_its_output"]
    assert found["read_its_input"] == "given"
    assert not found["wrote_beyond_the_limit"]
    if landlock_version():
        assert not any(found["changed_others"])
        assert not any(found["read_others"])
    assert "LORAPLEX_SECRET" not in found["environment"]


ADAPTERS_OF_INTAKE = {
    *(
        "added_tokens",
        "arrangement",
        "binding",
        "block",
        "bound",
        "classification",
        "canonical",
        "child",
        "confinement",
        "draft_head",
    ),
    "errors",
    *("examination", "expert_binding", "expert_names", "expert_parts", "auxiliary_binding"),
    *("formats", "identity", "intake", "invocation"),
    *(
        "landlock",
        "layout",
        "measuring",
        "niceness",
        "peft_config",
        "peft_fields",
        "rejections",
        "resized_ends",
        "safetensors_header",
    ),
    *("served_features", "source", "strict_json", "tensor_names", "weights", "whole_model_names"),
}
"""All that may parse a tenant's bytes; what is not among it does not run there."""


def modules_loaded_by(module: str) -> set[str]:
    script = f"import loraplex.adapters.{module}, sys; print(*sys.modules)"
    output = subprocess.check_output([*PYTHON, "-c", script], env=child_environment(), text=True)
    return set(output.split())


def test_child_loads_numpy_and_the_modules_of_intake_and_nothing_else() -> None:
    loaded = modules_loaded_by("intake")
    foreign = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert foreign - {"__main__", "numpy"} == {"loraplex"}
    assert "numpy.random" not in loaded
    version = {"loraplex.platform", "loraplex.platform.version"}
    ours = {name for name in loaded if name.startswith("loraplex.")} - version
    assert "loraplex.adapters.intake" in ours
    allowed = {f"loraplex.adapters.{name}" for name in ADAPTERS_OF_INTAKE}
    assert ours <= allowed | {"loraplex.adapters"}


def test_child_runs_nothing_that_the_environment_starts_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(9)")
    monkeypatch.syspath_prepend(tmp_path)
    assert "loraplex.adapters.intake" in modules_loaded_by("intake")


def test_fetcher_starts_without_heavy_libraries() -> None:
    loaded = modules_loaded_by("fetcher")
    assert "loraplex.adapters.fetcher" in loaded
    assert not {"torch", "boto3", "pydantic", "safetensors", "transformers"} & loaded


def test_examination_leaves_its_output_and_nothing_else(tmp_path: Path) -> None:
    request = make_request(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    run_intake(request)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {Path(request.output_path)}
    assert before.items() <= after.items()


def test_block_beyond_the_limit_on_files_is_a_rejection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen
    script = "import sys; from loraplex.adapters import intake; intake._OUTPUT_RESERVE_BYTES = 0; "
    script += "intake._OUTPUT_FACTOR = 1; intake.main()"
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: start([*PYTHON, "-c", script], **options),
    )
    error = refusal(make_request(tmp_path))  # the header and its padding make it the larger one
    assert error.reason == "intake_limit"
    assert "size limit" in str(error)
