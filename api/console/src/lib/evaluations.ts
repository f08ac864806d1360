/** Evaluations: what they compared, and their figures in words. */

import type { components } from "../api/schema.ts";

type Evaluation = components["schemas"]["EvaluationView"];
type Interval = components["schemas"]["IntervalView"];

const OPEN_STATES = ["queued", "running"];
const DIGITS = 3;

/** Whether the evaluation has not ended. */
export function isOpen({ status }: Pick<Evaluation, "status">): boolean {
  return OPEN_STATES.includes(status);
}

/** What the candidate is compared with: "version 3", or the name of the base. */
export function otherOf({ against, base }: Pick<Evaluation, "against" | "base">): string {
  return against === null ? base : `version ${against}`;
}

/** "0.840 [0.783, 0.884]": a mean with its confidence interval. */
export function intervalText({ mean, low, high }: Interval): string {
  return `${mean.toFixed(DIGITS)} [${low.toFixed(DIGITS)}, ${high.toFixed(DIGITS)}]`;
}

/** The same of a difference, each figure with its sign. */
export function differenceText({ mean, low, high }: Interval): string {
  return `${signed(mean)} [${signed(low)}, ${signed(high)}]`;
}

export function signed(value: number): string {
  const text = value.toFixed(DIGITS);
  const isZero = Number(text) === 0;
  return isZero ? (0).toFixed(DIGITS) : value > 0 ? `+${text}` : text.replace("-", "−");
}

const REMEDIES: Record<string, string> = {
  file_not_found: "Set the golden set again, and start another evaluation.",
  invalid_golden_set: "Correct the file, set the golden set again, and start another evaluation.",
  requests_failed: "Remove the cause, and start another evaluation.",
  batch_not_completed: "Start another evaluation.",
  quota_exceeded: "Delete files or wait for batches to end, and start another evaluation.",
  scoring_failed: "Simplify the schemas of the golden set or divide it, and start another evaluation.",
};

/** What to do about an evaluation that has failed with `code`. */
export function remedyOf(code: string): string {
  return REMEDIES[code] ?? "Start another evaluation.";
}
