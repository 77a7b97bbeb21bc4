import OpenAI from "openai";
import { assert, run, script, url } from "./run.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: script.KEY, maxRetries: 0 });
const model = script.MODEL;
const ask = (content) => [{ role: "user", content }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", parameters } };

await run({
  async chat() {
    const answer = await client.chat.completions.create({ model, messages: ask("Hi") });
    assert.equal(answer.choices[0].message.content, script.HELLO);
    const response = await client.responses.create({ model, input: "Hi" });
    assert.equal(response.output_text, script.HELLO);
    const next = await client.responses.create({
      model, input: script.ASK_COUNT, previous_response_id: response.id,
    });
    assert.equal(next.output_text, script.COUNT);
  },
  async stream() {
    let text = "";
    for await (const part of await client.chat.completions.create({
      model, messages: ask(script.ASK_COUNT), stream: true,
    })) text += part.choices[0]?.delta.content ?? "";
    assert.equal(text, script.COUNT);
    const stream = client.responses.stream({ model, input: script.ASK_COUNT });
    assert.equal((await stream.finalResponse()).output_text, script.COUNT);
  },
  async tools() {
    const messages = ask(script.ASK_WEATHER);
    const answer = await client.chat.completions.create({ model, messages, tools: [tool] });
    const call = answer.choices[0].message.tool_calls[0];
    assert.deepEqual(JSON.parse(call.function.arguments), { city: script.CITY });
    const runner = client.chat.completions.runTools({
      model,
      messages,
      tools: [{
        type: "function",
        function: {
          name: "get_weather", parameters, parse: JSON.parse, function: () => script.WEATHER,
        },
      }],
    });
    assert.equal(await runner.finalContent(), script.WEATHER_ANSWER);
  },
  async structured() {
    const schema = {
      type: "object",
      properties: { name: { type: "string" }, population: { type: "integer" } },
      required: ["name", "population"],
      additionalProperties: false,
    };
    const answer = await client.chat.completions.create({
      model,
      messages: ask(script.ASK_TOWN),
      response_format: { type: "json_schema", json_schema: { name: "town", schema, strict: true } },
    });
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), script.TOWN);
  },
  async vectors() {
    const { data } = await client.embeddings.create({ model, input: ["one", "two", "one"] });
    assert.deepEqual(data[0].embedding, data[2].embedding);
    assert.notDeepEqual(data[0].embedding, data[1].embedding);
  },
});
