import type { ReactNode } from "react";
import { Page } from "../components/layout.tsx";

export default function Requests(): ReactNode {
  return <Page title="Requests">{null}</Page>;
}
