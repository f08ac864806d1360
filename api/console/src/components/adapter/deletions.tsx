/** Deleting adapters or a version, and the receipts that remain. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { api } from "../../api/client.ts";
import type { AdapterSummary, Deletion } from "../../api/types.ts";
import { bytes, plural } from "../../lib/format.ts";
import { ConfirmDialog, Dialog, NameList } from "../dialog.tsx";
import { Button } from "../button.tsx";
import { TextField } from "../form.tsx";
import { useToast } from "../toast.tsx";
import { Facts } from "../layout.tsx";
import { EmptyState, Loaded } from "../states.tsx";
import { Digest, Time } from "../values.tsx";

const DRAIN_SECONDS = 30;
const MAX_DRAIN_SECONDS = 600;

interface DeleteProps {
  tenant: string;
  adapter: string;
  /** Only this version. */
  version?: number;
  onClose: () => void;
  onDeleted?: () => void;
}

/** Asks, deletes, and shows the receipt. */
export function DeleteDialog({ tenant, adapter, version, onClose, onDeleted }: DeleteProps): ReactNode {
  const client = useQueryClient();
  const [drain, setDrain] = useState(DRAIN_SECONDS);
  const [receipts, setReceipts] = useState<Deletion[] | null>(null);
  const name = version === undefined ? adapter : `${adapter}@${version}`;
  const close = (): void => {
    onClose();
    if (receipts !== null) onDeleted?.();
  };
  const remove = async (): Promise<void> => {
    const query = { drain_seconds: drain };
    const answer = version === undefined
      ? await api("delete", "/v1/adapters/{name}", { path: { name: adapter }, query, tenant })
      : await api("delete", "/v1/adapters/{name}/versions/{number}", {
        path: { name: adapter, number: version }, query, tenant,
      });
    setReceipts(answer.versions);
    await client.invalidateQueries({ queryKey: ["adapter", tenant, adapter] });
    await client.invalidateQueries({ queryKey: ["adapters"] });
  };
  if (receipts !== null) {
    return (
      <Dialog title={`${name} is deleted`} onClose={close} footer={<Button tone="primary" onClick={close}>Done</Button>}>
        {receipts.map((receipt) => <Receipt key={receipt.version} adapter={adapter} deletion={receipt} />)}
      </Dialog>
    );
  }
  return (
    <ConfirmDialog title={`Delete ${name}?`} action="Delete permanently" typed={name} danger
      onConfirm={remove} onDone={() => undefined} onClose={onClose}>
      <p>
        {version === undefined ? "Its versions stop" : "The version stops"} resolving immediately. {ERASED}
      </p>
      <DrainField value={drain} onChange={setDrain} />
    </ConfirmDialog>
  );
}

const ERASED =
  "The weights are removed from the device, memory, disk and store, and the memory that the engine frees is zeroed. This cannot be undone.";

function DrainField({ value, onChange }: { value: number; onChange: (seconds: number) => void }): ReactNode {
  return (
    <TextField label="Drain time for running requests (seconds)" type="number" min={0} max={MAX_DRAIN_SECONDS}
      value={value} onChange={(event) => onChange(event.target.valueAsNumber || 0)} />
  );
}

/** Asks, and deletes several adapters one after the other; what could not be deleted stays in the list. */
export function DeleteAdapters({ adapters, onClose }: { adapters: AdapterSummary[]; onClose: () => void }): ReactNode {
  const client = useQueryClient();
  const toast = useToast();
  const [drain, setDrain] = useState(DRAIN_SECONDS);
  const what = plural(adapters.length, "adapter");
  const remove = async (): Promise<void> => {
    try {
      for (const { tenant, name } of adapters) {
        await api("delete", "/v1/adapters/{name}", { path: { name }, query: { drain_seconds: drain }, tenant });
      }
      toast(`${what} deleted. Each adapter's page keeps the receipts.`);
    } finally {
      await client.invalidateQueries({ queryKey: ["adapters"] });
    }
  };
  return (
    <ConfirmDialog title={`Delete ${what}?`} action={`Delete ${what} permanently`} typed={what} danger
      onConfirm={remove} onClose={onClose}>
      <NameList names={adapters.map(({ tenant, name }) => `${tenant}/${name}`)} />
      <p>All of their versions stop resolving immediately. {ERASED}</p>
      <DrainField value={drain} onChange={setDrain} />
    </ConfirmDialog>
  );
}

/** What the receipt of a deletion holds; the API publishes it as it was written down. */
interface ReceiptBody {
  is_content_shared?: boolean;
  engine?: { device_bytes: number; host_bytes: number; num_drained: number; num_aborted: number } | null;
  disk?: string;
  object?: string;
  samples?: number;
}

function Receipt({ adapter, deletion }: { adapter: string; deletion: Deletion }): ReactNode {
  const receipt = (deletion.receipt ?? {}) as ReceiptBody;
  const { engine } = receipt;
  return (
    <section className="receipt">
      <h3>{adapter}@{deletion.version}</h3>
      <Facts facts={[
        ["Digest", <Digest key="digest" digest={deletion.digest} />],
        ["Requested", <Time key="asked" at={deletion.requested_at} exact />],
        ["Completed", <Time key="gone" at={deletion.finished_at} exact />],
        ...(receipt.is_content_shared
          ? [["Weights", "kept: another version has the same content"] as [string, string]]
          : []),
        ...(engine ? [
          ["Device", `${bytes(engine.device_bytes)} zeroed`],
          ["Host memory", `${bytes(engine.host_bytes)} freed`],
          ["Requests", `${engine.num_drained} drained, ${engine.num_aborted} aborted`],
        ] as [string, string][] : []),
        ...(receipt.disk ? [["Disk cache", receipt.disk] as [string, string]] : []),
        ...(receipt.samples ? [["Samples", `${receipt.samples} erased`] as [string, string]] : []),
        ...(receipt.object ? [["Removed from the store", receipt.object] as [string, string]] : []),
      ]} />
    </section>
  );
}

/** The receipts of all that was deleted under this name. */
export function Deletions({ tenant, adapter }: { tenant: string; adapter: string }): ReactNode {
  const query = useQuery({
    queryKey: ["adapter", tenant, adapter, "deletions"],
    queryFn: ({ signal }) =>
      api("get", "/v1/adapters/{name}/deletions", { path: { name: adapter }, tenant, signal }),
  });
  return (
    <section className="panel">
      <Loaded query={query}>
        {({ data }) => data.length === 0 ? (
          <EmptyState title="No deletions" command={`loraplex adapters rm ${adapter} --version 1`}>
            Each deletion has a receipt: the memory that was freed and zeroed, and the requests that were running.
          </EmptyState>
        ) : (
          <div className="panel-body stack">
            <h2>{plural(data.length, "version")} deleted</h2>
            {data.map((one) => <Receipt key={one.version} adapter={adapter} deletion={one} />)}
          </div>
        )}
      </Loaded>
    </section>
  );
}
