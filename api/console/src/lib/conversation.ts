/** A conversation with one model: its turns so far, and the one that is being answered. */

import { useCallback, useEffect, useRef, useState } from "react";
import { ask, NO_CHOICE, NO_REPLY, type ChatRequest, type Choice, type Message, type Reply } from "./chat.ts";

export interface Turn {
  /** The messages that it adds: a prompt, or the results of tools. */
  asked: readonly Message[];
  /** What was sent, with the turns before. */
  request: ChatRequest;
  reply: Reply;
  /** The place of the choice that the conversation goes on with. */
  chosen: number;
  /** Why there is no whole answer; null: there is, or will be. */
  error: unknown;
  state: "running" | "stopped" | "ended";
}

/** What a request says beside the conversation. */
export interface Settings {
  model: string;
  system: string;
  /** Further fields of the request. */
  fields: Readonly<Record<string, unknown>>;
  /** The tenant on whom an operator acts. */
  tenant: string | null;
}

export interface Conversation {
  turns: Turn[];
  isRunning: boolean;
  /** Ask after the first `numKept` turns, by default after all; those behind are dropped. */
  ask: (asked: readonly Message[], settings: Settings, numKept?: number) => void;
  /** Go on with another choice of a turn. */
  choose: (turn: number, choice: number) => void;
  stop: () => void;
  clear: () => void;
}

export function useConversation(): Conversation {
  const [turns, setTurns] = useState<Turn[]>([]);
  const running = useRef<AbortController | null>(null);
  useEffect(() => () => running.current?.abort(), []);

  const change = useCallback((place: number, update: Partial<Turn>): void => {
    setTurns((before) => before.map((turn, i) => (i === place ? { ...turn, ...update } : turn)));
  }, []);

  const begin = async (asked: readonly Message[], settings: Settings, numKept: number): Promise<void> => {
    running.current?.abort();
    const controller = new AbortController();
    running.current = controller;
    const kept = turns.slice(0, numKept);
    const request = requestOf(settings, kept, asked);
    setTurns([...kept, { asked, request, reply: NO_REPLY, chosen: 0, error: null, state: "running" }]);
    try {
      for await (const reply of ask(request, settings.tenant, controller.signal)) {
        if (running.current === controller) change(numKept, { reply });
      }
      if (running.current === controller) change(numKept, { state: "ended" });
    } catch (error) {
      if (running.current !== controller) return;
      change(numKept, controller.signal.aborted ? { state: "stopped" } : { state: "ended", error });
    }
  };

  return {
    turns,
    isRunning: turns.at(-1)?.state === "running",
    ask: (asked, settings, numKept = turns.length) => void begin(asked, settings, numKept),
    choose: (turn, choice) => change(turn, { chosen: choice }),
    stop: () => running.current?.abort(),
    clear: () => {
      running.current?.abort();
      running.current = null;
      setTurns([]);
    },
  };
}

/** The request that asks `asked` after `turns`. */
export function requestOf(settings: Settings, turns: readonly Turn[], asked: readonly Message[]): ChatRequest {
  const { model, system, fields } = settings;
  const first: Message[] = system.trim() === "" ? [] : [{ role: "system", content: system }];
  return { model, messages: [...first, ...messagesOf(turns, asked), ...asked], ...fields };
}

/** What the model is told of the turns before `asked`: those without an answer are left out, as templates want pairs. */
function messagesOf(turns: readonly Turn[], asked: readonly Message[]): Message[] {
  const answered = turns.filter((turn) => isAnswer(choiceOf(turn)));
  return answered.flatMap((turn, i) => {
    const next = answered[i + 1]?.asked ?? asked;
    const hasResults = next[0]?.role === "tool";
    // Templates expect the results of tools that were called.
    if (choiceOf(turn).toolCalls.length > 0 && !hasResults) return [];
    return [...turn.asked, answerOf(choiceOf(turn))];
  });
}

/** The answer of a turn with which the conversation goes on. */
export function choiceOf({ reply, chosen }: Turn): Choice {
  return reply.choices[chosen] ?? NO_CHOICE;
}

function isAnswer({ text, toolCalls }: Choice): boolean {
  return text !== "" || toolCalls.length > 0;
}

function answerOf({ text, toolCalls }: Choice): Message {
  if (toolCalls.length === 0) return { role: "assistant", content: text };
  return {
    role: "assistant",
    content: text === "" ? null : text,
    tool_calls: toolCalls.map(({ id, name, arguments: given }) => ({
      id, type: "function", function: { name, arguments: given },
    })),
  };
}
