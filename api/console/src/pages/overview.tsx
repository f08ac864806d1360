import type { ReactNode } from "react";
import { Page } from "../components/layout.tsx";

export default function Overview(): ReactNode {
  return <Page title="Overview">{null}</Page>;
}
