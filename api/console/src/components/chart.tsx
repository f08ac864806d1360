/** Charts over time, or over the steps of a training. What draws them is fetched when the first one is shown. */

import { lazy, Suspense, useState, type ReactNode } from "react";
import { highest, latest, type Figures } from "../lib/series.ts";

export interface Series {
  label: string;
  values: Figures;
  /** One of the eight colours, from 1; by default its place among the series. */
  color?: number;
}

interface ChartLook {
  /** What the chart shows, for screen readers. */
  label: string;
  series: Series[];
  /** A figure with its unit. */
  format: (value: number | null) => string;
  kind?: "lines" | "area" | "stack" | "bars";
  height?: number;
  /** Figures are bytes: the axis steps by powers of two. */
  binary?: boolean;
  /** The axis goes at least this far. */
  atLeast?: number;
}

/** Of figures at moments in ISO 8601. */
export interface TimeChartProps extends ChartLook {
  times: string[];
  steps?: never;
}

/** Of figures at steps in ascending order. */
interface StepChartProps extends ChartLook {
  steps: number[];
  times?: never;
}

export type ChartProps = TimeChartProps | StepChartProps;

const Plot = lazy(() => import("./plot.tsx"));
const HEIGHT = 150;

export function seriesColor(index: number): string {
  return `var(--series-${((index - 1) % 8) + 1})`;
}

export function Chart(props: ChartProps): ReactNode {
  const { label, series, format, height = HEIGHT } = props;
  const [pointed, setPointed] = useState<number | null>(null);
  const value = (one: Series): number | null =>
    pointed === null ? latest(one.values) : (one.values[pointed] ?? null);
  return (
    <figure className="chart">
      <div className="chart-plot" style={{ minHeight: height }} role="img"
        aria-label={`${label}. ${inWords(series, format)}`}>
        <Suspense fallback={null}>
          <Plot {...props} height={height} onPoint={setPointed} />
        </Suspense>
      </div>
      <ul className="legend" aria-hidden="true">
        {series.map((one, i) => (
          <li key={one.label}>
            <span className="swatch" style={{ background: seriesColor(one.color ?? i + 1) }} />
            {one.label} <b>{format(value(one))}</b>
          </li>
        ))}
        {pointed !== null && <li className="faint">{placeOf(props, pointed)}</li>}
      </ul>
    </figure>
  );
}

function inWords(series: Series[], format: ChartProps["format"]): string {
  return series
    .map((one) => `${one.label}: now ${format(latest(one.values))}, at most ${format(highest(one.values))}`)
    .join("; ");
}

function placeOf({ times, steps, kind }: ChartProps, pointed: number): string {
  if (steps) return `step ${steps[pointed] ?? ""}`;
  return kind === "bars" ? (times[pointed]?.slice(0, 10) ?? "") : clock(times[pointed]);
}

function clock(iso: string | undefined): string {
  return iso ? new Date(iso).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }) : "";
}
