/** Days in UTC as `YYYY-MM-DD`, which is how the API counts usage. */

const DAY_MS = 86_400_000;

export function today(now: number = Date.now()): string {
  return new Date(now).toISOString().slice(0, 10);
}

/** The day so many days after `day`, or before it. */
export function shifted(day: string, days: number): string {
  return today(Date.parse(`${day}T00:00:00Z`) + days * DAY_MS);
}

/** Every day from `first` up to, and without, `end`. */
export function daysBetween(first: string, end: string): string[] {
  const days: string[] = [];
  for (let day = first; day < end; day = shifted(day, 1)) days.push(day);
  return days;
}
