/**
 * SHA-256 (FIPS 180-4) of data that comes in pieces.
 *
 * The browser's own digest wants all of it in memory at once; weights may be larger than that.
 */

const BLOCK = 64;
const ROUND = constants();

/** The fractional parts of the cube roots of the first 64 primes. */
function constants(): Uint32Array {
  const words = new Uint32Array(64);
  for (let candidate = 2, found = 0; found < 64; candidate += 1) {
    if (!isPrime(candidate)) continue;
    words[found] = (Math.cbrt(candidate) % 1) * 2 ** 32;
    found += 1;
  }
  return words;
}

function isPrime(number: number): boolean {
  for (let divisor = 2; divisor * divisor <= number; divisor += 1) {
    if (number % divisor === 0) return false;
  }
  return true;
}

export class Sha256 {
  private readonly state = Uint32Array.of(
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
  );
  private readonly schedule = new Uint32Array(64);
  private readonly rest = new Uint8Array(BLOCK);
  private numRest = 0;
  private numBytes = 0;

  update(data: Uint8Array): this {
    this.numBytes += data.length;
    let at = 0;
    if (this.numRest > 0) {
      at = Math.min(BLOCK - this.numRest, data.length);
      this.rest.set(data.subarray(0, at), this.numRest);
      this.numRest += at;
      if (this.numRest < BLOCK) return this;
      this.compress(this.rest, 0);
      this.numRest = 0;
    }
    for (; at + BLOCK <= data.length; at += BLOCK) this.compress(data, at);
    this.rest.set(data.subarray(at));
    this.numRest = data.length - at;
    return this;
  }

  /** The digest in hexadecimal. Nothing may be added after it. */
  hex(): string {
    const numBytes = this.numBytes;
    const padding = new Uint8Array(((this.numRest < 56 ? 56 : 120) - this.numRest) + 8);
    padding[0] = 0x80;
    const view = new DataView(padding.buffer);
    view.setUint32(padding.length - 8, Math.floor(numBytes / 2 ** 29));
    view.setUint32(padding.length - 4, (numBytes * 8) >>> 0);
    this.update(padding);
    return Array.from(this.state, (word) => word.toString(16).padStart(8, "0")).join("");
  }

  private compress(data: Uint8Array, at: number): void {
    const w = this.schedule;
    const s = this.state;
    for (let i = 0, j = at; i < 16; i += 1, j += 4) {
      w[i] = (data[j]! << 24) | (data[j + 1]! << 16) | (data[j + 2]! << 8) | data[j + 3]!;
    }
    for (let i = 16; i < 64; i += 1) {
      const x = w[i - 15]!;
      const y = w[i - 2]!;
      const small = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const large = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16]! + small + w[i - 7]! + large) | 0;
    }
    let a = s[0]! | 0, b = s[1]! | 0, c = s[2]! | 0, d = s[3]! | 0;
    let e = s[4]! | 0, f = s[5]! | 0, g = s[6]! | 0, h = s[7]! | 0;
    for (let i = 0; i < 64; i += 1) {
      const fromE = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const first = (h + fromE + ((e & f) ^ (~e & g)) + ROUND[i]! + w[i]!) | 0;
      const fromA = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const second = (fromA + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + first) | 0;
      d = c;
      c = b;
      b = a;
      a = (first + second) | 0;
    }
    s[0]! += a; s[1]! += b; s[2]! += c; s[3]! += d;
    s[4]! += e; s[5]! += f; s[6]! += g; s[7]! += h;
  }
}
