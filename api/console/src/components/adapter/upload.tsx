import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useRef, useState, type FormEvent, type ReactNode } from "react";
import { useNavigate } from "react-router";
import { toApiError } from "../../api/errors.ts";
import { pushAdapter, type Progress } from "../../api/upload.ts";
import { noteActivity } from "../../lib/activity.ts";
import { CONFIG_FILE, readAdapterFolder, WEIGHTS_FILE, type AdapterFolder } from "../../lib/adapter-folder.ts";
import { bytes, percent } from "../../lib/format.ts";
import { Button } from "../button.tsx";
import { Dialog } from "../dialog.tsx";
import { Field, TextField } from "../form.tsx";
import { ErrorNotice } from "../states.tsx";
import { useToast } from "../toast.tsx";
import { Meter } from "../values.tsx";
import { addressOf } from "../../lib/addresses.ts";

const STEPS: Record<Progress["step"], string> = {
  hashing: "Hashing the weights in the browser",
  sending: "Sending",
  examining: "The server is checking every tensor",
};

interface UploadProps {
  tenant: string;
  /** The adapter that gets another version; without one, its name is asked for. */
  adapter?: string;
  onClose: () => void;
}

/** Choose a folder, check it here, send it with progress, and go to what it became. */
export function UploadDialog({ tenant, adapter, onClose }: UploadProps): ReactNode {
  const [name, setName] = useState(adapter ?? "");
  const [aliases, setAliases] = useState("");
  const [folder, setFolder] = useState<AdapterFolder<File> | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const [progress, setProgress] = useState<Progress | null>(null);
  const [error, setError] = useState<unknown>(null);
  const running = useRef<AbortController | null>(null);
  const finish = useFinish(tenant, onClose);
  useEffect(() => () => running.current?.abort(), []);

  const choose = async (files: File[]): Promise<void> => {
    setFolder(null);
    setProblem(null);
    setError(null);
    try {
      if (files.length) setFolder(await readAdapterFolder(files));
    } catch (thrown) {
      setProblem((thrown as Error).message);
    }
  };
  /** Whoever waits for an upload is not idle. */
  const report = (next: Progress): void => {
    noteActivity();
    setProgress(next);
  };
  const submit = async (event: FormEvent): Promise<void> => {
    event.preventDefault();
    if (folder === null) {
      setProblem((known) => known ?? `Choose the folder, or its ${CONFIG_FILE} and ${WEIGHTS_FILE}.`);
      return;
    }
    const controller = new AbortController();
    running.current = controller;
    setError(null);
    try {
      const wanted = aliases.split(/[\s,]+/).filter(Boolean);
      const version = await pushAdapter({
        tenant, name, folder, aliases: wanted, report, signal: controller.signal,
      });
      finish(version.adapter, version.version);
    } catch (thrown) {
      if (!controller.signal.aborted) setError(thrown);
      setProgress(null);
    }
  };
  const isBusy = progress !== null;
  const footer = (
    <>
      <Button onClick={onClose}>{isBusy ? "Stop" : "Cancel"}</Button>
      <Button tone="primary" type="submit" form="upload" busy={isBusy}>Upload</Button>
    </>
  );
  return (
    <Dialog title={adapter ? `Upload a version of ${adapter}` : "Upload an adapter"} onClose={onClose} footer={footer}>
      <form id="upload" className="form" onSubmit={(event) => void submit(event)}>
        {!adapter && (
          <TextField label="Name" required autoComplete="off" spellCheck={false} maxLength={64} value={name}
            hint="a–z, 0–9, dot, underscore and hyphen" disabled={isBusy}
            onChange={(event) => setName(event.target.value)} />
        )}
        <Field label="Files" problem={problem}
          hint={folder ? `${WEIGHTS_FILE}, ${bytes(folder.weights.size)}` : `${CONFIG_FILE} and ${WEIGHTS_FILE}, as PEFT's save_pretrained wrote them`}>
          {(control) => (
            <input {...control} type="file" multiple className="input" disabled={isBusy}
              onChange={(event) => void choose(Array.from(event.target.files ?? []))} />
          )}
        </Field>
        <Field label="Or a folder">
          {(control) => (
            <input {...control} ref={asFolder} type="file" className="input" disabled={isBusy}
              onChange={(event) => void choose(atTheTop(Array.from(event.target.files ?? [])))} />
          )}
        </Field>
        <TextField label="Aliases (optional)" autoComplete="off" spellCheck={false} placeholder="prod" value={aliases}
          hint="Set once the version is ready." disabled={isBusy}
          onChange={(event) => setAliases(event.target.value)} />
      </form>
      {progress !== null && <UploadProgress progress={progress} />}
      {error !== null && (
        <ErrorNotice error={error}>
          {toApiError(error).isTransient && (
            <div className="meta">Received bytes are kept. Uploading the same files resumes here.</div>
          )}
        </ErrorNotice>
      )}
    </Dialog>
  );
}

/** React has no attribute for it. */
function asFolder(input: HTMLInputElement | null): void {
  if (input) input.webkitdirectory = true;
}

/** Without what lies in folders below, such as a training's checkpoints. */
function atTheTop(files: File[]): File[] {
  return files.filter((file) => file.webkitRelativePath.split("/").length <= 2);
}

function UploadProgress({ progress: { step, part } }: { progress: Progress }): ReactNode {
  return (
    <div role="status">
      <div className="row spread">
        <span>{STEPS[step]}…</span>{part !== null && <span className="soft">{percent(part)}</span>}
      </div>
      {part !== null && <Meter label={STEPS[step]} value={part} max={1} />}
    </div>
  );
}

function useFinish(tenant: string, onClose: () => void): (name: string, version: number) => void {
  const client = useQueryClient();
  const toast = useToast();
  const navigate = useNavigate();
  return (name, version) => {
    toast(`${name}@${version} is there; its effect is being measured.`);
    void client.invalidateQueries({ queryKey: ["adapter", tenant, name] });
    void client.invalidateQueries({ queryKey: ["adapters"] });
    onClose();
    void navigate(`${addressOf(tenant, name)}?version=${version}`);
  };
}
