"""Keeps samples of requests, where the adapter's tenant opted in."""
