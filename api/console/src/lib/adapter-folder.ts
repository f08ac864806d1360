/** What a folder with an adapter must hold before it is worth sending: the command line's checks. */

export const CONFIG_FILE = "adapter_config.json";
export const WEIGHTS_FILE = "adapter_model.safetensors";
const PICKLED_FILES = ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"];
const MODEL_CONFIG_FILE = "config.json";
const MAX_CONFIG_BYTES = 1 << 20;

export interface NamedFile {
  name: string;
  size: number;
  text: () => Promise<string>;
}

export interface AdapterFolder<F extends NamedFile> {
  config: Record<string, unknown>;
  weights: F;
}

export class NotAnAdapter extends Error {}

/** The adapter among `files`. Throws NotAnAdapter, saying the way out. */
export async function readAdapterFolder<F extends NamedFile>(files: F[]): Promise<AdapterFolder<F>> {
  const weights = only(files, WEIGHTS_FILE);
  if (weights === undefined) throw new NotAnAdapter(missingWeights(files));
  const config = only(files, CONFIG_FILE);
  if (config === undefined) {
    throw new NotAnAdapter(`There is no ${CONFIG_FILE}: choose the folder that save_pretrained wrote.`);
  }
  if (weights.size === 0) throw new NotAnAdapter(`${WEIGHTS_FILE} is empty.`);
  return { config: await readConfig(config), weights };
}

function only<F extends NamedFile>(files: F[], name: string): F | undefined {
  const named = files.filter((file) => file.name === name);
  if (named.length > 1) {
    throw new NotAnAdapter(`There is more than one ${name}: choose the folder of one adapter.`);
  }
  return named[0];
}

function missingWeights(files: NamedFile[]): string {
  const names = new Set(files.map((file) => file.name));
  const pickle = PICKLED_FILES.find((name) => names.has(name));
  if (pickle) {
    return `${pickle} is a pickle, which could execute code. Save it again with
      model.save_pretrained(path, safe_serialization=True).`.replace(/\s+/g, " ");
  }
  const packed = files.find(({ name }) => /\.(zip|tar|tgz|gz|7z)$/i.test(name));
  if (packed) return `${packed.name} is an archive: unpack it, and choose the folder that is in it.`;
  if (names.has(MODEL_CONFIG_FILE) && !names.has(CONFIG_FILE)) {
    return `This is a whole model and no adapter. Save the PEFT model itself, before
      merge_and_unload(): peft_model.save_pretrained(path).`.replace(/\s+/g, " ");
  }
  return `There is no ${WEIGHTS_FILE}: choose the folder that PEFT's save_pretrained wrote.`;
}

async function readConfig(file: NamedFile): Promise<Record<string, unknown>> {
  if (file.size > MAX_CONFIG_BYTES) throw new NotAnAdapter(`${CONFIG_FILE} is too large to be one.`);
  let config: unknown;
  try {
    config = JSON.parse(await file.text());
  } catch (error) {
    throw new NotAnAdapter(`${CONFIG_FILE} is not JSON: ${String(error)}`);
  }
  if (typeof config !== "object" || config === null || Array.isArray(config)) {
    throw new NotAnAdapter(`${CONFIG_FILE} is not a JSON object.`);
  }
  return config as Record<string, unknown>;
}
