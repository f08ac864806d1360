import { useQuery } from "@tanstack/react-query";
import { useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api } from "../api/client.ts";
import type { CachedAdapter, Extent, RankMemory, ServerMemory } from "../api/types.ts";
import { seriesColor } from "../components/chart.tsx";
import { Figures, Page, Panel } from "../components/layout.tsx";
import { extentKey, extentName, MapLegend, MemoryMap, turnOf } from "../components/memory-map.tsx";
import { EmptyState, Loaded } from "../components/states.tsx";
import { Badge, Meter, State, Time } from "../components/values.tsx";
import { versionAddress } from "../lib/addresses.ts";
import { bytes, count, duration, percent, plural } from "../lib/format.ts";
import { colorsByTenant } from "../lib/memory-map.ts";
import { useScope } from "../session.tsx";

const REFRESH_MS = 3_000;
const MAX_ROWS = 100;

export default function Memory(): ReactNode {
  const { tenant } = useScope();
  const query = useQuery({
    queryKey: ["memory", tenant],
    queryFn: ({ signal }) => tenant === null
      ? api("get", "/admin/memory", { signal })
      : api("get", "/v1/memory", { tenant, signal }),
    refetchInterval: REFRESH_MS,
  });
  return (
    <Page title="Memory" lead={tenant === null
      ? "The position of each adapter, its leases, and the eviction order."
      : `The memory that the adapters of ${tenant} use.`}>
      <Loaded query={query}>
        {({ servers }) => servers.length === 0 ? (
          <section className="panel">
            <EmptyState title="No server reports its memory" command="loraplex serve">
              A server appears here seconds after it has started.
            </EmptyState>
          </section>
        ) : servers.map((server) => <Server key={server.server_id} server={server} isOnly={servers.length === 1} />)}
      </Loaded>
    </Page>
  );
}

function Server({ server, isOnly }: { server: ServerMemory; isOnly: boolean }): ReactNode {
  const { device, kv, prefixes, border, host, disk, ranks, trainers } = server;
  const colors = useMemo(
    () => colorsByTenant([...device.extents, ...host.entries, ...disk.entries]),
    [device, host, disk],
  );
  return (
    <>
      {!isOnly && <div className="row"><h2>{server.server_id}</h2><span className="soft">seen <Time at={server.seen_at} /></span></div>}
      {ranks.length > 0 && <Ranks ranks={ranks} />}
      <Device device={device} colors={colors} />
      <Kv kv={kv} />
      {prefixes.length > 0 && <Prefixes tiers={prefixes} />}
      {border !== null && <Border border={border} />}
      {trainers.length > 0 && <Trainers trainers={trainers} />}
      <div className="columns">
        <Cache title="Host memory" cache={host} colors={colors} empty="No adapter is in host memory." />
        <Cache title="Disk cache" cache={disk} colors={colors} empty="No adapter is on this machine's disk." />
      </div>
    </>
  );
}

/** The processes that serve the base together. */
function Ranks({ ranks }: { ranks: RankMemory[] }): ReactNode {
  return (
    <Panel title="Ranks" note="the processes that serve the base together">
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Ranks">
        <table className="table cards">
          <thead>
            <tr>
              <th scope="col">Rank</th><th scope="col">Stage</th><th scope="col">Host</th><th scope="col" className="end">Resident</th>
              <th scope="col" className="end">Weights</th><th scope="col" className="end">KV cache</th>
              <th scope="col" className="end">Arena</th><th scope="col" className="end">Host memory</th>
              <th scope="col" className="end">Reported</th>
            </tr>
          </thead>
          <tbody>
            {ranks.map((one) => (
              <tr key={one.rank}>
                <td data-label="Rank">{one.rank}</td>
                <td data-label="Stage">{one.stage}</td>
                <td data-label="Host">{one.host}</td>
                <td data-label="Resident" className="end">{bytes(one.resident_bytes)}</td>
                <td data-label="Weights" className="end">{bytes(one.weight_bytes)}</td>
                <td data-label="KV cache" className="end">{bytes(one.kv_bytes)}</td>
                <td data-label="Arena" className="end">{bytes(one.arena_used_bytes)} of {bytes(one.arena_bytes)}</td>
                <td data-label="Host memory" className="end">{bytes(one.host_used_bytes)} of {bytes(one.host_bytes)}</td>
                <td data-label="Reported" className="end">{duration(one.age_seconds * 1000)} ago</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

/** The processes that train adapters beside the engine. */
function Trainers({ trainers }: { trainers: ServerMemory["trainers"] }): ReactNode {
  return (
    <Panel title="Trainers" note="the processes of fine-tuning jobs, each with its own copy of the base">
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Trainers">
        <table className="table cards">
          <thead>
            <tr>
              <th scope="col">Adapter</th><th scope="col">Job</th>
              <th scope="col" className="end">Resident</th><th scope="col" className="end">Step, estimated maximum</th>
            </tr>
          </thead>
          <tbody>
            {trainers.map((one) => (
              <tr key={one.job}>
                <td data-label="Adapter">{one.tenant}/{one.adapter}</td>
                <td data-label="Job">{one.job}</td>
                <td data-label="Resident" className="end">{bytes(one.resident_bytes)}</td>
                <td data-label="Step, estimated maximum" className="end">{one.step_bytes > 0 ? bytes(one.step_bytes) : "–"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Device({ device, colors }: { device: ServerMemory["device"]; colors: Map<string, number> }): ReactNode {
  const [chosen, setChosen] = useState<string | null>(null);
  const { extents, arena_bytes, fragmentation, free_bytes, largest_free_bytes, used_bytes } = device;
  const figures = [
    { label: "Used by adapters", value: bytes(used_bytes), note: arena_bytes === null ? undefined : `of ${bytes(arena_bytes)}` },
    ...(free_bytes === null ? [] : [
      { label: "Free", value: bytes(free_bytes) },
      { label: "Largest free block", value: bytes(largest_free_bytes) },
      { label: "Fragmentation", value: percent(fragmentation), note: "of the free bytes lie outside the largest free block" },
    ]),
    { label: "Leased", value: bytes(sum(extents.filter((one) => one.leases > 0))) },
    { label: "Pinned", value: bytes(sum(extents.filter((one) => one.pinned))) },
  ];
  return (
    <Panel title="Device arena" note={device.name}>
      <div className="stack">
        <Figures figures={figures} />
        {extents.length === 0 ? (
          <EmptyState title="No adapter is on the device" command="loraplex adapters prefetch NAME --wait">
            An adapter is loaded by its first request.
          </EmptyState>
        ) : (
          <>
            <div className="map-scroll" tabIndex={0} role="region" aria-label="Map of the arena">
              <MemoryMap extents={extents} arenaBytes={arena_bytes} colors={colors} chosen={chosen} onChoose={setChosen} />
            </div>
            <MapLegend colors={colors} hasOrder={arena_bytes !== null} />
            <Extents extents={extents} hasOrder={arena_bytes !== null} chosen={chosen} colors={colors} />
          </>
        )}
      </div>
    </Panel>
  );
}

const sum = (parts: { bytes: number }[]): number => parts.reduce((total, part) => total + part.bytes, 0);

/** The chosen extent first, then who goes first, then who stays. */
function ordered(extents: Extent[], chosen: string | null): Extent[] {
  const rank = (one: Extent): number =>
    extentKey(one) === chosen ? -1 : (one.eviction_order ?? Number.MAX_SAFE_INTEGER);
  return [...extents].sort((one, other) => rank(one) - rank(other) || (one.offset ?? 0) - (other.offset ?? 0));
}

function Extents({ extents, hasOrder, chosen, colors }: {
  extents: Extent[];
  /** Who goes first and what lies where is told; it would tell a tenant of others. */
  hasOrder: boolean;
  chosen: string | null;
  colors: Map<string, number>;
}): ReactNode {
  const rows = ordered(extents, chosen).slice(0, MAX_ROWS);
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label="Extents of the arena">
      <table className="table cards">
        <thead>
          <tr>
            {hasOrder && <th scope="col" className="end">Evict order</th>}
            <th scope="col">Adapter</th><th scope="col" className="end">Size</th>
            {hasOrder && <th scope="col" className="end">Offset</th>}
            <th scope="col">State</th><th scope="col" className="end">Leases</th>
            <th scope="col" className="end">Idle for</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((extent) => (
            <tr key={extentKey(extent)} aria-current={extentKey(extent) === chosen || undefined}>
              {hasOrder && <td data-label="Evict order" className="end">{turnOf(extent) ?? "stays"}</td>}
              <td data-label="Adapter"><Named entry={extent} color={colors.get(extent.tenant) ?? 1} /></td>
              <td data-label="Size" className="end">{bytes(extent.bytes)}</td>
              {hasOrder && <td data-label="Offset" className="end">{bytes(extent.offset)}</td>}
              <td data-label="State"><State state={extent.state} /> {extent.pinned && <Badge tone="accent">pinned</Badge>}</td>
              <td data-label="Leases" className="end">{count(extent.leases)}</td>
              <td data-label="Idle for" className="end">{extent.leases > 0 ? "–" : duration(extent.idle_seconds * 1000)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {extents.length > rows.length && <p className="pager">The first {rows.length} of {count(extents.length)}</p>}
    </div>
  );
}

/** Every version with this content, since one copy serves all of them, or the composition. */
function Named({ entry, color }: { entry: Extent | CachedAdapter; color: number }): ReactNode {
  return (
    <span className="named">
      <span className="swatch" style={{ background: seriesColor(color) }} />
      <span>
        {entry.composition !== null || entry.names.length === 0 ? `${entry.tenant}/${extentName(entry)}` : entry.names.map((name) => (
          <Link key={name} to={versionAddress(entry.tenant, name)}>{entry.tenant}/{name}</Link>
        ))}
      </span>
    </span>
  );
}

function Kv({ kv }: { kv: ServerMemory["kv"] }): ReactNode {
  const total = kv.num_blocks;
  const size = (blocks: number): string => `${count(blocks)} blocks, ${bytes(blocks * kv.bytes_per_block)}`;
  const shown = total ?? Math.max(1, kv.used_blocks);
  const users = [...kv.by_adapter].sort((one, other) => other.blocks - one.blocks);
  return (
    <Panel title="KV cache" note={`${kv.block_size} tokens a block, ${bytes(kv.bytes_per_block)} each`}>
      <div className="stack">
        <div className="bar" role="img" aria-label={`${size(kv.used_blocks)} in use${total === null ? "" : ` of ${size(total)}`}`}>
          <Slice part={kv.used_blocks} total={shown} color="var(--accent)" />
          <Slice part={kv.cached_blocks ?? 0} total={shown} color="var(--series-8)" />
        </div>
        <ul className="legend">
          <li><span className="swatch" style={{ background: "var(--accent)" }} />in use <b>{size(kv.used_blocks)}</b></li>
          {kv.cached_blocks !== null && (
            <li><span className="swatch" style={{ background: "var(--series-8)" }} />cached prefixes, evicted when needed <b>{size(kv.cached_blocks)}</b></li>
          )}
          {kv.free_blocks !== null && <li><span className="swatch" style={{ background: "var(--sunken)" }} />free <b>{size(kv.free_blocks)}</b></li>}
        </ul>
        {users.length > 0 && (
          <div className="table-wrap" tabIndex={0} role="region" aria-label="KV blocks by adapter">
            <table className="table">
              <thead><tr><th scope="col">Held for</th><th scope="col" className="end">Blocks</th><th scope="col" className="end">Size</th></tr></thead>
              <tbody>
                {users.slice(0, MAX_ROWS).map((user) => (
                  <tr key={`${user.tenant} ${user.adapter} ${user.version}`}>
                    <td>{user.tenant}/{user.adapter === null ? "the base model" : (user.composition ?? user.names.join(", "))}</td>
                    <td className="end">{count(user.blocks)}</td>
                    <td className="end">{bytes(user.blocks * kv.bytes_per_block)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
      </div>
    </Panel>
  );
}

/** Where prompts that were computed before are kept, the fastest tier first. */
function Prefixes({ tiers }: { tiers: ServerMemory["prefixes"] }): ReactNode {
  return (
    <Panel title="Prefix cache" note="cached prompts; counters since the engine's start">
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Prefix cache">
        <table className="table cards">
          <thead>
            <tr>
              <th scope="col">Tier</th><th scope="col" className="end">Used</th>
              <th scope="col" className="end">Tokens found</th><th scope="col" className="end">Copied in</th>
              <th scope="col" className="end">Copied back</th><th scope="col" className="end">Evicted blocks</th>
            </tr>
          </thead>
          <tbody>
            {tiers.map((one) => (
              <tr key={one.tier}>
                <td data-label="Tier">{one.tier}</td>
                <td data-label="Used" className="end">{bytes(one.used_bytes)} of {bytes(one.capacity_bytes)}</td>
                <td data-label="Tokens found" className="end">{count(one.hit_tokens)}</td>
                <td data-label="Copied in" className="end">{one.tier === "device" ? "–" : bytes(one.copied_in_bytes)}</td>
                <td data-label="Copied back" className="end">{one.tier === "device" ? "–" : bytes(one.copied_out_bytes)}</td>
                <td data-label="Evicted blocks" className="end">{count(one.evicted_blocks)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

/** How the memory is divided between KV cache and arena now. */
function Border({ border }: { border: NonNullable<ServerMemory["border"]> }): ReactNode {
  const { kv_cache_bytes: kv, arena_bytes: arena, moves } = border;
  return (
    <Panel title="KV cache and arena" note={`the border has moved ${plural(moves, "time")}`}>
      <div className="stack">
        <div className="bar" role="img" aria-label={`KV cache ${bytes(kv)}, arena ${bytes(arena)}`}>
          <Slice part={kv} total={Math.max(1, kv + arena)} color="var(--accent)" />
          <Slice part={arena} total={Math.max(1, kv + arena)} color="var(--series-8)" />
        </div>
        <ul className="legend">
          <li><span className="swatch" style={{ background: "var(--accent)" }} />KV cache <b>{bytes(kv)}</b></li>
          <li><span className="swatch" style={{ background: "var(--series-8)" }} />adapters <b>{bytes(arena)}</b></li>
        </ul>
      </div>
    </Panel>
  );
}

function Slice({ part, total, color }: { part: number; total: number; color: string }): ReactNode {
  return <span style={{ width: `${(100 * part) / total}%`, background: color }} />;
}

function Cache({ title, cache, colors, empty }: {
  title: string;
  cache: ServerMemory["host"];
  colors: Map<string, number>;
  empty: string;
}): ReactNode {
  const entries = [...cache.entries].sort((one, other) => other.bytes - one.bytes);
  const capacity = cache.capacity_bytes;
  return (
    <Panel title={title} note={capacity === null ? bytes(cache.used_bytes) : `${bytes(cache.used_bytes)} of ${bytes(capacity)}`}>
      <div className="stack">
        {capacity !== null && <Meter label={`${title} in use`} value={cache.used_bytes} max={capacity} />}
        {entries.length === 0 ? <p className="soft">{empty}</p> : (
          <div className="table-wrap" tabIndex={0} role="region" aria-label={`Adapters: ${title}`}>
            <table className="table">
              <thead><tr><th scope="col">Adapter</th><th scope="col" className="end">Size</th><th scope="col">Held</th></tr></thead>
              <tbody>
                {entries.slice(0, MAX_ROWS).map((entry) => (
                  <tr key={`${entry.tenant} ${entry.digest}`}>
                    <td><Named entry={entry} color={colors.get(entry.tenant) ?? 1} /></td>
                    <td className="end">{bytes(entry.bytes)}</td>
                    <td>{entry.pinned ? <Badge tone="accent">pinned</Badge> : entry.leases > 0 ? "in use" : ""}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
      </div>
    </Panel>
  );
}
