"""Charts: what is drawn of few figures."""

from __future__ import annotations

import json

from playwright.sync_api import Page, Route

from support.console import Visitor

NUM_COLORED = """figure => {
  const canvas = figure.querySelector("canvas");
  const swatch = figure.querySelector(".swatch");
  const [red, green, blue] = getComputedStyle(swatch).backgroundColor.match(/\\d+/g).map(Number);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4)
    if (data[i] === red && data[i + 1] === green && data[i + 2] === blue) found += 1;
  return found;
}"""
"""The pixels of a chart that have the color of its first series."""


def num_colored(operator: Visitor, values: list[float | None]) -> int:
    """How much is drawn of the first percentile of latency, whose last figures are `values`."""
    page: Page = operator.page

    def answer(route: Route) -> None:
        real = route.fetch()
        view = real.json()
        for name, series in view["series"].items():
            if name.startswith("ttft"):
                last = values if name == "ttft_p50_ms" else []
                view["series"][name] = [None] * (len(series) - len(last) - 1) + [*last, None]
        route.fulfill(response=real, body=json.dumps(view))

    page.route("**/admin/overview**", answer)
    try:
        operator.open("/")
        page.locator("canvas").nth(2).wait_for()
        page.wait_for_timeout(100)
        return int(page.locator("figure").nth(2).evaluate(NUM_COLORED))
    finally:
        page.unroute("**/admin/overview**")


def test_a_single_figure_is_drawn(operator: Visitor) -> None:
    operator.open("/settings")
    operator.pick(None)
    assert num_colored(operator, [None]) == 0
    assert num_colored(operator, [40.0]) > 0
    assert num_colored(operator, [None, 40.0, None, 80.0]) > num_colored(operator, [40.0])
