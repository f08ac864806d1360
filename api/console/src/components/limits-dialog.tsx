import { useQuery, useQueryClient } from "@tanstack/react-query";
import type { FormEvent, ReactNode } from "react";
import { api, tagged } from "../api/client.ts";
import { LIMITS, limitsOf } from "../lib/limits.ts";
import { FormDialog } from "./form-dialog.tsx";
import { SelectField, TextField } from "./form.tsx";
import { Loaded } from "./states.tsx";

const PERIODS = [["month", "a month, in UTC"], ["day", "a day, in UTC"]] as const;

/** All limits of a tenant, replaced at once. */
export function LimitsDialog({ slug, onClose }: { slug: string; onClose: () => void }): ReactNode {
  const client = useQueryClient();
  const query = useQuery({
    queryKey: ["limits", slug],
    queryFn: ({ signal }) => tagged("get", "/admin/tenants/{slug}/quota", { path: { slug }, signal }),
    // The fields show what was read when the dialog opened, and that is what the change is of.
    gcTime: 0,
    staleTime: Infinity,
  });
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<boolean> => {
    // What is not there yet would be saved as no limits at all.
    if (query.data === undefined) return true;
    const body = limitsOf(new FormData(event.currentTarget));
    await api("put", "/admin/tenants/{slug}/quota", { path: { slug }, body, ifMatch: query.data.etag });
    await client.invalidateQueries({ queryKey: ["limits-in-use", slug] });
    return false;
  };
  return (
    <FormDialog title={`Limits of ${slug}`} action="Save limits" wide onSubmit={submit} onClose={onClose}>
      <p className="soft">Limits apply from the next request. Empty means unlimited.</p>
      <Loaded query={query}>
        {({ data: limits }) => (
          <div className="columns narrow">
            {LIMITS.map(({ name, label }) => (
              <TextField key={name} name={name} label={label} type="number" min={0} step={1}
                placeholder="no limit" defaultValue={limits[name] ?? ""} />
            ))}
            <SelectField label="Period" name="period" options={PERIODS} defaultValue={limits.period} />
          </div>
        )}
      </Loaded>
    </FormDialog>
  );
}
