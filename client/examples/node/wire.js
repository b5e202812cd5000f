// Messages as bytes: one msgpack map as header, then raw tensor frames.

import { decode, encode } from "@msgpack/msgpack";

export const VERSION = 1;
export const MAX_HEADER_BYTES = 1 << 20;
const ARRAYS = {
  int32: Int32Array,
  float32: Float32Array,
  uint8: Uint8Array,
  uint32: Uint32Array,
  bfloat16: Uint16Array, // its bits
};
// Whole numbers of 64 bits are BigInts in both directions; all smaller ones are numbers.
const OPTIONS = { useBigInt64: true };

/** The frames of a message. `raw` has {dtype, shape, data}, data being the typed array of dtype. */
export function encodeMessage(header, raw = []) {
  const described = raw.length
    ? { ...header, raw: raw.map(({ dtype, shape }) => ({ dtype, shape })) }
    : header;
  const first = encode(described, OPTIONS);
  if (first.length > MAX_HEADER_BYTES) {
    throw new RangeError(`a header of ${first.length} bytes: at most ${MAX_HEADER_BYTES}`);
  }
  return [first, ...raw.map(({ data }) => bytesOf(data))];
}

function bytesOf(array) {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

/** Header and raw frames of a message, these as {dtype, shape, data}. */
export function decodeMessage([first, ...frames]) {
  const header = decode(first, OPTIONS);
  const raw = (header.raw ?? []).map(({ dtype, shape }, index) => {
    const bytes = Uint8Array.from(frames[index]); // a copy, aligned for every dtype
    return { dtype, shape: shape.map(Number), data: new ARRAYS[dtype](bytes.buffer) };
  });
  return { header, raw };
}

/** The tensor that a field's value names, or undefined. */
export function pick(value, raw) {
  return value?.raw === undefined ? undefined : raw[value.raw];
}
