/** Tables of the server's pages: what is sorted, filtered and paged is so on the server. */

import {
  flexRender, getCoreRowModel, useReactTable, type ColumnDef, type Header, type RowData,
} from "@tanstack/react-table";
import type { ReactNode } from "react";
import { Button } from "./button.tsx";
import { ErrorState, Loading } from "./states.tsx";

declare module "@tanstack/react-table" {
  interface ColumnMeta<TData extends RowData, TValue> {
    /** Numbers stand at the right. */
    end?: boolean;
    /** What the server calls the orders by this column; without any it can't be sorted by. */
    sort?: { ascending?: string; descending?: string };
  }
}

// The value's type differs from column to column.
export type Columns<T> = ColumnDef<T, any>[];

export interface Rows<T> {
  rows: T[] | undefined;
  error: unknown;
  /** Older rows are shown until those asked for are there. */
  isStale: boolean;
  refetch: () => unknown;
  previous?: (() => void) | undefined;
  next?: (() => void) | undefined;
}

interface DataTableProps<T> {
  /** What the table holds, for screen readers. */
  caption: string;
  columns: Columns<T>;
  source: Rows<T>;
  rowId: (row: T) => string;
  empty: ReactNode;
  /** The server's name of the order in force. */
  sort?: string;
  onSort?: (sort: string) => void;
}

export function DataTable<T>(props: DataTableProps<T>): ReactNode {
  const { caption, columns, source, rowId, empty, sort, onSort } = props;
  const table = useReactTable({
    data: source.rows ?? [],
    columns,
    getRowId: rowId,
    getCoreRowModel: getCoreRowModel(),
    manualSorting: true,
    manualPagination: true,
    manualFiltering: true,
  });
  if (source.rows === undefined) {
    if (!source.error) return <Loading />;
    return <ErrorState error={source.error} onRetry={() => void source.refetch()} />;
  }
  return (
    <>
      {source.error !== null && source.error !== undefined && <ErrorState error={source.error} />}
      {source.rows.length === 0 ? empty : (
        // Reachable by keyboard, so that what is cut off can be scrolled to.
        <div className="table-wrap" tabIndex={0} role="region" aria-label={caption}>
          <table className={source.isStale ? "table is-stale" : "table"}>
            <caption className="visually-hidden">{caption}</caption>
            <thead>
              <tr>
                {table.getFlatHeaders().map((header) => (
                  <HeaderCell key={header.id} header={header} sort={sort} onSort={onSort} />
                ))}
              </tr>
            </thead>
            <tbody>
              {table.getRowModel().rows.map((row) => (
                <tr key={row.id}>
                  {row.getVisibleCells().map((cell) => (
                    <td key={cell.id} className={cell.column.columnDef.meta?.end ? "end" : undefined}>
                      {flexRender(cell.column.columnDef.cell, cell.getContext())}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {(source.previous || source.next) && (
        <div className="pager">
          <Button small disabled={!source.previous} onClick={source.previous}>Previous</Button>
          <Button small disabled={!source.next} onClick={source.next}>Next</Button>
        </div>
      )}
    </>
  );
}

function HeaderCell<T>({ header, sort, onSort }: {
  header: Header<T, unknown>;
  sort: string | undefined;
  onSort: ((sort: string) => void) | undefined;
}): ReactNode {
  const meta = header.column.columnDef.meta;
  const text = flexRender(header.column.columnDef.header, header.getContext());
  const className = meta?.end ? "end" : undefined;
  const orders = meta?.sort;
  const first = orders?.ascending ?? orders?.descending;
  if (orders === undefined || first === undefined || !onSort) {
    return <th scope="col" className={className}>{text}</th>;
  }
  const direction = directionOf(orders, sort);
  const arrow = { ascending: "↑", descending: "↓", none: "" }[direction];
  const next = direction === "ascending" ? (orders.descending ?? first) : first;
  return (
    <th scope="col" className={className} aria-sort={direction}>
      <button type="button" onClick={() => onSort(next)}>
        {text}<span aria-hidden="true">{arrow}</span>
      </button>
    </th>
  );
}

function directionOf(
  orders: { ascending?: string; descending?: string },
  sort: string | undefined,
): "ascending" | "descending" | "none" {
  if (sort !== undefined && sort === orders.ascending) return "ascending";
  return sort !== undefined && sort === orders.descending ? "descending" : "none";
}
