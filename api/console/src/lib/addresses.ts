/** The console's own addresses, from names that may hold anything. */

const join = (...parts: string[]): string => `/${parts.map(encodeURIComponent).join("/")}`;

export function addressOf(tenant: string, adapter: string, ...part: string[]): string {
  return join("adapters", tenant, adapter, ...part);
}

/** Of an adapter's page about one version, which is named `name@number`. */
export function versionAddress(tenant: string, version: string): string {
  const at = version.lastIndexOf("@");
  return `${addressOf(tenant, version.slice(0, at))}?version=${encodeURIComponent(version.slice(at + 1))}`;
}

export function tenantAddress(slug: string): string {
  return join("tenants", slug);
}

export function requestAddress(id: string): string {
  return join("requests", id);
}

export function webhookAddress(id: string): string {
  return join("webhooks", id);
}

export function jobAddress(id: string): string {
  return join("fine-tuning", id);
}
