/** The forms of a golden set and of an evaluation. */

import { useQueryClient } from "@tanstack/react-query";
import type { FormEvent, ReactNode } from "react";
import { useNavigate } from "react-router";
import { api } from "../../api/client.ts";
import { uploadFile } from "../../api/files.ts";
import type { Adapter } from "../../api/types.ts";
import { addressOf } from "../../lib/addresses.ts";
import { FormDialog } from "../form-dialog.tsx";
import { Field, SelectField, TextField } from "../form.tsx";
import { useToast } from "../toast.tsx";

interface Props {
  tenant: string;
  adapter: Adapter;
  onClose: () => void;
}

export function SetDialog({ tenant, adapter, onClose }: Props): ReactNode {
  const client = useQueryClient();
  const toast = useToast();
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const name = String(form.get("name"));
    const stored = await uploadFile(tenant, "evals", form.get("file") as File);
    const judge = String(form.get("judge"));
    await api("put", "/v1/adapters/{name}/golden-sets/{golden_set}", {
      path: { name: adapter.name, golden_set: name },
      body: { file: stored.id, tolerance: Number(form.get("tolerance")), judge: judge === "" ? null : judge },
      tenant,
    });
    toast(`The golden set ${name} is set.`);
    await client.invalidateQueries({ queryKey: ["evaluations", tenant, adapter.name] });
  };
  return (
    <FormDialog title="Set a golden set" action="Set" onSubmit={submit} onClose={onClose}>
      <TextField label="Name" name="name" required maxLength={64} autoComplete="off" spellCheck={false}
        hint="An existing set of this name is replaced." />
      <Field label="File" hint="One case per line: a prompt, and what its answer has to be.">
        {(control) => <input {...control} className="input" type="file" name="file" required />}
      </Field>
      <TextField label="Tolerance" name="tolerance" type="number" min={0} max={1} step="any" defaultValue="0" required
        hint="The loss of mean score that is no regression." />
      <TextField label="Judge" name="judge" maxLength={256} autoComplete="off" spellCheck={false}
        hint="The model for cases with the scorer judge. Leave it empty if there are none." />
    </FormDialog>
  );
}

export function EvaluateDialog({ tenant, adapter, sets, onClose }: Props & { sets: string[] }): ReactNode {
  const client = useQueryClient();
  const navigate = useNavigate();
  const versions = adapter.versions
    .filter(({ state }) => state === "ready")
    .map(({ version }) => [String(version), `Version ${version}`] as const)
    .toReversed();
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const against = String(form.get("against"));
    const started = await api("post", "/v1/adapters/{name}/evaluations", {
      path: { name: adapter.name },
      body: {
        version: Number(form.get("version")),
        golden_set: String(form.get("set")),
        against: against === "" ? null : against === "base" ? "base" : Number(against),
      },
      tenant,
    });
    void client.invalidateQueries({ queryKey: ["evaluations", tenant, adapter.name] });
    void navigate(addressOf(tenant, adapter.name, "evaluations", started.id));
  };
  return (
    <FormDialog title="Evaluate a version" action="Evaluate" onSubmit={submit} onClose={onClose}>
      <SelectField label="Version" name="version" options={versions} />
      <SelectField label="Against" name="against"
        options={[["", "The version that requests get"], ["base", "The base"], ...versions]} />
      <SelectField label="Golden set" name="set" options={sets.map((name) => [name, name] as const)}
        hint="The requests are those of your newest API key that may infer, or else of the key that set it." />
    </FormDialog>
  );
}
