import assert from "node:assert/strict";
import { test } from "node:test";

import { keyState, listOf } from "./keys.ts";

const NOW = Date.parse("2026-11-22T12:00:00Z");
const endless = { expires_at: null, revoked_at: null };

test("a key without an end is usable", () => {
  assert.equal(keyState(endless, NOW), "usable");
});

test("a key ends soon within its last week, and has expired at its end", () => {
  const ending = (at: string) => keyState({ ...endless, expires_at: at }, NOW);
  assert.equal(ending("2026-11-29T12:00:00Z"), "usable");
  assert.equal(ending("2026-11-29T11:59:59Z"), "ends soon");
  assert.equal(ending("2026-11-22T12:00:00Z"), "expired");
});

test("a revoked key is revoked, whatever its end; one that will be ends soon", () => {
  const expires_at = "2027-11-22T12:00:00Z";
  assert.equal(keyState({ expires_at, revoked_at: "2026-11-22T11:00:00Z" }, NOW), "revoked");
  assert.equal(keyState({ expires_at, revoked_at: "2026-11-23T11:00:00Z" }, NOW), "ends soon");
});

test("a list is what stands between spaces, commas and lines; nothing is no restriction", () => {
  assert.deepEqual(listOf("a, b\n  c"), ["a", "b", "c"]);
  assert.equal(listOf(" \n , "), null);
});
