// Hold wire.js against the frames that are published beside the protocol page:
//
//     node vectors.js ../../../docs/protocol-vectors.json

import { deepStrictEqual } from "node:assert";
import { readFileSync } from "node:fs";
import { decodeMessage, encodeMessage } from "./wire.js";

const { messages } = JSON.parse(readFileSync(process.argv[2], "utf8"));

/** Whole numbers over 32 bits as wire.js has them. */
function wide(value) {
  if (Number.isInteger(value) && value >= 2 ** 32) return BigInt(value);
  if (Array.isArray(value)) return value.map(wide);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, wide(inner)]));
}

let same = 0;
for (const message of messages) {
  const frames = message.frames.map((frame) => Buffer.from(frame, "hex"));
  const { header, raw } = decodeMessage(frames);
  deepStrictEqual(header, wide(message.header));
  const { raw: described, ...bare } = header;
  const written = encodeMessage(bare, raw).map((frame) => Buffer.from(frame));
  deepStrictEqual(decodeMessage(written), { header, raw });
  same += Buffer.concat(written).equals(Buffer.concat(frames));
}
// The others hold floats that are whole: JavaScript has no 1.0 besides 1, and numbers of any type
// will do.
console.log(`${messages.length} messages, ${same} of them written byte for byte`);
