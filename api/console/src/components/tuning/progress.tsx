import type { ReactNode } from "react";
import type { TuningJob } from "../../api/types.ts";
import { progressText } from "../../lib/tuning.ts";
import { Meter } from "../values.tsx";

/** How many of a job's steps are done. */
export function Progress({ job }: { job: TuningJob }): ReactNode {
  const words = progressText(job);
  return (
    <div className="progress">
      <Meter label={`Progress of ${job.adapter}: ${words}`} value={job.step} max={job.num_steps} />
      <span className="nowrap">{words}</span>
    </div>
  );
}
