/** Single values as they stand in tables and lists. */

import { useEffect, useState, type ReactNode } from "react";
import { dateTime, relative, shortDigest } from "../lib/format.ts";
import { CopyButton } from "./button.tsx";

/** When something was: how long ago, and exactly on hover. It keeps counting. */
export function Time({ at, exact }: { at: string | null | undefined; exact?: boolean }): ReactNode {
  const [, setTick] = useState(0);
  useEffect(() => {
    const timer = window.setInterval(() => setTick((tick) => tick + 1), 15_000);
    return () => window.clearInterval(timer);
  }, []);
  if (!at) return <span className="faint">never</span>;
  return (
    <time dateTime={at} title={exact ? relative(at) : dateTime(at)} className="nowrap">
      {exact ? dateTime(at) : relative(at)}
    </time>
  );
}

/** A sentence of the API; what stands between backticks in it is code. */
export function Words({ children }: { children: string }): ReactNode {
  return children.split("`").map((part, i) => (i % 2 === 1 ? <code key={i}>{part}</code> : part));
}

/** The beginning of a digest; the whole is copied. */
export function Digest({ digest }: { digest: string }): ReactNode {
  return (
    <span className="row tight nowrap">
      <code title={digest}>{shortDigest(digest)}</code>
      <CopyButton text={digest} label="Copy the digest" />
    </span>
  );
}

export type BadgeTone = "good" | "warn" | "bad" | "accent" | "";

export function Badge({ tone = "", children }: { tone?: BadgeTone; children: ReactNode }): ReactNode {
  return <span className={`badge ${tone}`}>{children}</span>;
}

const STATE_TONES: Record<string, BadgeTone> = {
  ready: "good", validated: "accent", attesting: "accent", rejected: "bad", deleting: "warn",
  device: "good", host: "accent", decoding: "good", prefilling: "accent", waiting: "warn",
  running: "accent", paused: "warn", succeeded: "good", resident: "good", failed: "bad", fetching: "accent", reading: "accent", copying: "accent",
  waiting_for_room: "warn", draining: "warn", refusing: "bad", suspended: "warn", disabled: "warn", revoked: "warn", expired: "warn",
};

export function toneOf(state: string): BadgeTone {
  return STATE_TONES[state] ?? "";
}

/** A state in its own word; the colour only repeats it. */
export function State({ state }: { state: string | null | undefined }): ReactNode {
  if (!state) return <span className="faint">–</span>;
  return <Badge tone={toneOf(state)}>{state.replaceAll("_", " ")}</Badge>;
}

/** What each alias means, with the part of its requests that goes to another version: `prod → 1, 10 % → 2`. */
export function AliasTargets({ aliases, canaries }: {
  aliases: Readonly<Record<string, number>>;
  canaries: Readonly<Record<string, { version: number; percent: number }>>;
}): ReactNode {
  return (
    <span className="row tight">
      {Object.entries(aliases).map(([alias, version]) => {
        const canary = canaries[alias];
        return (
          <Badge key={alias} tone="accent">
            {alias} → {version}{canary && `, ${canary.percent} % → ${canary.version}`}
          </Badge>
        );
      })}
    </span>
  );
}

interface MeterProps {
  value: number;
  max: number;
  /** What a screen reader says. */
  label: string;
}

/** How full something is. */
export function Meter({ value, max, label }: MeterProps): ReactNode {
  const part = max > 0 ? Math.min(1, Math.max(0, value / max)) : 0;
  return (
    <div className="meter" role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={max}
      aria-valuenow={value}>
      <span style={{ width: `${part * 100}%` }} />
    </div>
  );
}
