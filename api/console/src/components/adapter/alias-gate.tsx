/** The gate of an alias: the golden set that a version must pass before the alias moves to it. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { api } from "../../api/client.ts";
import { toApiError } from "../../api/errors.ts";
import { useScope } from "../../session.tsx";
import { SelectField } from "../form.tsx";
import { ErrorNotice } from "../states.tsx";
import { useToast } from "../toast.tsx";
import { useGoldenSets } from "./evaluations.tsx";

interface Props {
  tenant: string;
  adapter: string;
  alias: string;
}

const GATE = "/v1/adapters/{name}/aliases/{alias}/gate";

export function AliasGate({ tenant, adapter, alias }: Props): ReactNode {
  const { may } = useScope();
  const sets = useGoldenSets(tenant, adapter);
  const path = { name: adapter, alias };
  const key = ["evaluations", tenant, adapter, "gate", alias];
  const gate = useQuery({
    queryKey: key,
    queryFn: async ({ signal }) => {
      try {
        return (await api("get", GATE, { path, tenant, signal })).golden_set;
      } catch (error) {
        if (toApiError(error).code === "gate_not_found") return "";
        throw error;
      }
    },
  });
  const [error, setError] = useState<unknown>(null);
  const client = useQueryClient();
  const toast = useToast();
  const set = async (golden_set: string): Promise<void> => {
    setError(null);
    try {
      if (golden_set === "") await api("delete", GATE, { path, tenant });
      else await api("put", GATE, { path, body: { golden_set }, tenant });
      toast(golden_set === "" ? `${alias} has no gate.` : `${alias} has a gate with ${golden_set}.`);
    } catch (thrown) {
      setError(thrown);
    }
    await client.invalidateQueries({ queryKey: key });
  };
  const names = sets.data?.data.map(({ name }) => name) ?? [];
  if (gate.data === undefined || (names.length === 0 && gate.data === "")) return null;
  if (!may("adapters:write")) return gate.data === "" ? null : <p>Gate: the golden set {gate.data}.</p>;
  return (
    <>
      <SelectField label="Gate" options={[["", "none"], ...names.map((name) => [name, name] as const)]} value={gate.data}
        onChange={(event) => void set(event.target.value)}
        hint="The alias moves only to versions that lose nothing on this golden set." />
      {error !== null && <ErrorNotice error={error} />}
    </>
  );
}
