"""Lists of CPUs as the kernel writes them, such as `2-3,6`. Torch-free."""

from __future__ import annotations


def parse_cpus(text: str) -> tuple[int, ...]:
    """The numbers in ascending order. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ValueError(f"{text!r} is not a list of CPUs such as 2-3,6")
        first, last = int(ends[0]), int(ends[-1])
        if last < first:
            raise ValueError(f"{part.strip()} ends before it begins")
        found.update(range(first, last + 1))
    return tuple(sorted(found))
