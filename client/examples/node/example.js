// Decode with the demo model, whose tokens are bytes: single steps, logits, a stream, a refusal.

import { Client, LatentdError } from "./client.js";

const PROMPT = "In the beginning ";
const STEPS = 5;
const STREAMED = 40;

const client = await Client.connect(process.env.LATENTD_ENDPOINT, {
  patienceMs: Number(process.env.PATIENCE_MS ?? 5000),
  tries: Number(process.env.TRIES ?? 4),
});
try {
  const slot = await client.open(Buffer.from(PROMPT), { sampling: { temperature: 0 } });
  const tokens = [slot.token];
  for (let count = 0; count < STEPS; count++) tokens.push((await slot.step()).token);

  const { token, logits } = await slot.step({ logits: true });
  tokens.push(token);
  const largest = logits.indexOf(logits.reduce((a, b) => Math.max(a, b)));
  console.log(`${logits.length} logits, the largest is that of ${largest}`);

  for await (const each of slot.stream({ max_steps: STREAMED, credit: 8 })) tokens.push(each);
  console.log(`text: ${JSON.stringify(Buffer.from(tokens).toString())}`);
  console.log(`length: ${slot.contextLen}, the stream's end: ${slot.end}`);

  try {
    await slot.step({ pos: 1 });
  } catch (error) {
    if (!(error instanceof LatentdError)) throw error;
    console.log(`refused: ${error.code}, the length is ${error.detail.context_len}`);
  }
  await slot.close();
} finally {
  await client.close();
}
