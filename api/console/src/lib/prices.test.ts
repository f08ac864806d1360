import assert from "node:assert/strict";
import { test } from "node:test";
import { earliestEnd, priceState } from "./prices.ts";

const NOW = Date.parse("2026-05-04T12:00:00Z");
const validity = (from: string, until: string | null) => ({ effective_from: from, effective_until: until });

test("a price holds from its beginning to its end", () => {
  const price = validity("2026-05-04T12:00:00Z", "2026-05-05T12:00:00Z");
  assert.equal(priceState(price, NOW - 1), "scheduled");
  assert.equal(priceState(price, NOW), "in effect");
  assert.equal(priceState(price, Date.parse("2026-05-05T12:00:00Z")), "past");
  assert.equal(priceState(validity("2026-05-04T11:00:00Z", null), NOW), "in effect");
});

test("a price that another one supersedes from the same time on never holds", () => {
  assert.equal(priceState(validity("2026-06-01T00:00:00Z", "2026-06-01T00:00:00Z"), NOW), "past");
});

test("a scheduled price ends as it begins, another as soon as possible", () => {
  assert.equal(earliestEnd(validity("2026-06-01T00:00:00Z", null), NOW), "2026-06-01T00:00:00Z");
  assert.equal(earliestEnd(validity("2026-05-04T12:00:10Z", null), NOW), null);
  assert.equal(earliestEnd(validity("2026-05-01T00:00:00Z", null), NOW), null);
});
