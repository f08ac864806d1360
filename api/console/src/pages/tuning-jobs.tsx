/** A tenant's fine-tuning jobs. */

import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api } from "../api/client.ts";
import type { TuningJob } from "../api/types.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { EmptyState } from "../components/states.tsx";
import { NewJob } from "../components/tuning/new-job.tsx";
import { Progress } from "../components/tuning/progress.tsx";
import { State, Time } from "../components/values.tsx";
import { jobAddress, versionAddress } from "../lib/addresses.ts";
import { count, isoOf } from "../lib/format.ts";
import { usePages } from "../lib/pages.ts";
import { useScope, useSession } from "../session.tsx";

const REFRESH_MS = 5_000;
const PAGE_SIZE = 50;

export default function TuningJobsPage(): ReactNode {
  const { tenant, may } = useScope();
  const { server } = useSession();
  const [isCreating, setCreating] = useState(false);
  const mayCreate = server.tuning && may("adapters:write") && may("infer");
  return (
    <Page title="Fine-tuning" lead="Jobs that train adapters from files of examples, while the engine has no requests or little to do."
      actions={tenant && mayCreate && <Button tone="primary" onClick={() => setCreating(true)}>New job</Button>}>
      {!server.tuning && (
        <div className="notice">
          This server starts no fine-tuning jobs. The operator turns them on with <code>--tuning</code>.
        </div>
      )}
      <NeedsTenant what="Fine-tuning jobs">{(slug) => <TuningJobs key={slug} tenant={slug} />}</NeedsTenant>
      {isCreating && tenant && <NewJob tenant={tenant} onClose={() => setCreating(false)} />}
    </Page>
  );
}

function TuningJobs({ tenant }: { tenant: string }): ReactNode {
  const jobs = usePages<TuningJob>(["tuning", tenant, "list"], async (after, signal) => {
    const page = await api("get", "/v1/fine_tuning/jobs", { query: { after: after ?? null, limit: PAGE_SIZE }, tenant, signal });
    return { ...page, next_after: page.last_id };
  }, { refetchInterval: REFRESH_MS });
  return (
    <Panel title={`Jobs of ${tenant}`} flush>
      <DataTable caption="Fine-tuning jobs" columns={columnsFor(tenant)} source={jobs} rowId={(job) => job.id}
        empty={<EmptyState title="No fine-tuning jobs" command="loraplex tune ./data.jsonl my-adapter --watch">
          A job trains an adapter from a file of examples and publishes it as a version.
        </EmptyState>} />
    </Panel>
  );
}

function columnsFor(tenant: string): Columns<TuningJob> {
  return [
    { header: "Adapter", cell: ({ row: { original: job } }) => <Link to={jobAddress(job.id)}>{job.adapter}</Link> },
    { header: "State", cell: ({ row }) => <State state={row.original.status} /> },
    { header: "Progress", cell: ({ row }) => <Progress job={row.original} /> },
    {
      header: "Started",
      cell: ({ row: { original: { started_at: at } } }) => at === null ? <span className="faint">–</span> : <Time at={isoOf(at)} />,
    },
    { header: "Trained tokens", meta: { end: true }, cell: ({ row }) => count(row.original.trained_tokens) },
    {
      header: "Result",
      cell: ({ row: { original: { fine_tuned_model: version } } }) => version === null
        ? <span className="faint">–</span> : <Link to={versionAddress(tenant, version)}>{version}</Link>,
    },
  ];
}
