"""A step while it is filled, and what its sequences compute."""

from __future__ import annotations

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.draft import Draft
from loraplex.engine.execution.runner import StepRequests, chunk_of
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import SequenceBlocks, block_table
from loraplex.engine.messages import GenerationRequest, Pooling
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.batch import ScheduledBatch, ScheduledSequence, Step, parts_of
from loraplex.engine.scheduling.step_costs import StepShape


def make_request(
    num_tokens: int = 10,
    *,
    computed: int = 0,
    num_prompt_logprobs: int | None = None,
    pooling: Pooling | None = None,
    num_lone_steps: int = 0,
    name: str = "r",
    adapter: AdapterKey | None = None,
) -> Request:
    submitted = GenerationRequest(
        name,
        "acme",
        [1] * num_tokens,
        SamplingParams(max_tokens=1),
        adapter,
        num_prompt_logprobs=num_prompt_logprobs,
        pooling=pooling,
        num_lone_steps=num_lone_steps,
    )
    request = Request(submitted, CacheNamespace("acme", "runtime", None), 0, 0.0, None)
    request.kv = SequenceBlocks.empty(1)
    request.num_computed_tokens = computed
    return request


def make_step(budget: int = 32, max_read_rows: int = 4) -> Step:
    return Step(budget=budget, block_size=4, max_read_rows=max_read_rows, is_ahead=False)


# --- room in a step ---------------------------------------------------------------------------


def test_prompts_whose_logits_are_read_share_the_rows_that_a_step_has_for_them() -> None:
    step = make_step(max_read_rows=6)
    first, second, third = (make_request(num_prompt_logprobs=0) for _ in range(3))
    second.num_computed_tokens, second.unread = 3, range(5, 9)
    assert step.room_for(first) == 6
    step.add(first, 4)
    assert step.room_for(second) == (5 - 3) + 2
    step.add(second, 3)
    assert step.room_for(third) == 1
    step.add(third, 1)
    assert step.room_for(make_request(num_prompt_logprobs=0)) == 0
    assert step.room_for(make_request()) == 10


def test_without_rows_a_prompt_that_is_read_does_not_go_on_even_to_its_first_unread_token() -> None:
    request = make_request(num_prompt_logprobs=0, computed=3)
    request.unread = range(5, 9)
    assert make_step(max_read_rows=0).room_for(request) == 0


def test_prompts_without_logits_to_read_need_no_rows() -> None:
    step = make_step(max_read_rows=2)
    is_read = make_request(num_prompt_logprobs=0)
    is_read.unread = range(9, 9)
    for request in (make_request(pooling=Pooling.MEAN), is_read, make_request()):
        assert step.room_for(request) == 10
        step.add(request, 9)
    assert step.room_for(make_request(num_prompt_logprobs=0)) == 2


def test_a_bound_takes_away_what_is_beyond_it_and_adds_nothing() -> None:
    step = make_step(budget=10)
    step.leave_at_most(12)
    assert step.budget == 10
    step.leave_at_most(7)
    assert step.budget == 7
    step.add(make_request(5), 5)
    assert step.budget == 2


def test_what_a_preempted_request_was_to_draft_is_given_to_nobody() -> None:
    step = make_step(budget=12)
    first, second = make_request(), make_request()
    for request, num_draft_tokens in ((first, 3), (second, 2)):
        step.add(request, 1)
        step.draft_token(request, num_draft_tokens)
    assert (step.budget, step.num_draft_tokens) == (12 - 2 - 5, 5)
    step.cancel(first)
    assert (step.budget, step.num_draft_tokens) == (12 - 2 - 5 + 1, 2)
    assert [sequence.request for sequence in step.drafting()] == [second]


def test_a_decode_after_a_preempted_one_counts_its_own_context() -> None:
    step, first, second = make_step(), make_request(8, computed=7), make_request(6, computed=5)
    step.decodes[first] = ScheduledSequence.of(first, 1)
    step.sort_keys.append(0)
    step.num_context_tokens = 7
    step.cancel(first)
    step.add(second, 1)
    batch = step.batch(list)
    assert batch is not None
    assert batch.shape == StepShape(0, 1, 5)


def test_what_a_preempted_prompt_was_to_compute_is_room_again() -> None:
    step = make_step(budget=12)
    request = make_request()
    step.add(request, 10)
    step.cancel(request)
    assert (step.budget, step.preempted) == (12, {request})
    assert step.batch(list) is None


def test_the_shape_counts_the_context_of_decodes_and_prompts() -> None:
    step = make_step()
    decode, prompt = make_request(8, computed=7), make_request(9, computed=4)
    step.add(decode, 1)
    step.add(prompt, 5)
    step.draft_token(decode, 2)
    assert step.shape() == StepShape(5, 1, 7 + 4, 2)


# --- a sequence's tokens ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computed", "num_tokens", "num_draft_tokens", "samples"),
    [(0, 10, 0, True), (0, 9, 0, False), (9, 1, 0, True), (9, 4, 3, True), (4, 5, 0, False)],
)
def test_the_next_token_is_drawn_where_the_last_known_one_is_computed(
    computed: int, num_tokens: int, num_draft_tokens: int, samples: bool
) -> None:
    request = make_request(computed=computed)
    sequence = ScheduledSequence.of(request, num_tokens, num_draft_tokens)
    assert sequence.samples == samples
    assert sequence.num_known_tokens == num_tokens - num_draft_tokens


def test_logits_are_looked_at_from_the_first_position_that_is_read_or_to_draw_from() -> None:
    read = make_request(num_prompt_logprobs=0, computed=2)
    assert ScheduledSequence.of(read, 5).num_logits_rows == 5
    read.unread = range(4, 9)
    assert ScheduledSequence.of(read, 5).num_logits_rows == 3
    assert ScheduledSequence.of(read, 2).num_logits_rows == 1, "nothing is read yet"
    assert ScheduledSequence.of(make_request(pooling=Pooling.MEAN), 5).num_logits_rows == 1
    assert ScheduledSequence.of(make_request(computed=9), 4, 3).num_logits_rows == 4


def test_fewer_draft_tokens_than_were_scheduled_leave_the_known_ones_as_they_are() -> None:
    request = make_request(computed=9)
    request.draft = Draft(token_ids=(5, 6))
    assert ScheduledSequence.of(request, 4, 3).with_draft() == ScheduledSequence.of(request, 3, 2)


def test_a_batch_counts_the_drafts_that_really_run() -> None:
    request = make_request(computed=9)
    scheduled = (ScheduledSequence.of(request, 4, 3),)
    batch = ScheduledBatch(scheduled, (), StepShape(0, 1, 9, 3))
    running = (ScheduledSequence.of(request, 3, 2),)
    assert batch.running(running) == ScheduledBatch(running, (), StepShape(0, 1, 9, 2))


# --- parts ------------------------------------------------------------------------------------


def test_suspects_run_alone_for_as_many_steps_and_the_others_together() -> None:
    plain, other, suspect, brief = (
        ScheduledSequence.of(make_request(num_lone_steps=count, name=name), 1)
        for name, count in (("p", 0), ("o", 0), ("s", 3), ("b", 1))
    )
    sequences = (plain, suspect, other, brief)
    assert list(parts_of(sequences)) == [(plain, other), (suspect,), (brief,)]
    assert list(parts_of(sequences)) == [(plain, other, brief), (suspect,)]
    assert list(parts_of([suspect])) == [(suspect,)]
    assert list(parts_of(sequences)) == [sequences]


def test_suspects_of_one_adapter_share_their_passes() -> None:
    first, second, other, plain = (
        ScheduledSequence.of(make_request(num_lone_steps=count, name=name, adapter=adapter), 1)
        for name, adapter, count in (
            ("f", AdapterKey("acme", "a"), 2),
            ("s", AdapterKey("acme", "a"), 1),
            ("o", AdapterKey("acme", "b"), 1),
            ("p", AdapterKey("acme", "a"), 0),
        )
    )
    sequences = (first, other, second, plain)
    assert list(parts_of(sequences)) == [(plain,), (first, second), (other,)]
    assert list(parts_of(sequences)) == [(other, second, plain), (first,)]
    assert list(parts_of(sequences)) == [sequences]


def test_decodes_by_column_are_the_chunks_of_their_sequences_in_every_step() -> None:
    requests = tuple(make_request(length, computed=length - 1) for length in (3, 6, 9))
    for request in requests:
        request.kv.slides_at = 3  # so tokens may be evicted
    columns = StepRequests.of(requests)
    for step in range(4):
        changed = requests[step % 3]
        changed.kv.tables[0] = block_table([step + 1])
        changed.kv.num_evicted += step
        if step:
            for request in requests:
                request.num_computed_tokens += 1
                request.token_ids.append(20 + step)
        if step == 3:
            changed.token_ids.pop()  # it is pending
        sequences = [ScheduledSequence.of(request, 1) for request in requests]
        starts = [sequence.start for sequence in sequences]
        found = columns.decodes(starts, are_known=step < 3)
        assert list(found) == [chunk_of(sequence) for sequence in sequences]
