/** A version that answers copies of an alias's requests, and how its answers compare. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { api } from "../../api/client.ts";
import { ApiError } from "../../api/errors.ts";
import type { Adapter, ShadowView } from "../../api/types.ts";
import { useScope } from "../../session.tsx";
import { Button } from "../button.tsx";
import { FormDialog } from "../form-dialog.tsx";
import { SelectField, TextField } from "../form.tsx";
import { ErrorNotice, Loaded } from "../states.tsx";

const ROUTE = "/v1/adapters/{name}/aliases/{alias}/shadow";

export function Shadow({ tenant, adapter, alias }: {
  tenant: string;
  adapter: Adapter;
  alias: string;
}): ReactNode {
  const { may } = useScope();
  const client = useQueryClient();
  const [error, setError] = useState<unknown>(null);
  const [isSetting, setSetting] = useState(false);
  const others = adapter.versions.filter(({ state, version }) => state === "ready" && version !== adapter.aliases[alias]);
  const path = { name: adapter.name, alias };
  const queryKey = ["adapter", tenant, adapter.name, "alias", alias, "shadow"];
  const query = useQuery({
    queryKey,
    queryFn: async ({ signal }): Promise<ShadowView | null> => {
      try {
        return await api("get", ROUTE, { path, tenant, signal });
      } catch (thrown) {
        if (thrown instanceof ApiError && thrown.code === "shadow_not_found") return null;
        throw thrown;
      }
    },
  });
  const end = async (): Promise<void> => {
    try {
      await api("delete", ROUTE, { path, tenant });
      await client.invalidateQueries({ queryKey });
    } catch (thrown) {
      setError(thrown);
    }
  };
  return (
    <Loaded query={query}>
      {(shadow) => shadow === null ? others.length > 0 && may("adapters:write") && (
        <div>
          <Button small onClick={() => setSetting(true)}>Set a shadow</Button>
          {isSetting && (
            <ShadowDialog alias={alias} versions={others.map(({ version }) => version)} onClose={() => setSetting(false)}
              onSet={async (body) => {
                await api("put", ROUTE, { path, body, tenant });
                await client.invalidateQueries({ queryKey });
              }} />
          )}
        </div>
      ) : (
        <section aria-label={`Shadow of ${alias}`}>
          <p>
            Shadow: version {shadow.version} answers copies of {shadow.percent} % of the requests.
            {may("adapters:write") && <> <Button small onClick={() => void end()}>End shadow</Button></>}
          </p>
          <p className="soft">{comparison(shadow)}</p>
          {error !== null && <ErrorNotice error={error} />}
        </section>
      )}
    </Loaded>
  );
}

function ShadowDialog({ alias, versions, onSet, onClose }: {
  alias: string;
  versions: number[];
  onSet: (body: { version: number; percent: number }) => Promise<void>;
  onClose: () => void;
}): ReactNode {
  const submit = (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    return onSet({ version: Number(form.get("version")), percent: Number(form.get("percent")) });
  };
  return (
    <FormDialog title={`Shadow of ${alias}`} action="Set shadow" onSubmit={submit} onClose={onClose}>
      <p>The version answers copies of requests while the engine is idle. No caller gets its answers; their tokens are charged.</p>
      <SelectField label="Version" name="version" options={versions.map((version) => [String(version), `Version ${version}`])} />
      <TextField label="Percent of the requests" name="percent" type="number" required min={0.01} max={100} step="any" defaultValue={5} />
    </FormDialog>
  );
}

function comparison({ compared, errors, equal, rouge_l: rouge, length_ratio: ratio }: ShadowView): string {
  const failed = errors > 0 ? `, ${errors} failed` : "";
  if (rouge === null || ratio === null) return `No answers compared yet${failed}.`;
  return `${compared} answers compared${failed}: ${equal} equal, ROUGE-L ${rouge.toFixed(3)}, `
    + `${ratio.toFixed(2)} times as long.`;
}
