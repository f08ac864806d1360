/** Files of a tenant: examples for fine-tuning jobs, and cases of golden sets. */

import { send } from "./client.ts";
import type { components } from "./schema.ts";

export type TenantFile = components["schemas"]["FileView"];

export const MAX_FILE_BYTES = 200 * 2 ** 20;

/** Store `file` for the tenant. Throws ApiError. */
export async function uploadFile(tenant: string, purpose: "fine-tune" | "evals", file: File): Promise<TenantFile> {
  const body = new FormData();
  body.set("purpose", purpose);
  body.set("file", file);
  const response = await send("/v1/files", { method: "post", body, tenant });
  return (await response.json()) as TenantFile;
}
