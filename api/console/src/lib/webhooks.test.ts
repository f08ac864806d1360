import assert from "node:assert/strict";
import { test } from "node:test";
import { disabledText, failureText, webhookState } from "./webhooks.ts";

const ACTIVE = { disabled_at: null, disabled_by: null, failing_since: null };
const AT = "2026-05-04T12:00:00Z";

test("a webhook is disabled, whether it failed or not, or fails, or is active", () => {
  assert.equal(webhookState(ACTIVE), "active");
  assert.equal(webhookState({ ...ACTIVE, failing_since: AT }), "failing");
  assert.equal(webhookState({ disabled_at: AT, disabled_by: "failures", failing_since: AT }), "disabled");
});

test("only a webhook that nobody disabled says why it is", () => {
  assert.equal(disabledText(ACTIVE), null);
  assert.equal(disabledText({ ...ACTIVE, disabled_at: AT, disabled_by: "caller" }), null);
  assert.match(disabledText({ ...ACTIVE, disabled_at: AT, disabled_by: "failures" })!, /two days/);
  assert.match(disabledText({ ...ACTIVE, disabled_at: AT, disabled_by: "receiver" })!, /410/);
});

test("a failed attempt says why, with the status if there was an answer", () => {
  assert.equal(failureText({ last_failure: "status", last_status: 503 }), "status 503");
  assert.equal(failureText({ last_failure: "name_not_resolved", last_status: null }), "name not resolved");
  assert.equal(failureText({ last_failure: null, last_status: 204 }), "");
});
