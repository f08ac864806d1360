/** The machines of a fleet as the answering server sees them, and which of them shall get no requests. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { ConfirmDialog } from "../components/dialog.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { EmptyState } from "../components/states.tsx";
import { Badge, State, Time, Words } from "../components/values.tsx";
import { bytes, count, number, percent } from "../lib/format.ts";
import { useScope } from "../session.tsx";

type Replica = Answer<"get", "/admin/replicas">["data"][number];

const REFRESH_MS = 3_000;
const KEY = ["replicas"];

const COLUMNS: Columns<Replica> = [
  {
    header: "Replica",
    cell: ({ row: { original: replica } }) => {
      const reached = connected(replica);
      return (
        <><span className="nowrap">{replica.address}</span>{reached && (
          <span className="sub">{reached.device}, {bytes(reached.arena_bytes)} for adapters</span>
        )}</>
      );
    },
  },
  {
    header: "Role",
    cell: ({ row: { original: replica } }) => connected(replica)?.role ?? "–",
  },
  { header: "State", cell: ({ row }) => <Seen replica={row.original} /> },
  {
    header: "Target",
    cell: ({ row }) => row.original.is_draining
      ? <Badge tone="warn">draining</Badge> : <Badge tone="good">serving</Badge>,
  },
  figure("Running", ({ num_running, max_batch }) => `${count(num_running)} of ${count(max_batch)}`),
  figure("Waiting", ({ num_waiting }) => count(num_waiting)),
  figure("Adapters", ({ num_resident, num_loading }) => (
    <>{count(num_resident)}{num_loading > 0 && <span className="sub">{count(num_loading)} loading</span>}</>
  )),
  figure("KV use", ({ kv_usage }) => percent(kv_usage)),
  figure("Handovers", ({ handovers }) => <Handovers of={handovers} />),
  figure("Restarts", ({ num_restarts }) => count(num_restarts)),
  { header: "Last seen", cell: ({ row }) => <Time at={row.original.seen_at} /> },
];

type Connection = NonNullable<Replica["connection"]>;

/** The prefixes that the replica sends or gets; nothing of a replica that never did. */
function Handovers({ of }: { of: Connection["handovers"] }): ReactNode {
  const { num_complete, num_given_up, complete_per_second, bytes_per_second } = of;
  if (num_complete + num_given_up === 0) return "–";
  return (
    <>
      <span className="nowrap">{number(complete_per_second)}/s</span>
      <span className="sub">{bytes(bytes_per_second)}/s{num_given_up > 0 && `, ${count(num_given_up)} given up`}</span>
    </>
  );
}

/** This server's connection, while there is one: only then are there figures. */
function connected({ connection }: Replica): Connection | null {
  return connection?.failure === null ? connection : null;
}

function figure(header: string, of: (connection: Connection) => ReactNode): Columns<Replica>[number] {
  return {
    header,
    meta: { end: true },
    cell: ({ row: { original: replica } }) => {
      const reached = connected(replica);
      return reached === null ? "–" : of(reached);
    },
  };
}

/** What this server sees; without a connection of its own, what the agent last reported. */
function Seen({ replica: { connection, state, is_live } }: { replica: Replica }): ReactNode {
  if (connection === null) return is_live ? <State state={state} /> : <Badge tone="warn">unseen</Badge>;
  const { failure } = connection;
  if (failure === null) return <State state={connection.state} />;
  return <><Badge tone="bad">{failure.code}</Badge><span className="sub"><Words>{failure.message}</Words></span></>;
}

export default function ReplicasPage(): ReactNode {
  const { isAdmin } = useScope();
  const [asked, setAsked] = useState<Replica | null>(null);
  const query = useQuery({
    queryKey: KEY,
    queryFn: ({ signal }) => api("get", "/admin/replicas", { signal }),
    refetchInterval: REFRESH_MS,
  });
  const source = { rows: query.data?.data, error: query.error, isStale: false, refetch: query.refetch };
  return (
    <Page title="Replicas" lead="The engines of a fleet, one per agent, as this server sees them.">
      <Panel title="All replicas" flush>
        <DataTable caption="Replicas" columns={isAdmin ? [...COLUMNS, actions(setAsked)] : COLUMNS}
          source={source} rowId={(replica) => replica.id}
          empty={<EmptyState title="No replicas" command="loraplex fleet add gpu-1.internal:7070">
            A server with an engine of its own needs none. Add the agents of a fleet with the CLI.
          </EmptyState>} />
      </Panel>
      {asked?.is_draining === false && <Drain replica={asked} onClose={() => setAsked(null)} />}
      {asked?.is_draining && <Resume replica={asked} onClose={() => setAsked(null)} />}
    </Page>
  );
}

function actions(onAsk: (replica: Replica) => void): Columns<Replica>[number] {
  return {
    id: "actions",
    header: "",
    meta: { end: true },
    cell: ({ row: { original: replica } }) => {
      const text = replica.is_draining ? "Resume" : "Drain";
      return (
        <Button small tone="plain" aria-label={`${text} ${replica.address}`} onClick={() => onAsk(replica)}>{text}</Button>
      );
    },
  };
}

interface OfReplica {
  replica: Replica;
  onClose: () => void;
}

function Drain({ replica, onClose }: OfReplica): ReactNode {
  const client = useQueryClient();
  const drain = async (): Promise<void> => {
    await api("post", "/admin/replicas/{replica_id}/drain", { path: { replica_id: replica.id } });
    await client.invalidateQueries({ queryKey: KEY });
  };
  return (
    <ConfirmDialog title={`Drain ${replica.address}?`} action="Drain" onConfirm={drain} onClose={onClose}>
      <p>The replica gets no further requests. Its open requests finish, and its adapters move to other replicas.</p>
    </ConfirmDialog>
  );
}

function Resume({ replica, onClose }: OfReplica): ReactNode {
  const client = useQueryClient();
  const resume = async (): Promise<void> => {
    await api("post", "/admin/replicas/{replica_id}/resume", { path: { replica_id: replica.id } });
    await client.invalidateQueries({ queryKey: KEY });
  };
  return (
    <ConfirmDialog title={`Resume ${replica.address}?`} action="Resume" onConfirm={resume} onClose={onClose}>
      <p>The replica gets requests again within seconds.</p>
    </ConfirmDialog>
  );
}
