"""Which requests may become samples."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from ..http.batch_lines import line_of
from ..inference.inference import Inference
from ..inference.served_models import ServedModel
from ..samples.content import Content
from ..samples.open_sample import OpenSample


def open_sample(
    request: Request,
    inference: Inference,
    model: ServedModel,
    *,
    store: bool | None,
    num_sequences: int,
    make_content: Callable[[], Content],
) -> OpenSample | None:
    """The sample of a request, if it was drawn.

    None for requests to the base or to a composition, for several choices or prompts, for the lines
    of a batch, and for those that say `store: false`.
    """
    adapter = model.adapter
    is_one = adapter is not None and model.composition is None and num_sequences == 1
    if adapter is None or not is_one or store is False or line_of(request) is not None:
        return None
    return inference.samples.open(request.state.request_id, adapter, make_content)
