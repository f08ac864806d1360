/** What ends a canary, in words. */

import type { CanaryLimits } from "../api/types.ts";

/** The server's, for a canary whose limits are left out. */
export const DEFAULT_LIMITS: CanaryLimits = {
  error_rate: 0.02, refusals: 0.05, length: 1.5, latency: 1.5,
  judge: 0.1, judge_model: null, judge_percent: 10, min_requests: 100,
};

/** Such as `2 % more errors, 1.5 times the time per token, after 100 requests of each version`. */
export function limitsText(limits: CanaryLimits): string {
  const { error_rate: errors, refusals, length, latency, judge, judge_model: model } = limits;
  const parts = [
    errors !== null && `${percent(errors)} more errors`,
    refusals !== null && `${percent(refusals)} more refusals`,
    length !== null && `answers ${length} times as long or short`,
    latency !== null && `${latency} times the time per token`,
    judge !== null && model !== null && `fewer than ${percent(0.5 - judge)} of comparisons won, judged by ${model}`,
  ].filter((part) => part !== false);
  return `${parts.join(", ") || "no limit"}, after ${limits.min_requests} requests of each version`;
}

function percent(share: number): string {
  return `${Number((100 * share).toPrecision(12))} %`;
}
