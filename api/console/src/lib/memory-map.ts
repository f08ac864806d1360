/** An arena laid out in lines, as a text is: where each extent of it is drawn. */

export interface Placed {
  offset: number;
  bytes: number;
}

export interface Piece<E> {
  extent: E;
  /** From 0, at the top. */
  line: number;
  /** Within the line, from 0 to 1. */
  from: number;
  to: number;
  /** The piece with most room for writing on it. */
  isLargest: boolean;
}

/** The pieces of `extents` in `numLines` lines of an arena of `size` bytes. */
export function piecesOf<E extends Placed>(extents: readonly E[], size: number, numLines: number): Piece<E>[] {
  const perLine = size / numLines;
  return extents.flatMap((extent) => {
    const end = Math.min(size, extent.offset + extent.bytes);
    const pieces: Piece<E>[] = [];
    for (let line = Math.floor(extent.offset / perLine); line < numLines && line * perLine < end; line += 1) {
      const from = Math.max(0, extent.offset / perLine - line);
      const to = Math.min(1, end / perLine - line);
      if (to > from) pieces.push({ extent, line, from, to, isLargest: false });
    }
    const largest = pieces.reduce<Piece<E> | undefined>(
      (best, piece) => (best && best.to - best.from >= piece.to - piece.from ? best : piece), undefined,
    );
    if (largest) largest.isLargest = true;
    return pieces;
  });
}

/** Extents without a known place, side by side. */
export function sideBySide<E extends { bytes: number }>(extents: readonly E[]): (E & Placed)[] {
  let offset = 0;
  return extents.map((extent) => {
    const placed = { ...extent, offset };
    offset += extent.bytes;
    return placed;
  });
}

/** A colour for each tenant, from 1: those who hold most differ for certain. */
export function colorsByTenant(holdings: readonly { tenant: string; bytes: number }[]): Map<string, number> {
  const sums = new Map<string, number>();
  for (const { tenant, bytes } of holdings) sums.set(tenant, (sums.get(tenant) ?? 0) + bytes);
  const ordered = [...sums].sort(([name, held], [other, more]) => more - held || (name < other ? -1 : 1));
  return new Map(ordered.map(([tenant], i) => [tenant, (i % 8) + 1]));
}
