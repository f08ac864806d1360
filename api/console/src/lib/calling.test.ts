import assert from "node:assert/strict";
import { test } from "node:test";

import type { AdapterVersion } from "../api/types.ts";
import { firstRequest, latestVersion, modelNames, usesOf } from "./calling.ts";

const version = (number: number, state: string): AdapterVersion => ({ version: number, state }) as AdapterVersion;

test("an adapter is called by its name, its aliases and its ready versions", () => {
  const versions = [version(3, "rejected"), version(2, "ready"), version(1, "ready")];
  assert.deepEqual(modelNames({ name: "bot", aliases: { prod: 1 }, versions }), ["bot", "bot@prod", "bot@2", "bot@1"]);
});

test("the latest version is that of the highest number, in any order", () => {
  assert.equal(latestVersion({ versions: [version(2, ""), version(10, ""), version(1, "")] })?.version, 10);
  assert.equal(latestVersion({ versions: [] }), undefined);
});

const classifier = (labels: string[]) => ({ task: "classify", report: { classification: { labels } } }) as const;

test("each task has its own routes, and only a head of one label scores", () => {
  const paths = (version: Parameters<typeof usesOf>[0]): string[] => usesOf(version).map((use) => firstRequest("http://h", "bot", use).path);
  assert.deepEqual(paths({ task: "generate", report: {} }), ["/chat/completions", "/embeddings"]);
  assert.deepEqual(paths(classifier(["sport", "weather"])), ["/classify"]);
  assert.deepEqual(paths(classifier(["relevance"])), ["/score", "/rerank", "/classify"]);
});
