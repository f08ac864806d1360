"""What the recurrence of a layer with states costs a step on the CPU, by sequences and rows.

    make bench-states        ARGS="--sequences 1 16 --rows 1 64 --json FILE"

Each of several layers goes on from states of its own, more than any cache holds, with as many
threads as PyTorch takes. `library` is the kernel that serves. `transformers` is the family's own
function for all sequences at once, in chunks no longer than they are, from states that are gathered
for it. The two take turns. The figure is the least time of several repeats, in milliseconds a
layer.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.kernels.state_rows import StateRows
from support.recurrence_cases import (
    PER_TOKEN,
    TIME_DIMS,
    RecurrenceCase,
    gated_delta_rule,
    mamba,
    mamba2,
    read,
)

LAYERS: dict[str, Callable[..., RecurrenceCase]] = {
    "qwen3-next": partial(gated_delta_rule, num_heads=32, key_dim=128, value_dim=128),
    "kimi-linear": partial(
        gated_delta_rule, num_heads=32, key_dim=128, value_dim=128, decays_keys=True
    ),
    "falcon-h1-7b": partial(mamba2, num_heads=24, head_dim=128, state_size=256),
    "mamba-2.8b": partial(mamba, channels=5_120, size=16),
}
LONGEST_CHUNKS = {
    "torch_chunk_gated_delta_rule": 64,
    "chunk_kimi_delta_attention": 64,
    "mamba2_chunk_scan": 256,
}
FORMS = ("library", "transformers")
Run = Callable[[Tensor, Tensor], object]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(f"ms a layer, {torch.get_num_threads()} threads")
    print(f"  {'layer':14}{'sequences':>10}{'rows':>6}" + "".join(f"{form:>14}" for form in FORMS))
    found = []
    for layer in options.layers:
        for num_sequences in options.sequences:
            for num_rows in options.rows:
                torch.manual_seed(0)
                case = LAYERS[layer](num_sequences * num_rows)
                times = measure(case, num_sequences, options.num_layers, options.repeats)
                print(
                    f"  {layer:14}{num_sequences:10}{num_rows:6}"
                    + "".join(f"{times[form]:14.2f}" for form in FORMS),
                    flush=True,
                )
                found.append({"layer": layer, "sequences": num_sequences, "rows": num_rows} | times)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(
    case: RecurrenceCase, num_sequences: int, num_layers: int, num_repeats: int
) -> dict[str, float]:
    """Milliseconds a layer, by form."""
    change = read(case, slice(None))
    layers = torch.randn(num_layers, num_sequences, *change.state_size)
    afters = torch.empty_like(layers)
    num_rows = case.num_tokens // num_sequences
    rows = StateRows(torch.arange(num_sequences + 1) * num_rows, torch.arange(num_sequences))
    runs: dict[str, Run] = {
        "library": lambda states, after: change.advance(states, rows, after),
        "transformers": transformers_run(case, rows),
    }
    times: dict[str, list[float]] = {form: [] for form in runs}
    for _ in range(num_repeats + 1):
        for form, run in runs.items():
            began = time.perf_counter()
            for states, after in zip(layers, afters, strict=True):
                run(states, after)
            times[form].append((time.perf_counter() - began) * 1e3 / num_layers)
    return {form: min(taken[1:]) for form, taken in times.items()}


def transformers_run(case: RecurrenceCase, rows: StateRows) -> Run:
    """transformers' function of a batch of the sequences. Mamba's begins with zeros."""
    function = inspect.unwrap(getattr(case.family, case.name))
    size, dim = (len(rows.sources), -1), TIME_DIMS[case.name]
    batch: dict[str, Any] = {
        name: value[0].unflatten(dim - 1, size).movedim(dim - 1, 0).contiguous()
        if name in PER_TOKEN
        else value
        for name, value in case.arguments.items()
    }
    if case.name not in LONGEST_CHUNKS:
        return lambda _states, _after: function(**batch, return_last_state=True)
    num_rows = case.num_tokens // len(rows.sources)
    batch["chunk_size"] = min(LONGEST_CHUNKS[case.name], 1 << (num_rows - 1).bit_length())
    if case.name == "mamba2_chunk_scan":
        return lambda states, _after: function(
            **batch,
            initial_states=states.index_select(0, rows.sources).transpose(2, 3),
            return_final_states=True,
        )
    return lambda states, _after: function(
        **batch, initial_state=states.index_select(0, rows.sources), output_final_state=True
    )


if __name__ == "__main__":
    main()
