import { useState, type ReactNode } from "react";
import { applyTheme, currentTheme, type Theme } from "../lib/theme.ts";
import { Filter } from "./form.tsx";

const THEMES = [["system", "System colours"], ["light", "Light"], ["dark", "Dark"]] as const;

export function ThemeSwitch(): ReactNode {
  const [theme, setTheme] = useState(currentTheme);
  const choose = (value: string): void => {
    applyTheme(value as Theme);
    setTheme(value as Theme);
  };
  return <Filter label="Colour scheme" value={theme} onChange={choose} options={THEMES} />;
}
