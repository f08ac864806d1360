/** A tenant's people: letting them in, what they may do, and shutting them out. */

import { useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { api, tagged, type Answer } from "../api/client.ts";
import { changedMeanwhile, toApiError } from "../api/errors.ts";
import { BudgetDialog, budgetColumn, useBudgets } from "../components/budgets.tsx";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { ConfirmDialog } from "../components/dialog.tsx";
import { FormDialog } from "../components/form-dialog.tsx";
import { Filter, SelectField, TextField } from "../components/form.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { SecretDialog } from "../components/secret.tsx";
import { EmptyState } from "../components/states.tsx";
import { useToast } from "../components/toast.tsx";
import { Badge, Time } from "../components/values.tsx";
import { dateTime } from "../lib/format.ts";
import { useParam } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

type User = Answer<"get", "/v1/users">["data"][number];
type Role = "owner" | "developer" | "viewer";
type Invitation = Answer<"post", "/v1/users/{user_id}/invitation">;
type Asked = { what: "role" | "invite" | "budget" | "disable" | "enable"; user: User } | { what: "add" } | null;

const ROLES = [
  ["viewer", "viewer: sees adapters, requests and usage"],
  ["developer", "developer: also pushes adapters and generates"],
  ["owner", "owner: also manages keys and users, sees the audit log"],
] as const;
const ROLE_FILTERS = [["", "All roles"], ["owner", "Owners"], ["developer", "Developers"], ["viewer", "Viewers"]] as const;

export default function UsersPage(): ReactNode {
  const { tenant, may } = useScope();
  const [asked, setAsked] = useState<Asked>(null);
  return (
    <Page title="Users" lead="People who sign in to a tenant. Programs use keys."
      actions={tenant && may("users:manage") && (
        <Button tone="primary" onClick={() => setAsked({ what: "add" })}>Add user</Button>
      )}>
      <NeedsTenant what="Users">
        {(slug) => <Users key={slug} tenant={slug} asked={asked} onAsk={setAsked} />}
      </NeedsTenant>
    </Page>
  );
}

interface UsersProps {
  tenant: string;
  asked: Asked;
  onAsk: (asked: Asked) => void;
}

function Users({ tenant, asked, onAsk }: UsersProps): ReactNode {
  const { may } = useScope();
  const [role, setRole] = useParam("role");
  const budgets = useBudgets(tenant, may("usage:read"));
  const users = usePages<User>(["users", tenant, role], (after, signal) =>
    api("get", "/v1/users", { query: { after: after ?? null, role: (role || null) as Role | null }, tenant, signal }),
  );
  return (
    <>
      <Panel title={`Users of ${tenant}`} flush
        actions={<Filter label="Role" value={role} onChange={setRole} options={ROLE_FILTERS} />}>
        <DataTable caption="Users" source={users} rowId={(user) => user.id}
          columns={columnsOf(may("users:manage"), budgetColumn("user", budgets.data, (user) => user.email), onAsk)}
          empty={<EmptyState title="No users" command={`loraplex users create ada@${tenant}.example --role owner --tenant ${tenant}`}>
            This tenant has no users yet. Add a user and send them the one-time link.
          </EmptyState>} />
      </Panel>
      <UserDialogs tenant={tenant} asked={asked} onClose={() => onAsk(null)} />
    </>
  );
}

interface Invited {
  user: User;
  invitation: Invitation;
}

function UserDialogs({ tenant, asked, onClose }: { tenant: string; asked: Asked; onClose: () => void }): ReactNode {
  const [invited, setInvited] = useState<Invited | null>(null);
  if (asked === null) return invited && <InvitationLink invited={invited} onClose={() => setInvited(null)} />;
  if (asked.what === "add") return <AddUser tenant={tenant} onInvited={setInvited} onClose={onClose} />;
  const { user } = asked;
  const of = { tenant, user, onClose };
  switch (asked.what) {
    case "role": return <ChangeRole {...of} />;
    case "invite": return <Invite {...of} onInvited={(invitation) => setInvited({ user, invitation })} />;
    case "budget": return <BudgetDialog tenant={tenant} holder={{ kind: "user", id: user.id, name: user.email }} onClose={onClose} />;
    case "disable": return <Disable {...of} />;
    case "enable": return <Enable {...of} />;
  }
}

function InvitationLink({ invited, onClose }: {
  invited: Invited;
  onClose: () => void;
}): ReactNode {
  const { user, invitation } = invited;
  return (
    <SecretDialog title={`Link for ${user.email}`} secret={invitation.url} copyLabel="Copy link" onClose={onClose}>
      <p>Whoever opens it sets the password of this account. It works once, until {dateTime(invitation.expires_at)}.</p>
    </SecretDialog>
  );
}

function columnsOf(mayChange: boolean, budgets: Columns<User>, onAsk: (asked: Asked) => void): Columns<User> {
  const columns: Columns<User> = [
    { header: "Address", cell: ({ row }) => row.original.email },
    { header: "Role", cell: ({ row }) => row.original.role },
    {
      header: "State",
      cell: ({ row: { original: user } }) =>
        user.disabled_at ? <Badge tone="warn">disabled</Badge> : <Badge tone="good">active</Badge>,
    },
    ...budgets,
    { header: "Added", cell: ({ row }) => <Time at={row.original.created_at} /> },
  ];
  if (!mayChange) return columns;
  return [...columns, { id: "actions", header: "", meta: { end: true }, cell: ({ row }) => <Actions user={row.original} onAsk={onAsk} /> }];
}

function Actions({ user, onAsk }: { user: User; onAsk: (asked: Asked) => void }): ReactNode {
  const button = (what: "role" | "invite" | "budget" | "disable" | "enable", text: string, label = text): ReactNode => (
    <Button key={what} small tone="plain" aria-label={`${label} ${user.email}`} onClick={() => onAsk({ what, user })}>{text}</Button>
  );
  if (user.disabled_at) return button("enable", "Enable");
  return <span className="nowrap">{[button("invite", "Invite"), button("role", "Role"), button("budget", "Budgets", "Budgets of"), button("disable", "Disable")]}</span>;
}

function useRefresh(tenant: string): () => Promise<void> {
  const client = useQueryClient();
  return () => client.invalidateQueries({ queryKey: ["users", tenant] });
}

interface OfUser {
  tenant: string;
  user: User;
  onClose: () => void;
}

function invitation(tenant: string, user: User): Promise<Invitation> {
  return api("post", "/v1/users/{user_id}/invitation", { path: { user_id: user.id }, tenant });
}

function AddUser({ tenant, onInvited, onClose }: {
  tenant: string;
  onInvited: (invited: Invited) => void;
  onClose: () => void;
}): ReactNode {
  const refresh = useRefresh(tenant);
  const toast = useToast();
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const body = { email: String(form.get("email")).trim(), role: form.get("role") as Role };
    const user = await api("post", "/v1/users", { body, tenant });
    await refresh();
    try {
      onInvited({ user, invitation: await invitation(tenant, user) });
    } catch (error) {
      toast(`${user.email} is added, but has no link yet: ${toApiError(error).message}`, "warn");
    }
  };
  return (
    <FormDialog title="Add user" action="Add and create link" onSubmit={submit} onClose={onClose}>
      <TextField label="E-mail address" name="email" type="email" required autoComplete="off" autoFocus
        hint="The account name. No email is sent: you get a link to pass on." />
      <SelectField label="Role" name="role" options={ROLES} />
    </FormDialog>
  );
}

function ChangeRole({ tenant, user, onClose }: OfUser): ReactNode {
  const refresh = useRefresh(tenant);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const role = new FormData(event.currentTarget).get("role") as Role;
    const path = { user_id: user.id };
    const { data: now, etag: ifMatch } = await tagged("get", "/v1/users/{user_id}", { path, tenant });
    if (now.role !== user.role) throw changedMeanwhile();
    await api("patch", "/v1/users/{user_id}", { path, body: { role }, tenant, ifMatch });
    await refresh();
  };
  return (
    <FormDialog title={`Role of ${user.email}`} action="Change role" onSubmit={submit} onClose={onClose}>
      <SelectField label="Role" name="role" options={ROLES} defaultValue={user.role}
        hint="The user's keys are limited to the same role." />
    </FormDialog>
  );
}

function Invite({ tenant, user, onInvited, onClose }: OfUser & { onInvited: (one: Invitation) => void }): ReactNode {
  const invite = async (): Promise<void> => {
    onInvited(await invitation(tenant, user));
  };
  return (
    <ConfirmDialog title={`Invite ${user.email}?`} action="Create link" onConfirm={invite} onClose={onClose}>
      <p>You get a link, good for once and for a day, with which the user sets a password. An earlier link ends, and so do
        the user's sessions once the password is set.</p>
    </ConfirmDialog>
  );
}

function Disable({ tenant, user, onClose }: OfUser): ReactNode {
  const refresh = useRefresh(tenant);
  const disable = async (): Promise<void> => {
    await api("patch", "/v1/users/{user_id}", { path: { user_id: user.id }, body: { disabled: true }, tenant });
    await refresh();
  };
  return (
    <ConfirmDialog title={`Disable ${user.email}?`} action="Disable" danger onConfirm={disable} onClose={onClose}>
      <p>The user is signed out and cannot sign in. All of the user's keys are revoked permanently.</p>
    </ConfirmDialog>
  );
}

function Enable({ tenant, user, onClose }: OfUser): ReactNode {
  const refresh = useRefresh(tenant);
  const enable = async (): Promise<void> => {
    await api("patch", "/v1/users/{user_id}", { path: { user_id: user.id }, body: { disabled: false }, tenant });
    await refresh();
  };
  return (
    <ConfirmDialog title={`Enable ${user.email}?`} action="Enable" onConfirm={enable} onClose={onClose}>
      <p>The user can sign in again. Revoked keys stay revoked.</p>
    </ConfirmDialog>
  );
}
