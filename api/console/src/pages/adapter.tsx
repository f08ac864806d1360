import type { ReactNode } from "react";
import { Page } from "../components/layout.tsx";

export default function Adapter(): ReactNode {
  return <Page title="Adapter">{null}</Page>;
}
