import type { ReactNode } from "react";
import { Page } from "../components/layout.tsx";

export default function Memory(): ReactNode {
  return <Page title="Memory">{null}</Page>;
}
