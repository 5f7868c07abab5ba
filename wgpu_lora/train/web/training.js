// The training of one adapter: the order of rows, batches, the schedule, and steps, with the numbers of wgpu-lora finetune.

export const UNTRAINED = -100, NOWHERE = 0xffffffff;
const OPEN_BINS = 32, WORD = (1n << 64n) - 1n;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n], WEYL = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn];

// Raw words of NumPy's Philox (Salmon et al. 2011), of the key (first, second).
export function philox(first, second, count) {
  const words = [];
  for (let counter = 1n; words.length < count; counter++) {
    let c = [counter, 0n, 0n, 0n], k = [BigInt(first) & WORD, BigInt(second) & WORD];
    for (let round = 0; round < 10; round++) {
      if (round) k = k.map((word, i) => (word + WEYL[i]) & WORD);
      const [a, b] = [MULTIPLIERS[0] * c[0], MULTIPLIERS[1] * c[2]];
      c = [(b >> 64n) ^ c[1] ^ k[0], b & WORD, (a >> 64n) ^ c[3] ^ k[1], a & WORD];
    }
    words.push(...c);
  }
  return words.slice(0, count);
}

export function epochOrder(count, seed, epoch) {
  const words = philox(seed, epoch, count);
  return words.map((_, i) => i).sort((a, b) => (words[a] < words[b] ? -1 : words[a] > words[b] ? 1 : a - b));
}

// Bins of rows with at most `budget` tokens each: first fit over the open bins.
export function pack(lengths, order, budget) {
  const bins = [], room = new Map();
  for (const row of order) {
    let target = [...room].find(([, free]) => free >= lengths[row])?.[0];
    if (target === undefined) {
      if (room.size === OPEN_BINS) room.delete([...room].reduce((a, b) => (b[1] < a[1] ? b : a))[0]);
      target = bins.length;
      bins.push([]);
      room.set(target, budget);
    }
    bins[target].push(row);
    room.set(target, room.get(target) - lengths[row]);
    if (!room.get(target)) room.delete(target);
  }
  return bins;
}

// Rows a step of small data, which are not packed, so that an epoch has enough steps; null for packed batches.
export function rowsPerStep(lengths, { rows, tokens, small }) {
  const budget = rows * tokens, longest = [...lengths].sort((a, b) => a - b), sum = (values) => values.reduce((a, b) => a + b, 0);
  if (sum(lengths) / budget >= small.steps) return null;
  let batch = 1;
  for (const count of small.rows) {
    batch = Math.min(count, lengths.length);
    while (batch > 1 && sum(longest.slice(-batch)) > budget) batch = Math.floor(batch / 2);
    if (lengths.length / batch >= small.steps) break;
  }
  return batch;
}

export function learningRate({ kind, learning_rate: peak, warmup_ratio, least }, step, total) {
  const warmup = Math.min(Math.ceil(total * warmup_ratio), Math.max(0, total - 1));
  if (kind !== "constant" && step < warmup) return (peak * (step + 1)) / (warmup + 1);
  const progress = (step - warmup) / Math.max(1, total - warmup);
  if (kind === "cosine") return least + (peak - least) * Math.max(0, 0.5 * (1 + Math.cos(Math.PI * progress)));
  return kind === "linear" ? least + (peak - least) * Math.max(0, 1 - progress) : peak;
}

export const trainedTokens = (row) => row.labels.reduce((sum, label, i) => sum + (i > 0 && label !== UNTRAINED), 0);

export class Trainer {
  // rows: [{ids, labels}], of at most `tokens` tokens. steps: all of the run; by default, those of the model's epochs.
  constructor(player, rows, { steps, learningRate: peak } = {}) {
    Object.assign(this, { player, rows, plan: player.model.training, step: 0, losses: [], epochs: new Map() });
    this.lengths = rows.map((row) => row.ids.length);
    this.rowsPerStep = rowsPerStep(this.lengths, this.plan);
    this.schedule = { ...this.plan.schedule, ...(peak ? { learning_rate: peak } : {}) };
    this.total = steps || this.stepsOf(this.plan.epochs);
  }

  epoch(number) {
    if (!this.epochs.has(number)) {
      const order = epochOrder(this.rows.length, this.plan.seed, number), { rowsPerStep: size } = this;
      const whole = (i) => order.slice(i * size, (i + 1) * size);
      this.epochs.set(number, size ? Array.from({ length: Math.ceil(order.length / size) }, (_, i) => whole(i))
        : pack(this.lengths, order, this.plan.rows * this.plan.tokens));
    }
    return this.epochs.get(number);
  }

  stepsOf(epochs) {
    return Array.from({ length: epochs }, (_, i) => this.epoch(i).length).reduce((a, b) => a + b, 0);
  }

  batchOf(step) {
    for (let epoch = 0; ; epoch++) {
      const batches = this.epoch(epoch);
      if (step < batches.length) return batches[step].map((i) => this.rows[i]);
      step -= batches.length;
    }
  }

  // Uploads rows one after the other; each sees only itself, as does each row of padding.
  upload(batch, rows, weight) {
    const { player } = this, size = batch.size, words = (fill) => Array.from({ length: size }, (_, i) => fill(i));
    const ids = words(() => 0), positions = words(() => 0), first = words((i) => i), last = words((i) => i + 1);
    const targets = [], targetRows = [];
    let at = 0;
    for (const row of rows) {
      for (let i = 0; i < row.ids.length; i++) {
        [ids[at + i], positions[at + i], first[at + i], last[at + i]] = [row.ids[i], i, at, at + row.ids.length];
        if (i && row.labels[i] !== UNTRAINED) {
          targets.push(row.labels[i]);
          targetRows.push(at + i - 1);
        }
      }
      at += row.ids.length;
    }
    const padded = (values, fill) => Uint32Array.from(words((i) => values[i] ?? fill)), count = targets.length;
    player.write(batch.ids, Uint32Array.from(ids));
    player.write(batch.positions, Uint32Array.from(positions));
    for (const { window, place } of batch.keys)
      player.write(place, keyRanges(words((i) => [first[i], i + 1, last[i], i, i]), window));
    player.write(batch.slot_ranges, Uint32Array.of(0, at));
    player.write(batch.target_rows, padded(targetRows, NOWHERE));
    player.write(batch.targets, padded(targets, 0));
    player.write(batch.target_count, Uint32Array.of(count));
    player.write(batch.weights, Float32Array.from(words((i) => (i < count ? weight : 0))));
    player.write(batch.loss_ranges, Uint32Array.of(0, count));
  }

  hyper(step, rate) {
    const { hyper, weight_decay } = this.plan, { beta1, beta2 } = hyper;
    const values = {
      learning_rate: rate, beta1, beta2, eps: hyper.epsilon, weight_decay, correction1: 1 - beta1 ** step,
      correction2: 1 - beta2 ** step, rest1: 1 - beta1, rest2: 1 - beta2, step,
    };
    const row = hyper.fields.map((name) => values[name]);
    return Float32Array.from([...row, ...row]);
  }

  // Takes a step; returns {step, loss, norm, rate, applied, seconds}. Not applied: a value was not finite, and nothing changed.
  async train() {
    const { player, plan } = this, begin = performance.now(), rows = this.batchOf(this.step);
    const units = rows.reduce((sum, row) => sum + trainedTokens(row), 0), rate = learningRate(this.schedule, this.step, this.total);
    player.write(plan.loss, new Float32Array(1));
    this.upload(plan.batch, rows, 1 / units);
    await player.run("train");
    player.write(plan.hyper.place, this.hyper(this.step + 1, rate));
    await player.run("update");
    const [norm, , go, sum] = new Float32Array(await player.read(plan.report));
    const loss = sum / units, seconds = (performance.now() - begin) / 1000;
    this.losses.push(loss);
    return { step: ++this.step, loss, norm, rate, applied: go > 0, seconds };
  }

  // The mean loss over the trained tokens of rows, in nats.
  async heldoutLoss(rows) {
    const { player, plan } = this, order = rows.map((_, i) => i);
    let sum = 0;
    for (const bin of pack(rows.map((row) => row.ids.length), order, plan.heldout.size)) {
      player.write(plan.loss, new Float32Array(1));
      this.upload(plan.heldout, bin.map((i) => rows[i]), 1);
      await player.run("heldout");
      sum += new Float32Array(await player.read(plan.loss))[0];
    }
    return sum / rows.reduce((total, row) => total + trainedTokens(row), 0);
  }

  async state() {
    const state = await Promise.all(this.plan.state.map((place) => this.player.read(place)));
    return { step: this.step, total: this.total, losses: this.losses, schedule: this.schedule, state };
  }

  restore({ step, total, losses, schedule, state }) {
    Object.assign(this, { step, total, losses, schedule });
    state.forEach((values, i) => this.player.write(this.plan.state[i], values));
  }
}

// Rows of [first key, one past the last, one past the last row that sees it, first such row] from [..., row's own key].
export function keyRanges(rows, window) {
  return Uint32Array.from(rows.flatMap(([first, stop, last, viewer, key]) => window === null ? [first, stop, last, viewer]
    : [Math.max(first, key - window + 1), stop, Math.min(last, key + window), viewer]));
}
