import type { ReactNode } from "react";
import type { AdapterVersion } from "../../api/types.ts";
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
          ["Pushed", <Time key="pushed" at={version.created_at} exact />],
          ["Stored", `${bytes(version.size_bytes)}, ${report.dtype ?? "unknown type"}`],
          ["Parameters", `${count(report.num_parameters)} in ${count(report.num_modules)} modules`],
          ["Rank", ranks.join(" to ") || "–"],
          ["Targets", report.targets?.join(", ") || "–"],
          ["Features", version.features.join(", ") || "–"],
          ["Norm of the weight change", report.delta_norm?.toPrecision(4) ?? "–"],
        ]} />
        <Warnings warnings={report.warnings ?? []} />
      </div>
    </Panel>
  );
}

function Warnings({ warnings }: { warnings: { code: string; message: string }[] }): ReactNode {
  return warnings.map(({ code, message }) => (
    <div key={code} className="notice warn">
      <div>{message}</div>
      <div className="meta">warning {code}</div>
    </div>
  ));
}
