/** One fine-tuning job: its progress, its curves, its recipe and what happened. */

import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { Link, useParams } from "react-router";
import { api } from "../api/client.ts";
import type { TuningJob } from "../api/types.ts";
import { Facts, Figures, Page, Panel } from "../components/layout.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { Loaded } from "../components/states.tsx";
import { JobActions } from "../components/tuning/actions.tsx";
import { JobCurves } from "../components/tuning/curves.tsx";
import { JobEvents } from "../components/tuning/events.tsx";
import { Progress } from "../components/tuning/progress.tsx";
import { State, Time, Words } from "../components/values.tsx";
import { addressOf, versionAddress } from "../lib/addresses.ts";
import { count, isoOf } from "../lib/format.ts";
import { isOpen, pauseText, remedyOf } from "../lib/tuning.ts";
import { useScope } from "../session.tsx";

const REFRESH_MS = 2_000;

export default function TuningJobPage(): ReactNode {
  const { id = "" } = useParams();
  return <NeedsTenant what="Fine-tuning jobs">{(tenant) => <OneJob key={tenant} tenant={tenant} id={id} />}</NeedsTenant>;
}

function OneJob({ tenant, id }: { tenant: string; id: string }): ReactNode {
  const { may } = useScope();
  const query = useQuery({
    queryKey: ["tuning", tenant, "one", id],
    queryFn: ({ signal }) => api("get", "/v1/fine_tuning/jobs/{job_id}", { path: { job_id: id }, tenant, signal }),
    refetchInterval: ({ state: { data } }) => (data && !isOpen(data) ? false : REFRESH_MS),
  });
  const job = query.data;
  return (
    <Page title={job ? `Training of ${job.adapter}` : "Fine-tuning job"} crumbs={<Link to="/fine-tuning">Fine-tuning</Link>}
      actions={job && may("adapters:write") && <JobActions tenant={tenant} job={job} />}>
      <Loaded query={query}>
        {(data) => (
          <>
            <Failure job={data} />
            <Pause job={data} />
            <Summary tenant={tenant} job={data} />
            <JobCurves tenant={tenant} job={data} />
            <div className="columns">
              <Panel title="Job"><About tenant={tenant} job={data} /></Panel>
              <Panel title="Recipe"><Recipe job={data} /></Panel>
            </div>
            <JobEvents tenant={tenant} job={data} />
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Failure({ job: { error } }: { job: TuningJob }): ReactNode {
  if (error === null) return null;
  return (
    <div className="notice bad">
      <div><Words>{error.message}</Words></div>
      <div>{remedyOf(error.code)}</div>
      <div className="meta">code {error.code}{error.param && ` · field ${error.param}`}</div>
    </div>
  );
}

function Pause({ job: { pause_reason: reason } }: { job: TuningJob }): ReactNode {
  return reason === null ? null : <div className="notice"><div>{pauseText(reason)}</div></div>;
}

function Summary({ tenant, job }: { tenant: string; job: TuningJob }): ReactNode {
  const version = job.fine_tuned_model;
  return (
    <Figures figures={[
      { label: "State", value: <State state={job.status} /> },
      { label: "Progress", value: <Progress job={job} /> },
      { label: "Trained tokens", value: count(job.trained_tokens) },
      { label: "Result", value: version === null ? "–" : <Link to={versionAddress(tenant, version)}>{version}</Link> },
    ]} />
  );
}

function About({ tenant, job }: { tenant: string; job: TuningJob }): ReactNode {
  const at = (seconds: number | null): ReactNode => seconds === null ? "–" : <Time at={isoOf(seconds)} exact />;
  const labels = Object.entries(job.metadata ?? {});
  return (
    <Facts facts={[
      ["Adapter", <AdapterName key="adapter" tenant={tenant} job={job} />],
      ["Base", job.model],
      ["Training file", <code key="training" className="breakable">{job.training_file}</code>],
      ["Validation file", job.validation_file ? <code key="validation" className="breakable">{job.validation_file}</code> : "none"],
      ["Created", at(job.created_at)],
      ["Started", at(job.started_at)],
      ["Ended", at(job.finished_at)],
      ...(labels.length > 0 ? [["Metadata", labels.map((pair) => pair.join(": ")).join(", ")] as [string, ReactNode]] : []),
      ["Id", <code key="id" className="breakable">{job.id}</code>],
    ]} />
  );
}

/** A job that has published nothing may name an adapter that does not exist. */
function AdapterName({ tenant, job: { adapter, fine_tuned_model: version } }: { tenant: string; job: TuningJob }): ReactNode {
  return version === null ? adapter : <Link to={addressOf(tenant, adapter)}>{adapter}</Link>;
}

function Recipe({ job: { method, hyperparameters, lora, seed } }: { job: TuningJob }): ReactNode {
  const features = [lora.rslora && "rsLoRA", lora.dora && "DoRA", lora.packing && "packing"].filter(Boolean);
  return (
    <Facts facts={[
      ["Method", method.type],
      ["Epochs", hyperparameters.n_epochs],
      ["Batch size", hyperparameters.batch_size],
      ["Learning rate multiplier", hyperparameters.learning_rate_multiplier],
      ...(hyperparameters.beta === null ? [] : [["Beta", hyperparameters.beta] as [string, ReactNode]]),
      ["Rank", lora.rank],
      ["Alpha", lora.alpha],
      ["Modules", lora.targets.join(", ") || "all linear modules"],
      ["Features", features.join(", ") || "–"],
      ["Tokens per sequence", lora.max_tokens],
      ["Seed", seed],
    ]} />
  );
}
