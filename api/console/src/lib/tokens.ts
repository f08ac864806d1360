/** Tokens of an answer in words. */

import type { Token } from "./chat.ts";

export type Likelihood = "sure" | "likely" | "open" | "rare";

export function likelihoodOf({ logprob }: Pick<Token, "logprob">): Likelihood {
  const probability = Math.exp(logprob);
  if (probability >= 0.9) return "sure";
  if (probability >= 0.5) return "likely";
  return probability >= 0.1 ? "open" : "rare";
}

/** The token in quotes, with what cannot be seen spelled out; its bytes if they are no text. */
export function shownToken({ token, bytes }: Pick<Token, "token" | "bytes">): string {
  if (token.includes("\ufffd") && bytes.length > 0) return `bytes ${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}`;
  return JSON.stringify(token);
}
