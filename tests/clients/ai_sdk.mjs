// Calls of Vercel's AI SDK to a server, as it comes: the argument is its URL. Prints what it gives back as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.argv[2]}/`);
const { generateObject, generateText, stepCountIs, streamObject, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const baseURL = `${process.argv[3]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  responses: openai("base"),
  chat: openai.chat("base"),
  compatible: createOpenAICompatible({ name: "own", baseURL, supportsStructuredOutputs: true, includeUsage: true })("base"),
};
const schema = z.object({
  kind: z.enum(["a", "b"]),
  count: z.number().int().min(0).max(99),
  names: z.array(z.string().max(5)).max(2),
  more: z.object({ ok: z.boolean() }).nullable(),
});
const tools = {
  weather: tool({
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ city, degrees: 21 }),
  }),
};
const result = {};
for (const [name, model] of Object.entries(models)) {
  const text = await generateText({ model, prompt: "Hi", maxRetries: 0 });
  const stream = streamText({ model, prompt: "Hi", maxRetries: 0 });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  const options = { model, prompt: "How warm is it in Oslo?", tools, stopWhen: stepCountIs(3), maxRetries: 0 };
  const called = await generateText(options);
  const calledInStream = streamText(options);
  await calledInStream.consumeStream();
  const object = await generateObject({ model, schema, prompt: "x", maxRetries: 0 });
  const objectInStream = streamObject({ model, schema, prompt: "x", maxRetries: 0 });
  for await (const part of objectInStream.partialObjectStream) void part;
  result[name] = {
    texts: [text.text, streamed],
    usage: [text.usage.outputTokens, (await stream.usage).outputTokens],
    reasoning: [text.reasoningText ?? "", (await stream.reasoningText) ?? ""],
    calls: [called.steps, await calledInStream.steps].map((steps) =>
      steps.flatMap((step) => step.toolResults.map((item) => item.output)),
    ),
    ends: [called.text, await calledInStream.text],
    objects: [object.object, await objectInStream.object].map((value) => schema.parse(value)),
  };
}
console.log(JSON.stringify(result));
