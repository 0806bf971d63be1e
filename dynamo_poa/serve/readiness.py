"""Decides whether a process of a graph is up.

Owns: one answer per kind of probe, now, without waiting.
Does not own: how long to go on asking (supervisor.py).
Invariant: a probe never raises: whoever does not answer, or not as expected, is not up yet.
"""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from dynamo_poa.errors import BusError
from dynamo_poa.serve.discovery import count_in_etcd, count_in_folder
from dynamo_poa.serve.graph import HttpOk, ModelListed, NatsReady, Probe, Registered

PROBE_TIMEOUT_S = 2.0


async def is_up(probe: Probe, session: aiohttp.ClientSession, discovery: Path | str) -> bool:
    """Ask once."""
    match probe:
        case NatsReady(url):
            return await _nats_greets(url)
        case Registered(endpoint, instances):
            return await _count(session, discovery, endpoint) >= instances
        case HttpOk(url):
            return await _get(session, url) is not None
        case ModelListed(url, model):
            listed = await _get(session, url)
            return isinstance(listed, dict) and model in [entry.get("id") for entry in listed.get("data", [])]


async def shortfall(probe: Probe, session: aiohttp.ClientSession, discovery: Path | str) -> str:
    """Say what is still missing, for a person."""
    match probe:
        case NatsReady(url):
            return f"no NATS server greets at {url}"
        case Registered(endpoint, instances):
            count = await _count(session, discovery, endpoint)
            return f"{count} of {instances} instances of {endpoint} registered"
        case HttpOk(url):
            return f"{url} does not answer 200"
        case ModelListed(url, model):
            return f"{url} does not list {model}"


async def _count(session: aiohttp.ClientSession, discovery: Path | str, endpoint: str) -> int:
    if isinstance(discovery, Path):
        return count_in_folder(discovery, endpoint)
    try:
        return await count_in_etcd(session, discovery, endpoint)
    except BusError:
        return 0


async def _nats_greets(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222)
            try:
                return (await reader.readline()).startswith(b"INFO ")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _get(session: aiohttp.ClientSession, url: str) -> object:
    """Return the JSON answer, the text where it is none, None unless the status is 200."""
    try:
        async with session.get(url) as response:
            if response.status != 200:
                return None
            text = await response.text()
            try:
                return await response.json(content_type=None)
            except ValueError:
                return text
    except (aiohttp.ClientError, TimeoutError):
        return None
