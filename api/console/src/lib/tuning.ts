/** Fine-tuning jobs: their progress, what they measured, why they failed, and orders for new ones. */

import type { components } from "../api/schema.ts";
import type { Figures } from "./series.ts";

type Job = Pick<components["schemas"]["TuningJobView"], "status" | "step" | "num_steps">;
type Event = Pick<components["schemas"]["TuningEventView"], "data">;
type Order = components["schemas"]["TuningJobBody"];

const OPEN_STATES = ["queued", "running", "paused"];

/** Whether the job has not ended. */
export function isOpen({ status }: Pick<Job, "status">): boolean {
  return OPEN_STATES.includes(status);
}

/** "12 of 40 steps"; before the data is read, the number of steps is unknown. */
export function progressText({ step, num_steps }: Pick<Job, "step" | "num_steps">): string {
  return num_steps === 0 ? "no steps yet" : `${step} of ${num_steps} ${num_steps === 1 ? "step" : "steps"}`;
}

export interface Curves {
  /** In ascending order. */
  steps: number[];
  trainLoss: Figures;
  validLoss: Figures;
  trainAccuracy: Figures;
  validAccuracy: Figures;
}

/** What the events, the newest first, measured at each step. A step that was repeated has its latest figures. */
export function curvesOf(events: readonly Event[]): Curves {
  const measured = new Map<number, Record<string, unknown>>();
  for (const { data } of events.toReversed()) {
    if (typeof data?.step === "number") measured.set(data.step, { ...measured.get(data.step), ...data });
  }
  const rows = [...measured].sort(([one], [other]) => one - other);
  const figures = (name: string): Figures => rows.map(([, row]) => (typeof row[name] === "number" ? row[name] : null));
  return {
    steps: rows.map(([step]) => step),
    trainLoss: figures("train_loss"),
    validLoss: figures("valid_loss"),
    trainAccuracy: figures("train_mean_token_accuracy"),
    validAccuracy: figures("valid_mean_token_accuracy"),
  };
}

const PAUSES: Record<string, string> = {
  trained_tokens: "The tenant's trained tokens of this period are used up. Resume the job in the next period.",
  budget: "A budget is exhausted, of the tenant or of who created the job. The job resumes by itself when the budget allows it.",
};

/** Why a job is paused, and how it resumes. */
export function pauseText(reason: string): string {
  return Object.hasOwn(PAUSES, reason) ? PAUSES[reason]! : "The job was paused by its owner.";
}

const REMEDIES: Record<string, string> = {
  file_not_found: "Upload the file again, and create another job with it.",
  invalid_training_data: "Correct the line, and create another job with the corrected file.",
  invalid_recipe: "Create another job with other settings.",
  base_not_tunable: "Ask the operator for a server whose base can be trained.",
  out_of_memory: "Create another job with a smaller batch size, fewer tokens per sequence or a lower rank.",
  training_failed: "Create the job again. If it fails again, ask the operator: the server's log has details.",
};

/** What to do about a job that has failed with `code`. */
export function remedyOf(code: string): string {
  return Object.hasOwn(REMEDIES, code)
    ? REMEDIES[code]!
    : "The adapter was trained, but could not be published. Remove the cause, and create another job.";
}

interface Choices {
  base: string;
  trainingFile: string;
  validationFile: string | null;
}

/** The job that the form of `NewJob` asks for. An empty field leaves its default to the server. */
export function orderOf(form: FormData, { base, trainingFile, validationFile }: Choices): Order {
  const type = text(form, "method") === "dpo" ? "dpo" : "supervised";
  const rank = number(form, "rank");
  const targets = text(form, "targets").split(/[\s,]+/).filter(Boolean);
  const hyperparameters = {
    n_epochs: number(form, "n_epochs") ?? ("auto" as const),
    batch_size: number(form, "batch_size") ?? ("auto" as const),
    learning_rate_multiplier: number(form, "learning_rate_multiplier") ?? ("auto" as const),
  };
  return {
    model: base,
    suffix: text(form, "adapter"),
    training_file: trainingFile,
    validation_file: validationFile,
    method: type === "dpo"
      ? { type, dpo: { hyperparameters: { ...hyperparameters, beta: number(form, "beta") ?? "auto" } } }
      : { type, supervised: { hyperparameters } },
    seed: number(form, "seed"),
    lora: {
      ...(rank !== null && { rank }),
      alpha: number(form, "alpha"),
      targets: targets.length > 0 ? targets : null,
      max_tokens: number(form, "max_tokens"),
      rslora: form.has("rslora"),
      dora: form.has("dora"),
      packing: form.has("packing"),
    },
  };
}

function text(form: FormData, name: string): string {
  return String(form.get(name) ?? "").trim();
}

function number(form: FormData, name: string): number | null {
  const typed = text(form, name);
  return typed === "" ? null : Number(typed);
}
