/** Signing in and out, and what a session says of who uses the console. */

import { ApiError } from "./errors.ts";
import { hooks, send } from "./client.ts";

export interface Session {
  kind: "operator" | "user";
  name: string;
  tenant: string | null;
  role: string;
  scopes: string[];
  csrf_token: string;
  expires_at: string;
  idle_seconds: number;
  confirmed_until: string | null;
  server: { version: string; base_model: string; grammars: boolean };
}

async function call(method: string, path: string, body?: object): Promise<Session | undefined> {
  const headers = new Headers({ "content-type": "application/json" });
  const init = body === undefined ? { method } : { method, headers, body: JSON.stringify(body) };
  const text = await (await send(path, init)).text();
  return text === "" ? undefined : (JSON.parse(text) as Session);
}

async function begin(path: string, body: object): Promise<Session> {
  const session = await call("post", path, body);
  if (session === undefined) throw new Error(`${path} answered nothing`);
  return adopt(session);
}

/** Let the requests that follow speak in the name of `session`. */
function adopt(session: Session): Session {
  hooks.csrfToken = session.csrf_token;
  hooks.isOperator = session.kind === "operator";
  return session;
}

/** The running session, or null if nobody is signed in. */
export async function loadSession(): Promise<Session | null> {
  try {
    const session = await call("get", "/v1/session");
    return session === undefined ? null : adopt(session);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return null;
    throw error;
  }
}

export function signIn(name: string, password: string, tenant: string | null): Promise<Session> {
  return begin("/v1/session", { name, password, tenant });
}

/** Set the first password, or a new one, with the token of an invitation. */
export function enrol(token: string, password: string): Promise<Session> {
  return begin("/v1/session/enrolment", { token, password });
}

export async function confirmPassword(password: string): Promise<void> {
  await call("post", "/v1/session/confirmation", { password });
}

export async function changePassword(current: string, next: string): Promise<void> {
  const session = await call("post", "/v1/session/password", { current, new: next });
  if (session) adopt(session);
}

export async function signOut(): Promise<void> {
  await call("delete", "/v1/session");
}

export async function signOutEverywhere(): Promise<void> {
  await call("delete", "/v1/sessions");
}
