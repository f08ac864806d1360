/** The console's own line icons, 16 by 16, drawn in the text's colour. */

import type { ReactNode } from "react";

const PATHS = {
  overview: "M2 13V9m4 4V5m4 8V8m4 5V3",
  adapters: "M2 5l6-3 6 3-6 3zM2 8l6 3 6-3M2 11l6 3 6-3",
  tuning: "M2 2v12h12M4 4c1 6 4 7 9 7",
  memory: "M2 3h12v10H2zM2 8h12M6 3v5m4 0v5",
  replicas: "M2 3h12v4H2zM2 9h12v4H2zM4.5 5h1m-1 6h1",
  requests: "M2 4h7M2 8h12M2 12h9",
  tenants: "M2 14V6l6-4 6 4v8zM6 14v-4h4v4",
  users: "M8 8a3 3 0 1 0 0-6 3 3 0 0 0 0 6zM2.5 14a5.5 5.5 0 0 1 11 0",
  keys: "M6 10a3.5 3.5 0 1 1 2.5-1L14 14m-2.5-2.5L13 10",
  usage: "M8 2v6l4.5 4M8 2a6 6 0 1 0 6 6",
  prices: "M8.5 2H14v5.5L7.5 14 2 8.5zM11 5h.01",
  webhooks: "M2 8h8m-3-3l3 3-3 3M12 3h2v10h-2",
  playground: "M2 3h12v8H7l-3 3v-3H2z",
  audit: "M4 2h8v12H4zM6 5h4M6 8h4M6 11h2",
  settings: "M2 5h6m4 0h2M2 11h2m4 0h6M10 3v4M6 9v4",
  menu: "M2 4h12M2 8h12M2 12h12",
  close: "M4 4l8 8m0-8l-8 8",
  copy: "M5 5h8v9H5zM3 11V2h8",
  check: "M3 8.5l3.5 3.5L13 4.5",
  upload: "M8 11V3M5 6l3-3 3 3M3 13h10",
  download: "M8 3v8m-3-3l3 3 3-3M3 13h10",
  theme: "M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12",
  leave: "M9 3H3v10h6M7 8h7m-3-3l3 3-3 3",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }): ReactNode {
  return (
    <svg viewBox="0 0 16 16" fill="none" stroke="currentColor" strokeWidth="1.5"
      strokeLinecap="round" strokeLinejoin="round" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}

/** The mark: an L with two low ranks. */
export function Mark(): ReactNode {
  return (
    <svg viewBox="0 0 32 32" aria-hidden="true" focusable="false">
      <rect width="32" height="32" rx="7" fill="#0f4c5c" />
      <path d="M8 7h4v14h12v4H8z" fill="#f4f7f7" />
      <path d="M15 7h9v3h-9zm0 5.5h6v3h-6z" fill="#5fd0c5" />
    </svg>
  );
}
