/** The parameters of the playground's requests. */

import type { ReactNode } from "react";
import { EFFORTS, EXAMPLE_SCHEMA, EXAMPLE_TOOLS, formatted, INITIAL, NUMBERS, type NumberParameter, type Parameters, type Problems } from "../../lib/parameters.ts";
import { Button } from "../button.tsx";
import { Field, SelectField, TextField } from "../form.tsx";
import { Panel } from "../layout.tsx";

interface PanelProps {
  parameters: Parameters;
  problems: Problems;
  onChange: (parameters: Parameters) => void;
}

interface OneProps extends PanelProps {
  name: string;
}

const FIRST = ["max_tokens", "temperature"];
const SAMPLING = NUMBERS.filter(({ name }) => !FIRST.includes(name));
const FORMATS = [["", "Text"], ["json_object", "JSON object"], ["json_schema", "JSON schema"]] as const;
const CHOICES = [["", "The model decides (auto)"], ["required", "A tool must be called"], ["none", "No tool may be called"]] as const;
const EFFORT_OPTIONS = [["", "As the chat template decides"], ...EFFORTS.map((effort) => [effort, effort] as const)] as const;

export function ParametersPanel(props: PanelProps): ReactNode {
  const { parameters, onChange } = props;
  const hasSchema = parameters["response_format"] === "json_schema";
  return (
    <Panel title="Parameters" actions={<Button small onClick={() => onChange(INITIAL)}>Reset</Button>}>
      <div className="stack parameters">
        <LinesField {...props} name="system" label="System prompt" hint="Default: none" />
        {NUMBERS.filter(({ name }) => FIRST.includes(name)).map((one) => <NumberField key={one.name} {...props} parameter={one} />)}
        <Group title="Sampling" {...props} names={[...SAMPLING.map(({ name }) => name), "stop", "logit_bias", "reasoning_effort"]}>
          {SAMPLING.map((one) => <NumberField key={one.name} {...props} parameter={one} />)}
          <LinesField {...props} name="stop" label="Stop strings" hint={<>One a line, <code>\n</code> for a line break. Default: none</>} />
          <LinesField {...props} name="logit_bias" label="Logit bias" hint={<>A token id and -100 to 100 a line: <code>1234: -100</code>. Default: none</>} />
          <Choice {...props} name="reasoning_effort" label="Reasoning effort" options={EFFORT_OPTIONS} />
        </Group>
        <Group title="Output format" {...props} names={["response_format", "schema"]}>
          <Choice {...props} name="response_format" label="Format" options={FORMATS} />
          {hasSchema && <JsonField {...props} name="schema" label="JSON schema" example={EXAMPLE_SCHEMA} />}
        </Group>
        <Group title="Tools" {...props} names={["tools", "tool_choice"]}>
          <JsonField {...props} name="tools" label="Tools" example={EXAMPLE_TOOLS} />
          <Choice {...props} name="tool_choice" label="Tool choice" options={CHOICES} />
        </Group>
        <Group title="Token probabilities" {...props} names={["top_logprobs"]}>
          <NumberField {...props} parameter={{ name: "top_logprobs", label: "Alternatives", unset: "no probabilities", min: 0, max: 20, isWhole: true }} />
        </Group>
      </div>
    </Panel>
  );
}

/** Parameters that most requests leave as they are; the title says if some are set or wrong. */
function Group({ title, names, parameters, problems, children }: PanelProps & {
  title: string;
  names: string[];
  children: ReactNode;
}): ReactNode {
  const numSet = names.filter((name) => parameters[name] !== "").length;
  const numWrong = names.filter((name) => problems[name] !== undefined).length;
  return (
    <details>
      <summary>
        {title}
        {numSet > 0 && <span className="soft"> · {numSet} set</span>}
        {numWrong > 0 && <span className="problem"> · {numWrong} to correct</span>}
      </summary>
      <div className="stack">{children}</div>
    </details>
  );
}

function NumberField({ parameter, parameters, problems, onChange }: PanelProps & { parameter: NumberParameter }): ReactNode {
  const { name, label, unset, min, max, isWhole } = parameter;
  return (
    <TextField label={label} hint={`Default: ${unset}`} problem={problems[name]} type="number" min={min} max={max}
      step={isWhole ? 1 : "any"} autoComplete="off" value={parameters[name]}
      onChange={(event) => onChange({ ...parameters, [name]: event.target.value })} />
  );
}

function Choice({ name, label, options, parameters, onChange }: OneProps & {
  label: string;
  options: readonly (readonly [string, string])[];
}): ReactNode {
  return (
    <SelectField label={label} options={options} value={parameters[name]}
      onChange={(event) => onChange({ ...parameters, [name]: event.target.value })} />
  );
}

function LinesField({ name, label, hint, parameters, problems, onChange }: OneProps & { label: string; hint: ReactNode }): ReactNode {
  return (
    <Field label={label} hint={hint} problem={problems[name]}>
      {(control) => (
        <textarea {...control} className="input" rows={2} spellCheck={false} value={parameters[name]}
          onChange={(event) => onChange({ ...parameters, [name]: event.target.value })} />
      )}
    </Field>
  );
}

function JsonField({ name, label, example, parameters, problems, onChange }: OneProps & { label: string; example: string }): ReactNode {
  const set = (text: string): void => onChange({ ...parameters, [name]: text });
  const text = parameters[name] ?? "";
  return (
    <div className="stack tight">
      <Field label={label} problem={problems[name]}>
        {(control) => (
          <textarea {...control} className="input mono" rows={8} spellCheck={false} value={text}
            onChange={(event) => set(event.target.value)} />
        )}
      </Field>
      <div className="row">
        <Button small onClick={() => set(example)}>Insert example</Button>
        <Button small disabled={text === ""} onClick={() => set(formatted(text))}>Format</Button>
        <Button small disabled={text === ""} onClick={() => set("")}>Clear</Button>
      </div>
    </div>
  );
}
