/** Tables of the server's pages: what is sorted, filtered and paged is so on the server. */

import {
  flexRender, getCoreRowModel, useReactTable, type Cell, type Column, type ColumnDef, type Header, type Row, type RowData,
  type RowSelectionState, type Table,
} from "@tanstack/react-table";
import { useState, type ReactNode } from "react";
import { plural } from "../lib/format.ts";
import { Button } from "./button.tsx";
import { ErrorState } from "./states.tsx";

declare module "@tanstack/react-table" {
  interface ColumnMeta<TData extends RowData, TValue> {
    /** Numbers stand at the right. */
    end?: boolean;
    /** What the column is called beside its value on a phone, where the header is no text. */
    label?: string;
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

/** Actions on several rows at once. */
export interface Bulk<T> {
  /** Rows that it does not apply to can't be selected. */
  applies: (row: T) => boolean;
  /** What a row is called to screen readers. */
  name: (row: T) => string;
  /** The buttons; `clear` ends the selection. */
  actions: (rows: T[], clear: () => void) => ReactNode;
}

const SKELETON_ROWS = 6;

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
  bulk?: Bulk<T> | undefined;
}

export function DataTable<T>(props: DataTableProps<T>): ReactNode {
  const { caption, columns, source, rowId, empty, sort, onSort, bulk } = props;
  const [rowSelection, setRowSelection] = useState<RowSelectionState>({});
  const table = useReactTable({
    data: source.rows ?? [],
    columns: bulk ? [selectionOf(bulk), ...columns] : columns,
    state: { rowSelection },
    onRowSelectionChange: setRowSelection,
    enableRowSelection: (row) => bulk?.applies(row.original) ?? false,
    getRowId: rowId,
    getCoreRowModel: getCoreRowModel(),
    manualSorting: true,
    manualPagination: true,
    manualFiltering: true,
  });
  if (source.rows === undefined) {
    if (!source.error) return <Skeleton caption={caption} table={table} />;
    return <ErrorState error={source.error} onRetry={() => void source.refetch()} />;
  }
  // What was selected and is no longer on the page is not acted on.
  const selected = table.getRowModel().rows.filter((row) => row.getIsSelected()).map((row) => row.original);
  return (
    <>
      {bulk && selected.length > 0 && (
        <div className="bulk" role="group" aria-label="Selected rows">
          <span role="status">{plural(selected.length, "row")} selected</span>
          {bulk.actions(selected, () => setRowSelection({}))}
          <Button small tone="plain" onClick={() => setRowSelection({})}>Clear</Button>
        </div>
      )}
      {source.error !== null && source.error !== undefined && <ErrorState error={source.error} />}
      {source.rows.length === 0 ? empty : (
        // Reachable by keyboard, so that what is cut off can be scrolled to.
        <div className="table-wrap" tabIndex={0} role="region" aria-label={caption}>
          <table className={source.isStale ? "table cards is-stale" : "table cards"} role="table">
            <caption className="visually-hidden">{caption}</caption>
            <thead role="rowgroup">
              <tr role="row">
                {table.getFlatHeaders().map((header) => (
                  <HeaderCell key={header.id} header={header} sort={sort} onSort={onSort} />
                ))}
              </tr>
            </thead>
            <tbody role="rowgroup">
              {table.getRowModel().rows.map((row) => <BodyRow key={row.id} row={row} />)}
            </tbody>
            <Totals table={table} />
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

/** The selection's own column. */
function selectionOf<T>(bulk: Bulk<T>): ColumnDef<T, any> {
  return {
    id: "selection",
    header: ({ table }) => (
      <input type="checkbox" aria-label="Select all rows of this page" checked={table.getIsAllRowsSelected()}
        onChange={table.getToggleAllRowsSelectedHandler()} />
    ),
    meta: { label: "Select" },
    cell: ({ row }) => (
      <input type="checkbox" aria-label={`Select ${bulk.name(row.original)}`} disabled={!row.getCanSelect()}
        checked={row.getIsSelected()} onChange={row.getToggleSelectedHandler()} />
    ),
  };
}

function BodyRow<T>({ row }: { row: Row<T> }): ReactNode {
  // Roles are written out, since the cards of a phone are no table to the browser.
  return (
    <tr role="row">
      {row.getVisibleCells().map((cell) => <BodyCell key={cell.id} cell={cell} />)}
    </tr>
  );
}

function BodyCell<T>({ cell }: { cell: Cell<T, unknown> }): ReactNode {
  const { columnDef } = cell.column;
  return (
    <td role="cell" className={columnDef.meta?.end ? "end" : undefined} data-label={labelOf(cell.column)}>
      <div className="cell">{flexRender(columnDef.cell, cell.getContext())}</div>
    </td>
  );
}

function labelOf<T>({ columnDef }: Column<T, unknown>): string | undefined {
  return columnDef.meta?.label ?? (typeof columnDef.header === "string" ? columnDef.header : undefined);
}

/** The sums of columns that have one. */
function Totals<T>({ table }: { table: Table<T> }): ReactNode {
  const footers = table.getFooterGroups().flatMap((group) => group.headers);
  if (!footers.some((header) => header.column.columnDef.footer !== undefined)) return null;
  return (
    <tfoot role="rowgroup">
      <tr role="row">
        {footers.map((header) => (
          <td key={header.id} role="cell" className={header.column.columnDef.meta?.end ? "end" : undefined}
            data-label={labelOf(header.column)}>
            <div className="cell">{flexRender(header.column.columnDef.footer, header.getContext())}</div>
          </td>
        ))}
      </tr>
    </tfoot>
  );
}

/** The table's frame while its rows are on their way, so that nothing moves when they are there. */
function Skeleton<T>({ caption, table }: { caption: string; table: Table<T> }): ReactNode {
  return (
    <div className="loading skeleton" role="status" aria-label={`${caption} are loading`}>
      {Array.from({ length: SKELETON_ROWS }, (_, row) => (
        <div key={row} className="skeleton-row" aria-hidden="true">
          {table.getAllColumns().map((column) => <span key={column.id} />)}
        </div>
      ))}
    </div>
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
    return <th scope="col" role="columnheader" className={className}>{text}</th>;
  }
  const direction = directionOf(orders, sort);
  const arrow = { ascending: "↑", descending: "↓", none: "" }[direction];
  const next = direction === "ascending" ? (orders.descending ?? first) : first;
  return (
    <th scope="col" role="columnheader" className={className} aria-sort={direction}>
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
