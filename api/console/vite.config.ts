import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// The same input gives the same files: `make console-check` compares them with those committed.
export default defineConfig({
  base: "/console/",
  plugins: [react()],
  build: {
    outDir: "../static/console",
    emptyOutDir: true,
    target: ["chrome123", "firefox121", "safari17.5"],
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
  },
});
