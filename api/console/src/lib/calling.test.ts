import assert from "node:assert/strict";
import { test } from "node:test";

import type { AdapterVersion } from "../api/types.ts";
import { firstRequest, latestVersion, modelNames } from "./calling.ts";

const version = (number: number, state: string): AdapterVersion => ({ version: number, state }) as AdapterVersion;

test("an adapter is called by its name, its aliases and its ready versions", () => {
  const versions = [version(3, "rejected"), version(2, "ready"), version(1, "ready")];
  assert.deepEqual(modelNames({ name: "bot", aliases: { prod: 1 }, versions }), ["bot", "bot@prod", "bot@2", "bot@1"]);
});

test("the latest version is that of the highest number, in any order", () => {
  assert.equal(latestVersion({ versions: [version(2, ""), version(10, ""), version(1, "")] })?.version, 10);
  assert.equal(latestVersion({ versions: [] }), undefined);
});

test("a classifier is called at its own route", () => {
  assert.equal(firstRequest("http://h", "topics", "classify").path, "/classify");
  assert.equal(firstRequest("http://h", "bot", "generate").path, "/chat/completions");
});
