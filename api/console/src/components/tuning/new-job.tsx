/** The form of a new fine-tuning job. */

import { useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { useNavigate } from "react-router";
import { api } from "../../api/client.ts";
import { uploadFile } from "../../api/files.ts";
import { jobAddress } from "../../lib/addresses.ts";
import { orderOf } from "../../lib/tuning.ts";
import { useSession } from "../../session.tsx";
import { FormDialog } from "../form-dialog.tsx";
import { SelectField, TextField } from "../form.tsx";
import { TrainingFileField, UPLOAD, type Source } from "./training-file-field.tsx";

const METHODS = [["supervised", "Supervised"], ["dpo", "DPO, from preferences"]] as const;

interface NewJobProps {
  tenant: string;
  /** What is trained; without it, the form asks. */
  adapter?: string;
  onClose: () => void;
}

export function NewJob({ tenant, adapter, onClose }: NewJobProps): ReactNode {
  const { server } = useSession();
  const [method, setMethod] = useState("supervised");
  const [training, setTraining] = useState<Source | null>(UPLOAD);
  const [validation, setValidation] = useState<Source | null>(null);
  const stored = useStored(tenant);
  const client = useQueryClient();
  const navigate = useNavigate();
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const trainingFile = await stored(training, setTraining);
    const validationFile = await stored(validation, setValidation);
    if (trainingFile === null) return;
    const body = orderOf(form, { base: server.base_model, trainingFile, validationFile });
    const job = await api("post", "/v1/fine_tuning/jobs", { body, tenant });
    void client.invalidateQueries({ queryKey: ["tuning", tenant] });
    void navigate(jobAddress(job.id));
  };
  return (
    <FormDialog title="New fine-tuning job" action="Create job" onSubmit={submit} onClose={onClose}>
      <TextField label="Adapter" name="adapter" required maxLength={64} defaultValue={adapter} autoComplete="off" spellCheck={false}
        hint="The result becomes a version of it. A new name makes a new adapter." />
      <TrainingFileField label="Training file" tenant={tenant} source={training} onChange={setTraining} />
      <TrainingFileField label="Validation file" tenant={tenant} source={validation} onChange={setValidation} optional />
      <SelectField label="Method" name="method" options={METHODS} value={method}
        onChange={(event) => setMethod(event.target.value)} />
      <div className="columns narrow">
        <NumberField label="Epochs" name="n_epochs" min={1} max={50} unset="3" />
        <NumberField label="Batch size" name="batch_size" min={1} max={256} unset="8" />
        <NumberField label="Learning rate multiplier" name="learning_rate_multiplier" min={0} max={100} step="any" unset="1" />
        <NumberField label="Rank" name="rank" min={1} unset="16" />
      </div>
      <Advanced isDpo={method === "dpo"} />
    </FormDialog>
  );
}

/** Gives the id of a chosen file, which is uploaded first if it is not stored; it is not uploaded twice. */
function useStored(tenant: string): (source: Source | null, keep: (source: Source) => void) => Promise<string | null> {
  const client = useQueryClient();
  return async (source, keep) => {
    if (source === null || source.id !== "") return source?.id ?? null;
    if (source.file === null) return null;
    const { id } = await uploadFile(tenant, "fine-tune", source.file);
    await client.invalidateQueries({ queryKey: ["training-files", tenant] });
    keep({ id, file: null });
    return id;
  };
}

/** Settings that most jobs leave as they are. It opens if one of them is wrong, so that the browser can show it. */
function Advanced({ isDpo }: { isDpo: boolean }): ReactNode {
  return (
    <details className="fold" onInvalidCapture={(event) => { event.currentTarget.open = true; }}>
      <summary>Advanced</summary>
      <div className="form">
        <div className="columns narrow">
          <NumberField label="Alpha" name="alpha" min={0} step="any" unset="twice the rank" />
          <NumberField label="Tokens per sequence" name="max_tokens" min={1} unset="2048, or what the base serves" />
          <NumberField label="Seed" name="seed" min={0} unset="random" />
          {isDpo && <NumberField label="Beta" name="beta" min={0} max={10} step="any" unset="0.1" />}
        </div>
        <TextField label="Modules" name="targets" autoComplete="off" spellCheck={false} placeholder="q_proj, v_proj"
          hint="Default: all linear modules." />
        <Check name="rslora" text="rsLoRA" />
        <Check name="dora" text="DoRA" />
        {!isDpo && <Check name="packing" text="Several examples in one sequence (packing)" />}
      </div>
    </details>
  );
}

interface NumberFieldProps {
  label: string;
  name: string;
  min: number;
  max?: number;
  step?: "any";
  /** What holds if the field is empty. */
  unset: string;
}

function NumberField({ unset, ...input }: NumberFieldProps): ReactNode {
  return <TextField {...input} type="number" autoComplete="off" hint={`Default: ${unset}`} />;
}

function Check({ name, text }: { name: string; text: string }): ReactNode {
  return <label className="check"><input type="checkbox" name={name} /><span>{text}</span></label>;
}
