/** What can be done with a fine-tuning job in its state. */

import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { api } from "../../api/client.ts";
import { toApiError } from "../../api/errors.ts";
import type { TuningJob } from "../../api/types.ts";
import { isOpen } from "../../lib/tuning.ts";
import { useSession } from "../../session.tsx";
import { Button } from "../button.tsx";
import { ConfirmDialog } from "../dialog.tsx";
import { useToast } from "../toast.tsx";

const JOB = "/v1/fine_tuning/jobs/{job_id}";

interface Props {
  tenant: string;
  job: TuningJob;
}

export function JobActions({ tenant, job }: Props): ReactNode {
  const { server } = useSession();
  const [isCancelling, setCancelling] = useState(false);
  const client = useQueryClient();
  const toast = useToast();
  const path = { job_id: job.id };
  const refresh = () => client.invalidateQueries({ queryKey: ["tuning", tenant] });
  const change = useMutation({
    mutationFn: (deed: "pause" | "resume") => api("post", `${JOB}/${deed}`, { path, tenant }),
    onError: (error) => toast(toApiError(error).message, "bad"),
    onSettled: refresh,
  });
  const cancel = async (): Promise<void> => {
    await api("post", `${JOB}/cancel`, { path, tenant });
    toast("The job is cancelled.");
    await refresh();
  };
  if (!isOpen(job)) return null;
  return (
    <>
      {job.status !== "paused" && <Button busy={change.isPending} onClick={() => change.mutate("pause")}>Pause</Button>}
      {job.status === "paused" && server.tuning && (
        <Button tone="primary" busy={change.isPending} onClick={() => change.mutate("resume")}>Resume</Button>
      )}
      <Button tone="danger" onClick={() => setCancelling(true)}>Cancel job</Button>
      {isCancelling && (
        <ConfirmDialog title={`Cancel the training of ${job.adapter}?`} action="Cancel job" otherwise="Keep training" danger
          onConfirm={cancel} onClose={() => setCancelling(false)}>
          <p>
            The job ends without a version, and its checkpoints are deleted. This cannot be undone. The tokens that were
            trained stay in the usage.
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}
