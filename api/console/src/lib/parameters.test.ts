import assert from "node:assert/strict";
import { test } from "node:test";

import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, fieldsOf, INITIAL, type Parameters } from "./parameters.ts";

const NONE: Parameters = Object.fromEntries(Object.keys(INITIAL).map((name) => [name, ""]));
const read = (typed: Parameters) => fieldsOf({ ...NONE, ...typed });

test("an empty field is not sent", () => {
  assert.deepEqual(read({}), { fields: {}, problems: {} });
  assert.deepEqual(fieldsOf(INITIAL).fields, { max_tokens: 256, temperature: 0 });
});

test("numbers are sent as numbers, whole ones exactly", () => {
  const { fields } = read({ temperature: "0.7", top_k: "-1", seed: "9007199254740991", n: "3" });
  assert.deepEqual(fields, { temperature: 0.7, top_k: -1, seed: 9007199254740991, n: 3 });
});

test("a number out of its range, with a part or too long to be exact is a problem", () => {
  const { fields, problems } = read({ temperature: "2.1", top_p: "-0.1", n: "1.5", seed: "9007199254740993", min_p: "x" });
  assert.deepEqual(fields, {});
  assert.deepEqual(problems, {
    temperature: "At most 2.", top_p: "At least 0.", n: "A whole number is needed.", seed: "A whole number is needed.",
    min_p: "A number is needed.",
  });
});

test("stop strings are lines, with escapes for line breaks", () => {
  assert.deepEqual(read({ stop: "END\n\\n\\nUser:\n" }).fields, { stop: ["END", "\n\nUser:"] });
});

test("biases are pairs of a token id and a number", () => {
  assert.deepEqual(read({ logit_bias: "12: -100\n\n7:0.5" }).fields, { logit_bias: { 12: -100, 7: 0.5 } });
  for (const wrong of ["a: 1", "1", "1:", "1: 101", "1: 2: 3", "-1: 2", "1: x"]) {
    assert.match(read({ logit_bias: wrong }).problems["logit_bias"] ?? "", /is not a token id/, wrong);
  }
});

test("a schema is sent with the format that uses it", () => {
  assert.deepEqual(read({ schema: EXAMPLE_SCHEMA }).fields, {});
  const { fields } = read({ response_format: "json_schema", schema: EXAMPLE_SCHEMA });
  assert.deepEqual(fields, {
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(EXAMPLE_SCHEMA) } },
  });
  assert.deepEqual(read({ response_format: "json_object" }).fields, { response_format: { type: "json_object" } });
});

test("a schema that is missing, no JSON or no object is a problem", () => {
  for (const [schema, problem] of [["", /is needed/], ["{", /^Not JSON/], ["[]", /is an object/]] as const) {
    const { fields, problems } = read({ response_format: "json_schema", schema });
    assert.deepEqual(fields, {});
    assert.match(problems["schema"] ?? "", problem);
  }
});

test("tools are checked for their form, and the choice is sent with them only", () => {
  const tools = JSON.parse(EXAMPLE_TOOLS) as unknown;
  assert.deepEqual(read({ tools: EXAMPLE_TOOLS, tool_choice: "required" }).fields, { tools, tool_choice: "required" });
  assert.deepEqual(read({ tool_choice: "required" }).fields, {});
  for (const [wrong, problem] of [
    ["{}", /an array/], ["[]", /an array/], ["[1]", /Tool 1/], ['[{"type":"function","function":{}}]', /Tool 1/],
  ] as const) assert.match(read({ tools: wrong }).problems["tools"] ?? "", problem);
});

test("probabilities are asked for with the number of alternatives", () => {
  assert.deepEqual(read({ top_logprobs: "5" }).fields, { logprobs: true, top_logprobs: 5 });
  assert.deepEqual(read({ top_logprobs: "0" }).fields, { logprobs: true, top_logprobs: 0 });
  assert.deepEqual(read({ top_logprobs: "21" }).problems, { top_logprobs: "At most 20." });
});
