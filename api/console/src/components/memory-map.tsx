/** The device's arena as a picture. The table below it says the same in words. */

import { useId, type ReactNode } from "react";
import type { Extent } from "../api/types.ts";
import { bytes, duration } from "../lib/format.ts";
import { piecesOf, sideBySide, type Piece, type Placed } from "../lib/memory-map.ts";
import { seriesColor } from "./chart.tsx";

const WIDTH = 1200;
const LINE = 34;
const GAP = 4;
const MIN_NUMBERED = 22;
const MAX_LINES = 8;

interface MapProps {
  extents: Extent[];
  /** Null where it tells of others: then only the tenant's own extents are drawn. */
  arenaBytes: number | null;
  colors: Map<string, number>;
  chosen: string | null;
  onChoose: (key: string) => void;
}

export function extentKey(extent: Extent): string {
  return `${extent.tenant} ${extent.digest}`;
}

/** The names of the versions with this content, or a composition; the digest of one that was just deleted. */
export function extentName(extent: { names: readonly string[]; composition: string | null; digest: string }): string {
  return extent.composition ?? (extent.names.join(", ") || extent.digest.slice(0, 12));
}

/** When it goes if room is needed: 1 is the first; null stays. */
export function turnOf({ eviction_order }: Extent): number | null {
  return eviction_order === null ? null : eviction_order + 1;
}

export function MemoryMap({ extents, arenaBytes, colors, chosen, onChoose }: MapProps): ReactNode {
  const hatch = useId();
  const placed: (Extent & Placed)[] = arenaBytes === null
    ? sideBySide(extents)
    : extents.flatMap((one) => (one.offset === null ? [] : [{ ...one, offset: one.offset }]));
  const size = arenaBytes ?? Math.max(1, placed.reduce((sum, one) => sum + one.bytes, 0));
  const numLines = Math.min(MAX_LINES, Math.max(1, Math.ceil(placed.length / 4)));
  const height = numLines * (LINE + GAP) - GAP;
  return (
    <svg className="memory-map" viewBox={`0 0 ${WIDTH} ${height}`} role="img"
      aria-label={`The arena with ${placed.length} extents; the table below lists them.`}>
      <defs>
        <pattern id={hatch} width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
          <rect className="hatch" width="2.5" height="7" />
        </pattern>
      </defs>
      {Array.from({ length: numLines }, (_, line) => (
        <rect key={line} className="free" x="0" y={line * (LINE + GAP)} width={WIDTH} height={LINE} rx="3" />
      ))}
      {piecesOf(placed, size, numLines).map((piece, i) => (
        <Drawn key={i} piece={piece} hatch={hatch} color={colors.get(piece.extent.tenant) ?? 1}
          isChosen={extentKey(piece.extent) === chosen} onChoose={() => onChoose(extentKey(piece.extent))} />
      ))}
    </svg>
  );
}

function Drawn({ piece, hatch, color, isChosen, onChoose }: {
  piece: Piece<Extent & Placed>;
  hatch: string;
  color: number;
  isChosen: boolean;
  onChoose: () => void;
}): ReactNode {
  const { extent, line, from, to, isLargest } = piece;
  const box = {
    x: from * WIDTH, y: line * (LINE + GAP), width: Math.max(1.5, (to - from) * WIDTH - 1), height: LINE,
  };
  const turn = turnOf(extent);
  return (
    <g className={isChosen ? "extent is-chosen" : "extent"} onClick={onChoose}>
      <title>{described(extent)}</title>
      <rect {...box} rx="2" style={{ fill: seriesColor(color) }} className={extent.state} />
      {extent.leases > 0 && <rect {...box} rx="2" fill={`url(#${hatch})`} />}
      {extent.pinned && <circle cx={box.x + 8} cy={box.y + 8} r="3.5" className="pin" />}
      {isLargest && turn !== null && box.width >= MIN_NUMBERED && (
        <text x={box.x + box.width / 2} y={box.y + LINE / 2}>{turn}</text>
      )}
      {isChosen && <rect {...box} rx="2" className="outline" />}
    </g>
  );
}

function described(extent: Extent): string {
  const facts = [
    `${extent.tenant}/${extentName(extent)}`,
    bytes(extent.bytes),
    extent.leases > 0 ? `${extent.leases} running` : extent.state,
    extent.pinned && "pinned",
    extent.leases === 0 && `idle for ${duration(extent.idle_seconds * 1000)}`,
    turnOf(extent) !== null && `number ${turnOf(extent)} to go`,
  ];
  return facts.filter(Boolean).join(", ");
}

/** What the picture's marks mean. */
export function MapLegend({ colors, hasOrder }: { colors: Map<string, number>; hasOrder: boolean }): ReactNode {
  const hatch = useId();
  return (
    <ul className="legend">
      {[...colors].map(([tenant, color]) => (
        <li key={tenant}><span className="swatch" style={{ background: seriesColor(color) }} />{tenant}</li>
      ))}
      <li>
        <svg className="key" viewBox="0 0 14 14" aria-hidden="true">
          <defs>
            <pattern id={hatch} width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
              <rect className="hatch" width="2" height="5" />
            </pattern>
          </defs>
          <rect width="14" height="14" className="plain" /><rect width="14" height="14" fill={`url(#${hatch})`} />
        </svg>
        leased: stays while its requests run
      </li>
      <li>
        <svg className="key" viewBox="0 0 14 14" aria-hidden="true">
          <rect width="14" height="14" className="plain" /><circle cx="7" cy="7" r="3.5" className="pin" />
        </svg>
        pinned
      </li>
      {hasOrder && <li><b>1, 2, …</b> eviction order</li>}
    </ul>
  );
}
