import assert from "node:assert/strict";
import { test } from "node:test";

import { LIMITS, limitsOf } from "./limits.ts";

test("an empty field is no limit, and zero is one", () => {
  const form = new FormData();
  for (const { name } of LIMITS) form.set(name, "");
  form.set("keys", "0");
  form.set("requests_per_minute", " 600 ");
  form.set("period", "day");
  const limits = limitsOf(form);
  assert.equal(limits.keys, 0);
  assert.equal(limits.requests_per_minute, 600);
  assert.equal(limits.adapters, null);
  assert.equal(limits.period, "day");
});

test("all limits are sent, because those left out would be lifted unseen", () => {
  assert.deepEqual(Object.keys(limitsOf(new FormData())).sort(), [...LIMITS.map((one) => one.name), "period"].sort());
});
