"""Ratios and tables of ``speed.py``."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from cells import PEER_NAMES

LOOP_PEERS = ("td3x", "sb3", "sbx")


def ratio(rates: Sequence[float], peer_rates: Sequence[float]) -> dict[str, float]:
    """
    Return the ratio of two rates, computed in each repetition, whose segments met the same state of the machine.

    :return: median, minimum and maximum of rate / peer's rate
    """
    ratios = [rate / peer_rate for rate, peer_rate in zip(rates, peer_rates, strict=True)]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """
    Add medians and ratios to the result of a cell.

    :return: the same with ``per_second``; ``ratios``: TD3X's speed over the peer's, and its time over the floor's; and
        ``bounds``: the floor's speed over a peer's, which no implementation can pass
    """
    rates = {
        peer: [segment["steps"] / segment["seconds"] for segment in segments]
        for peer, segments in result["segments"].items()
    }
    own = rates.get("td3x", [])
    ratios = {
        peer: ratio(values, own) if peer == "floor" else ratio(own, values)
        for peer, values in rates.items()
        if own and peer != "td3x"
    }
    bounds = {peer: ratio(rates["floor"], rates[peer]) for peer in ("sb3", "sbx") if {"floor", peer} <= rates.keys()}
    per_second = {peer: median(values) for peer, values in rates.items()}
    return {**result, "per_second": per_second, "ratios": ratios, "bounds": bounds}


def format_speeds(results: Sequence[dict[str, Any]]) -> str:
    """
    Format the env steps per second.

    :param results: results of whole training loops, from ``summarize``
    """
    peers = LOOP_PEERS[1:]
    header = [f"{PEER_NAMES[peer]} steps/s" for peer in LOOP_PEERS] + [f"TD3X / {PEER_NAMES[peer]}" for peer in peers]
    rows = []
    for result in results:
        speeds = [_entry(result, "per_second", peer, _format_speed) for peer in LOOP_PEERS]
        ratios = [_entry(result, "ratios", peer, _format_ratio) for peer in peers]
        rows.append([result["cell"]["name"], *speeds, *ratios])
    return _table(["cell", *header], rows)


def format_bounds(results: Sequence[dict[str, Any]]) -> str:
    """
    Format how near TD3X is to the floor, and what the floor itself would gain over the peers.

    :param results: results of whole training loops with their floors, from ``summarize``
    """
    peers = LOOP_PEERS[1:]
    rows = [
        [
            result["cell"]["name"],
            _format_speed(result["per_second"]["floor"]),
            _entry(result, "ratios", "floor", _format_ratio),
            *(_entry(result, "bounds", peer, _format_ratio) for peer in peers),
        ]
        for result in results
    ]
    header = ["cell", "floor steps/s", "TD3X time / floor time", *(f"floor / {PEER_NAMES[peer]}" for peer in peers)]
    return _table(header, rows)


def format_memory(results: Sequence[dict[str, Any]]) -> str:
    """
    Format the peak memory of the workers, and that of their replay buffers.

    :param results: results from ``summarize``
    """
    header = [f"{PEER_NAMES[peer]} peak (replay) MB" for peer in LOOP_PEERS]
    rows = [
        [result["cell"]["name"], *(_entry(result, "figures", peer, _format_memory) for peer in LOOP_PEERS)]
        for result in results
    ]
    return _table(["cell", *header], rows)


def format_updates(result: dict[str, Any]) -> str:
    """
    Format the updates per second, and those of their matrix products.

    :param result: result of updates only, from ``summarize``
    """
    speeds = [_entry(result, "per_second", peer, _format_speed) for peer in ("td3x", "floor")]
    return _table(
        ["cell", "TD3X updates/s", "their matrix products alone, updates/s", "time of TD3X / of the products"],
        [[result["cell"]["name"], *speeds, _entry(result, "ratios", "floor", _format_ratio)]],
    )


def format_report(results: Sequence[dict[str, Any]]) -> str:
    """
    Format all tables, and what is missing.

    :param results: results from ``summarize``
    """
    loops = [result for result in results if not result["cell"]["updates_only"]]
    parts = [format_speeds(loops), format_memory(loops)] if loops else []
    with_floor = [result for result in loops if "floor" in result["per_second"]]
    parts += [format_bounds(with_floor)] if with_floor else []
    parts += [format_updates(result) for result in results if result["cell"]["updates_only"]]
    return "\n\n".join([*parts, *_missing_lines(results)])


def _missing_lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return for each peer and package that it lacks, the cells that it is missing from."""
    cells: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for peer, package in result["missing"].items():
            cells.setdefault((peer, package), []).append(result["cell"]["name"])
    return [
        f"{PEER_NAMES[peer]} is missing from {', '.join(names)}: {package} is not installed"
        for (peer, package), names in cells.items()
    ]


def _entry(result: dict[str, Any], kind: str, peer: str, form: Any) -> str:
    """Return a figure of a peer as text, or why there is none."""
    if peer in result["missing"]:
        return "missing"
    return form(result[kind][peer]) if peer in result[kind] else "-"


def _format_speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _format_ratio(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def _format_memory(figures: Mapping[str, Any]) -> str:
    peak = "?" if figures["peak_bytes"] is None else f"{figures['peak_bytes'] / 1e6:,.0f}"
    return f"{peak} ({figures['replay_bytes'] / 1e6:,.0f})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
