/** The texts of a sample, in their order. */

import type { SampleContent } from "../api/types.ts";

type Message = Record<string, unknown>;

/** Who wrote each text, and the text; tools and calls as JSON. */
export function textsOf(sample: Pick<SampleContent, "messages" | "tools" | "answer" | "prompt" | "completion">): [string, string][] {
  const { messages, tools, answer, prompt, completion } = sample;
  if (prompt !== null) return [["prompt", prompt], ["completion", completion ?? ""]];
  return [
    ...(tools === null ? [] : [["tools", json(tools)] as [string, string]]),
    ...(messages ?? []).flatMap((message) => partsOf(message, String(message.role))),
    ...(answer === null ? [] : partsOf(answer, "answer")),
  ];
}

function partsOf(message: Message, who: string): [string, string][] {
  const { reasoning_content: reasoning, content, tool_calls: calls } = message;
  const parts: [string, string][] = [];
  if (typeof reasoning === "string") parts.push([`${who}: reasoning`, reasoning]);
  if (content !== null && content !== undefined) parts.push([who, typeof content === "string" ? content : json(content)]);
  if (calls !== null && calls !== undefined) parts.push([`${who}: calls`, json(calls)]);
  return parts;
}

function json(value: unknown): string {
  return JSON.stringify(value, null, 2);
}
