import assert from "node:assert/strict";
import { test } from "node:test";
import { textsOf } from "./samples.ts";

const NOTHING = { messages: null, tools: null, answer: null, prompt: null, completion: null };

test("a completion is its prompt and its text", () => {
  assert.deepEqual(textsOf({ ...NOTHING, prompt: "1 + 1 =", completion: " 2" }), [["prompt", "1 + 1 ="], ["completion", " 2"]]);
});

test("a chat is its messages and the answer, with calls and reasoning apart", () => {
  const calls = [{ id: "a", type: "function", function: { name: "f", arguments: "{}" } }];
  assert.deepEqual(
    textsOf({
      ...NOTHING,
      tools: [{ type: "function" }],
      messages: [{ role: "system", content: "Be short." }, { role: "user", content: "Hi" }],
      answer: { role: "assistant", content: "Hello", reasoning_content: "A greeting.", tool_calls: calls },
    }),
    [
      ["tools", '[\n  {\n    "type": "function"\n  }\n]'],
      ["system", "Be short."],
      ["user", "Hi"],
      ["answer: reasoning", "A greeting."],
      ["answer", "Hello"],
      ["answer: calls", JSON.stringify(calls, null, 2)],
    ],
  );
});
