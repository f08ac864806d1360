/**
 * The typed client of the public API.
 *
 * Paths, parameters, bodies and answers are those of docs/openapi.json. The session is a cookie that
 * scripts cannot read; what changes something carries the session's CSRF token beside it.
 */

import { ApiError, errorOf, unreachable } from "./errors.ts";
import type { paths } from "./schema.ts";

type Method = "get" | "put" | "post" | "patch" | "delete";

export type PathOf<M extends Method> = {
  [P in keyof paths]: paths[P] extends Record<M, object> ? P : never;
}[keyof paths];

type Operation<M extends Method, P extends PathOf<M>> = paths[P] extends Record<M, infer O>
  ? O
  : never;

type Part<T, K extends string> = T extends { [key in K]?: infer V } ? NonNullable<V> : never;
type JsonOf<T> = T extends { content: { "application/json": infer J } } ? J : never;
type Responses<O> = Part<O, "responses">;

/** What the operation answers when it succeeds. */
export type Answer<M extends Method, P extends PathOf<M>> =
  Responses<Operation<M, P>> extends infer R
    ? R extends object
      ? JsonOf<R[keyof R & (200 | 201 | 202)]>
      : never
    : never;

export type QueryOf<M extends Method, P extends PathOf<M>> = Part<
  Part<Operation<M, P>, "parameters">,
  "query"
>;
type PathPartsOf<M extends Method, P extends PathOf<M>> = Part<
  Part<Operation<M, P>, "parameters">,
  "path"
>;
export type BodyOf<M extends Method, P extends PathOf<M>> = JsonOf<
  Part<Operation<M, P>, "requestBody">
>;

export interface Call<M extends Method, P extends PathOf<M>> {
  path?: PathPartsOf<M, P>;
  query?: QueryOf<M, P>;
  body?: BodyOf<M, P>;
  /** The tenant that is meant; a user who means another than their own is refused. */
  tenant?: string | null | undefined;
  /** The ETag of what was read: the change is made only if it is still that. */
  ifMatch?: string | null;
  signal?: AbortSignal;
}

interface Hooks {
  csrfToken: string | null;
  /** How long ago the person did something last: the server goes by it, not by what pages ask by themselves. */
  idleSeconds: () => number;
  /** The session is over. */
  onSignedOut: () => void;
  /** Ask for the password again; false if the person gave up. */
  confirm: () => Promise<boolean>;
}

/** What the session has to say about requests; `session.tsx` and the dialogs set it. */
export const hooks: Hooks = {
  csrfToken: null,
  idleSeconds: () => 0,
  onSignedOut: () => undefined,
  confirm: () => Promise.resolve(false),
};

/** Call the API. Throws ApiError. */
export async function api<M extends Method, P extends PathOf<M>>(
  method: M,
  path: P,
  call: Call<M, P> = {},
): Promise<Answer<M, P>> {
  return (await tagged(method, path, call)).data;
}

export interface Tagged<T> {
  data: T;
  /** What `ifMatch` of a change names; null where the answer has none. */
  etag: string | null;
}

/** Call the API for something that is to be changed only if nobody else has. Throws ApiError. */
export async function tagged<M extends Method, P extends PathOf<M>>(
  method: M,
  path: P,
  call: Call<M, P> = {},
): Promise<Tagged<Answer<M, P>>> {
  const url = urlOf(path as string, call.path, call.query);
  const headers = new Headers({ accept: "application/json" });
  if (call.ifMatch) headers.set("if-match", call.ifMatch);
  const init: SendInit = { method, headers, tenant: call.tenant };
  if (call.body !== undefined) {
    headers.set("content-type", "application/json");
    init.body = JSON.stringify(call.body);
  }
  if (call.signal) init.signal = call.signal;
  const response = await send(url, init);
  const text = await response.text();
  const data = (text === "" ? undefined : JSON.parse(text)) as Answer<M, P>;
  return { data, etag: response.headers.get("etag") };
}

export interface SendInit extends Omit<RequestInit, "headers"> {
  method: string;
  headers?: Headers;
  tenant?: string | null | undefined;
}

/**
 * Send a request in the session's name and give back its answer if it is a good one: for streams,
 * files and other bodies than JSON. Throws ApiError; an AbortError stays one.
 *
 * What needs the password once more asks for it, and is then sent again.
 */
export async function send(url: string, init: SendInit): Promise<Response> {
  try {
    return await sendOnce(url, init);
  } catch (error) {
    const mustConfirm = error instanceof ApiError && error.code === "confirmation_required";
    if (!mustConfirm || !(await hooks.confirm())) throw error;
    return sendOnce(url, init);
  }
}

async function sendOnce(url: string, init: SendInit): Promise<Response> {
  const { tenant, ...rest } = init;
  const headers = new Headers(init.headers);
  const method = init.method.toUpperCase();
  if (method !== "GET" && hooks.csrfToken) headers.set("x-csrf-token", hooks.csrfToken);
  headers.set("x-loraplex-idle-seconds", String(hooks.idleSeconds()));
  if (tenant) headers.set("x-loraplex-tenant", tenant);
  let response: Response;
  try {
    response = await fetch(url, { ...rest, method, headers, credentials: "same-origin" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (response.ok) return response;
  const error = errorOf(response.status, await response.text(), response.headers.get("retry-after"));
  if (response.status === 401 && !url.startsWith("/v1/session")) hooks.onSignedOut();
  throw error;
}

/** The address of a path of the API with its parameters, encoded. */
export function urlOf(template: string, parts?: unknown, query?: unknown): string {
  const values = (parts ?? {}) as Record<string, string | number>;
  const path = template.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = values[name];
    if (value === undefined) throw new Error(`${template} needs ${name}`);
    return encodeURIComponent(String(value));
  });
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries((query ?? {}) as Record<string, unknown>)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== undefined && item !== null) search.append(name, String(item));
    }
  }
  return search.size === 0 ? path : `${path}?${search}`;
}
