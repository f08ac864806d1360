/** The choice of a file of examples: one that the tenant has, or one to upload. */

import { useQuery } from "@tanstack/react-query";
import type { ChangeEvent, ReactNode } from "react";
import { api } from "../../api/client.ts";
import { MAX_FILE_BYTES, type TenantFile } from "../../api/files.ts";
import { bytes, dateTime, isoOf } from "../../lib/format.ts";
import { Field, SelectField } from "../form.tsx";

/** `id` is empty for a file that is to be uploaded; `file` is null until one is chosen. */
export interface Source {
  id: string;
  file: File | null;
}

export const UPLOAD: Source = { id: "", file: null };

const MAX_LISTED = 100;

interface TrainingFileFieldProps {
  label: string;
  tenant: string;
  /** null: no file. */
  source: Source | null;
  onChange: (source: Source | null) => void;
  optional?: boolean;
}

export function TrainingFileField({ label, tenant, source, onChange, optional = false }: TrainingFileFieldProps): ReactNode {
  const files = useQuery({
    queryKey: ["training-files", tenant],
    queryFn: ({ signal }) => api("get", "/v1/files", { query: { purpose: "fine-tune", limit: MAX_LISTED }, tenant, signal }),
  });
  const options: [string, string][] = [
    ...(optional ? [["none", "None"] as [string, string]] : []),
    ["", "Upload a file"],
    ...(files.data?.data ?? []).map((file): [string, string] => [file.id, describe(file)]),
  ];
  const pick = ({ target }: ChangeEvent<HTMLInputElement>): void => {
    const file = target.files?.[0] ?? null;
    target.setCustomValidity(file && file.size > MAX_FILE_BYTES ? `A file has at most ${bytes(MAX_FILE_BYTES)}.` : "");
    onChange({ id: "", file });
  };
  return (
    <>
      <SelectField label={label} options={options} value={source === null ? "none" : source.id}
        onChange={({ target: { value } }) => onChange(value === "none" ? null : { id: value, file: null })} />
      {source?.id === "" && (
        <Field label={`${label} to upload`} hint={`JSON lines, one example each, at most ${bytes(MAX_FILE_BYTES)}.`}>
          {(control) => <input {...control} type="file" required className="input" onChange={pick} />}
        </Field>
      )}
    </>
  );
}

function describe({ filename, bytes: size, created_at: createdAt }: TenantFile): string {
  return `${filename}, ${bytes(size)}, ${dateTime(isoOf(createdAt))}`;
}
