/** An answer by tokens: coloured by probability, each with the tokens that were likely instead. */

import { useState, type KeyboardEvent, type ReactNode } from "react";
import type { Token } from "../../lib/chat.ts";
import { percent } from "../../lib/format.ts";
import { shownToken, likelihoodOf } from "../../lib/tokens.ts";
import { Meter } from "../values.tsx";

const LIKELIHOODS = [["sure", "90 % and more"], ["likely", "50 to 90 %"], ["open", "10 to 50 %"], ["rare", "below 10 %"]] as const;

export function Tokens({ tokens }: { tokens: readonly Token[] }): ReactNode {
  const [pointed, setPointed] = useState(0);
  const move = (event: KeyboardEvent<HTMLElement>): void => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : step === undefined ? null : pointed + step;
    if (to === null) return;
    event.preventDefault();
    const next = Math.min(tokens.length - 1, Math.max(0, to));
    setPointed(next);
    (event.currentTarget.children[next] as HTMLElement | undefined)?.focus();
  };
  const token = tokens[pointed];
  return (
    <div className="stack tight">
      <ul className="legend">
        {LIKELIHOODS.map(([likelihood, words]) => <li key={likelihood}><span className={`swatch token-${likelihood}`} />{words}</li>)}
      </ul>
      <div className="tokens" role="listbox" aria-label="Tokens by probability" aria-orientation="horizontal" onKeyDown={move}>
        {tokens.map((one, i) => (
          <span key={i} role="option" aria-selected={i === pointed} tabIndex={i === pointed ? 0 : -1}
            className={`token-${likelihoodOf(one)}`} aria-label={`${shownToken(one)}, ${percent(Math.exp(one.logprob))}`}
            onFocus={() => setPointed(i)} onPointerEnter={() => setPointed(i)}>
            {one.token}
          </span>
        ))}
      </div>
      {token && <Alternatives token={token} place={pointed} />}
    </div>
  );
}

function Alternatives({ token, place }: { token: Token; place: number }): ReactNode {
  const isListed = token.top_logprobs.some((one) => one.token === token.token);
  const rows = isListed ? token.top_logprobs : [...token.top_logprobs, token];
  return (
    <table className="table alternatives">
      <caption className="soft">Token {place + 1}: what could stand here</caption>
      <thead><tr><th scope="col">Token</th><th scope="col" className="end">Probability</th><th scope="col" aria-hidden="true" /></tr></thead>
      <tbody>
        {rows.map((one, i) => (
          <tr key={i}>
            <td>
              <code>{shownToken(one)}</code>{one.token === token.token && <span className="soft"> sampled</span>}
            </td>
            <td className="end">{percent(Math.exp(one.logprob))}</td>
            <td aria-hidden="true"><Meter value={Math.exp(one.logprob)} max={1} label="Probability" /></td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
