/** Samples of an adapter's requests: the opt-in, how many there are, files of them, and their deletion. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { api } from "../../api/client.ts";
import type { Sampling } from "../../api/types.ts";
import { bytes, plural } from "../../lib/format.ts";
import { useScope } from "../../session.tsx";
import { Button } from "../button.tsx";
import { ConfirmDialog } from "../dialog.tsx";
import { FormDialog } from "../form-dialog.tsx";
import { SelectField, TextField } from "../form.tsx";
import { Facts, Panel } from "../layout.tsx";
import { EmptyState, Loaded } from "../states.tsx";
import { useToast } from "../toast.tsx";
import { Time } from "../values.tsx";
import { SampleList } from "./sample-list.tsx";

interface Props {
  tenant: string;
  adapter: string;
}

interface DialogProps extends Props {
  onClose: () => void;
}

const FORMATS = [["training", "Training data"], ["golden", "Golden set"]] as const;
const KINDS = [["chat", "Chats"], ["completion", "Completions"]] as const;
const FIRST_PERCENT = 5;
const FIRST_DAYS = 14;

export function Samples({ tenant, adapter }: Props): ReactNode {
  const { may } = useScope();
  const [open, setOpen] = useState<"on" | "off" | "export" | "delete" | null>(null);
  const close = (): void => setOpen(null);
  const query = useQuery({
    queryKey: ["adapter", tenant, adapter, "sampling"],
    queryFn: ({ signal }) => api("get", "/v1/adapters/{name}/sampling", { path: { name: adapter }, tenant, signal }),
  });
  const sampling = query.data;
  const actions = sampling && (
    <>
      {may("samples:read") && sampling.samples > 0 && <Button small onClick={() => setOpen("export")}>Export</Button>}
      {may("samples:write") && sampling.samples > 0 && (
        <Button small tone="danger" onClick={() => setOpen("delete")}>Delete samples</Button>
      )}
      {may("samples:write") && sampling.enabled && <Button small onClick={() => setOpen("off")}>Turn off</Button>}
      {may("samples:write") && sampling.max_days > 0 && (
        <Button small onClick={() => setOpen("on")}>{sampling.enabled ? "Change" : "Turn on"}</Button>
      )}
    </>
  );
  return (
    <>
      <Panel title="Samples of requests" actions={actions}>
        <Loaded query={query}>{(loaded) => <Standing adapter={adapter} sampling={loaded} />}</Loaded>
        {open === "on" && sampling && <TurnOn tenant={tenant} adapter={adapter} sampling={sampling} onClose={close} />}
        {open === "off" && <TurnOff tenant={tenant} adapter={adapter} onClose={close} />}
        {open === "export" && <Export tenant={tenant} adapter={adapter} onClose={close} />}
        {open === "delete" && <DeleteSamples tenant={tenant} adapter={adapter} onClose={close} />}
      </Panel>
      {may("samples:read") && sampling && sampling.samples > 0 && <SampleList tenant={tenant} adapter={adapter} />}
    </>
  );
}

function Standing({ adapter, sampling }: { adapter: string; sampling: Sampling }): ReactNode {
  if (!sampling.enabled && sampling.samples === 0) {
    const why = sampling.max_days === 0
      ? "The operator of this server allows no samples."
      : "Prompts and answers are not kept. An owner of the tenant can keep a share of them, encrypted, as examples for training and evaluation.";
    return (
      <EmptyState title="Sampling is off" command={`loraplex samples on ${adapter} --percent ${FIRST_PERCENT} --days ${FIRST_DAYS}`}>
        {why}
      </EmptyState>
    );
  }
  return (
    <Facts facts={[
      ["Sampling", sampling.enabled ? `${sampling.percent} % of the requests` : "off"],
      ...(sampling.days === null ? [] : [["Kept for", plural(sampling.days, "day")] as [string, string]]),
      ["Samples", String(sampling.samples)],
      ...(sampling.changed_by === null ? [] : [["Set by", sampling.changed_by] as [string, string]]),
      ...(sampling.changed_at === null ? [] : [["Set", <Time key="set" at={sampling.changed_at} exact />] as [string, ReactNode]]),
    ]} />
  );
}

function useRefresh({ tenant, adapter }: Props): () => Promise<void> {
  const client = useQueryClient();
  return () => client.invalidateQueries({ queryKey: ["adapter", tenant, adapter, "sampling"] });
}

function TurnOn({ tenant, adapter, sampling, onClose }: DialogProps & { sampling: Sampling }): ReactNode {
  const refresh = useRefresh({ tenant, adapter });
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const body = { percent: Number(form.get("percent")), days: Number(form.get("days")) };
    await api("put", "/v1/adapters/{name}/sampling", { path: { name: adapter }, body, tenant });
    await refresh();
  };
  return (
    <FormDialog title={`Keep samples of ${adapter}`} action={sampling.enabled ? "Save" : "Turn on"} onSubmit={submit} onClose={onClose}>
      <p>Prompts and answers of a share of the requests are kept, encrypted. Requests with <code>store: false</code> are not.</p>
      <TextField label="Share of the requests (%)" name="percent" type="number" required min={0.001} max={100} step="any"
        defaultValue={sampling.percent ?? FIRST_PERCENT} />
      <TextField label="Days to keep a sample" name="days" type="number" required min={1} max={sampling.max_days}
        defaultValue={sampling.days ?? Math.min(FIRST_DAYS, sampling.max_days)}
        hint={`The operator allows ${plural(sampling.max_days, "day")}.`} />
    </FormDialog>
  );
}

function TurnOff({ tenant, adapter, onClose }: DialogProps): ReactNode {
  const refresh = useRefresh({ tenant, adapter });
  const stop = async (): Promise<void> => {
    await api("delete", "/v1/adapters/{name}/sampling", { path: { name: adapter }, tenant });
    await refresh();
  };
  return (
    <ConfirmDialog title={`Keep no more samples of ${adapter}?`} action="Turn off" onConfirm={stop} onClose={onClose}>
      <p>Samples that exist stay until they expire or are deleted.</p>
    </ConfirmDialog>
  );
}

function Export({ tenant, adapter, onClose }: DialogProps): ReactNode {
  const client = useQueryClient();
  const toast = useToast();
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const body = {
      format: form.get("format") as "training" | "golden",
      kind: form.get("kind") as "chat" | "completion",
    };
    const file = await api("post", "/v1/adapters/{name}/samples/export", { path: { name: adapter }, body, tenant });
    await client.invalidateQueries({ queryKey: ["training-files", tenant] });
    toast(`${file.filename} is stored as ${file.id}: ${bytes(file.bytes)}.`);
  };
  return (
    <FormDialog title={`Export samples of ${adapter}`} action="Make file" onSubmit={submit} onClose={onClose}>
      <p>The file is one of the tenant's files. Only those who may read samples see it. Answers that were cut off are left out.</p>
      <SelectField label="Format" name="format" options={FORMATS} />
      <SelectField label="Samples" name="kind" options={KINDS} />
    </FormDialog>
  );
}

function DeleteSamples({ tenant, adapter, onClose }: DialogProps): ReactNode {
  const refresh = useRefresh({ tenant, adapter });
  const toast = useToast();
  const remove = async (): Promise<void> => {
    const receipt = await api("delete", "/v1/adapters/{name}/samples", { path: { name: adapter }, tenant });
    toast(`${plural(receipt.samples, "sample")} deleted.`);
    await refresh();
  };
  return (
    <ConfirmDialog title={`Delete all samples of ${adapter}?`} action="Delete permanently" danger onConfirm={remove} onClose={onClose}>
      <p>Exported files stay. This cannot be undone.</p>
    </ConfirmDialog>
  );
}
