import type { ReactNode } from "react";
import { api, type Answer } from "../../api/client.ts";
import type { TuningJob } from "../../api/types.ts";
import { isoOf } from "../../lib/format.ts";
import { usePages } from "../../lib/pages.ts";
import { isOpen } from "../../lib/tuning.ts";
import { DataTable, type Columns } from "../data-table.tsx";
import { Panel } from "../layout.tsx";
import { EmptyState } from "../states.tsx";
import { Badge, Time, type BadgeTone } from "../values.tsx";

type Event = Answer<"get", "/v1/fine_tuning/jobs/{job_id}/events">["data"][number];

const REFRESH_MS = 3_000;
const PAGE_SIZE = 20;
const TONES: Record<string, BadgeTone> = { warn: "warn", error: "bad" };

const COLUMNS: Columns<Event> = [
  { header: "Time", cell: ({ row }) => <Time at={isoOf(row.original.created_at)} exact /> },
  { header: "Level", cell: ({ row: { original: { level } } }) => <Badge tone={TONES[level] ?? ""}>{level}</Badge> },
  { header: "Event", cell: ({ row }) => <span className="breakable">{row.original.message}</span> },
];

/** What happened in a job, the newest first. */
export function JobEvents({ tenant, job }: { tenant: string; job: TuningJob }): ReactNode {
  const events = usePages<Event>(["tuning", tenant, "events", job.id, job.status], async (after, signal) => {
    const page = await api("get", "/v1/fine_tuning/jobs/{job_id}/events", {
      path: { job_id: job.id }, query: { after: after ?? null, limit: PAGE_SIZE }, tenant, signal,
    });
    return { ...page, next_after: page.last_id };
  }, isOpen(job) ? { refetchInterval: REFRESH_MS } : {});
  return (
    <Panel title="Events" note="the last 1,000" flush>
      <DataTable caption="Events" columns={COLUMNS} source={events} rowId={(event) => event.id}
        empty={<EmptyState title="No events" />} />
    </Panel>
  );
}
