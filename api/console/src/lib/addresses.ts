/** The console's own addresses, from names that may hold anything. */

const join = (...parts: string[]): string => `/${parts.map(encodeURIComponent).join("/")}`;

export function addressOf(tenant: string, adapter: string, ...part: string[]): string {
  return join("adapters", tenant, adapter, ...part);
}

export function tenantAddress(slug: string): string {
  return join("tenants", slug);
}

export function requestAddress(id: string): string {
  return join("requests", id);
}
