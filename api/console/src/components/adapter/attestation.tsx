import type { ReactNode } from "react";
import type { AdapterVersion } from "../../api/types.ts";
import { count, number, plural } from "../../lib/format.ts";
import { Facts, Panel } from "../layout.tsx";
import { Badge } from "../values.tsx";

interface Drift {
  /** Of each probe. */
  kl: number[];
  kl_mean: number;
  kl_max: number;
  top_token_changed: number;
  num_probes: number;
  limit: number | null;
}

interface Probe {
  num_tokens: number;
  max_logit_delta: number;
  noise_floor: number;
  kl_divergence: number;
  changes_top_token: boolean;
}

/** What the probes measured; the API publishes it as it was written down. */
interface Measured {
  max_logit_delta: number;
  noise_floor: number;
  max_kl_divergence: number;
  num_top_tokens_changed: number;
  probes: Probe[];
  reference: Drift | string;
}

const digits = (value: number): string => value.toPrecision(3);

/** The measured effect on the base's answers. */
export function Attestation({ version }: { version: AdapterVersion }): ReactNode {
  const measured = version.attestation as Measured | null;
  if (!measured?.probes) {
    return (
      <Panel title="Attestation">
        <p className="soft">
          {version.state === "attesting" || version.state === "validated"
            ? "Probe prompts are running with and without the adapter. This takes seconds."
            : "Not measured."}
        </p>
      </Panel>
    );
  }
  const times = measured.max_logit_delta / measured.noise_floor;
  return (
    <Panel title="Attestation" note="the adapter's effect, measured at push">
      <Facts facts={[
        ["Maximum logit change", `${digits(measured.max_logit_delta)}, ${times < 100 ? number(times, 1) : count(Math.round(times))} × the noise`],
        ["Noise of the base", digits(measured.noise_floor)],
        ["Maximum KL to the base", `${digits(measured.max_kl_divergence)} nats`],
        ["Next token changed", `${measured.num_top_tokens_changed} of ${plural(measured.probes.length, "probe")}`],
        ["Against the unquantized base", <Reference key="reference" reference={measured.reference} />],
      ]} />
      <Probes probes={measured.probes} drift={divergences(measured.reference)} />
    </Panel>
  );
}

function Reference({ reference }: { reference: Drift | string }): ReactNode {
  if (typeof reference === "string") return reference;
  const limit = reference.limit === null ? "" : `, ${digits(reference.limit)} allowed`;
  return (
    <>
      KL {digits(reference.kl_mean)} on average, {digits(reference.kl_max)} at most{limit};
      {" "}{reference.top_token_changed} of {plural(reference.num_probes, "next token")} changed
    </>
  );
}

function divergences(reference: Drift | string): number[] | undefined {
  return typeof reference === "string" ? undefined : reference.kl;
}

/** `drift`: the divergence of each probe from the unquantized base, if it was measured. */
function Probes({ probes, drift }: { probes: Probe[]; drift?: number[] | undefined }): ReactNode {
  return (
    <details>
      <summary>Probes</summary>
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Probes">
        <table className="table cards">
          <thead>
            <tr>
              <th scope="col" className="end">Tokens</th><th scope="col" className="end">Logit change</th>
              <th scope="col" className="end">Noise</th><th scope="col" className="end">KL</th>
              {drift && <th scope="col" className="end" title="KL to the unquantized base">Drift</th>}
              <th scope="col">Next token</th>
            </tr>
          </thead>
          <tbody>
            {probes.map((probe, i) => (
              <tr key={i}>
                <td data-label="Tokens" className="end">{probe.num_tokens}</td>
                <td data-label="Logit change" className="end">{digits(probe.max_logit_delta)}</td>
                <td data-label="Noise" className="end">{digits(probe.noise_floor)}</td>
                <td data-label="KL" className="end">{digits(probe.kl_divergence)}</td>
                {drift && <td data-label="Drift" className="end">{digits(drift[i] ?? NaN)}</td>}
                <td data-label="Next token">{probe.changes_top_token ? <Badge tone="accent">changed</Badge> : "the same"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}
