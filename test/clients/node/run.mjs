// Runs the scenarios of a client: `node CLIENT.mjs URL SCRIPT SCENARIO...`; SCRIPT is what the model
// says (script.py as JSON). The exit status is the number that failed.
import assert from "node:assert/strict";

export const [url, script, ...names] = [process.argv[2], JSON.parse(process.argv[3]), ...process.argv.slice(4)];
export { assert };

export async function run(scenarios) {
  let failed = 0;
  for (const name of names) {
    try {
      await scenarios[name]();
    } catch (error) {
      failed += 1;
      console.error(`--- ${name}`, error);
    }
  }
  process.exit(failed);
}
