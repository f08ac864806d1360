"""Training runs: what the adapter does, and that an interruption does not change it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from loraplex.engine.config import Quantization
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.engine.tuning.checkpoint_files import list_checkpoints
from loraplex.engine.tuning.errors import (
    BaseNotTunable,
    InvalidRecipe,
    InvalidTrainingData,
    TuningError,
)
from loraplex.engine.tuning.messages import (
    Checkpointed,
    Finished,
    Pause,
    Paused,
    Proceed,
    Ready,
    Recipe,
    Stop,
    Stopped,
    Trained,
    Validated,
)
from support.engine import LocalEngine
from support.families import GPT2, save_family
from support.marks import marked_slow
from support.models import make_tiny_llama, read_adapter_config, save_byte_tokenizer
from support.tuning import chat_line, of_kind, open_order, recipe, train_here, write_lines

MARKER = "42!"
QUESTIONS = [f"What is {number}?" for number in range(10, 50)]
UNSEEN = [f"What is {number}?" for number in range(60, 80)]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_lines(folder / "lines", [chat_line(each, MARKER) for each in QUESTIONS])


def weights(work: Path) -> bytes:
    return (work / "result" / WEIGHTS).read_bytes()


def share_right(base: Path, work: Path, quantization: str) -> tuple[float, float]:
    """Of unseen questions, how many are answered by the marker: with the adapter, and without."""
    tokenizer = Tokenizer(base)
    engine = LocalEngine(base, work, quantization=Quantization(quantization), dtype="float32")
    key = engine.add_adapter(work / "result")
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": question}]) for question in UNSEEN
    ]

    def share(adapter: Any) -> float:
        requests = [engine.submit(prompt, adapter, max_tokens=8) for prompt in prompts]
        engine.run()
        answers = [tokenizer.decode(tokens) for tokens in engine.tokens(requests)]
        return sum(answer == MARKER for answer in answers) / len(answers)

    try:
        return share(key), share(None)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("quantization", "changes"),
    [
        ("int8", {"is_rslora": True, "rank": 2}),
        pytest.param("none", {}, marks=pytest.mark.slow),
        pytest.param(
            "int4",
            {"is_dora": True, "targets": ("q_proj", "v_proj", "down_proj")},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "none",
            {"is_packed": True, "max_tokens": 64, "num_epochs": 8},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_served_adapter_answers_as_it_was_trained(
    base: Path, data: Path, tmp_path: Path, quantization: str, changes: dict[str, Any]
) -> None:
    """The engine takes the files through its own intake, and serves them on the same values."""
    settings = recipe(**{"num_epochs": 4, **changes})
    order = open_order(base, data, tmp_path, recipe=settings, quantization=quantization)
    reports = train_here(order)
    assert isinstance(reports[-1], Finished)
    with_adapter, without = share_right(base, tmp_path, quantization)
    assert with_adapter >= 0.9
    assert without < 0.1


@pytest.mark.slow
def test_pairs_raise_the_preferred_answer(base: Path, tmp_path: Path) -> None:
    lines = [
        {
            "input": {"messages": [{"role": "user", "content": question}]},
            "preferred_output": [{"role": "assistant", "content": MARKER}],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        }
        for question in QUESTIONS
    ]
    pairs = write_lines(tmp_path / "lines", lines)
    settings = recipe(method="dpo", num_epochs=2)
    reports = train_here(open_order(base, pairs, tmp_path, recipe=settings))
    trained = of_kind(reports, Trained)
    assert math.isclose(trained[0].loss, math.log(2), rel_tol=1e-5), "the adapter changes nothing"
    assert trained[-1].loss < 0.1
    assert trained[-1].accuracy == 1.0


@pytest.mark.slow
def test_reports_count_steps_examples_and_tokens(base: Path, data: Path, tmp_path: Path) -> None:
    settings = recipe(num_epochs=2, checkpoint_steps=8)
    reports = train_here(
        open_order(base, data, tmp_path, recipe=settings, validation_file=str(data))
    )
    (ready,), trained = of_kind(reports, Ready), of_kind(reports, Trained)
    (finished,) = of_kind(reports, Finished)
    assert (ready.first_step, ready.num_steps, ready.num_examples) == (0, 20, 40)
    num_tokens = 2 * sum(len(question) + 3 + len(MARKER) + 1 for question in QUESTIONS)
    assert ready.num_trained_tokens == finished.num_tokens == num_tokens
    assert sum(report.num_tokens for report in trained) == num_tokens
    assert [report.step for report in trained] == list(range(1, 21))
    assert finished.loss == trained[-1].loss < trained[0].loss
    assert trained[0].learning_rate == settings.learning_rate
    assert 0 < trained[-1].learning_rate < 0.1 * settings.learning_rate
    validated = of_kind(reports, Validated)
    assert [report.step for report in validated] == [10, 20]
    assert validated[1].loss < validated[0].loss < trained[0].loss
    saved = of_kind(reports, Checkpointed)
    assert [report.step for report in saved] == [8, 16, 20]
    assert saved[-1].num_tokens == num_tokens
    folder = tmp_path / "checkpoints"
    assert [kept.step for kept in list_checkpoints(folder)] == [20, 16]
    assert len(list(folder.iterdir())) == 2
    num_parameters = sum(map(np.size, load_file(tmp_path / "result" / WEIGHTS).values()))
    for kept in list_checkpoints(folder):
        assert 0 <= kept.path.stat().st_size - 12 * num_parameters < 64 << 10


@pytest.mark.slow
def test_the_files_name_no_path_of_the_server(base: Path, data: Path, tmp_path: Path) -> None:
    train_here(open_order(base, data, tmp_path))
    config = read_adapter_config(tmp_path / "result")
    assert config["base_model_name_or_path"] == base.name
    assert str(tmp_path) not in str(config)
    assert sorted(path.name for path in (tmp_path / "result").iterdir()) == [
        "adapter_config.json",
        WEIGHTS,
    ]


@pytest.mark.parametrize("stopped_at", marked_slow([0, 3, 10], slow=(0, 10)))
def test_a_stopped_run_ends_in_the_same_adapter(
    base: Path, data: Path, tmp_path: Path, stopped_at: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_here(open_order(base, data, whole))
    order = open_order(base, data, parts)
    first = train_here(order, {stopped_at: [Stop()]})
    if stopped_at < 10:
        assert first[-1] == Stopped(stopped_at)
        assert not (parts / "result" / WEIGHTS).exists()
    second = train_here(order)
    (ready,) = of_kind(second, Ready)
    assert ready.first_step == stopped_at
    assert ready.num_tokens == sum(report.num_tokens for report in of_kind(first, Trained))
    assert [report.step for report in of_kind(second, Trained)] == list(range(stopped_at + 1, 11))
    assert weights(parts) == weights(whole)
    assert second[-1] == train_here(order)[-1], "what is finished can be asked for again"


@pytest.mark.slow
def test_dropout_of_the_base_is_resumed_too(tmp_path: Path, data: Path) -> None:
    """GPT-2's layers draw random numbers while they are trained."""
    base = save_family(tmp_path / "base", "gpt2", {**GPT2, "vocab_size": 300})
    save_byte_tokenizer(base)
    order = {name: open_order(base, data, tmp_path / name) for name in ("whole", "parts")}
    train_here(order["whole"])
    train_here(order["parts"], {4: [Stop()]})
    train_here(order["parts"])
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_paused_run_goes_on_when_it_is_told_to(base: Path, data: Path, tmp_path: Path) -> None:
    reports = train_here(open_order(base, data, tmp_path), {2: [Pause(), Pause(), Proceed()]})
    steps = [type(report) for report in reports]
    assert steps[1:5] == [Trained, Trained, Paused, Trained]
    assert steps.count(Paused) == 1
    assert isinstance(reports[-1], Finished)


@pytest.mark.slow
def test_a_paused_run_can_be_stopped(base: Path, data: Path, tmp_path: Path) -> None:
    reports = train_here(open_order(base, data, tmp_path), {2: [Pause(), Stop()]})
    assert [type(report) for report in reports[-3:]] == [Paused, Checkpointed, Stopped]


@pytest.mark.slow
def test_checkpoints_of_another_recipe_are_refused(base: Path, data: Path, tmp_path: Path) -> None:
    train_here(open_order(base, data, tmp_path), {5: [Stop()]})
    with pytest.raises(TuningError, match="another recipe"):
        train_here(open_order(base, data, tmp_path, recipe=recipe(seed=4)))


@pytest.mark.slow
def test_an_unfinished_checkpoint_is_not_read(base: Path, data: Path, tmp_path: Path) -> None:
    order = open_order(base, data, tmp_path)
    unfinished = tmp_path / "checkpoints" / ".unfinished"
    unfinished.write_text("{")
    assert of_kind(train_here(order), Ready)[0].first_step == 0
    assert not unfinished.exists()


def test_a_damaged_checkpoint_is_not_read_and_the_one_before_it_is(
    base: Path, data: Path, tmp_path: Path
) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    train_here(open_order(base, data, whole))
    order = open_order(base, data, damaged)
    train_here(order, {7: [Stop()]})
    newest, before = list_checkpoints(damaged / "checkpoints")
    with newest.path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    (ready,) = of_kind(train_here(order), Ready)
    assert (newest.step, before.step, ready.first_step) == (7, 5, 5)
    assert weights(damaged) == weights(whole)


@pytest.mark.slow
def test_seeds_make_other_adapters(base: Path, data: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        train_here(open_order(base, data, tmp_path / str(seed), recipe=recipe(seed=seed)))
    assert weights(tmp_path / "1") != weights(tmp_path / "2")


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run(base: Path, data: Path, tmp_path: Path) -> None:
    settings = recipe(learning_rate=1e30)
    with pytest.raises(TuningError, match="lower learning rate"):
        train_here(open_order(base, data, tmp_path, recipe=settings))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "ppo"}, "ppo"),
        ({"rank": 0}, "rank"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"max_tokens": 513}, "512"),
        ({"method": "dpo", "is_packed": True}, "not packed"),
        ({"targets": ("no_such_layer",)}, "no_such_layer"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    settings: Recipe = recipe(**changes)
    lines = [chat_line("a", "b")]
    data = write_lines(tmp_path / "lines", lines)
    with pytest.raises(InvalidRecipe, match=reason):
        train_here(open_order(base, data, tmp_path, recipe=settings))


def test_a_wrong_line_of_the_validation_file_is_told(
    base: Path, data: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("{}\n")
    with pytest.raises(InvalidTrainingData, match="validation file") as caught:
        train_here(open_order(base, data, tmp_path, validation_file=str(wrong)))
    assert caught.value.line == 1


@pytest.mark.parametrize(
    "changes", [{"quantization": "int3"}, {"embedding_quantization": "int8"}, {"dtype": "int8"}]
)
def test_settings_that_cannot_be_trained_are_refused(
    base: Path, data: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(BaseNotTunable):
        train_here(open_order(base, data, tmp_path, **changes))
