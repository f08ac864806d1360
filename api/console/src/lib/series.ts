/** Series of figures over time, prepared for drawing. */

export type Figures = (number | null | undefined)[];

/** Each series on top of those before it; what is unknown adds nothing. */
export function stacked(series: Figures[]): (number | null)[][] {
  const length = Math.max(0, ...series.map((one) => one.length));
  const sums = new Array<number>(length).fill(0);
  return series.map((one) =>
    sums.map((below, i) => {
      sums[i] = below + (one[i] ?? 0);
      return sums[i] ?? null;
    }),
  );
}

/** The last figure that is known. */
export function latest(series: Figures): number | null {
  return series.findLast((value) => value !== null && value !== undefined) ?? null;
}

/** The largest figure that is known. */
export function highest(series: Figures): number | null {
  const known = series.filter((value) => value !== null && value !== undefined);
  return known.length === 0 ? null : Math.max(...known);
}

/** The places of figures that no line reaches, as nothing is known before and after. */
export function alone(series: Figures): number[] {
  const isKnown = (i: number): boolean => series[i] !== null && series[i] !== undefined;
  return [...series.keys()].filter((i) => isKnown(i) && !isKnown(i - 1) && !isKnown(i + 1));
}
