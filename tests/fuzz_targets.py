"""What is damaged: a target makes some whole files (once) and damaged versions of them (many)."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_cases
import gguf
import vocabularies
from foreign import llama_config, llama_folder, llama_shapes, random_weights, save_gguf
from mutations import WORDS, mutate_bytes, mutate_gguf, mutate_json, mutate_sentencepiece

import jaxlm
from jaxlm.checkpoints.manifest import MANIFEST, seal
from jaxlm.conversion.gguf_reader import read_gguf
from jaxlm.load import convert

Files = dict[str, bytes]


@dataclass(frozen=True)
class Target:
    """make: writes whole files to a folder, -> what to load. damage: other files, from a generator and whole ones.
    load: gives a model, jaxlm.load unless said otherwise."""

    make: Callable[[Path], Path]
    damage: Callable[[random.Random, Files], Files]
    load: Callable[[Path], Any] = jaxlm.load


def read_files(folder: Path) -> Files:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_files(folder: Path, files: Files) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


# Damage.


def in_header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with a changed header, its length made to fit or not."""
    length = int.from_bytes(data[:8], "little")
    header = mutate_json(rng, data[8 : 8 + length])
    said = len(header) if rng.random() < 0.9 else length
    return said.to_bytes(8, "little") + header + data[8 + length :]


def damage_weights(rng: random.Random, files: Files) -> Files:
    name = rng.choice([n for n in files if n.endswith(".safetensors")])
    return files | {name: rng.choice((in_header, mutate_bytes))(rng, files[name])}


def damage_json(*names: str) -> Callable[[random.Random, Files], Files]:
    def damage(rng: random.Random, files: Files) -> Files:
        name = rng.choice(names)
        change = mutate_json if rng.random() < 0.8 else mutate_bytes
        return files | {name: change(rng, files[name])}

    return damage


def damage_model(rng: random.Random, files: Files) -> Files:
    change = mutate_sentencepiece if rng.random() < 0.7 else mutate_bytes
    return files | {"tokenizer.model": change(rng, files["tokenizer.model"])}


def damage_gguf(rng: random.Random, files: Files) -> Files:
    if rng.random() < 0.4:
        return {"m.gguf": mutate_bytes(rng, files["m.gguf"], 4096)}
    path = Path(f"/proc/self/fd/{os.memfd_create('whole')}")
    path.write_bytes(files["m.gguf"])
    metadata, tensors = read_gguf(path)
    start = min(t.offset for t in tensors.values())
    kinds = {"F32": 0, "F16": 1}
    table = [(t.name, [*t.shape[::-1]], kinds[t.stored], t.offset - start) for t in tensors.values()]
    os.close(int(path.name))
    return {"m.gguf": mutate_gguf(rng, metadata, table, files["m.gguf"][start:])}


def damage_checkpoint(rng: random.Random, files: Files) -> Files:
    """Some with every hash made to fit again, as one would who means harm."""
    manifest = json.loads(files[MANIFEST])
    names = [n for n in files if n.endswith(".json") and n != MANIFEST]
    chunks = [n for n in files if "/c." in n]
    match rng.randrange(7):
        case 0:
            name = rng.choice([MANIFEST, *names, *chunks])
            return files | {name: mutate_bytes(rng, files[name], 512)}
        case 1:
            del manifest["sha256"]
            changed = mutate_json(rng, json.dumps(manifest).encode())
            return files | {MANIFEST: _sealed(changed)}
        case 2 | 3:
            name = rng.choice(names)
            return _resealed(files | {name: mutate_json(rng, files[name])}, manifest, name, name)
        case 4:
            name = "model_config.json"
            return _resealed(files | {name: mutate_json(rng, files[name])}, manifest, name, name)
        case 5:
            name = rng.choice(chunks)
            return _resealed(files | {name: mutate_bytes(rng, files[name])}, manifest, name, name)
        case _:
            name = rng.choice([*names, *chunks])
            place = rng.choice((*WORDS, f"../{name}", f"./{name}", f"/{name}", rng.choice(chunks)))
            return _resealed(files, manifest, name, place)


def _sealed(changed: bytes) -> bytes:
    try:
        document = json.loads(changed)
        return seal(document) if isinstance(document, dict) else changed
    except (ValueError, RecursionError):
        return changed


def _resealed(files: Files, manifest: dict[str, Any], name: str, place: str) -> Files:
    """The file listed at `place` with its present size and hash, in a manifest that fits itself."""
    listed = {n: i for n, i in manifest["files"].items() if n != name}
    listed[place] = {"size": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return files | {MANIFEST: seal(rest | {"files": listed})}


def damage_journal(rng: random.Random, files: Files) -> Files:
    name = "dest.jaxlm-partial/journal.jsonl"
    lines = files[name].splitlines(keepends=True)
    if rng.random() < 0.7:
        at = rng.randrange(len(lines))
        lines[at] = lines[at][:9] + mutate_json(rng, lines[at][9:]) + b"\n"  # After a checksum.
        return files | {name: b"".join(lines)}
    return files | {name: mutate_bytes(rng, files[name])}


# Whole files.


def tokens_folder(kind: str) -> Callable[[Path], Path]:
    """A Llama with a vocabulary: "json" or "model"."""

    def make(folder: Path) -> Path:
        llama_folder(folder, vocab_size=432, num_hidden_layers=1)
        files = vocabularies.byte_level_files(bos=True) if kind == "json" else vocabularies.sentencepiece_files()
        files["generation_config.json"] = json.dumps({"eos_token_id": [1, 2], "bos_token_id": 0}).encode()
        files["special_tokens_map.json"] = json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}).encode()
        write_files(folder, files)
        return folder

    return make


def charsmap_folder(folder: Path) -> Path:
    """With a vocabulary that normalises text by a table of its own."""
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(vocabularies.CORPUS * 3), model_writer=out, vocab_size=200, hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc_cf", minloglevel=3,
    )  # fmt: skip
    tokens_folder("model")(folder)
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return folder


def gguf_file(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        vocab = vocabularies.byte_level_metadata() if kind == "json" else vocabularies.sentencepiece_metadata()
        config = llama_config(vocab_size=len(vocab["tokenizer.ggml.tokens"]), num_hidden_layers=1)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
        weights = random_weights(llama_shapes(config), 0)
        named = {f"{names.get_name(n.removesuffix('.weight'))}.weight": a for n, a in weights.items()}
        metadata = {
            "block_count": 1, "context_length": 128, "embedding_length": 48, "feed_forward_length": 56,
            "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 10,
            "attention.value_length": 10, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4,
            "rope.dimension_count": 10, "vocab_size": config["vocab_size"], **vocab,
        }  # fmt: skip
        folder.mkdir()
        return save_gguf(folder / "m.gguf", "llama", metadata, named)

    return make


def checkpoint_folder(folder: Path) -> Path:
    return convert(tokens_folder("json")(folder.with_name("source")), folder)


def half_converted(folder: Path) -> Path:
    """A conversion that was interrupted, beside its source."""
    tokens_folder("json")(folder / "source")

    def stop(done: int, total: int, name: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    try:
        convert(folder / "source", folder / "dest", progress=stop)
    except KeyboardInterrupt:
        return folder
    raise AssertionError("the conversion was not interrupted")


def finish(folder: Path) -> Any:
    """Go on with the interrupted conversion, which checks names, sizes and times of the source."""
    whole = folder.parents[2] / "whole" / folder.parent.name / folder.name / "source"
    return jaxlm.load(convert(whole, folder / "dest"))


def family_folder(family: str) -> Callable[[Path], Path]:
    return lambda folder: family_cases.write_case(folder, family, family_cases.cases(family)[0])


def targets() -> dict[str, Target]:
    sharded = damage_json("model.safetensors.index.json")
    settings = damage_json("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
    found = {
        "safetensors": Target(lambda f: llama_folder(f, "bfloat16"), damage_weights),
        "shards": Target(lambda f: llama_folder(f, shards=2), sharded),
        "config": Target(lambda f: llama_folder(f), damage_json("config.json")),
        "gguf-json": Target(gguf_file("json"), damage_gguf),
        "gguf-model": Target(gguf_file("model"), damage_gguf),
        "tokenizer.json": Target(tokens_folder("json"), damage_json("tokenizer.json")),
        "tokenizer.model": Target(tokens_folder("model"), damage_model),
        "charsmap": Target(charsmap_folder, damage_model),
        "settings-json": Target(tokens_folder("json"), settings),
        "settings-model": Target(tokens_folder("model"), settings),
        "checkpoint": Target(checkpoint_folder, damage_checkpoint),
        "journal": Target(half_converted, damage_journal, finish),
    }
    for family in family_cases.family_names():
        found[f"{family}-config"] = Target(family_folder(family), damage_json("config.json"))
    for family in ("gpt_oss", "phi3", "qwen3_moe"):
        found[f"{family}-weights"] = Target(family_folder(family), damage_weights)
    return found


def remake(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
