import { useState, type ReactNode } from "react";
import { plural } from "../lib/format.ts";
import { TextField } from "./form.tsx";

export const MIN_PASSWORD = 12;

/** A new password, typed once and shown on request: what one can read needs no repetition. */
export function NewPassword({ value, onChange }: {
  value: string;
  onChange: (value: string) => void;
}): ReactNode {
  const [isShown, setShown] = useState(false);
  const missing = MIN_PASSWORD - value.length;
  const hint = missing > 0 && value !== ""
    ? `${plural(missing, "more character")} needed`
    : `At least ${MIN_PASSWORD} characters. Longer is safer; special characters are not required.`;
  return (
    <>
      <TextField label="New password" type={isShown ? "text" : "password"} required hint={hint}
        minLength={MIN_PASSWORD} maxLength={1024} autoComplete="new-password" value={value}
        onChange={(event) => onChange(event.target.value)} />
      <label className="check">
        <input type="checkbox" checked={isShown} onChange={(event) => setShown(event.target.checked)} />
        Show the password
      </label>
    </>
  );
}
