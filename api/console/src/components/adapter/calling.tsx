/** How to call an adapter from a program. */

import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import type { Adapter } from "../../api/types.ts";
import { firstRequest, latestVersion, modelNames } from "../../lib/calling.ts";
import { useScope } from "../../session.tsx";
import { RequestCode } from "../code-block.tsx";
import { SelectField } from "../form.tsx";
import { Panel } from "../layout.tsx";

export function Calling({ adapter }: { adapter: Adapter }): ReactNode {
  const { may } = useScope();
  const names = modelNames(adapter);
  const [picked, setPicked] = useState(adapter.name);
  const model = names.includes(picked) ? picked : adapter.name;
  const task = latestVersion(adapter)?.task ?? "generate";
  return (
    <Panel title="Call it">
      <div className="stack">
        <SelectField label="Model" options={names.map((name) => [name, name] as const)} value={model}
          onChange={(event) => setPicked(event.target.value)} />
        <p className="soft">{meaningOf(model, adapter)} {task === "classify" && "It is a classifier, which has a route of its own."}</p>
        <RequestCode request={firstRequest(window.location.origin, model, task)} />
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
