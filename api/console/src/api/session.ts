/** Signing in and out, and what a session says of who uses the console. */

import { api, hooks } from "./client.ts";
import { ApiError } from "./errors.ts";
import type { components } from "./schema.ts";

export type Session = components["schemas"]["SessionView"];

/** Let the requests that follow speak in the name of `session`. */
function adopt(session: Session): Session {
  hooks.csrfToken = session.csrf_token;
  return session;
}

/** The running session, or null if nobody is signed in. */
export async function loadSession(): Promise<Session | null> {
  try {
    return adopt(await api("get", "/v1/session"));
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return null;
    throw error;
  }
}

export async function signIn(
  name: string,
  password: string,
  tenant: string | null,
): Promise<Session> {
  return adopt(await api("post", "/v1/session", { body: { name, password, tenant } }));
}

/** Set the first password, or a new one, with the token of an invitation. */
export async function enrol(token: string, password: string): Promise<Session> {
  return adopt(await api("post", "/v1/session/enrolment", { body: { token, password } }));
}

export async function confirmPassword(password: string): Promise<void> {
  adopt(await api("post", "/v1/session/confirmation", { body: { password } }));
}

export async function changePassword(current: string, next: string): Promise<void> {
  await api("post", "/v1/session/password", { body: { current, new: next } });
}

/** Throws ApiError if the session may still be good. */
export async function signOut(): Promise<void> {
  try {
    await api("delete", "/v1/session");
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 401)) throw error;
  }
}

export async function signOutEverywhere(): Promise<void> {
  await api("delete", "/v1/sessions");
}
