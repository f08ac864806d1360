/** Which page stands at which address. Each is fetched when it is first gone to. */

import { lazy, Suspense, type ReactNode } from "react";
import { Navigate, Outlet, Route, Routes, useLocation } from "react-router";
import { Boundary } from "./components/boundary.tsx";
import { Confirmation } from "./components/confirmation.tsx";
import { Page } from "./components/layout.tsx";
import { Shell } from "./components/shell.tsx";
import { EmptyState, Loading } from "./components/states.tsx";
import Join from "./pages/join.tsx";
import SignInCallback from "./pages/sign-in-callback.tsx";
import SignIn from "./pages/sign-in.tsx";
import { useSessionContext } from "./session.tsx";

const Account = lazy(() => import("./pages/account.tsx"));
const Overview = lazy(() => import("./pages/overview.tsx"));
const Adapters = lazy(() => import("./pages/adapters.tsx"));
const Adapter = lazy(() => import("./pages/adapter.tsx"));
const Evaluation = lazy(() => import("./pages/evaluation.tsx"));
const TuningJobs = lazy(() => import("./pages/tuning-jobs.tsx"));
const TuningJob = lazy(() => import("./pages/tuning-job.tsx"));
const Memory = lazy(() => import("./pages/memory.tsx"));
const Replicas = lazy(() => import("./pages/replicas.tsx"));
const Requests = lazy(() => import("./pages/requests.tsx"));
const Request = lazy(() => import("./pages/request.tsx"));
const Playground = lazy(() => import("./pages/playground.tsx"));
const Tenants = lazy(() => import("./pages/tenants.tsx"));
const Tenant = lazy(() => import("./pages/tenant.tsx"));
const Users = lazy(() => import("./pages/users.tsx"));
const Keys = lazy(() => import("./pages/keys.tsx"));
const Webhooks = lazy(() => import("./pages/webhooks.tsx"));
const Webhook = lazy(() => import("./pages/webhook.tsx"));
const Prices = lazy(() => import("./pages/prices.tsx"));
const Usage = lazy(() => import("./pages/usage.tsx"));
const Audit = lazy(() => import("./pages/audit.tsx"));
const Settings = lazy(() => import("./pages/settings.tsx"));

export function App(): ReactNode {
  return (
    <Routes>
      <Route path="/sign-in" element={<SignIn />} />
      <Route path="/sign-in/callback" element={<SignInCallback />} />
      <Route path="/join" element={<Join />} />
      <Route element={<SignedIn />}>
        <Route index element={<Overview />} />
        <Route path="/adapters" element={<Adapters />} />
        <Route path="/adapters/:tenant/:name/:part?" element={<Adapter />} />
        <Route path="/adapters/:tenant/:name/evaluations/:id" element={<Evaluation />} />
        <Route path="/fine-tuning" element={<TuningJobs />} />
        <Route path="/fine-tuning/:id" element={<TuningJob />} />
        <Route path="/memory" element={<Memory />} />
        <Route path="/replicas" element={<Replicas />} />
        <Route path="/requests" element={<Requests />} />
        <Route path="/requests/:id" element={<Request />} />
        <Route path="/playground" element={<Playground />} />
        <Route path="/tenants" element={<Tenants />} />
        <Route path="/tenants/:slug" element={<Tenant />} />
        <Route path="/users" element={<Users />} />
        <Route path="/keys" element={<Keys />} />
        <Route path="/webhooks" element={<Webhooks />} />
        <Route path="/webhooks/:id" element={<Webhook />} />
        <Route path="/prices" element={<Prices />} />
        <Route path="/usage" element={<Usage />} />
        <Route path="/audit" element={<Audit />} />
        <Route path="/settings" element={<Settings />} />
        <Route path="/account" element={<Account />} />
        <Route path="*" element={<Nowhere />} />
      </Route>
    </Routes>
  );
}

function SignedIn(): ReactNode {
  const { session, tenant } = useSessionContext();
  const { pathname, search } = useLocation();
  if (session === null) return <Navigate to="/sign-in" state={{ from: pathname + search }} replace />;
  return (
    <Shell>
      {/* Of another tenant the page begins anew: nothing of the one before stays in sight. */}
      <Boundary place={pathname}>
        <Suspense key={tenant} fallback={<Loading />}><Outlet /></Suspense>
      </Boundary>
      <Confirmation />
    </Shell>
  );
}

function Nowhere(): ReactNode {
  return (
    <Page title="Not found">
      <EmptyState title="Page not found">Choose a page in the navigation.</EmptyState>
    </Page>
  );
}
