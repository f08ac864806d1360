"""Chains and trees of draft tokens."""

from __future__ import annotations

import pytest
import torch

from loraplex.engine.draft import ROOT, Draft

CHAIN = Draft((5, 6, 5))
TREE = Draft((5, 6, 5, 7, 6), (ROOT, ROOT, 1, 0, 1))


@pytest.mark.parametrize("parents", [(0,), (-2,), (ROOT, ROOT), (), (1, ROOT)])
def test_parents_stand_before_their_children_one_for_each_token(parents: tuple[int, ...]) -> None:
    num_tokens = 2 if len(parents) == 2 and parents[0] == 1 else 1
    with pytest.raises(ValueError, match=f"{num_tokens} tokens with the parents"):
        Draft((5, 6)[:num_tokens], parents)


def test_a_path_leads_from_the_root_to_its_token() -> None:
    assert [CHAIN.path(index) for index in (ROOT, 0, 2)] == [[], [0], [0, 1, 2]]
    assert [TREE.path(index) for index in (ROOT, 1, 3, 4)] == [[], [1], [0, 3], [1, 4]]


def test_a_child_is_the_first_of_its_parent_with_the_token() -> None:
    assert [CHAIN.child(parent, 5) for parent in (ROOT, 0, 1, 2)] == [0, None, 2, None]
    assert [TREE.child(parent, 5) for parent in (ROOT, 0, 1, 4)] == [0, None, 2, None]
    assert [TREE.child(parent, 6) for parent in (ROOT, 0, 1)] == [1, None, 4]
    assert Draft((5, 5), (ROOT, ROOT)).child(ROOT, 5) == 0


def test_what_is_kept_of_a_draft_keeps_its_parents_and_probabilities() -> None:
    probabilities = torch.arange(5.0)[:, None]
    tree = Draft(TREE.token_ids, TREE.parents, probabilities)
    kept = tree.only([1, 2, 4])
    assert (kept.token_ids, kept.parents) == ((6, 5, 6), (ROOT, 0, 0))
    assert kept.probabilities is not None
    assert kept.probabilities.tolist() == [[1.0], [2.0], [4.0]]
    assert tree.only(range(5)) is tree
    cut = CHAIN.only(range(2))
    assert (cut.token_ids, cut.parents, cut.probabilities) == ((5, 6), None, None)
