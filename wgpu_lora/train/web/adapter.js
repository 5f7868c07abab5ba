// The adapter as PEFT's files: adapter_config.json, and adapter_model.safetensors in float32.

import { PageError } from "./player.js";

const MOST = 2 ** 20; // of a value, as in training
const bytesOf = ({ shape }) => 4 * shape[0] * shape[1];

export async function adapterFiles(player) {
  const { adapter } = player.model, sorted = [...adapter.tensors].sort((a, b) => (a.name < b.name ? -1 : 1));
  const header = { __metadata__: { format: "pt" } };
  let at = 0;
  for (const tensor of sorted) {
    header[tensor.name] = { dtype: "F32", shape: tensor.shape, data_offsets: [at, at += bytesOf(tensor)] };
  }
  const text = JSON.stringify(header), padded = text.padEnd(8 * Math.ceil(text.length / 8)), front = new DataView(new ArrayBuffer(8));
  front.setBigUint64(0, BigInt(padded.length), true);
  const parts = [front.buffer, padded];
  for (const tensor of sorted) parts.push(await player.read([tensor.buffer, tensor.offset, bytesOf(tensor)]));
  return { [adapter.files.config]: new Blob([adapter.config]), [adapter.files.weights]: new Blob(parts) };
}

// Writes an adapter_model.safetensors with the tensors of this page to the device.
export function loadAdapter(player, buffer) {
  const wrong = (why) =>
    new PageError(`This file is not an adapter of ${player.model.model.name} as this page writes it (${why}): choose another.`);
  const size = buffer.byteLength < 8 ? 0 : Number(new DataView(buffer).getBigUint64(0, true));
  if (!size || size > buffer.byteLength - 8) throw wrong("it is damaged, or no safetensors file");
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(buffer, 8, size)));
  } catch {
    throw wrong("its header is damaged");
  }
  const writes = player.model.adapter.tensors.map((tensor) => {
    const entry = header?.[tensor.name], [start, stop] = entry?.data_offsets ?? [];
    if (entry?.dtype !== "F32" || `${entry.shape}` !== `${tensor.shape}`)
      throw wrong(`it lacks ${tensor.name} of ${tensor.shape.join(" x ")} in float32`);
    if (!(start >= 0 && stop - start === bytesOf(tensor) && 8 + size + stop <= buffer.byteLength)) throw wrong("it is cut off");
    const values = new Float32Array(buffer.slice(8 + size + start, 8 + size + stop));
    if (!values.every((value) => Math.abs(value) <= MOST)) throw wrong("it has values that are not finite");
    return [tensor, values];
  });
  if (Object.keys(header).length > writes.length + ("__metadata__" in header)) throw wrong("it has other tensors, too");
  for (const [tensor, values] of writes) player.write([tensor.buffer, tensor.offset, values.byteLength], values);
}
