import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { useId, type ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { useRested } from "../lib/hooks.ts";
import { Field } from "./form.tsx";

type Adapter = Answer<"get", "/v1/adapters">["data"][number];

interface ModelFieldProps {
  label: string;
  tenant: string;
  /** What the base model is called. */
  base: string;
  value: string;
  onChange: (model: string) => void;
}

const NUM_SUGGESTED = 20;
const NUM_VERSIONS = 3;
const HINT = "adapter, adapter@version, adapter@alias, or a sum such as first+second:0.5; empty is the base model.";
const CLASSIFIER_HINT = "This adapter is a classifier and generates no text. Use /v1/classify, /v1/score or /v1/rerank.";

/**
 * A model that generates text, by name: the base, an adapter, one of its versions or aliases, or a composition. Any name can be
 * typed; of a composition, the last adapter is suggested.
 */
export function ModelField({ label, tenant, base, value, onChange }: ModelFieldProps): ReactNode {
  const list = useId();
  const before = value.slice(0, value.lastIndexOf("+") + 1);
  const adapter = value.slice(before.length).split(/[@:]/)[0] ?? "";
  const search = useRested(adapter);
  const query = useQuery({
    queryKey: ["models", tenant, search],
    queryFn: ({ signal }) => api("get", "/v1/adapters", {
      query: { search: search === base ? null : search || null, limit: NUM_SUGGESTED }, tenant, signal,
    }),
    placeholderData: keepPreviousData,
    staleTime: 30_000,
  });
  const adapters = query.data?.data ?? [];
  const ofAdapters = adapters.filter(({ task }) => task === "generate").flatMap(namesOf).map((name) => before + name);
  const names = before ? ofAdapters : [base, ...ofAdapters];
  const isClassifier = adapters.some(({ name, task }) => name === adapter && task === "classify");
  return (
    <Field label={label} hint={isClassifier ? CLASSIFIER_HINT : HINT}>
      {(control) => (
        <>
          <input {...control} className="input mono" list={list} value={value} placeholder={base} autoComplete="off"
            spellCheck={false} onChange={(event) => onChange(event.target.value.trim())} />
          <datalist id={list}>{names.map((name) => <option key={name} value={name} />)}</datalist>
        </>
      )}
    </Field>
  );
}

function namesOf(adapter: Adapter): string[] {
  const versions = Array.from({ length: NUM_VERSIONS }, (_, i) => (adapter.latest_version ?? 0) - i).filter((number) => number > 0);
  return [
    adapter.name,
    ...Object.keys(adapter.aliases).map((alias) => `${adapter.name}@${alias}`),
    ...versions.map((version) => `${adapter.name}@${version}`),
  ];
}
