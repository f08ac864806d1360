/** One evaluation: its report by slice, and the answers side by side. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { Link, useParams } from "react-router";
import { api } from "../api/client.ts";
import type { Evaluation } from "../api/types.ts";
import { Button } from "../components/button.tsx";
import { ConfirmDialog } from "../components/dialog.tsx";
import { Cases } from "../components/evaluation/cases.tsx";
import { Slices } from "../components/evaluation/slices.tsx";
import { Facts, Page, Panel } from "../components/layout.tsx";
import { Loaded } from "../components/states.tsx";
import { useToast } from "../components/toast.tsx";
import { State, Time, Words } from "../components/values.tsx";
import { addressOf } from "../lib/addresses.ts";
import { isOpen, otherOf, remedyOf } from "../lib/evaluations.ts";
import { useScope } from "../session.tsx";

const REFRESH_MS = 2_000;
const EVALUATION = "/v1/adapters/{name}/evaluations/{evaluation_id}";

export default function EvaluationPage(): ReactNode {
  const { tenant = "", name = "", id = "" } = useParams();
  const { may } = useScope();
  const path = { name, evaluation_id: id };
  const query = useQuery({
    queryKey: ["evaluations", tenant, name, "one", id],
    queryFn: ({ signal }) => api("get", EVALUATION, { path, tenant, signal }),
    refetchInterval: ({ state: { data } }) => (data && !isOpen(data) ? false : REFRESH_MS),
  });
  const evaluation = query.data;
  const crumbs = (
    <><Link to={addressOf(tenant, name)}>{name}</Link> / <Link to={addressOf(tenant, name, "evaluations")}>Evaluations</Link></>
  );
  return (
    <Page title={evaluation ? `Version ${evaluation.version} against ${otherOf(evaluation)}` : "Evaluation"} crumbs={crumbs}
      actions={evaluation && isOpen(evaluation) && may("adapters:write") && <Cancel tenant={tenant} evaluation={evaluation} />}>
      <Loaded query={query}>
        {(data) => (
          <>
            <Failure evaluation={data} />
            <Slices evaluation={data} />
            <Cases evaluation={data} />
            <Panel title="Evaluation"><About evaluation={data} /></Panel>
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Failure({ evaluation: { error } }: { evaluation: Evaluation }): ReactNode {
  if (error === null) return null;
  return (
    <div className="notice bad">
      <div><Words>{error.message}</Words></div>
      <div>{remedyOf(error.code)}</div>
      <div className="meta">code {error.code}</div>
    </div>
  );
}

function About({ evaluation }: { evaluation: Evaluation }): ReactNode {
  const at = (moment: string | null): ReactNode => moment === null ? "–" : <Time at={moment} exact />;
  const batches = Object.entries(evaluation.batches);
  return (
    <Facts facts={[
      ["State", <State key="state" state={evaluation.status} />],
      ["Golden set", `${evaluation.golden_set}, ${evaluation.num_cases} cases`],
      ["Tolerance", evaluation.tolerance],
      ["Judge", evaluation.judge ?? "none"],
      ["Started by", evaluation.created_by],
      ["Created", at(evaluation.created_at)],
      ["Ended", at(evaluation.ended_at)],
      ["Batches", batches.length === 0 ? "none" : batches.map(([what, id]) => (
        <div key={id}>{what}: <code className="breakable">{id}</code></div>
      ))],
      ["Id", <code key="id" className="breakable">{evaluation.id}</code>],
    ]} />
  );
}

function Cancel({ tenant, evaluation }: { tenant: string; evaluation: Evaluation }): ReactNode {
  const [isAsking, setAsking] = useState(false);
  const client = useQueryClient();
  const toast = useToast();
  const cancel = async (): Promise<void> => {
    const path = { name: evaluation.adapter, evaluation_id: evaluation.id };
    await api("post", `${EVALUATION}/cancel`, { path, tenant });
    toast("The evaluation is cancelled.");
    await client.invalidateQueries({ queryKey: ["evaluations", tenant] });
  };
  return (
    <>
      <Button tone="danger" onClick={() => setAsking(true)}>Cancel evaluation</Button>
      {isAsking && (
        <ConfirmDialog title="Cancel the evaluation?" action="Cancel evaluation" otherwise="Keep evaluating" danger
          onConfirm={cancel} onClose={() => setAsking(false)}>
          <p>It ends without a report. Requests that were answered are charged.</p>
        </ConfirmDialog>
      )}
    </>
  );
}
