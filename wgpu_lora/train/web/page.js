// The page: rows, training, questions, and the adapter.

import { adapterFiles, loadAdapter } from "./adapter.js";
import { Generator } from "./generation.js";
import { PageError, Player, modelBytes, openDevice, readModel } from "./player.js";
import { Text, readRows } from "./rows.js";
import { Trainer, trainedTokens } from "./training.js";

const KEEP_EVERY = 10, SHOWN = 20; // steps between what is kept; rows of the preview
const $ = (id) => document.getElementById(id), format = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });
export const app = globalThis.app = {}; // for the console
let last = Promise.resolve(), paused = true, stopped = false;

function fail(error) {
  if (app.lost && !(error instanceof PageError)) return; // it follows from that
  $("error").textContent = error instanceof PageError ? error.message : `The page failed: ${error.message}. Reload it.`;
  $("error").hidden = false;
  if (!(error instanceof PageError)) console.error(error);
}

// Programs share buffers: what uses them waits for what did before.
function exclusive(work) {
  const result = last.then(work);
  last = result.catch(() => {});
  return result;
}

function on(id, event, work) {
  $(id).addEventListener(event, async (...args) => {
    $("error").hidden = !app.lost;
    try {
      await work(...args);
    } catch (error) {
      fail(error);
    }
  });
}

// -- what is kept in this browser -----------------------------------------------------------------------------------

function kept(mode, work) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("wgpu-lora", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("training");
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
      const transaction = opening.result.transaction("training", mode), request = work(transaction.objectStore("training"));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    };
  });
}

async function keep() {
  const state = { ...(await exclusive(() => app.trainer.state())), source: app.source, heldout: $("heldout").value };
  await kept("readwrite", (store) => store.put(state, app.key)).catch(() => {
    throw new PageError("The browser has no room to keep the training: download the adapter before you leave the page.");
  });
}

// -- rows -----------------------------------------------------------------------------------------------------------

// Sets a field, unless it is being edited.
const setField = (id, value) => document.activeElement === $(id) || ($(id).value = value);

function useRows(source) {
  if (source === app.source && app.rows) return;
  $("preview").hidden = true;
  $("rows-count").textContent = "";
  Object.assign(app, { source, rows: null, trainer: null });
  if (!source.trim()) return;
  const { rows, notes } = readRows(source, app.text, app.model.training.tokens);
  app.rows = rows;
  const tokens = rows.reduce((sum, row) => sum + row.ids.length, 0), trained = rows.reduce((sum, row) => sum + trainedTokens(row), 0);
  const counts = `${format(rows.length)} rows, ${format(tokens)} tokens, of which ${format(trained)} are trained`;
  setField("heldout", Math.min(20, Math.floor(rows.length / 10)));
  const trainer = new Trainer(app.player, trainingRows()), size = trainer.rowsPerStep;
  const small = size ? [`${format(size)} row${size > 1 ? "s" : ""} per step, not packed, since the data are small`] : [];
  const few = trainer.total < app.model.training.few_steps ? [`${format(trainer.total)} steps may be too few to learn much: raise the steps`] : [];
  $("rows-count").textContent = [counts, ...small, ...few, ...notes].join("; ");
  setField("steps", trainer.total);
  setField("rate", trainer.schedule.learning_rate);
  $("shown").replaceChildren(...rows.slice(0, SHOWN).map(({ pieces }) => {
    const item = document.createElement("li");
    item.append(...pieces.map(([text, trained]) =>
      Object.assign(document.createElement(trained ? "mark" : "span"), { textContent: text })));
    return item;
  }));
  $("preview").hidden = false;
  $("preview").open = true;
}

const heldoutCount = () => Math.max(0, Math.min(Number($("heldout").value) || 0, app.rows.length - 1));
const trainingRows = () => app.rows.slice(0, app.rows.length - heldoutCount());

// -- training -------------------------------------------------------------------------------------------------------

function drawCurve(losses) {
  const points = losses.filter(Number.isFinite), most = Math.max(...points), least = Math.min(0, ...points);
  const x = (i) => 75 + (515 * i) / Math.max(1, losses.length - 1), y = (loss) => 190 - (175 * (loss - least)) / (most - least || 1);
  const make = (name, attributes, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    return Object.assign(element, { textContent: text });
  };
  const labels = [[70, y(most) + 4, format(most), "end"], [70, 194, format(least), "end"],
    [75, 212, "1", "start"], [590, 212, `step ${losses.length}`, "end"]];
  $("curve").replaceChildren(
    make("path", { class: "axis", fill: "none", d: "M75 10V190H590" }),
    ...labels.map(([left, top, text, anchor]) => make("text", { x: left, y: top, "text-anchor": anchor }, text)),
    make("polyline", { class: "loss", points: losses.map((loss, i) => `${x(i)},${y(loss)}`).join(" ") }));
  $("curve").setAttribute("aria-label", `Loss by step: ${format(losses[0])} at step 1, ${format(losses.at(-1))} at step ${losses.length}`);
}

function showProgress(...more) {
  const { step, total, losses } = app.trainer;
  $("progress").value = step / total;
  $("progress-text").textContent = [`Step ${step} of ${total}, loss ${format(losses.at(-1))}`, ...more].join(", ");
  if (losses.length) drawCurve(losses);
}

async function train() {
  if (!app.rows) throw new PageError("There are no rows to train on: paste some, or choose a file.");
  if (!app.trainer || app.trainer.step >= app.trainer.total) {
    const [steps, rate] = [Number($("steps").value), Number($("rate").value)];
    if (!(Number.isInteger(steps) && steps > 0 && rate > 0 && rate < 1))
      throw new PageError("Steps must be a whole number above 0, and the learning rate between 0 and 1.");
    app.trainer = new Trainer(app.player, trainingRows(), { steps, learningRate: rate });
    await exclusive(() => app.trainer.restore({ ...app.trainer, state: app.start }));
  }
  const { trainer } = app, heldout = app.rows.slice(trainer.rows.length);
  paused = false;
  setRunning(true);
  try {
    $("progress-text").textContent = "Compiling …";
    await exclusive(() => Promise.all(["train", "update", "heldout"].map((name) => app.player.prepare(name))));
    const before = heldout.length ? await exclusive(() => trainer.heldoutLoss(heldout)) : null;
    while (!paused && trainer.step < trainer.total) {
      const result = await exclusive(() => trainer.train());
      if (!result.applied) throw new PageError("The loss is not finite, so training has stopped: lower the learning rate.");
      showProgress(`${format(result.seconds)} s a step`);
      if (trainer.step % KEEP_EVERY === 0 || trainer.step === trainer.total) await keep();
    }
    if (paused) await keep();
    const after = heldout.length ? await exclusive(() => trainer.heldoutLoss(heldout)) : null;
    const rose = heldout.length && after > before ? ["it rose: lower the learning rate, or take fewer steps"] : [];
    const result = heldout.length ? [`held-out loss ${format(before)} → ${format(after)}`, ...rose] : [];
    showProgress(...(paused ? ["paused"] : []), ...result);
    app.heldout = [before, after];
  } finally {
    setRunning(false);
  }
}

function setRunning(running) {
  for (const id of ["train", "rows", "file", "example", "load", "steps", "rate", "heldout"]) $(id).disabled = running;
  $("pause").disabled = !running;
}

// -- questions and the adapter --------------------------------------------------------------------------------------

async function ask() {
  const ids = app.text.prompt($("question").value), { context } = app.model.generation;
  const options = { temperature: Number($("temperature").value), most: Number($("most").value) };
  if (ids.length >= context)
    throw new PageError(`The question has ${ids.length} tokens, but there is room for ${context}: shorten it.`);
  stopped = false;
  [$("ask").disabled, $("stop").disabled] = [true, false];
  try {
    for (const [id, adapted] of [["before", false], ["after", true]]) {
      const answer = [];
      $(id).textContent = "…";
      await exclusive(async () => {
        for await (const token of app.generator.answer(ids, { adapted, ...options })) {
          answer.push(token);
          $(id).textContent = app.text.decode(answer);
          if (stopped) break;
        }
      });
      $(id).textContent = app.text.decode(answer) || "(nothing)";
    }
  } finally {
    [$("ask").disabled, $("stop").disabled] = [false, true];
  }
}

const stateNow = (pages) => Promise.all(app.model.training.state.slice(0, pages).map((place) => app.player.read(place)));

async function download() {
  const files = await exclusive(() => adapterFiles(app.player));
  for (const [name, blob] of Object.entries(files)) {
    const url = URL.createObjectURL(blob);
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }
  $("adapter-text").textContent = `${Object.keys(files).join(" and ")} are in your downloads.`;
}

// -- start ----------------------------------------------------------------------------------------------------------

async function offerKept() {
  const state = await kept("readonly", (store) => store.get(app.key)).catch(() => null);
  if (!state) return;
  $("kept").hidden = false;
  $("kept").firstElementChild.textContent = `A training of ${state.step} of ${state.total} steps is kept in this browser.`;
  on("resume", "click", async () => {
    $("kept").hidden = true;
    $("rows").value = state.source;
    useRows(state.source);
    $("heldout").value = state.heldout;
    [$("steps").value, $("rate").value] = [state.total, state.schedule.learning_rate];
    app.trainer = new Trainer(app.player, trainingRows(), { steps: state.total });
    await exclusive(() => app.trainer.restore(state));
    showProgress("kept");
  });
  on("discard", "click", async () => {
    $("kept").hidden = true;
    await kept("readwrite", (store) => store.delete(app.key));
  });
}

async function workerReady() {
  if (!navigator.serviceWorker) return;
  const controlled = new Promise((resolve) => navigator.serviceWorker.addEventListener("controllerchange", resolve, { once: true }));
  await navigator.serviceWorker.register("worker.js").catch(() => null);
  if (!navigator.serviceWorker.controller) await Promise.race([controlled, new Promise((resolve) => setTimeout(resolve, 3000))]);
}

function lost(error) {
  [app.lost, paused, stopped] = [true, true, true];
  fail(error);
}

async function start() {
  await workerReady();
  app.model = await readModel();
  app.key = app.model.files.map(({ sha256 }) => sha256).join(" ");
  const { name, layers, base_dtype } = app.model.model, opened = await openDevice(app.model, lost);
  $("status").textContent = `Loading ${name} …`;
  app.player = await Player.open(app.model, opened, ".", (share) => ($("loading").value = share));
  app.text = await Text.open(app.model);
  app.generator = new Generator(app.player, app.text);
  app.initial = app.start = await stateNow();
  $("loading").hidden = true;
  const memory = format(modelBytes(app.model) / 2 ** 20), size = opened.variant.subgroup_size;
  const subgroups = size ? `subgroups of ${size}` : "no subgroups";
  $("status").textContent = `${name}, ${layers} layers in ${base_dtype}, on ${opened.name}: ${memory} MiB, ${subgroups}.`;
  on("rows", "change", () => useRows($("rows").value));
  on("rows", "paste", () => new Promise((resolve) => setTimeout(resolve)).then(() => useRows($("rows").value)));
  const take = async (file) => $("rows").disabled || useRows(($("rows").value = await file.text()));
  on("file", "change", async ({ target }) => {
    const [file] = target.files;
    target.value = "";
    await take(file);
  });
  on("example", "click", async () => useRows(($("rows").value = await (await fetch("example.jsonl")).text())));
  const section = $("rows").closest("section");
  section.addEventListener("dragover", (event) => (event.preventDefault(), section.classList.add("drop")));
  section.addEventListener("dragleave", () => section.classList.remove("drop"));
  section.addEventListener("drop", (event) => {
    event.preventDefault();
    section.classList.remove("drop");
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]).catch(fail);
  });
  on("train", "click", train);
  on("pause", "click", () => (paused = true));
  on("ask", "click", ask);
  on("stop", "click", () => (stopped = true));
  on("download", "click", download);
  on("load", "change", async ({ target }) => {
    const [file] = target.files, data = await file.arrayBuffer();
    target.value = ""; // so that the same file may be chosen again
    await exclusive(async () => {
      loadAdapter(app.player, data); // throws before it writes
      app.start = [...(await stateNow(app.model.training.pages)), ...app.initial.slice(app.model.training.pages)];
    });
    app.trainer = null;
    $("adapter-text").textContent = `${file.name} is loaded: questions use it, and training begins with it.`;
  });
  await offerKept();
  $("main").inert = false;
}

start().catch(fail);
