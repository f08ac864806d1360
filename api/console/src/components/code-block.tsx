/** Code, to read and to copy. */

import { useState, type ReactNode } from "react";
import { codeOf, LANGUAGES, type ApiRequest, type Language } from "../lib/code.ts";
import { CopyButton } from "./button.tsx";
import { Segments } from "./layout.tsx";

export function CodeBlock({ code, label }: { code: string; label: string }): ReactNode {
  return (
    <div className="code-block">
      <pre tabIndex={0} role="region" aria-label={label}><code>{code}</code></pre>
      <CopyButton text={code} label="Copy the code" />
    </div>
  );
}

/** The code that sends `request`, in a language of the reader's choice. */
export function RequestCode({ request }: { request: ApiRequest }): ReactNode {
  const [language, setLanguage] = useState<Language>("curl");
  const name = LANGUAGES.find(([known]) => known === language)?.[1] ?? language;
  return (
    <div className="stack tight">
      <div><Segments label="Language" options={LANGUAGES} value={language} onChange={setLanguage} /></div>
      <CodeBlock code={codeOf(language, request)} label={`Code, ${name}`} />
    </div>
  );
}
