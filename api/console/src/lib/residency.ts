/** A version's way through the engine, from the changes that it tells. */

export interface Transition {
  state: string;
  seconds_ago: number;
  reason: string | null;
}

export interface Span {
  index: number;
  state: string;
  reason: string | null;
  /** How long it was so. */
  seconds: number;
  /** How long ago that began. */
  secondsAgo: number;
}

/** Each change, oldest first, as the time until the next; the last one lasts until now. */
export function spansOf(transitions: readonly Transition[]): Span[] {
  return transitions.map(({ state, reason, seconds_ago }, index) => ({
    index,
    state,
    reason,
    seconds: Math.max(0, seconds_ago - (transitions[index + 1]?.seconds_ago ?? 0)),
    secondsAgo: seconds_ago,
  }));
}
