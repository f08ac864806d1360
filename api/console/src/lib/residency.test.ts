import assert from "node:assert/strict";
import { test } from "node:test";
import { spansOf } from "./residency.ts";

test("a state lasts until the next one, the last until now", () => {
  const spans = spansOf([
    { state: "fetching", seconds_ago: 100, reason: null },
    { state: "resident", seconds_ago: 90, reason: null },
    { state: "failed", seconds_ago: 5, reason: "adapter_load_failed" },
  ]);
  assert.deepEqual(spans.map((span) => [span.state, span.seconds]), [
    ["fetching", 10], ["resident", 85], ["failed", 5],
  ]);
  assert.deepEqual(spansOf([]), []);
});

test("clocks that differ a little give no negative time", () => {
  const spans = spansOf([
    { state: "a", seconds_ago: 1, reason: null },
    { state: "b", seconds_ago: 1.01, reason: null },
  ]);
  assert.equal(spans[0]?.seconds, 0);
});
