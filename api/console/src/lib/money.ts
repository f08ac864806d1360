/** Amounts of money: decimal strings with at most nine decimals, which are added exactly. */

const DECIMALS = 9;
const MIN_DECIMALS = 2;

/** All amounts together. */
export function sumOfMoney(amounts: string[]): string {
  const sum = amounts.reduce((all, amount) => all + nanosOf(amount), 0n);
  const digits = (sum < 0n ? -sum : sum).toString().padStart(DECIMALS + 1, "0");
  const decimals = digits.slice(-DECIMALS).replace(/0+$/, "").padEnd(MIN_DECIMALS, "0");
  return `${sum < 0n ? "-" : ""}${digits.slice(0, -DECIMALS)}.${decimals}`;
}

/** The amount with its currency, if there is one. */
export function money(amount: string, currency: string | null | undefined): string {
  return currency ? `${amount} ${currency}` : amount;
}

function nanosOf(amount: string): bigint {
  const [units = "0", decimals = ""] = amount.split(".");
  return BigInt(units + decimals.padEnd(DECIMALS, "0"));
}
