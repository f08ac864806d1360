"""`loraplex plan`: the load fits into what is planned for it, and not into less."""

from __future__ import annotations

import json
import shutil
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

    def run(*options: str | Path) -> tuple[int, str, str]:
        arguments = ("plan", "--device", "cpu", *map(str, options))
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
    names = ("kv_bytes", "arena_bytes", "host_cache_bytes", "activation_bytes")
    pools = sum(planned[name] for name in names)
    assert planned["device_bytes"] - planned["weight_bytes"] == pytest.approx(pools / 0.9, abs=2)


def test_the_options_start_a_server_and_the_table_names_the_load(run: Run, tiny_base: Path) -> None:
    planned = ask(run, tiny_base)
    code, out, _ = run(tiny_base, *options_of(**LOAD))
    assert code == ExitCode.OK
    assert "4 sequences of 64 tokens" in out
    assert f"loraplex serve {' '.join(planned['options'])}" in out
    gib = float(planned["options"][planned["options"].index("--kv-cache-gib") + 1])
    assert 0 <= gib * (1 << 30) - planned["kv_bytes"] < 1100


def test_a_configuration_alone_is_planned_as_the_whole_folder(
    run: Run, tiny_base: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_base / "config.json", tmp_path)
    whole, bare = ask(run, tiny_base), ask(run, tmp_path / "config.json")
    assert bare.pop("options")[1:] == whole.pop("options")[1:]
    assert bare == whole


def test_figures_of_a_model_card_are_planned(run: Run) -> None:
    code, out, err = run(
        *("--params", "8b", "--layers", 32, "--hidden", 4096, "--kv-heads", 8, "--head-dim", 128),
        *("--vocab", 128_256, "--prompt-tokens", 3000, "--output-tokens", 1096, "--json"),
        *("--quantize", "int8", "--kv-dtype", "int8", "--sequences", 2, "--dtype", "bfloat16"),
    )
    assert code == ExitCode.OK, err
    planned = json.loads(out)
    ends = 2 * 128_256 * 4096
    assert planned["weight_bytes"] == pytest.approx(8e9 - ends + 2 * ends, rel=0.01)
    per_token = 2 * 32 * 8 * (128 + 2)  # a byte each, and a scale per head
    assert planned["kv_bytes_per_token"] == per_token
    assert planned["kv_bytes"] == 2 * 4096 * per_token
    assert planned["options"][0] == "MODEL"


def test_a_device_is_said_to_hold_the_load_or_not(run: Run, tiny_base: Path) -> None:
    needed = ask(run, tiny_base)["device_bytes"]
    fitting = ask(run, tiny_base, "--memory-gib", "1")
    assert fitting["does_fit"] is True
    assert fitting["max_sequences"] > LOAD["sequences"]
    assert needed < 1 << 30
    many = ask(run, tiny_base, "--memory-gib", "0.1", adapters=10_000)
    assert many["does_fit"] is False
    assert many["max_sequences"] == 0
    code, out, _ = run(tiny_base, *options_of(**LOAD), "--memory-gib", "1")
    assert code == ExitCode.OK
    assert "The load fits into 1.0 GiB." in out


def test_the_rounded_copy_for_drafts_is_planned_for(run: Run, tiny_base: Path) -> None:
    plain = ask(run, tiny_base)
    planned = ask(run, tiny_base, "--speculation", "ngram,quantized:int4")
    assert plain["rounded_bytes"] == 0
    assert planned["rounded_bytes"] > 0
    assert planned["device_bytes"] == plain["device_bytes"] + planned["rounded_bytes"]
    place = planned["options"].index("--speculation")
    assert planned["options"][place + 1] == "ngram,quantized:int4"
    assert "--speculation" not in plain["options"]
    _, out, _ = run(tiny_base, *options_of(**LOAD), "--speculation", "quantized:int4")
    assert "rounded weights" in out


@pytest.mark.parametrize("proposer", ["suffix", "early_exit:1", "skip:0"])
def test_proposers_without_weights_need_no_further_memory_on_the_cpu(
    run: Run, tiny_base: Path, proposer: str
) -> None:
    planned = ask(run, tiny_base, "--speculation", proposer)
    assert planned["device_bytes"] == ask(run, tiny_base)["device_bytes"]
    assert planned["options"][planned["options"].index("--speculation") + 1] == proposer


@pytest.mark.parametrize(
    ("proposer", "message"),
    [
        ("eagle:./head", "./head"),
        ("mtp", "weights of mtp are not planned for"),
        ("quantized:int3", "int8, int4"),
    ],
)
def test_a_proposer_that_cannot_be_planned_for_is_refused(
    run: Run, tiny_base: Path, proposer: str, message: str
) -> None:
    code, _, err = run(tiny_base, "--speculation", proposer)
    assert code == ExitCode.USAGE
    assert message in " ".join(err.split())


def test_the_options_of_ranks_are_those_of_the_server(run: Run, tiny_base: Path) -> None:
    ranks = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--kv-dtype", "int8")
    planned = ask(run, tiny_base, *ranks)
    assert [planned["options"][at] for at in (1, 3, 5)] == ["--kv-dtype", *ranks[0:4:2]]
    code, out, _ = run(tiny_base, *ranks, *options_of(**LOAD))
    assert code == ExitCode.OK
    assert "There are 4 ranks; all sizes are of the rank that needs most." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--params", "8b"), "Give a model or --params, and not both"),
        (("--prompt-tokens", "8"), "is the sum of --prompt-tokens and --output-tokens"),
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


def test_a_trainer_is_part_of_the_load_and_of_the_options(run: Run, tiny_base: Path) -> None:
    plain = ask(run, tiny_base)
    tuned = ask(run, tiny_base, "--tuning", "--tuning-batch-size", "2")
    assert plain["trainer_bytes"] == 0 < tuned["trainer_bytes"]
    assert tuned["device_bytes"] == plain["device_bytes"] + tuned["trainer_bytes"]
    wanted = ["--tuning", "--tuning-bytes", str(tuned["trainer_bytes"])]
    assert tuned["options"] == [*plain["options"], *wanted]
    larger = ask(run, tiny_base, "--tuning", "--tuning-batch-size", "4")
    assert larger["trainer_bytes"] > tuned["trainer_bytes"]
    pairs = ask(run, tiny_base, "--tuning", "--tuning-batch-size", "2", "--tuning-method", "dpo")
    assert pairs == larger
    room = plain["device_bytes"] / (1 << 30) + 0.05
    fits = ask(run, tiny_base, "--memory-gib", str(max(room, 0.1)))
    too_much = ask(run, tiny_base, "--memory-gib", str(max(room, 0.1)), "--tuning")
    assert (fits["does_fit"], too_much["does_fit"]) == (True, False)


def test_the_trainers_row_says_what_it_is_for(run: Run, tiny_base: Path) -> None:
    code, out, _ = run(tiny_base, *options_of(**LOAD), "--tuning")
    assert code == ExitCode.OK
    (row,) = (line for line in out.splitlines() if "its own base" in line)
    assert "8 sequences of 64 tokens, rank 8, estimated" in row
    code, out, _ = run(tiny_base, *options_of(**LOAD), "--tuning", "--tuning-method", "dpo")
    assert "16 sequences of 64 tokens, rank 8, estimated" in out
