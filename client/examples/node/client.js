// A session and its slots.

import { randomUUID } from "node:crypto";
import { Connection, LatentdError, refusal } from "./connection.js";
import { VERSION, pick } from "./wire.js";

export { LatentdError };

export class Client {
  #control;
  #renewing;

  /** Say hello. `options`: see Connection. */
  static async connect(endpoint = "ipc:///run/latentd/latentd.sock", options = {}) {
    const data = new Connection(endpoint, options);
    try {
      const hello = { versions: [VERSION, VERSION], client: "latentd-node-example" };
      return new Client(data, (await data.request("hello", hello)).header);
    } catch (error) {
      data.close();
      throw error;
    }
  }

  constructor(data, info) {
    this.data = data;
    this.info = info; // hello's reply: model, limits, features, ...
    data.maxFrameBytes = info.limits.max_frame_bytes;
    this.#control = new Connection(info.control);
    this.#renewing = setInterval(() => this.#renew(), (1000 * info.lease_s) / 3);
    this.#renewing.unref();
  }

  /** Renew the lease on the control socket, or where that does not answer on the data socket. */
  async #renew() {
    const fields = { session: this.info.session };
    for (const connection of [this.#control, this.data]) {
      try {
        return await connection.request("ping", fields, [], 1);
      } catch {} // the next one, the next time; a lost lease is what the next step meets
    }
  }

  request(op, fields, raw) {
    return this.data.request(op, { session: this.info.session, ...fields }, raw);
  }

  begin(op, fields) {
    return this.data.begin(op, { session: this.info.session, ...fields });
  }

  /** A slot with a prompt of token ids. `fields`: sampling, logits, salt, deadline_s, ... */
  async open(prompt, fields = {}) {
    const raw = [{ dtype: "int32", shape: [prompt.length], data: Int32Array.from(prompt) }];
    const named = { key: randomUUID(), prompt: { raw: 0 }, ...fields };
    return new Slot(this, await this.request("open", named, raw));
  }

  /** Close all slots and the session. */
  async close() {
    clearInterval(this.#renewing);
    try {
      await this.request("close", {});
    } finally {
      this.#control.close();
      this.data.close();
    }
  }
}

export class Slot {
  #client;
  #name; // {slot, epoch}

  constructor(client, { header, raw }) {
    this.#client = client;
    this.#name = { slot: header.slot, epoch: header.epoch };
    this.contextLen = header.context_len;
    this.token = header.token; // the last one sampled
    this.logits = pick(header.logits, raw)?.data;
    this.end = undefined; // of the last stream
  }

  get #seat() {
    return { ...this.#name, pos: this.contextLen };
  }

  /** Append a token (`fields.token`, or the last sampled one) and sample the next. Returns the
   * reply's fields, logits as a Float32Array if asked for. After "connection_lost" the same call
   * may be made again: the length, and so `pos`, is the same. */
  async step(fields = {}) {
    const { header, raw } = await this.#client.request("step", { ...this.#seat, ...fields });
    this.contextLen = header.context_len;
    this.token = header.token;
    return { ...header, logits: pick(header.logits, raw)?.data };
  }

  /** Tokens as they are sampled, at most `max_steps`; the daemon may be `credit` of them ahead.
   * Whoever leaves the loop early finds the slot at the length that the daemon had come to. Behind
   * the loop `end` says why it ended: "max_steps", "stop", "draining", ... */
  async *stream({ credit = 64, ...fields }) {
    const stream = new TokenStream(this.#client, this.#seat, fields, credit);
    try {
      for await (const token of stream.tokens()) {
        yield token;
      }
    } finally {
      await stream.finish();
      this.contextLen = stream.contextLen;
      this.token = stream.token ?? this.token;
      this.end = stream.end;
    }
  }

  /** Forget the tokens from position `to` on. The next step must name its token. */
  async truncate(to) {
    const { header } = await this.#client.request("truncate", { ...this.#seat, to });
    this.contextLen = header.context_len;
    this.token = null;
  }

  async close() {
    await this.#client.request("close", this.#name);
  }
}

/** One stream, over as many connections and requests as it takes. */
class TokenStream {
  #client;
  #seat;
  #fields;
  #credit;
  #running;
  #used = 0; // tokens read since credit was last granted
  #silent = 0; // requests in a row without a frame that could be used
  #arrived; // the length as of the last token that has arrived
  #isOver = false;

  constructor(client, seat, fields, credit) {
    this.#client = client;
    this.#seat = seat;
    this.#fields = fields;
    this.#credit = credit;
    this.#arrived = seat.pos;
    this.contextLen = seat.pos;
    this.token = undefined;
    this.end = undefined;
    this.#running = client.begin("stream", { ...seat, ...fields, credit });
  }

  async *tokens() {
    while (!this.#isOver) {
      for (const token of await this.#next()) {
        yield token;
        this.#grant();
      }
    }
  }

  /** The tokens of the next frame. */
  async #next() {
    const reply = await this.#running.take();
    if (reply === undefined) {
      this.#again();
      return [];
    }
    const { header } = reply;
    if (header.status !== "ok") {
      this.#isOver = true;
      throw refusal(header);
    }
    const { pos, tokens = [] } = header;
    if (tokens.length && pos !== this.#arrived + 1) {
      this.#again(); // a frame is missing
      return [];
    }
    this.#silent = 0;
    this.#isOver = !header.more;
    this.#arrived += tokens.length;
    this.token = tokens.at(-1) ?? this.token;
    this.contextLen = header.context_len;
    this.end = header.end;
    return tokens;
  }

  /** Nothing came in time: go on behind what has arrived, or make the same request again. */
  #again() {
    const { data } = this.#client;
    this.#running.end();
    if (++this.#silent === data.tries) {
      this.#isOver = true;
      throw data.lost("stream");
    }
    this.#used = 0;
    this.#running = this.#arrived > this.#seat.pos
      ? this.#client.begin("resume", { ...this.#seat, pos: this.#arrived, credit: this.#credit })
      : this.#client.begin("stream", { ...this.#seat, ...this.#fields, credit: this.#credit });
  }

  /** Grant as much as has been read, when that is half of the credit. */
  #grant() {
    if (++this.#used < this.#credit / 2 || this.#isOver) return;
    const granted = this.#client.begin("credit", { stream: this.#running.id, n: this.#used });
    granted.end(); // whether it arrives shows in the stream
    this.#used = 0;
  }

  /** Have the daemon stop, if it has not, and read to the end, so that the length is known. */
  async finish() {
    if (!this.#isOver) {
      await this.#client.request("cancel", { request: this.#running.id });
      while (!this.#isOver) await this.#next();
    }
    this.#running.end();
  }
}
