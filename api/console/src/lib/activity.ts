/** When somebody last used the console in this browser, in whichever of its tabs. */

const KEY = "loraplex.active";
const STEP_MS = 1_000;

export function noteActivity(now: number = Date.now()): void {
  if (now - lastActivity() >= STEP_MS) localStorage.setItem(KEY, String(now));
}

/** Milliseconds since 1970; 0: nobody has. */
export function lastActivity(): number {
  return Number(localStorage.getItem(KEY)) || 0;
}
