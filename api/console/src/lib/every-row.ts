/** Lists that are wanted whole, such as sums to add up. */

export interface PageOf<T> {
  data: T[];
  has_more: boolean;
  next_after?: string | null;
}

/** The rows of all pages; `load` gets the cursor behind which a page begins, undefined for the first. */
export async function everyRow<T>(load: (after: string | undefined) => Promise<PageOf<T>>): Promise<T[]> {
  const rows: T[] = [];
  let after: string | undefined;
  do {
    const page = await load(after);
    rows.push(...page.data);
    after = page.has_more ? (page.next_after ?? undefined) : undefined;
  } while (after !== undefined);
  return rows;
}
