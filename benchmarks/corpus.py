"""The tokens that sampled_training.py trains on, in .npy files: Python sources and, for its
fine-tuning, headers of C and C++."""

import hashlib
import pathlib
import sysconfig

import numpy
import torch


def read_sources(limit, suffixes=(".py",)):
    """Distinct files of Python's own folders and of the installed packages, shuffled."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "include")}
    paths = {path for folder in folders for path in pathlib.Path(folder).rglob("*.*")}
    paths = sorted(path for path in paths if path.suffix in suffixes)
    texts, size = {}, 0
    for index in numpy.random.default_rng(0).permutation(len(paths)):
        try:
            text = paths[index].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) <= 200_000 and text not in texts:
            texts[text] = None
            size += len(text)
        if size >= limit:
            break
    return list(texts)


def make_corpus(path, other, vocab, limit):
    """At most `limit` tokens, by a BPE made from a fifth of the files; `other`: where a quarter as
    many of other text go, by the same BPE, or None."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # for this mode alone

    texts = read_sources(5 * limit)  # characters; a token has about 3.6 of them
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[: len(texts) // 5], trainer)
    write_tokens(path, tokenizer, vocab, limit, texts)
    if other:
        headers = read_sources(5 * limit // 4, (".h", ".hpp", ".cuh"))
        write_tokens(other, tokenizer, vocab, limit // 4, headers)


def write_tokens(path, tokenizer, vocab, limit, texts):
    parts, count = [], 0
    for text in texts:
        dtype = numpy.uint16 if vocab <= 2**16 else numpy.int32
        parts.append(numpy.array(tokenizer.encode(text).ids, dtype))
        count += len(parts[-1])
        if count >= limit:
            break
    numpy.save(path, numpy.concatenate(parts)[:limit])
    print(f"{path}: {min(count, limit)} tokens of {len(parts)} files")


class Corpus:
    """Tokens of the file `path` on the device; the last `heldout` of them are for validation."""

    def __init__(self, options, path):
        tokens = numpy.load(path)
        heldout = options.heldout // options.sequence
        split = len(tokens) - heldout * options.sequence - 1
        if not (heldout > 0 and split > options.sequence + 1):
            raise SystemExit(f"{path}: {len(tokens)} tokens are too few")
        if not tokens.max() < options.vocab:
            raise SystemExit(f"{path}: token {tokens.max()}, vocabulary {options.vocab}")
        self.digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        wide = torch.from_numpy(tokens.astype(numpy.int32))
        self.counts = torch.bincount(wide[:split], minlength=options.vocab).to(options.device)
        wide = wide.to(options.device)
        self.train, rest = wide[:split], wide[split:].long()
        self.ids = rest[:-1].view(heldout, options.sequence)
        self.targets = rest[1:].view(heldout, options.sequence)
