import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { BrowserRouter } from "react-router";
import { toApiError } from "./api/errors.ts";
import { App } from "./app.tsx";
import { ToastProvider } from "./components/toast.tsx";
import { applyTheme, currentTheme } from "./lib/theme.ts";
import { SessionProvider } from "./session.tsx";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/controls.css";
import "./styles/panels.css";
import "./styles/charts.css";
import "./styles/pages.css";

const MAX_RETRIES = 2;
const RECOVERY_MS = 5_000;

const client = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 2_000,
      retry: (failures, error) => failures < MAX_RETRIES && toApiError(error).isTransient,
      // A page that is left open finds the server again by itself.
      refetchInterval: ({ state: { error } }) => error !== null && toApiError(error).isTransient && RECOVERY_MS,
    },
  },
});

applyTheme(currentTheme());

const root = document.getElementById("root");
if (root === null) throw new Error("index.html has no root");
createRoot(root).render(
  <StrictMode>
    <QueryClientProvider client={client}>
      <BrowserRouter basename="/console">
        <ToastProvider>
          <SessionProvider><App /></SessionProvider>
        </ToastProvider>
      </BrowserRouter>
    </QueryClientProvider>
  </StrictMode>,
);
