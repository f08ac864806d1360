"""The sequences that the engine gets for an order of several choices of several prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from loraplex.api.inference.objective import Objective
from loraplex.api.inference.order import Order
from loraplex.api.inference.sequences import sequences_of
from loraplex.api.inference.served_models import ServedModel
from loraplex.engine.messages import GenerationRequest, LatencyTargets
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.text_form import TextForm

TOKENIZER = cast(
    Any, SimpleNamespace(eos_token_ids=frozenset({7, 2}), own_eos_token_ids=frozenset())
)


OBJECTIVE = Objective(LatencyTargets(1.0), "server")


def requests_of(
    sampling: SamplingParams, *, num_choices: int, num_prompts: int = 1, **fields: Any
) -> list[GenerationRequest]:
    order = Order(
        request_id="r",
        arrived_at=0.0,
        principal=cast(Any, SimpleNamespace(tenant_id="acme", tenant_weight=1.0)),
        model=ServedModel("base", None),
        prompts=[[10 + number] for number in range(num_prompts)],
        num_choices=num_choices,
        sampling=sampling,
        text=TextForm(continues_prompt=True),
        **fields,
    )
    counters = [cast(Any, f"counter {index}") for index in range(order.num_sequences)]
    specs = sequences_of(order, OBJECTIVE, counters=counters, tokenizer=TOKENIZER)
    assert [spec.counter for spec in specs] == counters
    assert {spec.request.targets for spec in specs} == {OBJECTIVE.targets}
    return [spec.request for spec in specs]


def test_each_prompt_s_choices_share_its_group_and_only_the_first_reads_it() -> None:
    requests = requests_of(SamplingParams(), num_choices=2, num_prompts=2, num_prompt_logprobs=3)
    assert [request.prompt_token_ids for request in requests] == [[10], [10], [11], [11]]
    groups = [request.group_id for request in requests]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert [request.num_prompt_logprobs for request in requests] == [3, None, 3, None]
    assert len({request.request_id for request in requests}) == 4
    assert requests_of(SamplingParams(), num_choices=1)[0].group_id is None


def test_choices_draw_with_seeds_of_their_own_that_the_caller_s_seed_decides() -> None:
    def seeds(seed: int | None, num_choices: int) -> list[int | None]:
        requests = requests_of(SamplingParams(seed=seed), num_choices=num_choices)
        return [request.sampling.seed for request in requests]

    assert seeds(3, 1) == [3]
    assert seeds(3, 4)[:2] == seeds(3, 2)
    assert seeds(3, 4)[0] == 3
    assert len({*seeds(3, 4), *seeds(4, 4)}) == 8
    assert seeds(None, 2) == [None, None]


def test_the_tokenizer_s_end_tokens_end_every_choice_unless_they_are_ignored() -> None:
    sampling = SamplingParams(stop_token_ids=(9,))
    for request in requests_of(sampling, num_choices=2):
        assert request.sampling.stop_token_ids == (9, 2, 7)
    sampling = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
    for request in requests_of(sampling, num_choices=2):
        assert request.sampling.stop_token_ids == (9,)
