import type { ReactNode } from "react";
import { Page } from "../components/layout.tsx";

export default function Adapters(): ReactNode {
  return <Page title="Adapters">{null}</Page>;
}
