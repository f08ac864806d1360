/** Prices of tokens: whether one holds at a time. */

export interface Validity {
  effective_from: string;
  effective_until: string | null;
}

export type PriceState = "in effect" | "scheduled" | "past";

/** A price holds from its beginning until the next one of the same base and tenant begins. */
export function priceState({ effective_from, effective_until }: Validity, now: number): PriceState {
  const [from, until] = [Date.parse(effective_from), effective_until === null ? Infinity : Date.parse(effective_until)];
  if (until <= now || until <= from) return "past";
  return from > now ? "scheduled" : "in effect";
}

/** The least time from the setting of a price to its effect, with the way to the server. */
const LEAD_MS = 35_000;

/** When the price can end at the earliest; null: as soon as the server allows. One that is scheduled ends before it begins. */
export function earliestEnd({ effective_from }: Validity, now: number): string | null {
  return Date.parse(effective_from) > now + LEAD_MS ? effective_from : null;
}
