"""`loraplex plan`: the load fits into what is planned for it, and not into less."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.api import cli
from loraplex.api.cli.exit_codes import ExitCode
from support.engine import LocalEngine
from support.models import make_adapter

Run = Callable[..., tuple[int, str, str]]
LOAD = {"sequences": 4, "context": 64, "adapters": 6, "active": 3, "rank": 8}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `plan` for the CPU: exit code, stdout, stderr."""

    def run(path: Path, *options: str) -> tuple[int, str, str]:
        arguments = ("plan", str(path), "--device", "cpu", *options)
        monkeypatch.setattr("sys.argv", ["loraplex", *arguments])
        try:
            code = cli.main()
        except SystemExit as exc:
            code = int(exc.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def options_of(**load: int) -> list[str]:
    return [word for name, value in load.items() for word in (f"--{name}", str(value))]


def ask(run: Run, path: Path, *options: str, **load: int) -> Any:
    code, out, err = run(path, *options, *options_of(**{**LOAD, **load}), "--json")
    assert code == ExitCode.OK, err
    return json.loads(out)


def serve(base: Path, folder: Path, planned: Any, *, kv_part: float = 1.0) -> LocalEngine:
    """An engine with these pools, after all sequences of the load at their full length."""
    engine = LocalEngine(
        base,
        folder,
        max_num_seqs=LOAD["sequences"],
        max_model_len=LOAD["context"],
        kv_cache_bytes=int(planned["kv_bytes"] * kv_part),
        arena_bytes=planned["arena_bytes"],
        host_cache_bytes=planned["host_cache_bytes"],
    )
    keys = [
        engine.add_adapter(make_adapter(base, folder / str(seed), seed=seed, r=LOAD["rank"]))
        for seed in range(LOAD["active"])
    ]
    for number in range(LOAD["sequences"]):
        key = keys[number % len(keys)]
        engine.submit([number + 1] * 8, key, max_tokens=LOAD["context"] - 8, ignore_eos=True)
    engine.run()
    engine.close()
    return engine


def test_the_load_fits_into_the_planned_pools(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    targets = ("--target", "q_proj", "--target", "v_proj")
    stats = serve(tiny_base, tmp_path, ask(run, tiny_base, *targets)).core.stats()
    assert (stats.num_preemptions, stats.num_adapter_evictions) == (0, 0)


def test_the_load_does_not_fit_into_half_of_the_planned_kv_cache(
    run: Run, tiny_base: Path, tmp_path: Path
) -> None:
    engine = serve(tiny_base, tmp_path, ask(run, tiny_base), kv_part=0.5)
    assert engine.core.stats().num_preemptions > 0


def test_the_figures_are_those_of_the_model(run: Run, tiny_base: Path) -> None:
    planned = ask(run, tiny_base)
    config = json.loads((tiny_base / "config.json").read_text())
    head_size = config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * 4
    assert planned["kv_bytes_per_token"] == per_token
    assert planned["kv_bytes"] == LOAD["sequences"] * LOAD["context"] * per_token
    # Llama's q, k, v, o, gate, up and down, in two layers.
    sizes = 2 * [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    assert planned["adapter_bytes"] == 4 * LOAD["rank"] * sum(map(sum, sizes))
    assert planned["host_cache_bytes"] == LOAD["adapters"] * planned["adapter_bytes"]
    pools = planned["kv_bytes"] + planned["arena_bytes"] + planned["host_cache_bytes"]
    assert planned["device_bytes"] - planned["weight_bytes"] == pytest.approx(pools / 0.9, abs=2)


def test_the_options_start_a_server_and_the_table_names_the_load(run: Run, tiny_base: Path) -> None:
    planned = ask(run, tiny_base)
    code, out, _ = run(tiny_base, *options_of(**LOAD))
    assert code == ExitCode.OK
    assert "4 sequences of 64 tokens" in out
    assert f"loraplex serve {' '.join(planned['options'])}" in out
    gib = float(planned["options"][planned["options"].index("--kv-cache-gib") + 1])
    assert 0 <= gib * (1 << 30) - planned["kv_bytes"] < 1100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "100000"), "The longest sequence of this model has"),
        (("--target", "nothing"), "No layer is called nothing. There are down_proj,"),
    ],
)
def test_what_the_model_does_not_have_is_refused(
    run: Run, tiny_base: Path, options: tuple[str, ...], message: str
) -> None:
    code, _, err = run(tiny_base, "--context", "64", *options)
    assert code == ExitCode.USAGE
    assert message in err
