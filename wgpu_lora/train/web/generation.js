// Answers of the base model, or of the base with the adapter as it is now.

import { NOWHERE, keyRanges, philox } from "./training.js";

export class Generator {
  constructor(player, text) {
    Object.assign(this, { player, text, plan: player.model.generation });
    player.write(this.plan.blocks, Uint32Array.from({ length: this.plan.context / this.plan.block }, (_, i) => i));
  }

  step(program, ids, position, adapted, picked) {
    const { player } = this, { size } = program, count = ids.length;
    const words = (fill) => Uint32Array.from({ length: size }, (_, i) => fill(i));
    player.write(program.ids, words((i) => ids[i] ?? 0));
    player.write(program.positions, words((i) => (i < count ? position + i : 0)));
    player.write(program.cache_rows, words((i) => (i < count ? position + i : NOWHERE)));
    for (const { window, place } of program.keys) {
      const own = keyRanges(ids.map((_, i) => [0, position + i + 1, 0, position + i, position + i]), window), edge = own[4 * count - 4];
      player.write(place, Uint32Array.from({ length: 4 * size }, (_, i) => own[i] ?? (i % 4 < 2 ? edge : 0)));
    }
    player.write(program.slot_ranges, Uint32Array.of(0, adapted ? count : 0));
    player.write(program.picked, Uint32Array.of(picked ? count - 1 : NOWHERE));
  }

  sampling(temperature, seed, position) {
    const row = new DataView(new ArrayBuffer(32)), draw = Number(philox(seed, position, 1)[0] >> 40n) * 2 ** -24;
    row.setFloat32(0, temperature, true);
    row.setFloat32(4, 1, true);
    row.setFloat32(12, temperature ? draw : 0, true);
    return row.buffer;
  }

  // Yields the answer's ids. adapted: with the adapter.
  async *answer(ids, { adapted = true, temperature = 0, seed = 0, most = 256 } = {}) {
    const { player, plan } = this, stops = new Set(this.text.facts.stop_ids);
    if (!this.shared) {
      await player.run("shared");
      this.shared = true;
    }
    let at = 0;
    for (const largest = plan.prefill.at(-1).size; at < ids.length;) {
      const part = ids.slice(at, at + largest), program = plan.prefill.find(({ size }) => size >= part.length);
      this.step(program, part, at, adapted, at + part.length === ids.length);
      await player.run(`prefill ${program.size}`);
      at += part.length;
    }
    for (const end = Math.min(plan.context, at + most); at < end; at++) {
      player.write(plan.params, this.sampling(temperature, seed, at));
      await player.run("choose");
      const [id] = new Uint32Array(await player.read(plan.ids));
      if (id === NOWHERE || stops.has(id)) return;
      yield id;
      this.step(plan.decode, [id], at, adapted, true);
      await player.run("decode");
    }
  }
}
