"""The published table of PEFT features, row by row: pushed files compared with PEFT."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex.adapters.formats import REFUSED, SERVED, RefusedFeature, ServedFeature
from support.feature_proofs import OUTCOME_SERVED, TOLERANCE, FeatureProofs, open_feature_proofs


@pytest.fixture(scope="module")
def proofs() -> Iterator[FeatureProofs]:
    with open_feature_proofs() as opened:
        yield opened


@pytest.mark.filterwarnings("ignore")  # PEFT warns of much of what is to be shown here
@pytest.mark.parametrize("feature", [*SERVED, *REFUSED], ids=lambda feature: feature.name)
def test_row_is_true(feature: ServedFeature | RefusedFeature, proofs: FeatureProofs) -> None:
    proof = proofs.prove(feature)
    assert proof.is_right
    if isinstance(feature, ServedFeature):
        assert proof.outcome == OUTCOME_SERVED
        assert proof.max_error is not None
        assert proof.max_error < TOLERANCE
    else:
        assert proof.outcome == f"refused:{feature.code}"
