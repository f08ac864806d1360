/** One answer of the playground: streamed, measured while it comes. */

import { send } from "../api/client.ts";
import { ApiError, type ErrorBody } from "../api/errors.ts";
import type { components } from "../api/schema.ts";
import { eventsOf } from "./sse.ts";

export type Token = components["schemas"]["ChatLogprob"];

export interface ToolCall {
  id: string;
  name: string;
  /** JSON, as far as it has come. */
  arguments: string;
}

export interface CallMessage {
  id: string;
  type: "function";
  function: { name: string; arguments: string };
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string | null;
  tool_calls?: CallMessage[];
  tool_call_id?: string;
}

/** The body of the request, but for how the answer is delivered. */
export interface ChatRequest {
  readonly model: string;
  readonly messages: readonly Message[];
  readonly [field: string]: unknown;
}

/** How the answer was served, as its headers say. */
export interface Served {
  requestId: string | null;
  adapter: string | null;
  version: string | null;
  tier: string | null;
  loadMs: number | null;
  waitMs: number | null;
}

/** One of the answers of a request. */
export interface Choice {
  /** What the model thought before the answer; empty without reasoning. */
  reasoning: string;
  text: string;
  toolCalls: ToolCall[];
  /** With their probabilities; empty unless asked for. */
  tokens: Token[];
  finishReason: string | null;
}

export interface Reply {
  /** At least one. */
  choices: readonly [Choice, ...Choice[]];
  /** The pinned name that answered; the base's own name without an adapter. */
  model: string | null;
  served: Served | null;
  promptTokens: number | null;
  outputTokens: number | null;
  /** From asking to the first text, reasoning included, as it is seen here. */
  firstTokenMs: number | null;
  /** From asking to the end, or until now. */
  totalMs: number;
}

export const NO_CHOICE: Choice = { reasoning: "", text: "", toolCalls: [], tokens: [], finishReason: null };

export const NO_REPLY: Reply = {
  choices: [NO_CHOICE],
  model: null,
  served: null,
  promptTokens: null,
  outputTokens: null,
  firstTokenMs: null,
  totalMs: 0,
};

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string | null; arguments?: string | null } }[];
}

interface ChunkChoice {
  index?: number;
  delta?: Delta;
  finish_reason?: string | null;
  logprobs?: { content?: Token[] | null } | null;
}

interface Chunk {
  model?: string;
  choices?: ChunkChoice[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  error?: ErrorBody;
}

/**
 * Ask in the name of `tenant`, and give the reply as far as it has come.
 * Throws ApiError; AbortError when it is stopped.
 */
export async function* ask(request: ChatRequest, tenant: string | null, signal: AbortSignal): AsyncGenerator<Reply> {
  const started = performance.now();
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: new Headers({ "content-type": "application/json", accept: "text/event-stream" }),
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    tenant,
    signal,
  });
  let reply: Reply = { ...NO_REPLY, served: servedBy(response.headers) };
  yield reply;
  if (!response.body) return;
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    reply = extend(reply, JSON.parse(data) as Chunk, performance.now() - started);
    yield reply;
  }
  throw new ApiError(0, { code: "stream_broken", message: "The answer ended early." });
}

function servedBy(headers: Headers): Served {
  const figure = (name: string): number | null => {
    const value = headers.get(name);
    return value === null ? null : Number(value);
  };
  return {
    requestId: headers.get("x-request-id"),
    adapter: headers.get("x-loraplex-adapter"),
    version: headers.get("x-loraplex-adapter-version"),
    tier: headers.get("x-loraplex-tier"),
    loadMs: figure("x-loraplex-load-ms"),
    waitMs: figure("x-loraplex-wait-ms"),
  };
}

/** The reply with one more chunk. Throws ApiError for a chunk that says what went wrong. */
export function extend(reply: Reply, chunk: Chunk, elapsedMs: number): Reply {
  if (chunk.error) throw new ApiError(200, chunk.error);
  const choices = [...reply.choices];
  for (const part of chunk.choices ?? []) {
    const index = part.index ?? 0;
    while (choices.length <= index) choices.push(NO_CHOICE);
    choices[index] = extendChoice(choices[index] ?? NO_CHOICE, part);
  }
  const hasBegun = choices.some(({ reasoning, text, toolCalls }) => reasoning + text !== "" || toolCalls.length > 0);
  return {
    ...reply,
    choices: choices as [Choice, ...Choice[]],
    model: chunk.model ?? reply.model,
    promptTokens: chunk.usage?.prompt_tokens ?? reply.promptTokens,
    outputTokens: chunk.usage?.completion_tokens ?? reply.outputTokens,
    firstTokenMs: reply.firstTokenMs ?? (hasBegun ? elapsedMs : null),
    totalMs: elapsedMs,
  };
}

function extendChoice(choice: Choice, { delta, finish_reason, logprobs }: ChunkChoice): Choice {
  return {
    reasoning: choice.reasoning + (delta?.reasoning_content ?? ""),
    text: choice.text + (delta?.content ?? ""),
    toolCalls: (delta?.tool_calls ?? []).reduce(extendCalls, choice.toolCalls),
    tokens: logprobs?.content ? [...choice.tokens, ...logprobs.content] : choice.tokens,
    finishReason: finish_reason ?? choice.finishReason,
  };
}

function extendCalls(calls: ToolCall[], part: NonNullable<Delta["tool_calls"]>[number]): ToolCall[] {
  const before = calls[part.index] ?? { id: "", name: "", arguments: "" };
  const after = [...calls];
  after[part.index] = {
    id: part.id ?? before.id,
    name: before.name + (part.function?.name ?? ""),
    arguments: before.arguments + (part.function?.arguments ?? ""),
  };
  return after;
}

/** Output tokens a second from the first token on; null where there is nothing to measure. */
export function tokensPerSecond(reply: Reply): number | null {
  if (reply.outputTokens === null || reply.outputTokens < 2 || reply.firstTokenMs === null) return null;
  const seconds = (reply.totalMs - reply.firstTokenMs) / 1000;
  return seconds > 0 ? (reply.outputTokens - 1) / seconds : null;
}
