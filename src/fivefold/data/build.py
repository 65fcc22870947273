"""`fivefold data build`: from documents to a training and a validation set on disk.

Reads inputs in a fixed order, encodes them with many processes, divides documents by a hash of their text, and lets
both folders appear at once. The stages are rooms of their own: `inputs.py` finds, `read.py` reads, `encode.py` is the
worker, `writer.py` writes, `publish.py` renames, `recipe.py` remembers what it was made from.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fivefold.data.encode import Encoded, Settings, Tally, encode_all, spread_sample
from fivefold.data.inputs import Input, cut_blocks, find_inputs
from fivefold.data.publish import Workshop
from fivefold.data.recipe import INPUTS, BuildOptions, differences, input_list, make_recipe
from fivefold.data.tokenizer import Tokenizer, train
from fivefold.data.tokens import SIDECAR, TokenSet
from fivefold.data.writer import TokenWriter
from fivefold.errors import RunError, UserError
from fivefold.outputs import check_folder

SAMPLE_BYTES = 64 << 20
"""Text that a tokenizer is trained on, at most."""
SMALL = 4 << 20
"""Bytes of input below which starting worker processes takes longer than the work."""


@dataclass(frozen=True)
class BuildResult:
    """What a build did."""

    out: Path
    built: bool
    """False if the same set was there already."""
    train: dict[str, Any]
    """dataset.json of the training set."""
    validation: dict[str, Any] | None
    """dataset.json of the validation set, None if nothing is held out."""

    def summary(self) -> str:
        """Some lines for a person."""
        lines = [] if self.built else [f"{self.out} was already built from these inputs and options; nothing done"]
        for path, meta in ((self.out, self.train), (validation_path(self.out), self.validation)):
            if meta:
                lines.append(
                    f"{path}: {meta['documents']:,} documents, {meta['tokens']:,} tokens, "
                    f"{meta['text_bytes'] / 1e6:,.1f} MB of text"
                )
        if self.validation is None and self.train["recipe"]["val_fraction"]:
            lines.append("nothing is held out for validation: there is only one document")
        counts = self.train["summary"]
        skipped = ", ".join(f"{number} {reason}" for reason, number in counts["skipped"].items())
        lines.append(f"documents read {counts['read']:,} = written {counts['written']:,} + skipped {skipped or 0}")
        for reason, places in counts["examples"].items():
            lines.append(f"  {reason}, for example {'; '.join(places)}")
        if counts["replaced_surrogates"]:
            lines.append(f"lone surrogates replaced by U+FFFD: {counts['replaced_surrogates']}")
        lines.append(f"vocabulary {self.train['vocab']:,}, end of document {self.train['eod']}")
        return "\n".join(lines)


def validation_path(out: Path) -> Path:
    """Where the documents held out go."""
    return out.with_name(out.name + "-val")


def build(inputs: Sequence[str | Path], out: str | Path, options: BuildOptions) -> BuildResult:
    """Build the token sets `out` and `out`-val from files and folders.

    Both appear whole or not at all. An output that is there already and was made from the same inputs and options is
    checked and left alone; one made from others is refused with the difference, unless `options.overwrite`.
    Raises UserError for whatever is wrong with inputs or options, RunError if a worker dies or the disk is full.
    """
    options.check()
    out = Path(out)
    check_folder(out)
    found = find_inputs(inputs, options.include, options.exclude)
    tokenizer = None if options.tokenizer is None else Tokenizer.load(options.tokenizer, options.end_token)
    recipe = make_recipe(found, options, tokenizer.to_json() if tokenizer else None)
    with Workshop(out) as shop, full_disk_named(out):
        if (existing := same_output(out, recipe, found, options.overwrite)) is not None:
            return existing
        tokenizer = tokenizer or train_tokenizer(found, options)
        division = Division(shop.path, tokenizer, options)
        for encoded in encode_inputs(found, tokenizer, options):
            division.add(encoded)
        metas = division.finish(recipe=recipe)
        for folder in metas:
            tokenizer.save(folder)
            (folder / INPUTS).write_text(input_list(found), encoding="utf-8", errors="surrogateescape")
        held_out = shop.path / "validation"
        shop.publish({validation_path(out): held_out if held_out in metas else None, out: shop.path / "train"})
    return BuildResult(out, True, metas[shop.path / "train"], metas.get(held_out))


def same_output(out: Path, recipe: dict[str, Any], inputs: Sequence[Input], overwrite: bool) -> BuildResult | None:
    """The existing output if it has this recipe, None if the way is free. UserError if something else is there."""
    held_out = validation_path(out)
    for path in (out, held_out):
        if path.exists() and (not path.is_dir() or any(path.iterdir())) and not (path / SIDECAR).is_file():
            raise UserError(f"{path} exists and was not written by `fivefold data build`; choose another --out")
    if held_out.exists() and any(held_out.iterdir()) and stored_role(held_out) != "validation":
        raise UserError(
            f"{held_out} is a set of its own, and would be the validation set of {out}; choose another --out"
        )
    if overwrite or not (out / SIDECAR).is_file():
        return None
    existing = TokenSet.open(out)
    assert existing.meta is not None, "the sidecar is there"
    if changes := differences(existing.meta.get("recipe", {}), recipe, out, inputs):
        raise UserError(
            f"{out} was built differently: {'; '.join(changes)}; --overwrite builds it again, or choose another --out"
        )
    existing.verify()
    validation = TokenSet.open(held_out) if existing.meta["held_out_documents"] else None
    if validation is not None:
        validation.verify()
    return BuildResult(out, False, existing.meta, validation.meta if validation else None)


def stored_role(folder: Path) -> str | None:
    """What a set says it is, read leniently: a damaged set may be replaced too."""
    try:
        return json.loads((folder / SIDECAR).read_text(encoding="utf-8")).get("role")
    except (ValueError, AttributeError):
        return None


def train_tokenizer(inputs: Sequence[Input], options: BuildOptions) -> Tokenizer:
    """Train on a sample that is spread over the inputs."""
    assert options.train_tokenizer is not None, "one of the two is given: the options were checked"
    blocks = cut_blocks(inputs, options.text_key)
    return train(spread_sample(blocks, options.text_key, SAMPLE_BYTES), options.train_tokenizer)


def encode_inputs(inputs: Sequence[Input], tokenizer: Tokenizer, options: BuildOptions) -> Iterator[Encoded]:
    """All blocks of the inputs, encoded, in order, under a progress bar."""
    total = sum(each.size for each in inputs)
    workers = options.workers or (len(os.sched_getaffinity(0)) if total > SMALL else 1)
    settings = Settings(tokenizer.to_json(), tokenizer.eod, tokenizer.bos, options.text_key, options.seed)
    blocks = cut_blocks(inputs, options.text_key)
    with tqdm(total=total, unit="B", unit_scale=True, desc="encode", disable=None if options.progress else True) as bar:
        for encoded in encode_all(blocks, tokenizer, settings, workers):
            bar.update(encoded.size)
            yield encoded


class Division:
    """Divides documents between the training and the validation set, as they come.

    A document is held out if the hash of its text falls into the fraction, so that neither order nor number of workers
    matter and copies of a text stay on one side. If none falls there, the one with the smallest hash is taken.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: BuildOptions) -> None:
        self._folder, self._options = folder, options
        self._size = tokenizer.vocab_size, tokenizer.eod
        self._train = TokenWriter(folder / "train", *self._size)
        self._held_out = TokenWriter(folder / "validation", *self._size)
        self._limit = np.uint64(int(options.val_fraction * 2**64))
        self._seen: set[bytes] = set()
        self._tally = Tally()
        self._smallest = np.uint64(2**64 - 1)
        self._smallest_at: list[tuple[int, int]] = []

    def add(self, encoded: Encoded) -> None:
        """Write a block's documents."""
        self._tally.add(encoded.tally)
        keep = np.ones(len(encoded.lengths), dtype=bool)
        if self._options.dedup == "exact":
            keep = self._first_of_their_kind(encoded.hashes)
        held_out = encoded.hashes[:, 0] < self._limit
        if not self._held_out.documents:
            self._track_smallest(encoded, keep)
        for writer, mine in ((self._train, keep & ~held_out), (self._held_out, keep & held_out)):
            tokens = encoded.tokens if mine.all() else encoded.tokens[np.repeat(mine, encoded.lengths)]
            writer.write(tokens, encoded.lengths[mine], int(encoded.text_bytes[mine].sum()))

    def _first_of_their_kind(self, hashes: np.ndarray) -> np.ndarray:
        keep = np.zeros(len(hashes), dtype=bool)
        for number, key in enumerate(map(bytes, hashes)):
            if key in self._seen:
                self._tally.skip("duplicate", "")
            else:
                self._seen.add(key)
                keep[number] = True
        return keep

    def _track_smallest(self, encoded: Encoded, keep: np.ndarray) -> None:
        """Remember where the documents with the smallest hash are, and their bytes of text."""
        hashes = encoded.hashes[keep, 0]
        if not len(hashes) or hashes.min() > self._smallest:
            return
        if hashes.min() < self._smallest:
            self._smallest, self._smallest_at = hashes.min(), []
        places = np.flatnonzero(hashes == self._smallest)
        sizes = encoded.text_bytes[keep][places]
        self._smallest_at += [
            (self._train.documents + int(at), int(size)) for at, size in zip(places, sizes, strict=True)
        ]

    def finish(self, recipe: dict[str, Any]) -> dict[Path, dict[str, Any]]:
        """Complete the sets; returns each folder's dataset.json. Raises UserError if nothing is left to train on."""
        written = self._train.documents + self._held_out.documents
        summary = {
            "read": self._tally.read,
            "written": written,
            "skipped": dict(self._tally.skipped),
            "examples": self._tally.examples,
            "replaced_surrogates": self._tally.replaced_surrogates,
        }
        if not written:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._tally.skipped.items())
            raise UserError(
                f"no document to write: {self._tally.read} read, skipped {reasons or 0}; nothing was written"
            )
        if not self._train.documents:
            raise UserError(
                f"all {written} documents fall into the validation set at --val-fraction {self._options.val_fraction}; "
                "lower it"
            )
        if self._limit and not self._held_out.documents and len(self._smallest_at) < written:
            self._hold_out_smallest()
        more = {"held_out_documents": self._held_out.documents, "recipe": recipe, "summary": summary}
        metas = {self._train.folder: self._train.close(role="train", **more)}
        held_out = self._held_out.close(role="validation", **more)
        if self._held_out.documents:
            metas[self._held_out.folder] = held_out
        return metas

    def _hold_out_smallest(self) -> None:
        """Write the training set again without the documents of the smallest hash, which go to the validation set."""
        self._train.close(role="train")
        everything = self._folder / "everything"
        self._train.folder.rename(everything)
        source, text_bytes = TokenSet.open(everything), self._train.text_bytes
        self._train = TokenWriter(self._folder / "train", *self._size)
        done = 0
        for at, size in self._smallest_at:
            copy_documents(source, done, at, self._train)
            copy_documents(source, at, at + 1, self._held_out)
            self._held_out.text_bytes += size
            done = at + 1
        copy_documents(source, done, len(source.starts), self._train)
        self._train.text_bytes = text_bytes - self._held_out.text_bytes


def copy_documents(source: TokenSet, first: int, last: int, writer: TokenWriter, together: int = 1 << 16) -> None:
    """Append documents `first` to `last` - 1 of a set of one sequence a document."""
    for begin in range(first, last, together):
        lengths = source.index.lengths[begin : min(begin + together, last)]
        start = int(source.starts[begin])
        writer.write(source.read(start, int(lengths.sum())), lengths)


@contextmanager
def full_disk_named(out: Path) -> Iterator[None]:
    """Turn the error of a full disk into one that says what it left: nothing."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunError(
            f"the disk of {out} is full ({error.strerror}); nothing was left behind; free space and run it again"
        ) from None
