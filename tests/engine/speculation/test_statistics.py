"""The engine's reports about drafts."""

from __future__ import annotations

from pathlib import Path

from loraplex.engine.messages import SpeculationParams
from support.engine import LocalEngine
from support.speculation import ScriptedProposer, scripted


def test_the_engine_counts_what_its_proposers_did_for_each_adapter(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    plain = LocalEngine(tiny_base, tmp_path)
    key = plain.add_adapter(adapter_folders[0])
    ids = {"base": None, "adapter": key}
    for name, line in ids.items():
        plain.submit([5, 6, 7], line, request_id=name, max_tokens=60)
    plain.run()
    plain.close()
    answers = {name: plain.answers[name].token_ids for name in ids}
    with scripted(ScriptedProposer(answers)) as name:
        engine = LocalEngine(tiny_base, tmp_path, speculation=(name,))
        assert engine.add_adapter(adapter_folders[0]) == key
        for request_id, line in ids.items():
            engine.submit(
                [5, 6, 7],
                line,
                request_id=request_id,
                max_tokens=60,
                speculation=SpeculationParams(num_tokens=4),
            )
        engine.run()
        stats = engine.core.stats()
        engine.close()
    ends = {it: engine.answers[it].finished for it in ids}
    assert {it.key for it in stats.speculation} == {None, key}
    for entry in stats.speculation:
        end = ends["base" if entry.key is None else "adapter"]
        assert end is not None
        assert entry.num_draft_tokens == end.num_draft_tokens > 0
        assert entry.num_accepted_tokens == end.num_accepted_tokens > 0
    (totals,) = stats.speculation_totals
    assert totals.proposer == name
    assert totals.num_drafts == sum(entry.num_drafts for entry in stats.speculation)
    assert totals.num_accepted_tokens == sum(it.num_accepted_tokens for it in stats.speculation)
    assert totals.seconds > 0
