"""`loraplex serve --speculation`: accepted values, and the resulting engine configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from loraplex.api.cli.speculation import describe_speculation, parse_speculation
from loraplex.engine.config import PROPOSERS, EngineConfig, source_of
from loraplex.engine.proposer_list import ARGUMENTS, DEFAULT_PROPOSERS
from loraplex.engine.speculation.proposers import OPENERS
from support.fake_engine import fake_info


@pytest.mark.parametrize(
    ("said", "entries"),
    [
        (list(DEFAULT_PROPOSERS), ("ngram",)),
        (["off"], ()),
        (["ngram", "draft:/models/small"], ("ngram", "draft:/models/small")),
        (["early_exit:4, ngram"], ("early_exit:4", "ngram")),
        (["skip:3, 5,8-10,ngram"], ("skip:3,5,8-10", "ngram")),
        (["skip_tree:3,5", "mtp_tree"], ("skip_tree:3,5", "mtp_tree")),
        (["ngram", "skip:3", "5"], ("ngram", "skip:3,5")),
        (["medusa:heads.safetensors,"], ("medusa:heads.safetensors",)),
    ],
)
def test_proposers_are_given_one_by_one_or_in_a_list(
    said: list[str], entries: tuple[str, ...]
) -> None:
    assert parse_speculation(said) == entries
    assert EngineConfig("m", speculation=entries).proposers == [e.split(":")[0] for e in entries]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (
            ["hydra"],
            "hydra is not one of ngram, suffix, draft, draft_tree, early_exit, early_exit_tree, "
            "skip, skip_tree, quantized, quantized_tree, medusa, medusa_tree, eagle, eagle_tree, "
            "mtp, mtp_tree",
        ),
        (["off,ngram"], "off cannot be combined with other proposers"),
        (["ngram", "ngram"], "is named twice"),
        (["draft:a,draft:b"], "is named twice"),
        ([":x"], "is not one of"),
        (["ngram:4"], "ngram takes no argument"),
        (["mtp:head"], "mtp takes no argument"),
        (["suffix:4"], "suffix takes no argument"),
        (["draft"], "draft:MODEL"),
        (["medusa:"], "medusa:CHECKPOINT"),
        (["eagle"], "eagle:CHECKPOINT"),
        (["ngram,medusa_tree"], "medusa_tree:CHECKPOINT"),
        (["ngram_tree"], "ngram_tree is not one of"),
        (["mtp_tree:head"], "mtp_tree takes no argument"),
        (["early_exit_tree:0"], "a number of layers, not 0"),
        (["quantized_tree:int3"], "one of int8, int4, fp8, nf4, mxfp4, not int3"),
        (["early_exit"], "early_exit:LAYERS"),
        (["early_exit:many"], "a number of layers, not many"),
        (["early_exit:0"], "a number of layers, not 0"),
        (["skip"], "skip:LAYERS"),
        (["skip:1,one"], "one is not one of"),
        (["skip:1-"], "'1-' is neither a layer nor a range"),
        (["skip:5-3"], "'5-3' is neither a layer nor a range"),
        (["skip:0-99999999"], "neither a layer nor a range"),
        (["skip:1-4,2"], "names a layer twice"),
        (["ngram,5"], "5 is not one of"),
        (["quantized:int3"], "one of int8, int4, fp8, nf4, mxfp4, not int3"),
        (["quantized:none"], "one of int8, int4, fp8, nf4, mxfp4, not none"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: list[str], complaint: str) -> None:
    with pytest.raises(typer.BadParameter, match=complaint):
        parse_speculation(said)


def test_the_engine_runs_nothing_that_cannot_be_asked_for() -> None:
    assert set(OPENERS) <= set(PROPOSERS)
    assert set(map(source_of, PROPOSERS)) == set(ARGUMENTS) <= set(PROPOSERS)


def test_the_start_tells_who_drafts() -> None:
    info = fake_info("base")
    assert describe_speculation(info) == "No speculation: one token a step"
    speculating = replace(info, proposers=["ngram", "draft"], max_draft_tokens=6)
    line = "Speculation: ngram, draft; up to 6 draft tokens per step, coupled"
    assert describe_speculation(speculating) == line
