"""Generated figures for the hour before a server's start, for screenshots with time series."""

from __future__ import annotations

import math
from random import Random
from time import time

from loraplex.platform.overview import service as overview
from loraplex.platform.overview.figures import FigureSums
from loraplex.platform.overview.service import Gathered
from support.seeded import Seeded

NUM_MINUTES = 60
SERVER_ID = "before"
NUM_KV_BLOCKS = 2000
LOADS = {"acme": 3.0, "globex": 2.0, "initech": 0.8}
"""Requests a second of each tenant, about which they swing."""


def write_past_hour(seeded: Seeded) -> None:
    """A minute each, up to the one that has just ended."""
    random, now = Random(11), time()
    database = seeded.server.database
    with database.platform_transaction() as session:
        for back in range(NUM_MINUTES, 0, -1):
            gathered = Gathered(kv_capacity_seconds=60.0 * NUM_KV_BLOCKS)
            for slug, load in LOADS.items():
                swing = 1 + 0.5 * math.sin(back / 7 + load) + random.uniform(-0.15, 0.15)
                sums = _minute(random, load * swing)
                gathered.server.add(sums)
                gathered.tenants[seeded.callers[slug].tenant_id] = sums
            overview.add(session, SERVER_ID, now - 60 * back, gathered)
    database.close()


def _minute(random: Random, per_second: float) -> FigureSums:
    requests = round(60 * per_second)
    output = requests * random.randint(70, 110)
    sums = FigureSums(
        num_requests=requests,
        num_errors=random.choice((0, 0, 0, 1)),
        prompt_tokens=requests * random.randint(180, 260),
        output_tokens=output,
        num_cold_loads=random.choice((0, 0, 1, 2)),
        running_seconds=60 * per_second * random.uniform(0.9, 1.3),
        waiting_seconds=60 * per_second * random.uniform(0.0, 0.25),
        kv_block_seconds=60 * per_second * random.uniform(60, 90),
        adapter_byte_seconds=60 * 1_200_000.0,
    )
    for _ in range(requests):
        sums.first_token_came(random.lognormvariate(-3.2, 0.5))
    for _ in range(output // 20):
        sums.tokens_came_again(random.lognormvariate(-4.7, 0.35))
    return sums
