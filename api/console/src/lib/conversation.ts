/** A conversation with one model: its turns so far, and the one that is being answered. */

import { useCallback, useEffect, useRef, useState } from "react";
import { ask, NO_REPLY, type Message, type Question, type Reply } from "./chat.ts";

export interface Turn {
  prompt: string;
  reply: Reply;
  /** Why there is no whole answer; null: there is, or will be. */
  error: unknown;
  state: "running" | "stopped" | "ended";
}

export type Settings = Omit<Question, "messages"> & { system: string };

export interface Conversation {
  turns: Turn[];
  isRunning: boolean;
  ask: (prompt: string, settings: Settings) => void;
  stop: () => void;
  clear: () => void;
}

export function useConversation(): Conversation {
  const [turns, setTurns] = useState<Turn[]>([]);
  const running = useRef<AbortController | null>(null);
  useEffect(() => () => running.current?.abort(), []);

  const change = useCallback((update: Partial<Turn>): void => {
    setTurns((before) => before.map((turn, i) => (i === before.length - 1 ? { ...turn, ...update } : turn)));
  }, []);

  const begin = async (prompt: string, settings: Settings): Promise<void> => {
    const controller = new AbortController();
    running.current = controller;
    setTurns([...turns, { prompt, reply: NO_REPLY, error: null, state: "running" }]);
    const { system, ...rest } = settings;
    try {
      const question = { ...rest, messages: messagesOf(system, turns, prompt) };
      for await (const reply of ask(question, controller.signal)) {
        if (running.current === controller) change({ reply });
      }
      if (running.current === controller) change({ state: "ended" });
    } catch (error) {
      if (running.current !== controller) return;
      change(controller.signal.aborted ? { state: "stopped" } : { state: "ended", error });
    }
  };

  return {
    turns,
    isRunning: turns.at(-1)?.state === "running",
    ask: (prompt, settings) => void begin(prompt, settings),
    stop: () => running.current?.abort(),
    clear: () => {
      running.current?.abort();
      running.current = null;
      setTurns([]);
    },
  };
}

/** What the model is told: turns without an answer are left out, as templates want them in pairs. */
export function messagesOf(system: string, turns: readonly Turn[], prompt: string): Message[] {
  const messages: Message[] = system.trim() === "" ? [] : [{ role: "system", content: system }];
  for (const turn of turns) {
    if (turn.reply.text === "") continue;
    messages.push({ role: "user", content: turn.prompt }, { role: "assistant", content: turn.reply.text });
  }
  return [...messages, { role: "user", content: prompt }];
}
