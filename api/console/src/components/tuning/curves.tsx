/** Loss and accuracy of a fine-tuning job by step. */

import { keepPreviousData, useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api } from "../../api/client.ts";
import type { TuningJob } from "../../api/types.ts";
import { number, percent } from "../../lib/format.ts";
import type { Figures } from "../../lib/series.ts";
import { curvesOf, isOpen } from "../../lib/tuning.ts";
import { Chart } from "../chart.tsx";
import { Panel } from "../layout.tsx";
import { EmptyState, Loaded } from "../states.tsx";

/** All that a job keeps. */
const MAX_EVENTS = 1000;
const HEIGHT = 220;

/** The events are read again when the job has made a step or is in another state. */
export function JobCurves({ tenant, job }: { tenant: string; job: TuningJob }): ReactNode {
  const query = useQuery({
    queryKey: ["tuning", tenant, "curves", job.id, job.status, job.step],
    queryFn: ({ signal }) => api("get", "/v1/fine_tuning/jobs/{job_id}/events", {
      path: { job_id: job.id }, query: { limit: MAX_EVENTS }, tenant, signal,
    }),
    placeholderData: keepPreviousData,
    gcTime: 0,
  });
  return (
    <Loaded query={query}>
      {({ data }) => {
        const { steps, trainLoss, validLoss, trainAccuracy, validAccuracy } = curvesOf(data);
        if (steps.length === 0 && !isOpen(job)) return null;
        return (
          <div className="columns">
            <Curve title="Loss" steps={steps} training={trainLoss} validation={validLoss} format={(value) => number(value, 4)} />
            <Curve title="Accuracy" steps={steps} training={trainAccuracy} validation={validAccuracy} format={percent}
              note="of trained tokens" atLeast={1} />
          </div>
        );
      }}
    </Loaded>
  );
}

interface CurveProps {
  title: string;
  note?: string;
  steps: number[];
  training: Figures;
  validation: Figures;
  format: (value: number | null) => string;
  atLeast?: number;
}

function Curve({ title, note, steps, training, validation, format, atLeast = 0 }: CurveProps): ReactNode {
  const series = [
    { label: "Training", values: training },
    ...(validation.some((value) => value !== null) ? [{ label: "Validation", values: validation }] : []),
  ];
  return (
    <Panel title={title} note={note}>
      {training.some((value) => value !== null)
        ? <Chart label={`${title} by step`} steps={steps} series={series} format={format} height={HEIGHT} atLeast={atLeast} />
        : <EmptyState title="Nothing measured yet">The curve begins with the first step.</EmptyState>}
    </Panel>
  );
}
