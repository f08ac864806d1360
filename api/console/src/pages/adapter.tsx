import { useQuery } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { Link, useNavigate, useParams } from "react-router";
import { toApiError } from "../api/errors.ts";
import { api } from "../api/client.ts";
import type { Adapter as AdapterDetail } from "../api/types.ts";
import { Aliases } from "../components/adapter/aliases.tsx";
import { Calling } from "../components/adapter/calling.tsx";
import { DeleteDialog, Deletions } from "../components/adapter/deletions.tsx";
import { Evaluations } from "../components/adapter/evaluations.tsx";
import { Samples } from "../components/adapter/samples.tsx";
import { UploadDialog } from "../components/adapter/upload.tsx";
import { AdapterUsage } from "../components/adapter/usage.tsx";
import { Versions } from "../components/adapter/versions.tsx";
import { NewJob } from "../components/tuning/new-job.tsx";
import { Button } from "../components/button.tsx";
import { Icon } from "../components/icons.tsx";
import { Page, Tabs } from "../components/layout.tsx";
import { Loaded } from "../components/states.tsx";
import { AliasTargets } from "../components/values.tsx";
import { addressOf } from "../lib/addresses.ts";
import { latestVersion } from "../lib/calling.ts";
import { useScope, useSession, useSessionContext } from "../session.tsx";

const REFRESH_MS = 5_000;
/** While somebody waits for a version to become ready. */
const SETTLING_MS = 1_000;
const PARTS = [
  ["", "Versions"], ["call", "Call it"], ["aliases", "Aliases"], ["evaluations", "Evaluations"], ["usage", "Usage"], ["samples", "Samples"],
  ["deletions", "Deletions"],
] as const;

/** One adapter: its versions, aliases, usage and what was deleted of it. */
export default function Adapter(): ReactNode {
  const { tenant = "", name = "", part = "" } = useParams();
  const { may } = useScope();
  const { server } = useSession();
  const [open, setOpen] = useState<"upload" | "train" | "delete" | null>(null);
  const navigate = useNavigate();
  const query = useQuery({
    queryKey: ["adapter", tenant, name],
    queryFn: ({ signal }) => api("get", "/v1/adapters/{name}", { path: { name }, tenant, signal }),
    refetchInterval: ({ state }) => (isSettling(state.data) ? SETTLING_MS : REFRESH_MS),
  });
  const isGone = toApiError(query.error).status === 404;
  const { pickTenant } = useSessionContext();
  const tryIt = (): void => {
    pickTenant(tenant);
    void navigate(`/playground?model=${encodeURIComponent(name)}`);
  };
  const actions = (
    <>
      {may("infer") && !isGone && !isClassifier(query.data) && <Button onClick={tryIt}><Icon name="playground" />Try it</Button>}
      {may("adapters:write") && (
        <>
          {server.tuning && may("infer") && <Button onClick={() => setOpen("train")}>Train a version</Button>}
          <Button onClick={() => setOpen("upload")}><Icon name="upload" />Upload a version</Button>
          {!isGone && <Button tone="danger" onClick={() => setOpen("delete")}>Delete</Button>}
        </>
      )}
    </>
  );
  return (
    <Page title={name} crumbs={<><Link to="/adapters">Adapters</Link> / {tenant}</>}
      lead={query.data && !isGone && <AliasTargets {...query.data} />} actions={actions}>
      <Tabs label="Adapter sections"
        tabs={PARTS.map(([path, text]) => [addressOf(tenant, name, ...(path ? [path] : [])), text])} />
      {part === "deletions" ? <Deletions tenant={tenant} adapter={name} /> : (
        <Loaded query={query}>
          {(adapter) => <Part part={part} tenant={tenant} adapter={adapter} />}
        </Loaded>
      )}
      {open === "upload" && <UploadDialog tenant={tenant} adapter={name} onClose={() => setOpen(null)} />}
      {open === "train" && <NewJob tenant={tenant} adapter={name} onClose={() => setOpen(null)} />}
      {open === "delete" && (
        <DeleteDialog tenant={tenant} adapter={name} onClose={() => setOpen(null)}
          onDeleted={() => void navigate(addressOf(tenant, name, "deletions"))} />
      )}
    </Page>
  );
}

function Part({ part, tenant, adapter }: {
  part: string;
  tenant: string;
  adapter: AdapterDetail;
}): ReactNode {
  if (part === "call") return <Calling adapter={adapter} />;
  if (part === "aliases") return <Aliases tenant={tenant} adapter={adapter} />;
  if (part === "evaluations") return <Evaluations tenant={tenant} adapter={adapter} />;
  if (part === "samples") return <Samples tenant={tenant} adapter={adapter.name} />;
  if (part === "usage") return <AdapterUsage tenant={tenant} adapter={adapter.name} />;
  return <Versions tenant={tenant} adapter={adapter} />;
}

function isSettling(adapter: AdapterDetail | undefined): boolean {
  return adapter?.versions.some(({ state }) => state === "validated" || state === "attesting") ?? false;
}

/** The playground has no use for it. */
function isClassifier(adapter: AdapterDetail | undefined): boolean {
  return adapter !== undefined && latestVersion(adapter)?.task === "classify";
}
