/** How to call an adapter from a program. */

import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import type { Adapter } from "../../api/types.ts";
import { firstRequest, latestVersion, modelNames, USE_TEXTS, usesOf, type Use } from "../../lib/calling.ts";
import { useScope } from "../../session.tsx";
import { RequestCode } from "../code-block.tsx";
import { SelectField } from "../form.tsx";
import { Panel, Segments } from "../layout.tsx";

const USE_HINTS: Readonly<Record<Use, string>> = {
  chat: "",
  embeddings: "Embeddings are good only if the adapter was trained for them.",
  classify: "It is a classifier, which has a route of its own.",
  score: "Its head has one label, so it scores pairs of texts.",
  rerank: "Its head has one label, so it ranks documents by their relevance to a query.",
};

export function Calling({ adapter }: { adapter: Adapter }): ReactNode {
  const { may } = useScope();
  const names = modelNames(adapter);
  const [picked, setPicked] = useState(adapter.name);
  const model = names.includes(picked) ? picked : adapter.name;
  const latest = latestVersion(adapter);
  const uses = usesOf(latest ?? { task: "generate", report: {} });
  const [wanted, setUse] = useState<Use | null>(null);
  const use = wanted !== null && uses.includes(wanted) ? wanted : uses[0]!;
  const useOptions = uses.map((each) => [each, USE_TEXTS[each]] as const);
  return (
    <Panel title="Call it" actions={uses.length > 1 && <Segments label="Task" options={useOptions} value={use} onChange={setUse} />}>
      <div className="stack">
        <SelectField label="Model" options={names.map((name) => [name, name] as const)} value={model}
          onChange={(event) => setPicked(event.target.value)} />
        <p className="soft">{meaningOf(model, adapter)} {USE_HINTS[use]}</p>
        <RequestCode request={firstRequest(window.location.origin, model, use)} />
        <p className="soft">
          Replace <code>YOUR_API_KEY</code> by {may("keys:manage") ? <Link to="/keys">a key of the tenant</Link> : "a key of the tenant"} that
          may generate.
        </p>
      </div>
    </Panel>
  );
}

function meaningOf(model: string, { name, aliases }: Adapter): string {
  const suffix = model.slice(name.length + 1);
  if (suffix === "") return "prod" in aliases ? "The bare name is the alias prod." : "The bare name is the newest ready version.";
  return suffix in aliases ? "An alias can be moved to another version without changing the code." : "A version never changes.";
}
