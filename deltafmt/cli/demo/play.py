"""The course of the demo: train, publish, follow, prove."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import deltafmt
from deltafmt.cli.demo.engine import layout, shards
from deltafmt.cli.demo.follower import Follower, Job, Step
from deltafmt.cli.demo.model import SHAPES
from deltafmt.cli.demo.screen import Screen
from deltafmt.cli.demo.trainer import RATE, Trainer
from deltafmt.cli.output import bytes_text, saving_text
from deltafmt.format.checksum import blake2b
from deltafmt.tensors import numpy_bits

RANKS = 2
WARM_UP_STEPS = {"small": 30, "tiny": 20}


@dataclass(kw_only=True)
class Demo:
    """One run. `url` None publishes to a temporary directory that is removed again."""

    url: str | None
    versions: int
    seed: int
    size: str
    storage_options: dict[str, Any] | None = None

    def play(self, screen: Screen) -> dict[str, Any]:
        """Run it all; the result tells each version, each receiver, and whether all bits agree."""
        with contextlib.ExitStack() as stack:
            url = self.url
            if url is None:
                url = tempfile.mkdtemp(prefix="deltafmt-demo-")
                stack.callback(shutil.rmtree, url, ignore_errors=True)
            return self._play(url, screen, stack)

    def _play(self, url: str, screen: Screen, stack: contextlib.ExitStack) -> dict[str, Any]:
        began = time.perf_counter()
        trainer = Trainer(self.size, self.seed)
        parameters = sum(p.numel() for p in trainer.model.parameters())
        screen.say(f"a transformer of {parameters / 1e6:.1f} M parameters learns a rule by example ...")
        loss = trainer.warm_up(WARM_UP_STEPS[self.size])
        screen.say(f"loss {loss:.2f}; from here on by reward, AdamW at {RATE:g}; versions go to {url}")

        full, shape = trainer.publishable(), SHAPES[self.size]
        writer = deltafmt.Writer(
            url,
            publish_dtype="bfloat16",
            options=deltafmt.WriterOptions(tile_for=[layout(full, shape, r, RANKS) for r in range(RANKS)]),
            storage_options=self.storage_options,
        )
        first = time.perf_counter()
        version = writer.publish_anchor(full, step=0)
        seconds = time.perf_counter() - first
        lineage = deltafmt.open(url, storage_options=self.storage_options)

        followers = [self._start(f"rank {r} of {RANKS}", url, r, RANKS, stack) for r in range(RANKS)]
        for follower in followers:
            follower.answer()
        rows = [self._follow(lineage, version, None, seconds, followers, screen)]
        joiner: Follower | None = None
        for step in range(1, self.versions):
            reward = trainer.step()
            first = time.perf_counter()
            version = writer.publish(trainer.publishable(), step=step)
            seconds = time.perf_counter() - first
            if joiner is None and step >= self.versions // 2:
                joiner = self._start("late joiner", url, 0, 1, stack)
            elif (
                joiner is not None
                and joiner not in followers
                and (joiner.answered() or step == self.versions - 1)
            ):
                joiner.answer()
                followers.append(joiner)
            rows.append(self._follow(lineage, version, reward, seconds, followers, screen))
        if joiner is None:
            joiner = self._start("late joiner", url, 0, 1, stack)
        if joiner not in followers:
            joiner.answer()
            followers.append(joiner)
            rows[-1]["note"] = self._advance(version, [joiner])[1]
        proofs = self._prove(trainer, followers, screen)
        return self._summary(url, parameters, rows, proofs, time.perf_counter() - began, screen)

    def _start(self, name: str, url: str, rank: int, ranks: int, stack: contextlib.ExitStack) -> Follower:
        follower = Follower(
            Job(
                name=name,
                url=url,
                size=self.size,
                rank=rank,
                ranks=ranks,
                storage_options=self.storage_options,
            )
        )
        stack.callback(follower.close)
        return follower

    def _follow(
        self,
        lineage: deltafmt.Lineage,
        version: int,
        reward: float | None,
        publish_seconds: float,
        followers: list[Follower],
        screen: Screen,
    ) -> dict[str, Any]:
        steps, note = self._advance(version, followers)
        warm = [step for step in steps if not step.cold] or steps
        schema, manifest = lineage.schema(version), lineage.manifest(version)
        row = {
            "version": version,
            "reward": reward,
            "changed": manifest.changed,
            "elements": schema.elements,
            "stored_bytes": manifest.stored_bytes,
            "full_bytes": schema.nbytes,
            "publish_seconds": publish_seconds,
            # The slowest receiver counts: an engine goes on when all its ranks do.
            "fetch_seconds": None if warm[0].cold else max(step.fetch_seconds for step in warm),
            "pause_seconds": max(step.pause_seconds for step in warm),
            "note": note,
        }
        screen.add(row)
        return row

    def _advance(self, version: int, followers: list[Follower]) -> tuple[list[Step], str]:
        for follower in followers:
            follower.ask("advance", version)
        steps: list[Step] = [follower.answer() for follower in followers]
        joined = [f.job.name for f, step in zip(followers, steps, strict=True) if step.cold]
        late = [step.pause_seconds for step in steps if step.cold]
        return steps, f"{', '.join(joined)} from nothing in {max(late):.2f} s" if joined else ""

    def _prove(self, trainer: Trainer, followers: list[Follower], screen: Screen) -> list[dict[str, Any]]:
        """Compare every receiver's bytes with the trainer's, cut by torch and not by deltafmt."""
        full, shape = trainer.cast(), SHAPES[self.size]
        proofs = []
        for follower in followers:
            follower.ask("proof")
            found: dict[str, bytes] = follower.answer()
            job = follower.job
            mine = full if job.ranks == 1 else shards(full, shape, job.rank, job.ranks)
            expected = {name: numpy_bits(tensor).tobytes() for name, tensor in mine.items()}
            wrong = sorted(
                name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
            )
            held = sum(map(len, found.values()))
            proof: dict[str, Any] = {
                "receiver": job.name,
                "tensors": len(found),
                "bytes": held,
                "blake2b": blake2b(b"".join(found[name] for name in sorted(found))).hex(),
                "trainer_blake2b": blake2b(b"".join(expected[name] for name in sorted(expected))).hex(),
                "different": wrong,
            }
            proofs.append(proof)
            verdict = f"DIFFERENT in {', '.join(wrong)}" if wrong else "identical, bit for bit"
            screen.say(
                f"{job.name:>12}: {proof['tensors']} tensors, {bytes_text(held)}, "
                f"blake2b {proof['blake2b'][:16]}, trainer's {proof['trainer_blake2b'][:16]}: {verdict}"
            )
        return proofs

    def _summary(
        self,
        url: str,
        parameters: int,
        rows: list[dict[str, Any]],
        proofs: list[dict[str, Any]],
        seconds: float,
        screen: Screen,
    ) -> dict[str, Any]:
        deltas = rows[1:]
        stored = sum(row["stored_bytes"] for row in deltas)
        full = sum(row["full_bytes"] for row in deltas)
        # The first one compiles kernels, once per machine.
        pause = median(row["pause_seconds"] for row in deltas[1:] or deltas)
        screen.say(
            f"{len(deltas)} updates in {bytes_text(stored)} instead of {bytes_text(full)} "
            f"({saving_text(full, stored)} less); median pause {1000 * pause:.1f} ms; {seconds:.0f} s in all"
        )
        if self.url is not None:
            screen.say(f"look at it: deltafmt log {url}")
        return {
            "url": url,
            "parameters": parameters,
            "seed": self.seed,
            "versions": rows,
            "proofs": proofs,
            "identical": not any(proof["different"] for proof in proofs),
            "seconds": seconds,
        }
