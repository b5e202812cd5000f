// Requests and their replies over one DEALER, and what is done when no reply comes.

import { setTimeout as sleep } from "node:timers/promises";
import { Dealer } from "zeromq";
import { VERSION, decodeMessage, encodeMessage } from "./wire.js";

/** The daemon refused (`code` is the reply's status, `detail` its other fields), or no reply came
 * in spite of all repetitions (`code` is "connection_lost"): then the request may have run. */
export class LatentdError extends Error {
  constructor(code, message, detail = {}) {
    super(`${code}: ${message}`);
    this.name = "LatentdError";
    this.code = code;
    this.detail = detail;
  }
}

/** The error of a reply whose status is a code. */
export function refusal({ v, id, status, error, ...detail }) {
  return new LatentdError(status, error, detail);
}

/** The replies to one request, in their order. */
class Replies {
  #arrived = [];
  #wake = () => {};

  push(reply) {
    this.#arrived.push(reply);
    this.#wake();
  }

  /** The next reply, or undefined if none comes in time. */
  async take(patienceMs) {
    if (!this.#arrived.length) {
      let timer;
      await new Promise((resolve) => {
        this.#wake = resolve;
        timer = setTimeout(resolve, patienceMs);
      });
      clearTimeout(timer);
    }
    return this.#arrived.shift();
  }
}

export class Connection {
  #socket;
  #waiting = new Map(); // Replies by the id of their request
  #lastId = 0;
  #sent = Promise.resolve();

  /** `patienceMs` is how long a reply may take before the request is repeated, `tries` how often it
   * is sent. */
  constructor(endpoint, { patienceMs = 5000, tries = 4 } = {}) {
    this.patienceMs = patienceMs;
    this.tries = tries;
    this.maxFrameBytes = Infinity; // hello tells
    this.#socket = new Dealer({ immediate: true, linger: 0, sendTimeout: patienceMs });
    this.#socket.connect(endpoint);
    this.#read();
  }

  async #read() {
    for await (const frames of this.#socket) {
      const reply = decodeMessage(frames);
      this.#waiting.get(reply.header.id)?.push(reply); // one that nobody waits for is late
    }
  }

  /** Send a request; returns its id and where its replies come. `end` it when no more are
   * wanted. */
  begin(op, fields, raw = [], replies = new Replies()) {
    const id = ++this.#lastId;
    const frames = encodeMessage({ v: VERSION, id, op, ...fields }, raw);
    const longest = Math.max(...frames.map((frame) => frame.length));
    if (longest > this.maxFrameBytes) {
      throw new RangeError(`a frame of ${longest} bytes: at most ${this.maxFrameBytes}`);
    }
    this.#waiting.set(id, replies);
    // One after another; what cannot be sent in time is repeated like what is not answered in time.
    this.#sent = this.#sent.then(() => this.#socket.send(frames)).catch(() => {});
    return { id, take: () => replies.take(this.patienceMs), end: () => this.#waiting.delete(id) };
  }

  /** The one reply to a request, which is repeated until it comes: the daemon runs it once, since
   * its fields (`pos` or `key`) are the same. Throws LatentdError. */
  async request(op, fields, raw = [], tries = this.tries) {
    const replies = new Replies();
    const sent = [];
    try {
      for (let count = 0; count < tries; count++) {
        sent.push(this.begin(op, fields, raw, replies));
        const reply = await sent.at(-1).take();
        if (reply === undefined) continue;
        if (reply.header.status === "ok") return reply;
        if (reply.header.status !== "busy" || count + 1 === tries) throw refusal(reply.header);
        await sleep(1000 * (reply.header.retry_after_s ?? 0.1));
      }
    } finally {
      for (const each of sent) each.end(); // the reply to any of them will have done
    }
    throw this.lost(op);
  }

  lost(op) {
    const waited = (this.patienceMs * this.tries) / 1000;
    return new LatentdError("connection_lost", `no reply to ${op} within ${waited} s`);
  }

  close() {
    this.#socket.close();
  }
}
