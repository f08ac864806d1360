/** A request's phases, one behind the other on a common scale. */

export interface Phase {
  phase: string;
  ms: number;
  summary: string;
}

export interface Bar extends Phase {
  /** Of the whole, from 0 to 1. */
  from: number;
  to: number;
}

/** Where each phase begins and ends; phases that are longer than the whole stretch the scale. */
export function waterfall(phases: readonly Phase[], totalMs: number): Bar[] {
  const known = phases.reduce((sum, { ms }) => sum + ms, 0);
  const scale = Math.max(totalMs, known, Number.MIN_VALUE);
  let begin = 0;
  return phases.map((phase) => {
    const from = begin / scale;
    begin += phase.ms;
    return { ...phase, from, to: begin / scale };
  });
}
