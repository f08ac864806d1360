import type { ReactNode } from "react";
import { Link } from "react-router";
import type { AdapterVersion } from "../../api/types.ts";
import { jobAddress } from "../../lib/addresses.ts";
import { bytes, count } from "../../lib/format.ts";
import { Facts, Panel } from "../layout.tsx";
import { Digest, Time } from "../values.tsx";

/** What intake found; the API publishes it as it was written down. */
interface Report {
  file_sha256?: string;
  dtype?: string;
  num_parameters?: number;
  num_modules?: number;
  min_rank?: number;
  max_rank?: number;
  targets?: string[];
  delta_norm?: number;
  largest_deltas?: { module: string; norm: number }[];
  warnings?: { code: string; message: string }[];
  trained_on?: string | null;
  /** Of an activated LoRA. */
  invocation_token_ids?: number[];
}

/** How a fine-tuning job made the version. */
interface Lineage {
  job: string;
  training_sha256: string;
  validation_sha256: string | null;
}

/** What the version is made of and where it comes from. */
export function Provenance({ version }: { version: AdapterVersion }): ReactNode {
  const report = version.report as Report;
  const ranks = [...new Set([report.min_rank, report.max_rank])].filter((rank) => rank !== undefined);
  return (
    <Panel title="Provenance">
      <div className="stack">
        <Facts facts={[
          ["Digest", <Digest key="digest" digest={version.digest} />],
          ["Block SHA-256", report.file_sha256 ? <Digest key="file" digest={report.file_sha256} /> : "–"],
          ["Base", <Digest key="base" digest={version.base_id} />],
          ["Trained on", report.trained_on ?? "unknown"],
          ...lineageFacts(version.lineage as Lineage | null),
          ["Pushed", <Time key="pushed" at={version.created_at} exact />],
          ["Stored", `${bytes(version.size_bytes)}, ${report.dtype ?? "unknown type"}`],
          ["Parameters", `${count(report.num_parameters)} in ${count(report.num_modules)} modules`],
          ["Rank", ranks.join(" to ") || "–"],
          ["Targets", report.targets?.join(", ") || "–"],
          ["Features", version.features.join(", ") || "–"],
          ...invocationFacts(report.invocation_token_ids ?? []),
          ["Norm of the weight change", report.delta_norm?.toPrecision(4) ?? "–"],
        ]} />
        <Warnings warnings={report.warnings ?? []} />
      </div>
    </Panel>
  );
}

function invocationFacts(tokenIds: number[]): [string, ReactNode][] {
  return tokenIds.length === 0 ? [] : [["Acts from the tokens", <code key="invocation">{tokenIds.join(" ")}</code>]];
}

function lineageFacts(lineage: Lineage | null): [string, ReactNode][] {
  if (lineage === null) return [];
  const { job, training_sha256: training, validation_sha256: validation } = lineage;
  return [
    ["Fine-tuning job", <Link key="job" to={jobAddress(job)} className="mono breakable">{job}</Link>],
    ["Training file SHA-256", <Digest key="training" digest={training} />],
    ...(validation ? [["Validation file SHA-256", <Digest key="validation" digest={validation} />] as [string, ReactNode]] : []),
  ];
}

function Warnings({ warnings }: { warnings: { code: string; message: string }[] }): ReactNode {
  return warnings.map(({ code, message }) => (
    <div key={code} className="notice warn">
      <div>{message}</div>
      <div className="meta">warning {code}</div>
    </div>
  ));
}
