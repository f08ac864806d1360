import assert from "node:assert/strict";
import { test } from "node:test";

import { grouped, isFound, titleOf, valueOf, type Setting } from "./settings.ts";

const setting = (name: string, value: string | null = null): Setting => ({
  name, value, flag: "--some-gib", variable: "SOME_GIB", description: "What it is for.", unset: null,
});

test("values have units", () => {
  const shown = (name: string, value: string): string | null => valueOf({ name, value });
  assert.equal(shown("engine.memory_bytes", "536870912"), "512 MiB");
  assert.equal(shown("LORAPLEX_DISK_CACHE_BYTES", "10737418240"), "10.0 GiB");
  assert.equal(shown("LORAPLEX_MAX_FULL_MATRIX_MIB", "1.5"), "1.50 MiB");
  assert.equal(shown("LORAPLEX_STALE_SECONDS", "300.0"), "5 min");
  assert.equal(shown("LORAPLEX_DRAIN_SECONDS", "25.0"), "25 s");
  assert.equal(shown("engine.target_itl_ms", "40"), "40 ms");
  assert.equal(shown("LORAPLEX_UPLOAD_DAYS", "1"), "1 day");
  assert.equal(shown("engine.tenant_cap", "0.6"), "60 %");
  assert.equal(shown("engine.max_queued", "4096"), "4,096");
});

test("words stay words, and truths become on and off", () => {
  assert.equal(valueOf({ name: "engine.kv_dtype", value: "auto" }), "auto");
  assert.equal(valueOf({ name: "engine.prefix_caching", value: "true" }), "on");
  assert.equal(valueOf({ name: "LORAPLEX_OTEL", value: "false" }), "off");
  assert.equal(valueOf({ name: "LORAPLEX_OTEL", value: null }), null);
});

test("names are words without units", () => {
  assert.equal(titleOf({ name: "engine.kv_cache_bytes" }), "KV cache");
  assert.equal(titleOf({ name: "engine.max_draft_tokens" }), "Maximum draft tokens");
  assert.equal(titleOf({ name: "LORAPLEX_MAX_PINS" }), "Pins of a tenant");
});

test("groups have their order, and what none names comes last", () => {
  const found = grouped(["engine.newer", "LORAPLEX_STORE", "engine.dtype", "engine.model"].map((name) => setting(name)));
  assert.deepEqual(found.map(([title, members]) => [title, ...members.map(({ name }) => name)]), [
    ["Base model", "engine.model", "engine.dtype"], ["Storage", "LORAPLEX_STORE"], ["Other settings", "engine.newer"],
  ]);
});

test("a setting is found by each of its names, its title and its meaning", () => {
  for (const wanted of ["memory_bytes", "--some-gib", "some_GIB", " memory", "is FOR"]) {
    assert.ok(isFound(setting("engine.memory_bytes"), wanted), wanted);
  }
  assert.ok(!isFound(setting("engine.memory_bytes"), "nothing"));
});
