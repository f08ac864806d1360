import type { ReactNode } from "react";
import type { Evaluation } from "../../api/types.ts";
import { differenceText, intervalText, otherOf } from "../../lib/evaluations.ts";
import { Panel } from "../layout.tsx";
import { Badge } from "../values.tsx";

/** The report by slice: mean scores with their intervals, and the difference. */
export function Slices({ evaluation }: { evaluation: Evaluation }): ReactNode {
  if (evaluation.slices === null) return null;
  const other = otherOf(evaluation);
  const candidate = `version ${evaluation.version}`;
  return (
    <Panel title="Report" note={`a loss of more than ${evaluation.tolerance} is a regression`} flush>
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Report by slice">
        <table className="table cards">
          <thead>
            <tr>
              <th scope="col">Slice</th><th scope="col" className="end">Cases</th>
              {evaluation.against !== null && <th scope="col" className="end">{evaluation.base}</th>}
              <th scope="col" className="end">{other}</th><th scope="col" className="end">{candidate}</th>
              <th scope="col" className="end">Difference</th><th scope="col">Result</th>
            </tr>
          </thead>
          <tbody>
            {evaluation.slices.map((slice) => (
              <tr key={slice.slice}>
                <td data-label="Slice" className="breakable">{slice.slice}</td>
                <td data-label="Cases" className="end">{slice.num_cases}</td>
                {evaluation.against !== null && (
                  <td data-label={evaluation.base} className="end">{intervalText(slice.base)}</td>
                )}
                <td data-label={other} className="end">{intervalText(slice.against)}</td>
                <td data-label={candidate} className="end">{intervalText(slice.candidate)}</td>
                <td data-label="Difference" className="end">{differenceText(slice.difference)}</td>
                <td data-label="Result">
                  {slice.is_regression ? <Badge tone="bad">regression</Badge> : <Badge tone="good">no regression</Badge>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
