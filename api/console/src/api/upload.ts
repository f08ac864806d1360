/** Sending an adapter: hashed here, sent in parts, resumed where it broke. */

import type { AdapterFolder } from "../lib/adapter-folder.ts";
import { Sha256 } from "../lib/sha256.ts";
import { api, send, urlOf } from "./client.ts";
import { toApiError } from "./errors.ts";
import type { AdapterVersion, Upload } from "./types.ts";

const PART_BYTES = 8 << 20;
const MAX_RECONNECTS = 5;
const FIRST_PAUSE_MS = 500;

export interface Progress {
  step: "hashing" | "sending" | "examining";
  /** Of the step; null where it can't be told. */
  part: number | null;
}

export interface Push {
  tenant: string;
  name: string;
  folder: AdapterFolder<File>;
  aliases: string[];
  report: (progress: Progress) => void;
  signal: AbortSignal;
}

/** The version that the adapter became, not yet attested; the one it is already if it is there. */
export async function pushAdapter(push: Push): Promise<AdapterVersion> {
  const { tenant, name, folder, aliases, report, signal } = push;
  const sha256 = await hash(folder.weights, push);
  const declaration = { config: folder.config, size_bytes: folder.weights.size, sha256, aliases };
  const upload = await api("post", "/v1/adapters/{name}/uploads", {
    path: { name }, body: declaration, tenant, signal,
  });
  if (upload.already && upload.version) return upload.version;
  await sendParts(upload, push);
  report({ step: "examining", part: null });
  return api("post", "/v1/uploads/{upload_id}/commit", {
    path: { upload_id: upload.id }, tenant, signal,
  });
}

async function hash(file: File, { report, signal }: Push): Promise<string> {
  const digest = new Sha256();
  for (let at = 0; at < file.size; at += PART_BYTES) {
    signal.throwIfAborted();
    report({ step: "hashing", part: at / file.size });
    digest.update(new Uint8Array(await file.slice(at, at + PART_BYTES).arrayBuffer()));
  }
  return digest.hex();
}

/** Send what the server has not got yet; ask again where it stands when a part breaks. */
async function sendParts(begun: Upload, push: Push): Promise<void> {
  let upload = begun;
  let failures = 0;
  while (upload.received_bytes < upload.size_bytes) {
    push.report({ step: "sending", part: upload.received_bytes / upload.size_bytes });
    try {
      upload = await sendPart(upload, push);
      failures = 0;
    } catch (error) {
      push.signal.throwIfAborted();
      const { code, isTransient } = toApiError(error);
      failures += 1;
      if ((!isTransient && code !== "upload_conflict") || failures > MAX_RECONNECTS) throw error;
      await pause(FIRST_PAUSE_MS * 2 ** (failures - 1));
      upload = await askAgain(upload, push);
    }
  }
}

async function sendPart(upload: Upload, { tenant, folder, signal }: Push): Promise<Upload> {
  const offset = upload.received_bytes;
  const url = urlOf("/v1/uploads/{upload_id}/content", { upload_id: upload.id }, { offset });
  const response = await send(url, {
    method: "put",
    headers: new Headers({ "content-type": "application/octet-stream" }),
    body: folder.weights.slice(offset, offset + PART_BYTES),
    tenant,
    signal,
  });
  return (await response.json()) as Upload;
}

async function askAgain(upload: Upload, { tenant, signal }: Push): Promise<Upload> {
  try {
    return await api("get", "/v1/uploads/{upload_id}", { path: { upload_id: upload.id }, tenant, signal });
  } catch (error) {
    if (toApiError(error).isTransient) return upload;
    throw error;
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => { setTimeout(resolve, ms); });
}
