/** Numbers, sizes and times as people read them. */

const NONE = "–";
const BINARY_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A size in bytes, with three significant digits. */
export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  let scaled = value;
  let unit = 0;
  while (Math.abs(scaled) >= 1023.5 && unit < BINARY_UNITS.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || Math.abs(scaled) >= 99.95 ? 0 : Math.abs(scaled) >= 9.995 ? 1 : 2;
  return `${scaled.toFixed(digits)} ${BINARY_UNITS[unit]}`;
}

/** A count: whole with separators below a million, then short. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 1e6) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
}

/** A figure that may be small, such as a rate. */
export function number(value: number | null | undefined, digits = 2): string {
  if (value === null || value === undefined) return NONE;
  const places = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? Math.min(1, digits) : digits;
  return value.toLocaleString("en", { maximumFractionDigits: places });
}

/** A part of one as a percentage. */
export function percent(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  const scaled = value * 100;
  return `${scaled.toFixed(scaled !== 0 && Math.abs(scaled) < 9.95 ? 1 : 0)} %`;
}

/** A length of time in milliseconds: 0.4 ms, 12 ms, 1.25 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function duration(ms: number | null | undefined): string {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 9.95) return `${Number(ms.toFixed(1))} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(ms < 9_995 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return twoUnits(seconds, 60, "min", "s");
  if (seconds < 86_400) return twoUnits(Math.round(seconds / 60), 60, "h", "min");
  return twoUnits(Math.round(seconds / 3600), 24, "d", "h");
}

function twoUnits(value: number, base: number, large: string, small: string): string {
  const rest = value % base;
  const whole = `${Math.floor(value / base)} ${large}`;
  return rest === 0 ? whole : `${whole} ${rest} ${small}`;
}

/** How long ago, or in how long: "just now", "4 min ago", "in 2 h". */
export function relative(iso: string | null | undefined, now: number = Date.now()): string {
  if (!iso) return NONE;
  const distance = now - Date.parse(iso);
  if (Number.isNaN(distance)) return NONE;
  if (Math.abs(distance) < 10_000) return "just now";
  const seconds = Math.floor(Math.abs(distance) / 1000);
  if (distance > 0) return `${coarse(seconds)} ago`;
  // What was given 90 days a moment ago still has 90 days.
  return `in ${coarse(seconds < 60 ? seconds : 60 * Math.ceil(seconds / 60))}`;
}

const UNITS = [["d", 86_400], ["h", 3600], ["min", 60]] as const;

/** Whole seconds in the largest unit that is there. */
function coarse(seconds: number): string {
  const unit = UNITS.find(([, length]) => seconds >= length);
  return unit ? `${Math.floor(seconds / unit[1])} ${unit[0]}` : `${seconds} s`;
}

/** The value of a field of date and time: in the reader's time zone, to the second. */
export function localTime(iso: string): string {
  return dateTime(iso).replace(" ", "T");
}

/** The time of such a field; null if it is empty. */
export function momentOf(local: string): string | null {
  return local === "" ? null : new Date(local).toISOString();
}

/** Date and time to the second in the reader's time zone. */
export function dateTime(iso: string | null | undefined): string {
  if (!iso) return NONE;
  const date = new Date(iso);
  if (Number.isNaN(date.getTime())) return NONE;
  const two = (value: number): string => String(value).padStart(2, "0");
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-");
  return `${day} ${[date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":")}`;
}

/** A moment in seconds since 1970 as ISO 8601. */
export function isoOf(seconds: number): string {
  return new Date(seconds * 1000).toISOString();
}

/** The first characters of a digest, enough to tell it from others. */
export function shortDigest(digest: string): string {
  return digest.replace(/^sha256:/, "").slice(0, 12);
}

/** "one adapter", "3 adapters". */
export function plural(amount: number, noun: string, nouns = `${noun}s`): string {
  return `${count(amount)} ${amount === 1 ? noun : nouns}`;
}
