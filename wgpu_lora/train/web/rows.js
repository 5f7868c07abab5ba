// Rows of data to token ids and labels, as wgpu-lora reads them (docs/data.md).

import { PageError, fetchChecked } from "./player.js";
import { UNTRAINED, trainedTokens } from "./training.js";
import { Template } from "./vendor/jinja.js";
import { Tokenizer } from "./vendor/tokenizers.mjs";

const NONCE = crypto.randomUUID(), BEGIN = `<${NONCE}<`, END = `>${NONCE}>`; // for {% generation %} and {% endgeneration %}
const REASONING = /[<◁]\s*\/?\s*(?:think|thinking|thought|reasoning)\s*[>▷]|\[\/?THINK\]/i;
const ROLES = ["system", "developer", "user", "assistant", "tool"];
const FORMATS = "'messages', 'prompt' and 'completion', 'instruction' and 'output', or 'text'";
const ALPACA = "Below is an instruction that describes a task";

export class Text {
  constructor(tokenizer, facts) {
    Object.assign(this, { tokenizer, facts, blocks: new Map() });
    const wrong = facts.samples.find(([text, ids]) => `${this.ids(text)}` !== `${ids}`)?.[0].trim().slice(0, 20);
    if (wrong) throw new PageError(`The page's tokenizer differs from the model's own at "${wrong}": train with wgpu-lora finetune.`);
    if (facts.template === null) return;
    this.template = new Template(marked(facts.template));
    this.differs = facts.conversations.some(([messages, prompting, text]) => {
      try {
        return this.render(messages, prompting).text !== text;
      } catch {
        return text !== null;
      }
    });
  }

  static async open(model, base = ".") {
    const { tokenizer: facts } = model, data = await fetchChecked({ name: "tokenizer.json", ...facts }, base);
    return new Text(new Tokenizer(JSON.parse(new TextDecoder().decode(data)), facts.config), facts);
  }

  ids(text) {
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  // Token ids. Throws PageError at a character of which the page's tokenizer makes others than the model's own.
  encode(text) {
    for (const character of text) {
      const block = character.codePointAt(0) >> 4, expected = this.facts.blocks.slice(8 * block, 8 * block + 8);
      if (!this.blocks.has(block)) this.blocks.set(block, digest(this.ids(blockText(block))) === expected);
      if (!this.blocks.get(block))
        throw new PageError(`the page's tokenizer differs from the model's own at characters like "${character}"; train with wgpu-lora finetune`);
    }
    return this.ids(text);
  }

  decode(ids) {
    return this.tokenizer.decode(ids, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
  }

  // The text of a conversation, and the spans that the template marks as generated.
  render(messages, prompting = false) {
    const special = Object.entries(this.facts.config).filter(([, value]) => typeof value === "string");
    const plain = messages.map((message) => Object.fromEntries(Object.entries(message).filter(([, value]) => value !== null)));
    let text;
    try {
      text = this.template.render({ ...Object.fromEntries(special), messages: plain, add_generation_prompt: prompting });
    } catch (error) {
      throw new PageError(`the chat template refuses this conversation (${error.message.split("\n")[0]})`);
    }
    const spans = [], clean = text.split(BEGIN).reduce((before, part) => {
      const [inside, ...rest] = part.split(END);
      if (rest.length) spans.push([before.length, before.length + inside.length]);
      return before + inside + rest.join("");
    });
    return { text: clean, spans };
  }

  prompt(question) {
    if (!this.template) return [...this.facts.prefix_ids, ...this.encode(question)];
    return this.encode(this.render([{ role: "user", content: question }], true).text);
  }

  // {ids, labels, pieces: [[text, trained]]} of a row.
  tokenize(row) {
    const { facts } = this, example = exampleOf(row, this.template, (name) => isHarmless(name, facts.harmless));
    if (example.messages) return this.conversation(example);
    const { prompt = "", answer } = example;
    if (!answer.trim()) return { ids: [], labels: [], pieces: [] };
    const [head, tail] = prompt ? this.split(prompt, answer) : [[], this.encode(answer)];
    const opening = [...head, ...tail][0] === facts.prefix_ids[0] ? [] : facts.prefix_ids, ids = [...opening, ...head, ...tail];
    const ended = ids.at(-1) === facts.eos_id || (facts.eos_text && answer.trimEnd().endsWith(facts.eos_text));
    if (facts.eos_id !== null && !ended) ids.push(facts.eos_id);
    const untrained = prompt ? opening.length + head.length : 0;
    return { ids, labels: ids.map((id, i) => (i < untrained ? UNTRAINED : id)), pieces: [[prompt, false], [answer, true]] };
  }

  split(prompt, answer) {
    const head = this.encode(prompt), whole = this.encode(prompt + answer);
    return head.every((id, i) => whole[i] === id) ? [head, whole.slice(head.length)] : [head, this.encode(answer)];
  }

  conversation({ messages, trained }) {
    if (this.differs)
      throw new PageError("the page's template engine differs from the model's own, so it takes no messages; train with wgpu-lora finetune");
    const { facts } = this, { text, spans: marks } = this.render(messages), ids = this.encode(text);
    const answers = messages.flatMap(({ role }, i) => (role === "assistant" ? [i] : []));
    const spans = marks.length === answers.length && marks.length ? marks.filter((_, i) => trained.includes(answers[i]))
      : trained.map((turn) => this.turn(messages, text, turn));
    if (spans.length === trained.length) spans.forEach(([start, stop], i) => {
      if (!isWhole(messages[trained[i]].content, text.slice(start, stop)))
        throw new PageError(`the chat template leaves out a part of message ${trained[i]}; train with wgpu-lora finetune`);
    });
    const labels = ids.map(() => UNTRAINED);
    for (const [start, stop] of spans) {
      const [from, to] = [start, stop].map((end) => this.boundary(ids, text.slice(0, end)));
      for (let i = from; i < to; i++) labels[i] = ids[i];
    }
    if (facts.eos_id !== null && trained.includes(messages.length - 1) && !facts.end_texts.some((end) => text.trimEnd().endsWith(end))) {
      const end = labels.findLastIndex((label) => label !== UNTRAINED) + 1;
      [ids, labels].forEach((list) => list.splice(end, list.length, facts.eos_id));
    }
    const edges = [0, ...spans.flat(), text.length];
    return { ids, labels, pieces: edges.slice(1).map((edge, i) => [text.slice(edges[i], edge), i % 2 === 1]) };
  }

  // The span of a turn, if the text up to it does not depend on what follows.
  turn(messages, text, turn) {
    const before = this.render(messages.slice(0, turn), true).text, after = this.render(messages.slice(0, turn + 1)).text;
    if (!text.startsWith(after) || !after.startsWith(before))
      throw new PageError(`the chat template renders message ${turn} in another way once others follow; train on its last answer alone`);
    const bare = after.trimEnd();
    return [before.length, this.facts.special_texts.some((end) => bare.endsWith(end)) ? bare.length : after.length];
  }

  boundary(ids, text) {
    const head = this.encode(text);
    if (!head.every((id, i) => ids[i] === id)) throw new PageError("a token reaches across the beginning or end of an answer");
    return head.length;
  }
}

function marked(source) {
  const mark = (name, character) =>
    [new RegExp(`\\{%([-+]?)\\s*${name}\\s*([-+]?)%\\}`, "g"), `{%$1 if true %}{{ '${character}' }}{% endif $2%}`];
  return [mark("generation", BEGIN), mark("endgeneration", END)].reduce((text, [tag, by]) => text.replace(tag, by), source);
}

// A polynomial of token ids, modulo 2^32, in hexadecimal digits.
const digest = (ids) => ids.reduce((hash, id) => (Math.imul(hash, 0x01000193) + id + 1) >>> 0, 0).toString(16).padStart(8, "0");

// Every character of a block of 16 code points, beside itself, a letter, a digit and a space.
function blockText(block) {
  const points = Array.from({ length: 16 }, (_, i) => (block << 4) + i).filter((point) => point < 0xd800 || point > 0xdfff);
  return points.map((point) => String.fromCodePoint(point)).map((c) => `${c}${c}a${c}1 ${c}`).join("");
}

// Whether a rendered answer has all of its text, but for white space and the marks of reasoning.
function isWhole(content, text) {
  const squeeze = (part) => part.replace(/\s+/gu, "").toLowerCase(), whole = squeeze(text);
  return content.split(REASONING).every((part) => whole.includes(squeeze(part)));
}

const isEmpty = (value) => value === null || value === "" || (typeof value === "object" && !Object.keys(value).length);

// As in data/unread_columns.py.
function isHarmless(name, { names, ends, starts }) {
  const words = (name.match(/[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*/g) || [""]).map((word) => word.toLowerCase());
  return names.includes(name.trim().toLowerCase()) || name.startsWith("__") || ends.includes(words.at(-1)) || starts.includes(words[0]);
}

function refuseOthers(object, known, where = "") {
  const other = Object.keys(object).find((name) => !known.includes(name) && !isEmpty(object[name]));
  if (other !== undefined) throw new PageError(`${where}'${other}' is not read by the page; remove it, or train with wgpu-lora finetune`);
}

// A row as {messages, trained}, {prompt, answer} or {answer}.
function exampleOf(row, template, harmless) {
  const wrong = (why) => new PageError(why), text = (name) => {
    if (typeof row[name] !== "string") throw wrong(`'${name}' is not a text`);
    return row[name];
  };
  const has = (...names) => names.every((name) => row[name] !== undefined && row[name] !== null);
  const chat = (messages, first = 0) => {
    if (!template) throw wrong("the model has no chat template, so it takes no messages");
    if (!Array.isArray(messages) || !messages.length || !messages.every((one) => typeof one?.role === "string" && typeof one?.content === "string"))
      throw wrong("'messages' is not a list of objects with 'role' and 'content'");
    messages.forEach((message, i) => {
      refuseOthers(message, ["role", "content", "weight"], `message ${i}: `);
      if (!ROLES.includes(message.role)) throw wrong(`message ${i} has the role '${message.role}', but the roles are ${ROLES.join(", ")}`);
      if (![0, 1, true, false, null, undefined].includes(message.weight)) throw wrong(`the weight of message ${i} is not 0 or 1`);
    });
    const trained = messages.flatMap(({ role, content, weight }, i) =>
      (role === "assistant" && i >= first && (weight ?? 1) && content.trim() ? [i] : []));
    return { messages: messages.map(({ role, content }) => ({ role, content })), trained };
  };
  if (row === null || typeof row !== "object" || Array.isArray(row)) throw wrong("it is not an object");
  const only = (...names) => refuseOthers(row, [...names, ...Object.keys(row).filter(harmless)]);
  if (has("messages")) {
    only("messages", "system");
    const { messages, system } = row;
    return chat(system && messages[0]?.role !== "system" ? [{ role: "system", content: system }, ...messages] : messages);
  }
  if (has("prompt", "completion")) {
    only("prompt", "completion");
    if (Array.isArray(row.prompt) && Array.isArray(row.completion)) return chat([...row.prompt, ...row.completion], row.prompt.length);
    return { prompt: text("prompt"), answer: text("completion") };
  }
  if (has("instruction", "output")) {
    only("instruction", "output", "input", "system");
    const [instruction, output] = [text("instruction"), text("output")], { input = "", system = "" } = row;
    const before = system ? [{ role: "system", content: system }] : [], question = input ? `${instruction}\n\n${input}` : instruction;
    if (template) return chat([...before, { role: "user", content: question }, { role: "assistant", content: output }]);
    const task = input ? `${ALPACA}, paired with an input that provides further context. ` : `${ALPACA}. `;
    const asked = `${task}Write a response that appropriately completes the request.\n\n### Instruction:\n${instruction}\n\n`;
    return { prompt: `${system ? `${system}\n\n` : ""}${asked}${input ? `### Input:\n${input}\n\n` : ""}### Response:`, answer: output };
  }
  if (has("text")) {
    only("text");
    return { answer: text("text") };
  }
  throw wrong(`its keys are ${Object.keys(row).slice(0, 8).map((key) => `'${key}'`).join(", ") || "none"}, but rows need ${FORMATS}`);
}

// The rows of a text in JSONL, JSON or CSV, each with its line.
export function parseRows(source) {
  const text = source.replace(/^\ufeff/, ""), begin = text.trimStart()[0];
  if (begin === "{") return text.split("\n").flatMap((line, i) => (line.trim() ? [[i + 1, parseJson(line, `line ${i + 1}`)]] : []));
  if (begin === "[") return parseJson(text, "the text").map((row, i) => [i + 1, row]);
  const [header = [0, []], ...lines] = csvLines(text);
  return lines.map(([line, cells]) =>
    [line, Object.fromEntries(header[1].map((name, i) => [name.trim(), cells[i]]).filter(([, cell]) => cell))]);
}

function parseJson(text, where) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new PageError(`The rows cannot be read: ${where} is not JSON (${error.message}).`);
  }
}

function csvLines(text) {
  const lines = [];
  let cells = [], line = 1, first = 1, at = 0;
  for (const { 0: all, 1: quoted, 2: bare, 3: end, index } of text.matchAll(/(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\r?\n|$)/g)) {
    if (index !== at) throw new PageError(`The rows cannot be read: line ${line} is not CSV, in which quotes stand around whole cells.`);
    if (!all && !cells.length) break;
    at += all.length;
    cells.push(quoted === undefined ? bare : quoted.replaceAll('""', '"'));
    line += all.split("\n").length - 1;
    if (end === ",") continue;
    if (cells.some(Boolean)) lines.push([first, cells]);
    [cells, first] = [[], line];
  }
  return lines;
}

// {rows, notes}: rows that can be trained on, cut at `longest` tokens. Throws PageError.
export function readRows(source, text, longest) {
  const rows = [], bad = [], notes = [];
  let cut = 0, empty = 0;
  for (const [line, row] of parseRows(source)) {
    try {
      const { ids, labels, pieces } = text.tokenize(row);
      const whole = { ids: ids.slice(0, longest), labels: labels.slice(0, longest), pieces, line };
      cut += ids.length > longest;
      if (trainedTokens(whole)) rows.push(whole);
      else empty++;
    } catch (error) {
      if (!(error instanceof PageError)) throw error;
      bad.push(`line ${line}: ${error.message}`);
    }
  }
  const count = bad.length === 1 ? "A row" : `${bad.length} rows`;
  if (bad.length) throw new PageError(`${count} cannot be used; ${bad.slice(0, 3).join("; ")}.`);
  if (!rows.length) throw new PageError("There are no rows to train on: paste some, or choose a file.");
  if (cut) notes.push(`${cut} longer than ${longest} tokens are cut`);
  if (empty) notes.push(`${empty} with nothing to train on are left out`);
  return { rows, notes };
}
