import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, run, script, url } from "./run.mjs";

const options = { baseURL: `${url}/v1`, apiKey: script.KEY };
// The SDK's default for OpenAI is the Responses API; the compatible provider uses chat.
const models = [
  createOpenAI(options)(script.MODEL),
  createOpenAICompatible({ ...options, name: "ours", supportsStructuredOutputs: true })(script.MODEL),
];
const common = { maxRetries: 0 };
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      assert.equal(city, script.CITY);
      return script.WEATHER;
    },
  }),
};

await run({
  async chat() {
    for (const model of models) {
      const { text } = await generateText({ ...common, model, prompt: "Hi" });
      assert.equal(text, script.HELLO);
    }
  },
  async stream() {
    for (const model of models) {
      const { textStream } = streamText({ ...common, model, prompt: script.ASK_COUNT });
      let text = "";
      for await (const part of textStream) text += part;
      assert.equal(text, script.COUNT);
    }
  },
  async tools() {
    for (const model of models) {
      const result = await generateText({
        ...common, model, tools, prompt: script.ASK_WEATHER, stopWhen: stepCountIs(3),
      });
      assert.equal(result.text, script.WEATHER_ANSWER);
      const stream = streamText({
        ...common, model, tools, prompt: script.ASK_WEATHER, stopWhen: stepCountIs(3),
      });
      assert.ok((await stream.text).endsWith(script.WEATHER_ANSWER));
    }
  },
  async structured() {
    const schema = z.object({ name: z.string(), population: z.number().int() });
    for (const model of models) {
      const { output } = await generateText({
        ...common, model, prompt: script.ASK_TOWN, output: Output.object({ schema }),
      });
      assert.deepEqual(output, script.TOWN);
    }
  },
});
