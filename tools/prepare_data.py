"""Tokenises text into ArrayRecord shards for `data.source = "arrayrecord"`.

    python -m tools.prepare_data --source text --path corpus/ --tokenizer tokenizer.json --out prepared/

writes shards, document lengths, the packing index for one sequence length and a manifest into a new folder: whole, or
not at all. Another sequence length or held-out fraction works too; its index is then computed at the first run.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ep_jax.cli import CommandParser
from ep_jax.data.config import DataConfig
from ep_jax.data.dataset import split_documents
from ep_jax.data.documents import skipped_text
from ep_jax.data.manifest import Manifest, new_folder, read_documents_table, read_manifest, seal
from ep_jax.data.packing import pack, packing_name, save_packing
from ep_jax.data.shards import write_shards
from ep_jax.data.tokenizer import open_tokenizer
from ep_jax.exits import run_main
from ep_jax.fields import ConfigError


def main(argv: Sequence[str]) -> None:
    """Parses the command line, writes the folder and prints what is in it. Raises ConfigError."""
    options = _parser().parse_args(argv)
    config = DataConfig(
        source=options.source,
        path=options.path,
        jsonl_field=options.jsonl_field,
        tokenizer=options.tokenizer,
        sequence_length=options.sequence_length,
        held_out_fraction=options.held_out_fraction,
    )
    if options.shard_mib < 1:
        raise ConfigError(f"--shard-mib {options.shard_mib}: allowed is at least 1")
    manifest = prepare(config, Path(options.out).expanduser(), shard_bytes=options.shard_mib << 20)
    num_shards = sum(name.endswith(".arrayrecord") for name in manifest.files)
    print(
        f"{options.out}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in {num_shards} shards; "
        f"skipped: {skipped_text(manifest.skipped)}"
    )


def prepare(config: DataConfig, out: Path, *, shard_bytes: int) -> Manifest:
    """Writes the folder `out`, which must not exist. Raises ConfigError; then nothing is left behind."""
    if out.exists():
        raise ConfigError(f"--out {out}: exists already and is not overwritten")
    tokenizer = open_tokenizer(config.tokenizer)
    try:
        with new_folder(out) as unfinished:
            write_shards(unfinished, config, tokenizer, shard_bytes=shard_bytes)
            _write_packing(unfinished, config)
            if config.tokenizer != "bytes":
                (unfinished / "tokenizer.json").write_bytes(Path(config.tokenizer).expanduser().read_bytes())
            return seal(unfinished)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror} ({error.filename})") from None


def _write_packing(folder: Path, config: DataConfig) -> None:
    lengths, hashes = read_documents_table(folder, read_manifest(folder, "arrayrecord", verify=False))
    for documents in split_documents(hashes, config.held_out_fraction):
        packing = pack(documents, lengths[documents], config.sequence_length)
        save_packing(folder, packing_name(documents, lengths[documents], config.sequence_length), packing)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m tools.prepare_data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", choices=("stdlib", "text", "jsonl"), default="text", help="kind of the documents")
    parser.add_argument("--path", default="", help="file, folder or glob; unused for stdlib")
    parser.add_argument("--jsonl-field", default="text", help="field of a JSON line that holds the text (text)")
    parser.add_argument("--tokenizer", default="bytes", help="'bytes' or the path of a tokenizer.json (bytes)")
    parser.add_argument("--out", required=True, help="folder to write; must not exist")
    parser.add_argument("--sequence-length", type=int, default=256, help="columns of the packing index (256)")
    parser.add_argument("--held-out-fraction", type=float, default=0.05, help="split of the packing index (0.05)")
    parser.add_argument("--shard-mib", type=int, default=256, help="tokens of a shard, MiB (256)")
    return parser


if __name__ == "__main__":
    # A terminated run cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_main(main)
