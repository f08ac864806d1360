/** The parameters of a request, as they are typed, and the fields of the request that they become. */

export interface NumberParameter {
  name: string;
  label: string;
  /** What an empty field means, in words. */
  unset: string;
  min?: number;
  max?: number;
  isWhole?: boolean;
}

export const NUMBERS: readonly NumberParameter[] = [
  { name: "max_tokens", label: "Max tokens", unset: "as many as fit into the context", min: 1, isWhole: true },
  { name: "temperature", label: "Temperature", unset: "the base's own, else 1", min: 0, max: 2 },
  { name: "top_p", label: "Top p", unset: "the base's own, else 1: all tokens", min: 0, max: 1 },
  { name: "top_k", label: "Top k", unset: "the base's own, else all tokens", min: -1, isWhole: true },
  { name: "min_p", label: "Min p", unset: "the base's own, else 0: all tokens", min: 0, max: 1 },
  { name: "presence_penalty", label: "Presence penalty", unset: "0: none", min: -2, max: 2 },
  { name: "frequency_penalty", label: "Frequency penalty", unset: "0: none", min: -2, max: 2 },
  { name: "repetition_penalty", label: "Repetition penalty", unset: "the base's own, else 1: none", min: 0, max: 10 },
  { name: "seed", label: "Seed", unset: "another one each time", isWhole: true },
  { name: "n", label: "Answers", unset: "one", min: 1, max: 8, isWhole: true },
];

export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"] as const;
export const MAX_TOP_LOGPROBS = 20;

const TEXTS = [
  "system", "stop", "logit_bias", "reasoning_effort", "response_format", "schema", "tools", "tool_choice", "top_logprobs",
] as const;

/** What is typed for each parameter; empty: the field is not sent. */
export type Parameters = Readonly<Record<string, string>>;
/** What is wrong with a parameter, in words, by its name. */
export type Problems = Readonly<Record<string, string>>;

export const INITIAL: Parameters = {
  ...Object.fromEntries([...NUMBERS.map(({ name }) => name), ...TEXTS].map((name) => [name, ""])),
  max_tokens: "256",
  temperature: "0",
};

export interface Fields {
  /** The request's fields but its model and messages. */
  fields: Record<string, unknown>;
  /** Of parameters that are not in `fields`, as they can't be sent. */
  problems: Problems;
}

/** The fields that `parameters` become, and what keeps the others from becoming one. */
export function fieldsOf(parameters: Parameters): Fields {
  const fields: Record<string, unknown> = {};
  const problems: Record<string, string> = {};
  const read = (name: string, parse: (text: string) => Record<string, unknown>): void => {
    const text = parameters[name] ?? "";
    if (text.trim() === "") return;
    try {
      Object.assign(fields, parse(text));
    } catch (error) {
      problems[name] = (error as Error).message;
    }
  };
  for (const parameter of NUMBERS) read(parameter.name, (text) => ({ [parameter.name]: numberOf(parameter, text) }));
  read("stop", (text) => ({ stop: stopsOf(text) }));
  read("logit_bias", (text) => ({ logit_bias: biasOf(text) }));
  read("reasoning_effort", (text) => ({ reasoning_effort: text }));
  if (parameters["response_format"] === "json_object") fields["response_format"] = { type: "json_object" };
  if (parameters["response_format"] === "json_schema") {
    if (parameters["schema"]?.trim() === "") problems["schema"] = "A JSON schema is needed.";
    read("schema", (text) => ({
      response_format: { type: "json_schema", json_schema: { name: "answer", schema: schemaOf(text) } },
    }));
  }
  read("tools", (text) => ({ tools: toolsOf(text) }));
  if (fields["tools"] !== undefined) read("tool_choice", (text) => ({ tool_choice: text }));
  read("top_logprobs", (text) => ({
    logprobs: true,
    top_logprobs: numberOf({ name: "", label: "", unset: "", min: 0, max: MAX_TOP_LOGPROBS, isWhole: true }, text),
  }));
  return { fields, problems };
}

function numberOf({ min = -Infinity, max = Infinity, isWhole = false }: NumberParameter, text: string): number {
  const value = Number(text);
  if (isWhole ? !Number.isSafeInteger(value) : !Number.isFinite(value)) {
    throw new Error(isWhole ? "A whole number is needed." : "A number is needed.");
  }
  if (value < min) throw new Error(`At least ${min}.`);
  if (value > max) throw new Error(`At most ${max}.`);
  return value;
}

/** One stop string a line, in which `\n` and `\t` stand for what no line can contain. */
function stopsOf(text: string): string[] {
  return text.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
}

function biasOf(text: string): Record<string, number> {
  const lines = text.split("\n").filter((line) => line.trim() !== "");
  return Object.fromEntries(lines.map((line) => {
    const [id = "", bias = "", ...more] = line.split(":").map((part) => part.trim());
    const value = Number(bias);
    const isPair = more.length === 0 && /^\d+$/.test(id) && bias !== "" && Math.abs(value) <= 100;
    if (!isPair) throw new Error(`"${line.trim()}" is not a token id and a bias from -100 to 100, such as 1234: -100.`);
    return [id, value];
  }));
}

function jsonOf(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Not JSON: ${(error as Error).message}`);
  }
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function schemaOf(text: string): Record<string, unknown> {
  const schema = jsonOf(text);
  if (!isObject(schema)) throw new Error("A JSON schema is an object.");
  return schema;
}

function toolsOf(text: string): unknown[] {
  const tools = jsonOf(text);
  if (!Array.isArray(tools) || tools.length === 0) throw new Error("Tools are an array with at least one tool.");
  tools.forEach((tool: unknown, i) => {
    const called = isObject(tool) && tool["type"] === "function" ? tool["function"] : null;
    if (!isObject(called) || typeof called["name"] !== "string" || called["name"] === "") {
      throw new Error(`Tool ${i + 1} is not {"type": "function", "function": {"name": …}}.`);
    }
  });
  return tools;
}

/** `text` indented, or as it is if it is not JSON. */
export function formatted(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export const EXAMPLE_SCHEMA = formatted(JSON.stringify({
  type: "object",
  properties: { title: { type: "string" }, priority: { enum: ["low", "normal", "high"] } },
  required: ["title", "priority"],
  additionalProperties: false,
}));

export const EXAMPLE_TOOLS = formatted(JSON.stringify([{
  type: "function",
  function: {
    name: "weather",
    description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}]));
