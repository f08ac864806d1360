/** The golden sets of an adapter, and the evaluations on them. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api } from "../../api/client.ts";
import type { Adapter, Evaluation, GoldenSet } from "../../api/types.ts";
import { addressOf } from "../../lib/addresses.ts";
import { count } from "../../lib/format.ts";
import { differenceText, otherOf } from "../../lib/evaluations.ts";
import { usePages } from "../../lib/pages.ts";
import { useScope } from "../../session.tsx";
import { Button } from "../button.tsx";
import { DataTable, type Columns } from "../data-table.tsx";
import { ConfirmDialog } from "../dialog.tsx";
import { EvaluateDialog, SetDialog } from "../evaluation/dialogs.tsx";
import { Panel } from "../layout.tsx";
import { EmptyState } from "../states.tsx";
import { useToast } from "../toast.tsx";
import { Badge, State, Time } from "../values.tsx";

interface Props {
  tenant: string;
  adapter: Adapter;
}

const REFRESH_MS = 5_000;
const PAGE_SIZE = 20;

/** The adapter's golden sets, by name. */
export function useGoldenSets(tenant: string, name: string) {
  return useQuery({
    queryKey: ["evaluations", tenant, name, "sets"],
    queryFn: ({ signal }) => api("get", "/v1/adapters/{name}/golden-sets", { path: { name }, tenant, signal }),
  });
}

export function Evaluations({ tenant, adapter }: Props): ReactNode {
  const { may } = useScope();
  const [open, setOpen] = useState<"set" | "evaluate" | null>(null);
  const sets = useGoldenSets(tenant, adapter.name);
  const names = sets.data?.data.map(({ name }) => name) ?? [];
  const close = (): void => setOpen(null);
  const mayWrite = may("adapters:write") && may("infer");
  return (
    <>
      <Panel title="Golden sets" flush
        actions={mayWrite && <Button small onClick={() => setOpen("set")}>Set a golden set</Button>}>
        <Sets tenant={tenant} adapter={adapter} query={sets} />
      </Panel>
      <Panel title="Evaluations" flush actions={mayWrite && names.length > 0 && (
        <Button small tone="primary" onClick={() => setOpen("evaluate")}>Evaluate a version</Button>
      )}>
        <List tenant={tenant} adapter={adapter} />
      </Panel>
      {open === "set" && <SetDialog tenant={tenant} adapter={adapter} onClose={close} />}
      {open === "evaluate" && <EvaluateDialog tenant={tenant} adapter={adapter} sets={names} onClose={close} />}
    </>
  );
}

function Sets({ tenant, adapter, query }: Props & { query: ReturnType<typeof useGoldenSets> }): ReactNode {
  const { may } = useScope();
  const [removed, setRemoved] = useState<string | null>(null);
  const client = useQueryClient();
  const toast = useToast();
  const remove = async (golden_set: string): Promise<void> => {
    const path = { name: adapter.name, golden_set };
    await api("delete", "/v1/adapters/{name}/golden-sets/{golden_set}", { path, tenant });
    toast(`${golden_set} is removed.`);
    await client.invalidateQueries({ queryKey: ["evaluations", tenant, adapter.name] });
  };
  const columns: Columns<GoldenSet> = [
    { header: "Name", cell: ({ row }) => <span className="breakable">{row.original.name}</span> },
    { header: "Cases", meta: { end: true }, cell: ({ row }) => count(row.original.num_cases) },
    { header: "Tolerance", meta: { end: true }, cell: ({ row }) => row.original.tolerance },
    { header: "Judge", cell: ({ row }) => row.original.judge ?? <span className="faint">–</span> },
    { header: "Set", cell: ({ row }) => <Time at={row.original.updated_at} /> },
    ...(may("adapters:write") ? [{
      id: "actions", header: "", meta: { end: true },
      cell: ({ row: { original: { name } } }: { row: { original: GoldenSet } }) => (
        <Button small tone="danger" aria-label={`Remove ${name}`} onClick={() => setRemoved(name)}>Remove</Button>
      ),
    }] : []),
  ];
  const source = { rows: query.data?.data, error: query.error, isStale: false, refetch: query.refetch };
  return (
    <>
      <DataTable caption="Golden sets" columns={columns} source={source} rowId={({ name }) => name}
        empty={<EmptyState title="No golden sets" command={`loraplex golden-sets set ${adapter.name} golden golden.jsonl`}>
          A golden set is a file of prompts and what their answers have to be. Versions are compared on it.
        </EmptyState>} />
      {removed !== null && (
        <ConfirmDialog title={`Remove the golden set ${removed}?`} action="Remove" danger
          onConfirm={() => remove(removed)} onClose={() => setRemoved(null)}>
          <p>Its file and its evaluations stay.</p>
        </ConfirmDialog>
      )}
    </>
  );
}

function List({ tenant, adapter }: Props): ReactNode {
  const evaluations = usePages<Evaluation>(["evaluations", tenant, adapter.name, "list"], async (after, signal) => {
    const page = await api("get", "/v1/adapters/{name}/evaluations", {
      path: { name: adapter.name }, query: { after: after ?? null, limit: PAGE_SIZE }, tenant, signal,
    });
    return { ...page, next_after: page.last_id };
  }, { refetchInterval: REFRESH_MS });
  const columns: Columns<Evaluation> = [
    {
      header: "Version",
      cell: ({ row: { original: { id, version } } }) => (
        <Link to={addressOf(tenant, adapter.name, "evaluations", id)}>Version {version}</Link>
      ),
    },
    { header: "Against", cell: ({ row }) => otherOf(row.original) },
    { header: "Golden set", cell: ({ row }) => <span className="breakable">{row.original.golden_set}</span> },
    { header: "State", cell: ({ row }) => <State state={row.original.status} /> },
    { header: "Difference", meta: { end: true }, cell: ({ row }) => <Difference evaluation={row.original} /> },
    { header: "Result", cell: ({ row }) => <Result evaluation={row.original} /> },
    { header: "Created", cell: ({ row }) => <Time at={row.original.created_at} /> },
  ];
  return (
    <DataTable caption="Evaluations" columns={columns} source={evaluations} rowId={({ id }) => id}
      empty={<EmptyState title="No evaluations">
        An evaluation compares a version with another one and the base, while the engine has no other requests.
      </EmptyState>} />
  );
}

function Difference({ evaluation: { slices } }: { evaluation: Evaluation }): ReactNode {
  const all = slices?.[0];
  return all === undefined ? <span className="faint">–</span> : differenceText(all.difference);
}

function Result({ evaluation: { is_regression } }: { evaluation: Evaluation }): ReactNode {
  if (is_regression === null) return <span className="faint">–</span>;
  return is_regression ? <Badge tone="bad">regression</Badge> : <Badge tone="good">no regression</Badge>;
}
