/** The single samples of an adapter's requests: a list, and one with its prompt and answer. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { api } from "../../api/client.ts";
import type { Sample, SampleContent } from "../../api/types.ts";
import { textsOf } from "../../lib/samples.ts";
import { bytes, count } from "../../lib/format.ts";
import { usePages } from "../../lib/pages.ts";
import { useScope } from "../../session.tsx";
import { Button } from "../button.tsx";
import { DataTable, type Columns } from "../data-table.tsx";
import { ConfirmDialog, Dialog } from "../dialog.tsx";
import { Facts, Panel } from "../layout.tsx";
import { EmptyState, Loaded } from "../states.tsx";
import { useToast } from "../toast.tsx";
import { Time } from "../values.tsx";

interface Props {
  tenant: string;
  adapter: string;
}

const PAGE_SIZE = 50;

/** For who may read samples. Opening one is entered in the tenant's audit log. */
export function SampleList({ tenant, adapter }: Props): ReactNode {
  const [opened, setOpened] = useState<string | null>(null);
  const samples = usePages<Sample>(["adapter", tenant, adapter, "sampling", "list"], (after, signal) => api(
    "get", "/v1/adapters/{name}/samples", { path: { name: adapter }, query: { after: after ?? null, limit: PAGE_SIZE }, tenant, signal },
  ));
  return (
    <Panel title="Single samples" note="Who opens one is in the audit log." flush>
      <DataTable caption="Samples" columns={columnsFor(setOpened)} source={samples} rowId={(sample) => sample.id}
        empty={<EmptyState title="No samples">Samples of the requests to {adapter} are listed here.</EmptyState>} />
      {opened && <OpenSample tenant={tenant} adapter={adapter} id={opened} onClose={() => setOpened(null)} />}
    </Panel>
  );
}

function columnsFor(open: (id: string) => void): Columns<Sample> {
  return [
    { header: "Answered", cell: ({ row }) => <Time at={row.original.created_at} exact /> },
    { header: "Version", cell: ({ row }) => row.original.version },
    { header: "Kind", cell: ({ row }) => row.original.kind },
    { header: "Finish", cell: ({ row }) => row.original.finish_reason },
    { header: "Tokens", meta: { end: true }, cell: ({ row }) => count(row.original.prompt_tokens + row.original.completion_tokens) },
    { header: "Size", meta: { end: true }, cell: ({ row }) => bytes(row.original.size_bytes) },
    { header: "Expires", cell: ({ row }) => <Time at={row.original.expires_at} /> },
    {
      header: "Content",
      cell: ({ row: { original: { id } } }) => <Button small onClick={() => open(id)} aria-label={`Open ${id}`}>Open</Button>,
    },
  ];
}

function OpenSample({ tenant, adapter, id, onClose }: Props & { id: string; onClose: () => void }): ReactNode {
  const { may } = useScope();
  const client = useQueryClient();
  const toast = useToast();
  const [isDeleting, setDeleting] = useState(false);
  const path = { name: adapter, sample_id: id };
  const query = useQuery({
    queryKey: ["sample", tenant, adapter, id],
    queryFn: ({ signal }) => api("get", "/v1/adapters/{name}/samples/{sample_id}", { path, tenant, signal }),
    gcTime: 0,
    refetchOnWindowFocus: false,
  });
  const remove = async (): Promise<void> => {
    await api("delete", "/v1/adapters/{name}/samples/{sample_id}", { path, tenant });
    toast("1 sample deleted.");
    await client.invalidateQueries({ queryKey: ["adapter", tenant, adapter, "sampling"] });
  };
  if (isDeleting) {
    return (
      <ConfirmDialog title="Delete this sample?" action="Delete permanently" danger onConfirm={remove}
        onClose={() => setDeleting(false)} onDone={onClose}>
        <p>Exported files stay. This cannot be undone.</p>
      </ConfirmDialog>
    );
  }
  const footer = may("samples:write") && <Button tone="danger" onClick={() => setDeleting(true)}>Delete</Button>;
  return (
    <Dialog title={`Sample of ${adapter}`} wide onClose={onClose} footer={footer}>
      <Loaded query={query}>{(sample) => <Content sample={sample} />}</Loaded>
    </Dialog>
  );
}

function Content({ sample }: { sample: SampleContent }): ReactNode {
  return (
    <div className="stack">
      <Facts facts={[
        ["Request", sample.request_id],
        ["Version", String(sample.version)],
        ["Answered", <Time key="at" at={sample.created_at} exact />],
        ["Finish", sample.finish_reason],
      ]} />
      {textsOf(sample).map(([who, text], place) => (
        <section key={place}>
          <h3>{who}</h3>
          <div className="compared-text">{text}</div>
        </section>
      ))}
    </div>
  );
}
