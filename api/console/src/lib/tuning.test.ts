import assert from "node:assert/strict";
import { test } from "node:test";
import { curvesOf, isOpen, orderOf, pauseText, progressText, remedyOf } from "./tuning.ts";

const FILES = { base: "tiny", trainingFile: "file-1", validationFile: null };

function formOf(fields: Record<string, string>): FormData {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.set(name, value);
  return form;
}

test("a job is open until it has succeeded, failed or been cancelled", () => {
  for (const status of ["queued", "running", "paused"]) assert.ok(isOpen({ status }));
  for (const status of ["succeeded", "failed", "cancelled"]) assert.ok(!isOpen({ status }));
});

test("the progress counts steps once their number is known", () => {
  assert.equal(progressText({ step: 0, num_steps: 0 }), "no steps yet");
  assert.equal(progressText({ step: 1, num_steps: 1 }), "1 of 1 step");
  assert.equal(progressText({ step: 3, num_steps: 40 }), "3 of 40 steps");
});

test("curves join training and validation of a step and rise by step", () => {
  const curves = curvesOf([
    { data: null },
    { data: { step: 4, total_steps: 4, valid_loss: 0.5, valid_mean_token_accuracy: 0.75 } },
    { data: { step: 4, total_steps: 4, train_loss: 0.25, train_mean_token_accuracy: 0.5 } },
    { data: { step: 1, total_steps: 4, train_loss: 1, train_mean_token_accuracy: null } },
  ]);
  assert.deepEqual(curves, {
    steps: [1, 4],
    trainLoss: [1, 0.25],
    validLoss: [null, 0.5],
    trainAccuracy: [null, 0.5],
    validAccuracy: [null, 0.75],
  });
});

test("of a repeated step the latest figures count", () => {
  const curves = curvesOf([{ data: { step: 2, train_loss: 0.5 } }, { data: { step: 2, train_loss: 9 } }]);
  assert.deepEqual([curves.steps, curves.trainLoss], [[2], [0.5]]);
});

test("data without a step, or with figures of another kind, is not drawn", () => {
  assert.deepEqual(curvesOf([{ data: { step: "2", train_loss: 1 } }]).steps, []);
  assert.deepEqual(curvesOf([{ data: { step: 2, train_loss: "1" } }]).trainLoss, [null]);
});

test("each code has its remedy, and a refused adapter another one", () => {
  assert.match(remedyOf("out_of_memory"), /batch size/);
  assert.match(remedyOf("adapter_no_effect"), /published/);
  assert.match(remedyOf("toString"), /published/);
});

test("empty fields leave the defaults to the server", () => {
  const order = orderOf(formOf({ method: "supervised", adapter: " bot ", rank: "", targets: "" }), FILES);
  assert.deepEqual(order, {
    model: "tiny", suffix: "bot", training_file: "file-1", validation_file: null, seed: null,
    method: {
      type: "supervised",
      supervised: { hyperparameters: { n_epochs: "auto", batch_size: "auto", learning_rate_multiplier: "auto" } },
    },
    lora: { alpha: null, targets: null, max_tokens: null, rslora: false, dora: false, packing: false },
  });
});

test("what is filled in is sent as numbers and lists", () => {
  const order = orderOf(formOf({
    method: "dpo", adapter: "bot", n_epochs: "2", batch_size: "4", learning_rate_multiplier: "0.5", beta: "0.2",
    rank: "8", alpha: "32", targets: "q_proj, v_proj", max_tokens: "512", seed: "7", dora: "on",
  }), { ...FILES, validationFile: "file-2" });
  assert.equal(order.validation_file, "file-2");
  assert.equal(order.seed, 7);
  assert.deepEqual(order.method, {
    type: "dpo",
    dpo: { hyperparameters: { n_epochs: 2, batch_size: 4, learning_rate_multiplier: 0.5, beta: 0.2 } },
  });
  assert.deepEqual(order.lora, {
    rank: 8, alpha: 32, targets: ["q_proj", "v_proj"], max_tokens: 512, rslora: false, dora: true, packing: false,
  });
});

test("a paused job says how it resumes", () => {
  assert.match(pauseText("budget"), /resumes by itself/);
  assert.match(pauseText("trained_tokens"), /next period/);
  assert.match(pauseText("requested"), /owner/);
});
