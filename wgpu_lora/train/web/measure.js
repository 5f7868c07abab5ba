// Times the bricks of a training step: products and attention alone, then the step.

import { PageError, Player, openDevice, readModel } from "./player.js";
import { Trainer, UNTRAINED } from "./training.js";

const LEAST = 200, ROUNDS = 5; // milliseconds of a measurement, of which the median is taken
const $ = (id) => document.getElementById(id), result = { schema: "wgpu-lora web measurement", version: 1 };

async function seconds(player, part) {
  const time = async (count) => {
    const begin = performance.now();
    for (let i = 0; i < count; i++) player.replay(part);
    await player.device.queue.onSubmittedWorkDone();
    return performance.now() - begin;
  };
  let count = 1; // the first call is not counted
  for (let took = (await time(1), await time(1)); took < LEAST && count < 4096; took = await time(count)) count *= 2;
  const times = [];
  for (let i = 0; i < ROUNDS; i++) times.push((await time(count)) / count / 1000);
  return times.sort((a, b) => a - b)[ROUNDS >> 1];
}

// A batch of one row as long as may be, of which all tokens are trained.
function fill(player) {
  const { training, model } = player.model, ids = Array.from({ length: training.tokens }, (_, i) => (7 * i) % model.vocab_size);
  const trainer = new Trainer(player, [{ ids, labels: ids.map((id, i) => (i ? id : UNTRAINED)) }], { steps: 1 });
  trainer.upload(training.batch, Array(training.rows).fill(trainer.rows[0]), 1);
}

async function measure(player) {
  const steps = await player.prepare("train"), { bricks, model, training } = player.model, results = [];
  fill(player);
  const show = (name, calls, time, work) => {
    const cells = [name, calls, (1e6 * time).toFixed(1), work ? ((2 * work) / time / 1e9).toFixed(1) : ""];
    results.push({ name, calls, seconds: time, ...(work ? { multiply_adds: work } : {}) });
    const row = $("results").insertRow();
    row.append(...cells.map((text, i) => Object.assign(document.createElement(i ? "td" : "th"), { textContent: text })));
  };
  await player.run("train"); // values that kernels meet in a step
  for (const [i, { kernel, dims, dispatch, calls, work }] of bricks.entries()) {
    show(`${kernel} ${dims}`, calls, await seconds(player, [steps[dispatch]]), work);
    $("progress").value = (i + 1) / (bricks.length + 1);
  }
  show("training step", 1, await seconds(player, steps));
  $("progress").value = 1;
  return { ...result, device: player.name, browser: navigator.userAgent, model, subgroup_size: player.variant.subgroup_size,
    tokens: training.batch.size, results };
}

async function start() {
  const model = await readModel(), player = await Player.open(model, await openDevice(model, fail));
  $("status").textContent = `${model.model.name} on ${player.name}, ${model.training.batch.size} tokens a step.`;
  $("measure").disabled = false;
  $("measure").addEventListener("click", async () => {
    $("results").replaceChildren();
    $("measure").disabled = true;
    try {
      globalThis.measured = await measure(player);
      $("save").disabled = false;
    } catch (error) {
      fail(error);
    }
    $("measure").disabled = false;
  });
  $("save").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([JSON.stringify(globalThis.measured, null, 1)], { type: "application/json" }));
    Object.assign(document.createElement("a"), { href: url, download: "wgpu-lora-device.json" }).click();
  });
}

function fail(error) {
  $("error").textContent = error instanceof PageError ? error.message : `The page failed: ${error.message}. Reload it.`;
  $("error").hidden = false;
}

start().catch(fail);
