import assert from "node:assert/strict";
import test from "node:test";
import { actionText, detailText, subjectOf } from "./audit.ts";

test("an action is a sentence without its dots", () => {
  assert.equal(actionText("key.create"), "key created");
  assert.equal(actionText("operator.key.revoke"), "operator key revoked");
  assert.equal(actionText("version.unpin"), "version unpinned");
});

test("an action that has no word yet stands as it is", () => {
  assert.equal(actionText("thing.frobnicate_all"), "thing frobnicate all");
});

test("what was changed is called by its name, and an id without a name by itself", () => {
  assert.deepEqual(subjectOf("key_1", { name: "ci" }), { name: "ci", id: "key_1" });
  assert.deepEqual(subjectOf("user_1", { email: "a@b.example", role: "owner" }), { name: "a@b.example", id: "user_1" });
  assert.deepEqual(subjectOf("bot@3", {}), { name: "bot@3", id: null });
  assert.deepEqual(subjectOf("acme", { name: "acme" }), { name: "acme", id: null });
  assert.deepEqual(subjectOf("acme", { name: null }), { name: "acme", id: null });
});

test("details are in units that people read", () => {
  assert.deepEqual(detailText("stored_bytes", 2 ** 31), ["stored bytes", "2.00 GiB"]);
  assert.deepEqual(detailText("overlap_seconds", 3600), ["overlap", "1 h"]);
  assert.deepEqual(detailText("suspended", true), ["suspended", "yes"]);
  assert.deepEqual(detailText("keys", null), ["keys", "none"]);
  assert.deepEqual(detailText("scopes", ["infer", "adapters:read"]), ["scopes", "infer, adapters:read"]);
  assert.deepEqual(detailText("digest", "sha256:0123456789abcdef0123"), ["digest", "0123456789ab"]);
  assert.deepEqual(detailText("canary", { version: 3, percent: 10 }), ["canary", "version: 3, percent: 10"]);
});
