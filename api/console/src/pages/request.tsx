import type { ReactNode } from "react";
import { Page } from "../components/layout.tsx";

export default function Request(): ReactNode {
  return <Page title="Request">{null}</Page>;
}
