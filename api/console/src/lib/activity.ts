/** When somebody last used the console in this browser, in whichever of its tabs. */

const KEY = "loraplex.active";
const STEP_MS = 1_000;

export function noteActivity(now: number = Date.now()): void {
  if (now - lastActivity() >= STEP_MS) localStorage.setItem(KEY, String(now));
}

/** How long ago that was; 0 if nobody has yet. */
export function idleSeconds(now: number = Date.now()): number {
  return lastActivity() === 0 ? 0 : Math.max(0, Math.floor((now - lastActivity()) / 1000));
}

/** Milliseconds since 1970; 0: nobody has. */
export function lastActivity(): number {
  return Number(localStorage.getItem(KEY)) || 0;
}
