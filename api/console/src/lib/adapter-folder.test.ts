import assert from "node:assert/strict";
import { test } from "node:test";
import { NotAnAdapter, readAdapterFolder, type NamedFile } from "./adapter-folder.ts";

function file(name: string, text = "{}"): NamedFile {
  return { name, size: text.length, text: () => Promise.resolve(text) };
}

const weights = file("adapter_model.safetensors", "weights");

test("a folder as PEFT writes it is taken, whatever else lies in it", async () => {
  const config = file("adapter_config.json", '{"r": 8}');
  const folder = await readAdapterFolder([file("README.md"), config, weights]);
  assert.deepEqual(folder, { config: { r: 8 }, weights });
});

for (const [what, files, said] of [
  ["a pickle", [file("adapter_model.bin"), file("adapter_config.json")], /pickle.*safe_serialization/],
  ["a whole model", [file("config.json"), file("model.safetensors")], /whole model.*merge_and_unload/],
  ["an archive", [file("bot.ZIP")], /unpack it/],
  ["nothing", [], /no adapter_model\.safetensors/],
  ["no configuration", [weights], /no adapter_config\.json/],
  ["two adapters", [weights, weights, file("adapter_config.json")], /more than one/],
  ["empty weights", [file("adapter_model.safetensors", ""), file("adapter_config.json")], /empty/],
  ["a broken configuration", [weights, file("adapter_config.json", "{")], /not JSON/],
  ["a list as configuration", [weights, file("adapter_config.json", "[]")], /not a JSON object/],
] as const) {
  test(`${what} is refused with the way out`, async () => {
    await assert.rejects(readAdapterFolder([...files]), (error: unknown) => {
      assert.ok(error instanceof NotAnAdapter);
      assert.match(error.message, said);
      return true;
    });
  });
}
