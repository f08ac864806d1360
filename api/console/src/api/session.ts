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

/** The identity provider's name on the button; null: people sign in with passwords only. */
export async function identityProvider(): Promise<string | null> {
  return (await api("get", "/v1/session/oidc")).name;
}

const RETURN_KEY = "loraplex.return";

/**
 * Leave for the identity provider, which sends the browser back; `place` is the page to open then.
 * `again`: the person has to authenticate even if signed in there.
 */
export async function leaveForProvider(place: string, again: boolean): Promise<void> {
  const { url } = await api("post", "/v1/session/oidc", { body: { again } });
  sessionStorage.setItem(RETURN_KEY, place);
  window.location.assign(url);
}

/** The page from which this browser left for the identity provider. */
export function placeBefore(): string {
  return sessionStorage.getItem(RETURN_KEY) ?? "/";
}

/** Sign in with what the identity provider added to the address. */
export async function finishSignIn(code: string, state: string): Promise<Session> {
  return adopt(await api("post", "/v1/session/oidc/callback", { body: { code, state } }));
}

/** Where the browser ends its session at the identity provider; null: nowhere. */
export async function providerSignOutUrl(session: Session): Promise<string | null> {
  if (session.signed_in_with !== "provider") return null;
  return (await api("get", "/v1/session/oidc/sign-out")).url;
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
