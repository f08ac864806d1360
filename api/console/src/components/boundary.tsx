import { Component, type ReactNode } from "react";
import { Button } from "./button.tsx";
import { Page } from "./layout.tsx";
import { ErrorNotice } from "./states.tsx";

interface BoundaryProps {
  /** Where the reader is: what failed at one place does not hide another. */
  place: string;
  children: ReactNode;
}

/** Keeps the navigation when a page fails, be it that its code is gone since the server's update. */
export class Boundary extends Component<BoundaryProps, { error: unknown }> {
  override state = { error: null };

  static getDerivedStateFromError(error: unknown): { error: unknown } {
    return { error };
  }

  override componentDidUpdate(before: BoundaryProps): void {
    if (before.place !== this.props.place && this.state.error !== null) this.setState({ error: null });
  }

  override render(): ReactNode {
    if (this.state.error === null) return this.props.children;
    return (
      <Page title="This page could not be displayed">
        <ErrorNotice error={this.state.error}>
          <p>If the server was updated, reload the page.</p>
          <div><Button small onClick={() => window.location.reload()}>Reload</Button></div>
        </ErrorNotice>
      </Page>
    );
  }
}
