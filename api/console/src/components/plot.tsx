/** Draws a chart with uPlot, in the colours of the scheme in force. */

import { useEffect, useRef, type ReactNode } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { alone, stacked, type Figures } from "../lib/series.ts";
import { seriesColor, type ChartProps } from "./chart.tsx";

type PlotProps = ChartProps & {
  height: number;
  /** The place of the figure under the pointer; null: none is. */
  onPoint: (index: number | null) => void;
};

export default function Plot(props: PlotProps): ReactNode {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const current = useRef(props);
  current.current = props;
  const shape = JSON.stringify([props.series.map((one) => [one.label, one.color]), props.kind]);

  useEffect(() => {
    const element = box.current;
    if (element === null) return;
    const draw = (): void => {
      plot.current?.destroy();
      plot.current = new uPlot(optionsOf(element, current), dataOf(current.current), element);
    };
    const resized = new ResizeObserver(() => {
      plot.current?.setSize({ width: element.clientWidth, height: current.current.height });
    });
    const scheme = window.matchMedia("(prefers-color-scheme: dark)");
    const switched = new MutationObserver(draw);
    draw();
    resized.observe(element);
    scheme.addEventListener("change", draw);
    switched.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      resized.disconnect();
      switched.disconnect();
      scheme.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    plot.current?.setData(dataOf(props));
  }, [props.times, props.steps, props.series]);

  return <div ref={box} />;
}

const fills = (kind: PlotProps["kind"]): boolean => kind === "stack" || kind === "bars";

/** Places and figures as uPlot takes them; of what is stacked, the highest lies at the back. */
function dataOf({ times, steps, series, kind }: PlotProps): uPlot.AlignedData {
  const places = steps ?? times.map((time) => Date.parse(time) / 1000);
  const values = series.map((one) => one.values);
  const drawn = fills(kind) ? stacked(values).reverse() : values;
  return [places, ...drawn] as uPlot.AlignedData;
}

function optionsOf(element: HTMLElement, current: { current: PlotProps }): uPlot.Options {
  const { height, series, kind, steps } = current.current;
  const color = colorsIn(element);
  const drawn = series.map((one, i) => seriesOf(kind, color(seriesColor(one.color ?? i + 1)), steps !== undefined));
  return {
    width: element.clientWidth,
    height,
    padding: [8, 20, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { show: !fills(kind) } },
    ...(kind === "bars" && { tzDate: (seconds: number) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC") }),
    scales: {
      x: xScaleOf(kind, steps !== undefined),
      y: { range: (_, low, high) => rangeOf(low, high, current.current.atLeast) },
    },
    axes: axesOf(element, current, color),
    series: [{}, ...(fills(kind) ? drawn.reverse() : drawn)],
    hooks: { setCursor: [(self) => current.current.onPoint(self.cursor.idx ?? null)] },
  };
}

function xScaleOf(kind: PlotProps["kind"], isBySteps: boolean): uPlot.Scale {
  if (isBySteps) return { time: false, range: (_, __, last) => [0, Math.max(1, last)] };
  return kind === "bars" ? { range: (self, first, last) => withRoomForBars(self, first, last) } : {};
}

/** Some figures are measured at few steps: a line joins them. At a time without a figure, a line ends. */
function seriesOf(kind: PlotProps["kind"], stroke: string, spanGaps: boolean): uPlot.Series {
  const points = { show: false, size: 5, fill: stroke, filter: withoutLine };
  const line = { stroke, width: 1.5, points, spanGaps };
  if (kind === "bars") {
    const paths = uPlot.paths.bars?.({ size: [0.7, 48] });
    return { ...line, fill: stroke, width: 0, ...(paths && { paths }) };
  }
  if (kind === "stack") return { ...line, fill: stroke, width: 0 };
  if (kind === "area") return { ...line, fill: translucent(stroke) };
  return line;
}

/** A single figure has no line: it is drawn as a point. */
function withoutLine(self: uPlot, series: number): number[] {
  return alone(self.data[series] as Figures);
}

function axesOf(
  element: HTMLElement,
  current: { current: PlotProps },
  color: (name: string) => string,
): uPlot.Axis[] {
  const { fontFamily } = getComputedStyle(element);
  const common = {
    stroke: color("var(--text-soft)"),
    font: `11px ${fontFamily}`,
    ticks: { show: false },
    grid: { stroke: color("var(--line)"), width: 1 },
  };
  return [
    {
      ...common,
      size: 26,
      space: 70,
      grid: { show: false },
      ...(current.current.steps && { incrs: STEP_INCREMENTS }),
      values: (_, ticks, __, ___, increment) => ticks.map((tick) =>
        current.current.steps ? tick.toLocaleString("en") : tickOf(tick, increment, current.current.kind)),
    },
    {
      ...common,
      space: 30,
      ...(current.current.binary && { incrs: BINARY_STEPS }),
      size: (self, values) => widest(self, values, common.font),
      values: (_, ticks) => ticks.map((tick) => current.current.format(tick)),
    },
  ] as uPlot.Axis[];
}

/** A bar stands around its time, and so do the first and the last one. */
function withRoomForBars(self: uPlot, first: number, last: number): [number, number] {
  const half = (last - first) / Math.max(1, self.data[0].length - 1) / 2;
  return [first - half, last + half];
}

/** Bars are sums of days in UTC; everything else is told by the reader's clock. */
function tickOf(seconds: number, step: number, kind: PlotProps["kind"]): string {
  const timeZone = kind === "bars" ? "UTC" : undefined;
  const isDay = step >= 86_400;
  return new Date(seconds * 1000).toLocaleString("en-GB", {
    timeZone, ...(isDay ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit" }),
  });
}

const STEP_INCREMENTS = Array.from({ length: 7 }, (_, i) => [1, 2, 5].map((digit) => digit * 10 ** i)).flat();
const BINARY_STEPS = Array.from({ length: 50 }, (_, i) => 2 ** i);

/** From zero, so that heights can be compared, to a little above the highest. */
function rangeOf(low: number | null, high: number | null, atLeast = 0): [number, number] {
  const top = Math.max(high ?? 0, atLeast);
  return [Math.min(0, low ?? 0), top > 0 ? top * (top === atLeast ? 1 : 1.08) : 1];
}

function widest(self: uPlot, values: string[] | null, font: string): number {
  self.ctx.save();
  self.ctx.font = font;
  const widths = (values ?? []).map((value) => self.ctx.measureText(value).width);
  self.ctx.restore();
  return Math.ceil(Math.max(24, ...widths)) + 12;
}

/** Looks up what a colour of the style sheet is now: a canvas knows no variables. */
function colorsIn(element: HTMLElement): (name: string) => string {
  return (name) => {
    const probe = element.appendChild(document.createElement("i"));
    probe.style.color = name;
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  };
}

function translucent(color: string): string {
  return color.replace(/^rgb\((.*)\)$/, "rgba($1, 0.14)");
}
