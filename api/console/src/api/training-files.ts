/** Files of examples for fine-tuning jobs. */

import { send } from "./client.ts";
import type { components } from "./schema.ts";

export type TrainingFile = components["schemas"]["FileView"];

export const MAX_FILE_BYTES = 200 * 2 ** 20;

/** Store `file` for the tenant. Throws ApiError. */
export async function uploadTrainingFile(tenant: string, file: File): Promise<TrainingFile> {
  const body = new FormData();
  body.set("purpose", "fine-tune");
  body.set("file", file);
  const response = await send("/v1/files", { method: "post", body, tenant });
  return (await response.json()) as TrainingFile;
}
