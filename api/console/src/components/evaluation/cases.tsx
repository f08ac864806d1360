import { useState, type ReactNode } from "react";
import type { Evaluation } from "../../api/types.ts";
import { otherOf, signed } from "../../lib/evaluations.ts";
import { Button } from "../button.tsx";
import { Panel } from "../layout.tsx";
import { Badge } from "../values.tsx";

type Case = NonNullable<Evaluation["cases"]>[number];

const FIRST = 10;

/** The answers to the cases side by side: the largest losses first, then the largest gains. */
export function Cases({ evaluation }: { evaluation: Evaluation }): ReactNode {
  const [all, setAll] = useState(false);
  const cases = evaluation.cases ?? [];
  if (cases.length === 0) return null;
  const shown = all ? cases : cases.slice(0, FIRST);
  return (
    <Panel title="Cases" note={`${cases.length} of ${evaluation.num_cases}, those that differ most first`}>
      <div className="stack">
        {shown.map((one) => <OneCase key={one.id} evaluation={evaluation} one={one} />)}
        {shown.length < cases.length && <div><Button onClick={() => setAll(true)}>Show all {cases.length}</Button></div>}
      </div>
    </Panel>
  );
}

function OneCase({ evaluation, one }: { evaluation: Evaluation; one: Case }): ReactNode {
  const difference = one.candidate.score - one.against.score;
  return (
    <article className="compared" aria-label={`Case ${one.id}`}>
      <div className="row">
        <h3 className="breakable">{one.id}</h3>
        <Badge tone={difference < 0 ? "bad" : difference > 0 ? "good" : ""}>{signed(difference)}</Badge>
        <span className="soft">{[one.scorer, ...one.slices].join(" · ")}</span>
      </div>
      <Text label="Prompt" text={one.prompt} />
      {one.expected !== null && <Text label="Expected" text={one.expected} />}
      <div className="columns pair">
        {evaluation.against !== null && <Text label={evaluation.base} text={one.base.answer} score={one.base.score} />}
        <Text label={otherOf(evaluation)} text={one.against.answer} score={one.against.score} />
        <Text label={`version ${evaluation.version}`} text={one.candidate.answer} score={one.candidate.score} />
      </div>
    </article>
  );
}

function Text({ label, text, score }: { label: string; text: string; score?: number }): ReactNode {
  return (
    <div>
      <div className="soft">{label}{score !== undefined && `: ${score.toFixed(3)}`}</div>
      {text === "" ? <div className="faint">nothing</div> : <div className="compared-text">{text}</div>}
    </div>
  );
}
