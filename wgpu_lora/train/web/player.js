// Replays recorded programs (model.json, written by wgpu-lora export web) on a WebGPU device.

export class PageError extends Error {} // a sentence for whoever reads the page

const SCHEMA = "wgpu-lora web", VERSION = 1;
const MEBIBYTE = 1 << 20, FIRST_SUBMIT = 8, SLOW = 250, FAST = 80; // dispatches; milliseconds of a submit

export async function readModel(base = ".") {
  const response = await fetch(`${base}/model.json`).catch(() => null);
  if (!response?.ok) throw new PageError("The file model.json could not be loaded: check the connection, then reload.");
  const model = await response.json().catch(() => {
    throw new PageError("The file model.json is damaged: export the site again.");
  });
  if (model.schema !== SCHEMA || model.version !== VERSION)
    throw new PageError(`The file model.json has another version than this page (${model.version}): export the site again.`);
  return model;
}

export const modelBytes = (model) => model.buffers.reduce((sum, buffer) => sum + buffer.bytes, 0);

// The device, and the variant of the programs that it runs: with subgroups if all of its own have an exported size.
export async function openDevice(model, onLost) {
  if (!navigator.gpu)
    throw new PageError("This browser has no WebGPU: use a current Chrome, Edge, Safari or Firefox, over https.");
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new PageError("This browser offers no GPU to WebGPU: update the GPU's driver, or allow WebGPU in its settings.");
  const lacking = Object.entries(model.limits).filter(([name, least]) => adapter.limits[name] < least);
  const number = (value) => value.toLocaleString("en");
  const needs = lacking.map(([name, least]) => `${name} of ${number(least)} (it has ${number(adapter.limits[name])})`);
  if (lacking.length) throw new PageError(`This GPU is too small for the model, which needs ${needs.join(" and ")}.`);
  const info = adapter.info ?? {}, features = ["timestamp-query"].filter((name) => adapter.features.has(name));
  const fixed = adapter.features.has("subgroups") && info.subgroupMinSize === info.subgroupMaxSize && info.subgroupMinSize;
  const variant = model.variants.find((one) => fixed && one.subgroup_size === fixed) ?? model.variants[0];
  if (variant.subgroup_size) features.push("subgroups");
  const device = await adapter.requestDevice({ requiredFeatures: features, requiredLimits: model.limits });
  device.lost.then((lost) => {
    if (lost.reason !== "destroyed") onLost(new PageError("The browser lost the GPU: reload the page to go on from what was kept."));
  });
  return { device, variant, name: [info.vendor, info.architecture, info.description].filter(Boolean).join(" ") || "unnamed GPU" };
}

async function sha256(data) {
  return [...new Uint8Array(await crypto.subtle.digest("SHA-256", data))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// A file of the site whose size and SHA-256 are those in model.json.
export async function fetchChecked(file, base = ".", progress = () => {}) {
  const response = await fetch(`${base}/${file.name}`).catch(() => null);
  if (!response?.ok) throw new PageError(`The file ${file.name} could not be loaded: check the connection, then reload.`);
  const data = new Uint8Array(file.bytes), reader = response.body.getReader();
  let at = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    if (at + part.value.length <= file.bytes) data.set(part.value, at);
    at += part.value.length;
    progress(Math.min(at, file.bytes));
  }
  if (at !== file.bytes || (await sha256(data)) !== file.sha256) {
    for (const name of (await globalThis.caches?.keys()) ?? []) await (await caches.open(name)).delete(response.url);
    throw new PageError(`The file ${file.name} is damaged: reload the page, which loads it again, or export the site again.`);
  }
  return data;
}

export class Player {
  constructor(model, { device, variant, name }) {
    Object.assign(this, { model, device, variant, name, replays: {}, pipelines: new Map(), submit: FIRST_SUBMIT });
  }

  static async open(model, opened, base = ".", progress = () => {}) {
    const player = new Player(model, opened);
    await player.allocate();
    await player.load(base, progress);
    return player;
  }

  async allocate() {
    const { device, model } = this, usage = GPUBufferUsage, uses = usage.STORAGE | usage.UNIFORM | usage.COPY_SRC | usage.COPY_DST;
    device.pushErrorScope("out-of-memory");
    this.buffers = model.buffers.map(({ name, bytes }) => device.createBuffer({ label: name, size: (bytes + 3) & ~3, usage: uses }));
    if (await device.popErrorScope()) {
      this.close();
      const need = Math.ceil(modelBytes(model) / MEBIBYTE).toLocaleString("en");
      throw new PageError(`The model needs ${need} MiB of the GPU's memory, more than this tab may have: ` +
        "close others, or use a smaller model.");
    }
  }

  // Each file is a part of one stream of the buffers' contents.
  async load(base, progress) {
    const total = this.model.files.reduce((sum, file) => sum + file.bytes, 0);
    const filled = this.model.buffers.map((buffer, i) => [i, buffer.at, buffer.bytes]).filter(([, at]) => at !== undefined);
    let first = 0;
    for (const file of this.model.files) {
      const data = await fetchChecked(file, base, (bytes) => progress((first + bytes) / total)), last = first + file.bytes;
      for (const [i, at, bytes] of filled) {
        const start = Math.max(at, first), stop = Math.min(at + bytes, last);
        if (start < stop) this.device.queue.writeBuffer(this.buffers[i], start - at, data, start - first, stop - start);
      }
      first = last;
      await this.device.queue.onSubmittedWorkDone();
    }
  }

  write([buffer, offset, bytes], values) {
    if (values.byteLength > bytes) throw new Error(`${values.byteLength} bytes for ${bytes}`);
    this.device.queue.writeBuffer(this.buffers[buffer], offset, values);
  }

  async read([buffer, offset, bytes]) {
    const size = (bytes + 3) & ~3, staging = this.device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(this.buffers[buffer], offset, staging, 0, size);
    this.device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    const result = staging.getMappedRange().slice(0, bytes);
    staging.destroy();
    return result;
  }

  pipeline(shader) {
    if (!this.pipelines.has(shader)) this.pipelines.set(shader, this.compile(this.model.shaders[shader]));
    return this.pipelines.get(shader);
  }

  async compile(code) {
    const module = this.device.createShaderModule({ code }), { messages } = await module.getCompilationInfo();
    const wrong = messages.find(({ type }) => type === "error");
    if (wrong) throw new Error(`${wrong.message}, line ${wrong.lineNum}`);
    return this.device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint: "main" } });
  }

  // The dispatches of a program with their compute pipelines and bind groups, made on first use.
  async prepare(name, progress = () => {}) {
    if (this.replays[name]) return this.replays[name];
    const steps = this.variant.programs[name], shaders = [...new Set(steps.map(([shader]) => shader))], groups = new Map();
    let done = 0;
    const made = await Promise.all(shaders.map(async (shader) => {
      const pipeline = await this.pipeline(shader);
      progress(++done / shaders.length);
      return [shader, pipeline];
    })).catch((error) => {
      throw new PageError(`A shader does not compile on this GPU (${error.message.split("\n")[0]}): use another browser or GPU.`);
    });
    const pipelines = new Map(made);
    return this.replays[name] = steps.map(([shader, x, y, z, ...parts]) => {
      const pipeline = pipelines.get(shader), key = `${shader} ${parts}`;
      if (!groups.has(key)) {
        const entries = [];
        for (let i = 0; i < parts.length; i += 3) {
          const [buffer, offset, bytes] = parts.slice(i, i + 3);
          entries.push({ binding: i / 3, resource: { buffer: this.buffers[buffer], offset, size: (bytes + 3) & ~3 } });
        }
        groups.set(key, this.device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
      }
      return [pipeline, groups.get(key), [x, y, z]];
    });
  }

  replay(steps) {
    const encoder = this.device.createCommandEncoder(), pass = encoder.beginComputePass();
    for (const [pipeline, group, grid] of steps) {
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...grid);
    }
    pass.end();
    this.device.queue.submit([encoder.finish()]);
  }

  // Runs a program in submits that are short enough for watchdogs, and for the page to stay prompt.
  async run(name) {
    const steps = await this.prepare(name);
    for (let at = 0; at < steps.length;) {
      const part = steps.slice(at, at + this.submit), begin = performance.now();
      this.replay(part);
      at += part.length;
      await this.device.queue.onSubmittedWorkDone();
      const took = performance.now() - begin;
      if (took > SLOW) this.submit = Math.max(1, this.submit >> 1);
      else if (took < FAST && part.length === this.submit) this.submit *= 2;
    }
  }

  close() {
    this.buffers?.forEach((buffer) => buffer.destroy());
    this.device.destroy();
  }
}
