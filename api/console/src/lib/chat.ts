/** One answer of the playground: streamed, measured while it comes. */

import { send } from "../api/client.ts";
import { ApiError, type ErrorBody } from "../api/errors.ts";
import { eventsOf } from "./sse.ts";

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Question {
  model: string;
  messages: Message[];
  maxTokens: number;
  temperature: number;
  /** The tenant on whom an operator acts. */
  tenant: string | null;
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

export interface Reply {
  /** What the model thought before the answer; empty without reasoning. */
  reasoning: string;
  text: string;
  /** The pinned name that answered; the base's own name without an adapter. */
  model: string | null;
  served: Served | null;
  finishReason: string | null;
  promptTokens: number | null;
  outputTokens: number | null;
  /** From asking to the first text, reasoning included, as it is seen here. */
  firstTokenMs: number | null;
  /** From asking to the end, or until now. */
  totalMs: number;
}

export const NO_REPLY: Reply = {
  reasoning: "",
  text: "",
  model: null,
  served: null,
  finishReason: null,
  promptTokens: null,
  outputTokens: null,
  firstTokenMs: null,
  totalMs: 0,
};

interface Chunk {
  model?: string;
  choices?: { delta?: { content?: string | null; reasoning_content?: string | null }; finish_reason?: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  error?: ErrorBody;
}

/** Ask, and give the reply as far as it has come. Throws ApiError; AbortError when it is stopped. */
export async function* ask(question: Question, signal: AbortSignal): AsyncGenerator<Reply> {
  const started = performance.now();
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: new Headers({ "content-type": "application/json", accept: "text/event-stream" }),
    body: JSON.stringify(bodyOf(question)),
    tenant: question.tenant,
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

function bodyOf(question: Question): object {
  return {
    model: question.model,
    messages: question.messages,
    max_tokens: question.maxTokens,
    temperature: question.temperature,
    stream: true,
    stream_options: { include_usage: true },
  };
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
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const reasoning = choice?.delta?.reasoning_content ?? "";
  return {
    ...reply,
    reasoning: reply.reasoning + reasoning,
    text: reply.text + text,
    model: chunk.model ?? reply.model,
    finishReason: choice?.finish_reason ?? reply.finishReason,
    promptTokens: chunk.usage?.prompt_tokens ?? reply.promptTokens,
    outputTokens: chunk.usage?.completion_tokens ?? reply.outputTokens,
    firstTokenMs: reply.firstTokenMs ?? (reasoning + text === "" ? null : elapsedMs),
    totalMs: elapsedMs,
  };
}

/** Output tokens a second from the first token on; null where there is nothing to measure. */
export function tokensPerSecond(reply: Reply): number | null {
  if (reply.outputTokens === null || reply.outputTokens < 2 || reply.firstTokenMs === null) return null;
  const seconds = (reply.totalMs - reply.firstTokenMs) / 1000;
  return seconds > 0 ? (reply.outputTokens - 1) / seconds : null;
}
