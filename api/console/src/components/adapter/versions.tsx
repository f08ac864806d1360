/** The versions of an adapter, and one of them in full. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { api, send, urlOf } from "../../api/client.ts";
import { toApiError } from "../../api/errors.ts";
import type { Adapter, AdapterVersion } from "../../api/types.ts";
import { CONFIG_FILE, WEIGHTS_FILE } from "../../lib/adapter-folder.ts";
import { bytes } from "../../lib/format.ts";
import { useParam } from "../../lib/hooks.ts";
import { saveFile } from "../../lib/save.ts";
import { useScope } from "../../session.tsx";
import { Button } from "../button.tsx";
import { DataTable, type Columns } from "../data-table.tsx";
import { Icon } from "../icons.tsx";
import { EmptyState } from "../states.tsx";
import { useToast } from "../toast.tsx";
import { Badge, Digest, State, Time } from "../values.tsx";
import { DeleteDialog } from "./deletions.tsx";
import { Provenance } from "./provenance.tsx";
import { ReadinessPanel, Residency, SpeculationPanel, useReadiness } from "./readiness.tsx";
import { Attestation } from "./attestation.tsx";
import { VersionHistory } from "./history.tsx";

interface Props {
  tenant: string;
  adapter: Adapter;
}

export function Versions({ tenant, adapter }: Props): ReactNode {
  const [chosen, setChosen] = useParam("version");
  const versions = [...adapter.versions].sort((one, other) => other.version - one.version);
  const shown = versions.find((one) => String(one.version) === chosen) ?? versions[0];
  if (shown === undefined) {
    return (
      <section className="panel">
        <EmptyState title="No versions" command={`loraplex adapters push ./my-adapter ${adapter.name}`} />
      </section>
    );
  }
  const source = { rows: versions, error: null, isStale: false, refetch: () => undefined };
  return (
    <>
      <section className="panel">
        <DataTable caption="Versions" columns={columnsFor(shown, setChosen)} source={source}
          rowId={(row) => row.id} empty={null} />
      </section>
      <Version key={shown.version} tenant={tenant} version={shown} />
    </>
  );
}

function columnsFor(shown: AdapterVersion, choose: (version: string) => void): Columns<AdapterVersion> {
  return [
    {
      accessorKey: "version", header: "Version",
      cell: ({ row: { original } }) => (
        <Button small tone={original === shown ? "primary" : "plain"} aria-pressed={original === shown}
          onClick={() => choose(String(original.version))}>Version {original.version}</Button>
      ),
    },
    {
      accessorKey: "state", header: "State",
      cell: ({ row: { original } }) => (
        <><State state={original.state} />{original.reason && <span className="sub">{original.reason.message}</span>}</>
      ),
    },
    {
      accessorKey: "aliases", header: "Aliases",
      cell: ({ row: { original } }) => (
        <span className="row tight">{original.aliases.map((one) => <Badge key={one} tone="accent">{one}</Badge>)}</span>
      ),
    },
    { accessorKey: "task", header: "Task" },
    { accessorKey: "tier", header: "Location", cell: ({ row: { original } }) => <State state={original.tier} /> },
    {
      accessorKey: "size_bytes", header: "Size", meta: { end: true },
      cell: ({ row: { original } }) => bytes(original.size_bytes),
    },
    { accessorKey: "digest", header: "Digest", cell: ({ row: { original } }) => <Digest digest={original.digest} /> },
    { accessorKey: "created_at", header: "Pushed", cell: ({ row: { original } }) => <Time at={original.created_at} /> },
  ];
}

function Version({ tenant, version }: { tenant: string; version: AdapterVersion }): ReactNode {
  const readiness = useReadiness(tenant, version);
  return (
    <>
      <Actions tenant={tenant} version={version}
        hasPin={readiness.data?.wishes.some((wish) => wish.kind === "pin") ?? false} />
      <div className="columns">
        <div className="stack">
          <ReadinessPanel query={readiness} title={`Is version ${version.version} ready?`} />
          <Attestation version={version} />
          <VersionHistory tenant={tenant} version={version} />
        </div>
        <div className="stack">
          <Provenance version={version} />
          <Residency readiness={readiness.data} />
          <SpeculationPanel readiness={readiness.data} />
        </div>
      </div>
    </>
  );
}

/** What can be done with one version. */
function Actions({ tenant, version, hasPin }: {
  tenant: string;
  version: AdapterVersion;
  hasPin: boolean;
}): ReactNode {
  const { may } = useScope();
  const [isDeleting, setDeleting] = useState(false);
  const path = { name: version.adapter, number: version.version };
  const change = useChange(tenant, version);
  const isReady = version.state === "ready";
  return (
    <div className="row">
      <h2>Version {version.version}</h2>
      <code className="soft">{version.id}</code>
      {may("adapters:write") && (
        <>
          <Button small disabled={!isReady} busy={change.isPending} onClick={() => change.mutate({
            call: () => api("post", "/v1/adapters/{name}/versions/{number}/prefetch", { path, tenant, body: {} }),
            done: "The version is loaded as close to the device as memory allows.",
          })}>Prefetch</Button>
          <Button small disabled={!isReady && !hasPin} busy={change.isPending} onClick={() => change.mutate({
            call: () => hasPin
              ? api("delete", "/v1/adapters/{name}/versions/{number}/pin", { path, tenant })
              : api("put", "/v1/adapters/{name}/versions/{number}/pin", { path, tenant, body: {} }),
            done: hasPin ? "The version may be evicted again." : "The version stays on the device until it is unpinned.",
          })}>{hasPin ? "Unpin" : "Pin"}</Button>
        </>
      )}
      <Download tenant={tenant} version={version} file={WEIGHTS_FILE} />
      <Download tenant={tenant} version={version} file={CONFIG_FILE} />
      {may("adapters:write") && (
        <Button small tone="danger" onClick={() => setDeleting(true)}>Delete version {version.version}</Button>
      )}
      {isDeleting && (
        <DeleteDialog tenant={tenant} adapter={version.adapter} version={version.version}
          onClose={() => setDeleting(false)} />
      )}
    </div>
  );
}

interface Change {
  call: () => Promise<unknown>;
  done: string;
}

function useChange(tenant: string, version: AdapterVersion) {
  const client = useQueryClient();
  const toast = useToast();
  return useMutation({
    mutationFn: ({ call }: Change) => call(),
    onSuccess: (_, { done }) => {
      toast(done);
      return client.invalidateQueries({ queryKey: ["adapter", tenant, version.adapter] });
    },
    onError: (error) => toast(toApiError(error).message, "bad"),
  });
}

function Download({ tenant, version, file }: {
  tenant: string;
  version: AdapterVersion;
  file: string;
}): ReactNode {
  const toast = useToast();
  const download = useMutation({
    mutationFn: async () => {
      const parts = { name: version.adapter, number: version.version, file };
      const url = urlOf("/v1/adapters/{name}/versions/{number}/files/{file}", parts);
      saveFile(await (await send(url, { method: "get", tenant })).blob(), file);
    },
    onError: (error) => toast(toApiError(error).message, "bad"),
  });
  return (
    <Button small busy={download.isPending} onClick={() => download.mutate()}>
      <Icon name="download" />{file}
    </Button>
  );
}
