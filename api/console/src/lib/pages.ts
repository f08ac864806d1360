/** Lists that the server gives in pages, one page in sight. */

import { keepPreviousData, useQuery, type QueryKey } from "@tanstack/react-query";
import { useState } from "react";
import type { Rows } from "../components/data-table.tsx";
import type { PageOf } from "./every-row.ts";

export interface PagesOptions {
  /** Milliseconds after which the page in sight is asked for again. */
  refetchInterval?: number;
  enabled?: boolean;
}

interface Position {
  list: string;
  /** Where each page up to the one in sight began. */
  cursors: string[];
}

/**
 * The rows of the page in sight, and how to go to its neighbours.
 *
 * `key` names the list with all that narrows or orders it: another list begins at its first page.
 * `load` gets the cursor behind which the page begins; undefined is the first.
 */
export function usePages<T>(
  key: QueryKey,
  load: (after: string | undefined, signal: AbortSignal) => Promise<PageOf<T>>,
  options: PagesOptions = {},
): Rows<T> {
  const list = JSON.stringify(key);
  const [position, setPosition] = useState<Position>({ list, cursors: [] });
  const cursors = position.list === list ? position.cursors : [];
  const after = cursors.at(-1);
  const query = useQuery({
    queryKey: [...key, after],
    queryFn: ({ signal }) => load(after, signal),
    placeholderData: keepPreviousData,
    ...options,
  });
  const page = query.data;
  const goTo = (next: string[]) => () => setPosition({ list, cursors: next });
  return {
    rows: page?.data,
    error: query.error,
    isStale: query.isPlaceholderData,
    refetch: query.refetch,
    previous: cursors.length > 0 ? goTo(cursors.slice(0, -1)) : undefined,
    // Rows that stand in for those asked for say nothing of what comes after these.
    next: !query.isPlaceholderData && page?.has_more && page.next_after
      ? goTo([...cursors, page.next_after]) : undefined,
  };
}
