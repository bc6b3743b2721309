"""Sample data that tests generate when the real samples are not there.

The folder has the layout of the real one. Images are scikit-learn's handwritten digits, scaled up and coloured.
Reviews are drawn from a word list. The tokenizers have generated vocabularies. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import random
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GOOD = ("wonderful", "moving", "clever", "great", "charming", "good")
BAD = ("dreadful", "dull", "lazy", "bad", "tedious", "noisy")
_PLAIN = (
    "the a film story of and in it is was with an actor scene music end camera plot script never always very not this "
    "that who but for on as she he they we you i one two dog dogs fine new answer world hello null buy now so"
)
PLAIN = _PLAIN.split()
BERT_WORDS = 30_522
"""The size of the vocabulary of bert-base-uncased, on which some expected sizes depend."""
BERT_SPECIAL = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
BIG_BIRD_SPECIAL = {"<pad>": 0, "<s>": 2, "</s>": 1, "[CLS]": 65, "[SEP]": 66, "[MASK]": 67, "<unk>": 100}


def make_samples(folder: Path) -> None:
    """Write every sample below ``folder``. Takes about two seconds."""
    _cifar10(folder / "cifar10")
    _fashion_mnist(folder / "fashion_mnist_small", train=1_000, test=500)
    _fashion_mnist(folder / "fashion_mnist", train=60_000, test=10_000)
    _reviews(folder)
    _bert_tokenizer(folder / "tokenizers" / "bert-base-uncased")
    _big_bird_tokenizer(folder / "tokenizers" / "bigbird-roberta-base")


def _digits(count: int, size: int) -> np.ndarray:
    """``count`` digits whose class is their index modulo 10: uint8, shape (count, size, size)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    by_class = [digits.images[digits.target == label] for label in range(10)]
    picked = np.stack([by_class[index % 10][index // 10 % len(by_class[index % 10])] for index in range(count)])
    scaled = (picked * 15).astype(np.uint8).repeat(size // 8, 1).repeat(size // 8, 2)
    edge = size - scaled.shape[1]
    return np.pad(scaled, ((0, 0), (0, edge), (0, edge)))


def _cifar10(folder: Path) -> None:
    """``cifar10_subset.npz`` with 5,000 and 1,000 images of 32 × 32 pixels, and 150 and 50 of them as PNG files."""
    from PIL import Image

    labels = np.arange(6_000) % 10
    drawn = np.random.default_rng(0)
    tint, noise = drawn.integers(2, 8, (6_000, 1, 1, 3)), drawn.integers(0, 16, (6_000, 32, 32, 3))
    images = (_digits(6_000, 32)[..., None] // 8 * tint + noise).astype(np.uint8)
    split = (np.arange(6_000) >= 5_000).astype(np.uint8)
    names = [f"{CLASSES[label]}_s_{index:06d}.png" for index, label in enumerate(labels)]
    folder.mkdir(parents=True)
    arrays = {"images": images, "labels": labels.astype(np.uint8), "split": split, "filenames": np.array(names)}
    np.savez(folder / "cifar10_subset.npz", class_names=np.array(CLASSES), **arrays)
    for part, first, count in (("train", 0, 150), ("test", 5_000, 50)):
        for name in CLASSES:
            (folder / "folder" / part / name).mkdir(parents=True)
        for index in range(first, first + count):
            Image.fromarray(images[index]).save(folder / "folder" / part / CLASSES[labels[index]] / names[index])


def _fashion_mnist(folder: Path, train: int, test: int) -> None:
    """The four uncompressed files of Fashion-MNIST. Beyond 1,000 images the pixels are zeros in a sparse file."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        with (raw / f"{name}-images-idx3-ubyte").open("wb") as file:
            file.write(np.array([0x803, count, 28, 28], ">i4").tobytes())
            if count <= 1_000:
                file.write(_digits(count, 28).tobytes())
            file.truncate(16 + count * 28 * 28)
        labels = np.arange(count, dtype=np.int64) % 10
        content = np.array([0x801, count], ">i4").tobytes() + labels.astype(np.uint8).tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(content)


def _review(chance: random.Random, number: int, label: int) -> str:
    """A text of 20 to 1,000 words that says by its adjectives which ``label`` it has."""
    words = min(1_000, max(20, int(chance.lognormvariate(5.2, 0.6))))
    drawn = [chance.choice(PLAIN if chance.random() < 0.85 else (BAD, GOOD)[label]) for _ in range(words)]
    half = words // 2
    return f"{' '.join(drawn[:half])}.<br /><br />Review {number}: {' '.join(drawn[half:])}!"


def _reviews(folder: Path) -> None:
    """``imdb/{train,test}.csv`` with 1,000 and 400 rows, ``imdb_folder/{train,test}/{pos,neg}`` with 50 files each."""
    chance = random.Random(0)
    (folder / "imdb").mkdir()
    for part, count in (("train", 1_000), ("test", 400)):
        labels = [index % 2 for index in range(count)]
        chance.shuffle(labels)
        rows = [(_review(chance, number, label), label) for number, label in enumerate(labels)]
        with (folder / "imdb" / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("text", "label"), *rows])
        for label, name in enumerate(("neg", "pos")):
            place = folder / "imdb_folder" / part / name
            place.mkdir(parents=True)
            for number in range(50):
                rating = chance.choice(((1, 2, 3, 4), (7, 8, 9, 10))[label])
                (place / f"{number}_{rating}.txt").write_text(_review(chance, number, label), encoding="utf-8")


def _placed(special: dict[str, int], words: Sequence[str], size: int) -> list[str]:
    """``size`` different entries: ``special`` at their ids, then ``words``, then ``[unused...]``."""
    placed = {index: word for word, index in special.items()}
    rest = iter([*dict.fromkeys(words), *(f"[unused{index}]" for index in range(size))])
    return [placed[index] if index in placed else next(rest) for index in range(size)]


def _bert_tokenizer(folder: Path) -> None:
    """WordPiece with the special tokens and the size of bert-base-uncased: whole words, else single characters."""
    from transformers import DistilBertTokenizerFast

    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    pieces = [*letters, *(f"##{letter}" for letter in letters), *PLAIN, *GOOD, *BAD, "review", "br"]
    vocabulary = {word: index for index, word in enumerate(_placed(BERT_SPECIAL, pieces, BERT_WORDS))}
    DistilBertTokenizerFast(vocab=vocabulary, do_lower_case=True, model_max_length=512).save_pretrained(folder)


def _big_bird_tokenizer(folder: Path) -> None:
    """A unigram tokenizer with the special tokens of bigbird-roberta-base at their ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [*string.ascii_letters, *string.digits, *string.punctuation]
    pieces = ["▁", *letters, *(f"▁{word}" for word in (*PLAIN, *GOOD, *BAD))]
    vocabulary = _placed(BIG_BIRD_SPECIAL, pieces, 400)
    made = Tokenizer(models.Unigram([(piece, -1.0 - 1 / len(piece)) for piece in vocabulary], unk_id=100))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    ends = [(name, BIG_BIRD_SPECIAL[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "bos": "<s>"}
    tokens = {f"{name}_token": token for name, token in names.items()} | {"eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=4096, **tokens).save_pretrained(folder)
