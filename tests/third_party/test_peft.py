"""Adapters and merged models in PEFT and transformers themselves: what is exported computes the same there, and back."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor import Tune
from fedfactor.data import load as load_data
from fedfactor.export import export
from fedfactor.factor import ChannelSplit, Core, Hadamard, Scheme
from fedfactor.models.huggingface import text_classifier
from fedfactor.nn import adapt, compose
from fedfactor.protocol.message import Message, encode
from fedfactor.registry import create
from fedfactor.runs import recipe as recipes
from fedfactor.runs.execute import run as execute
from fedfactor.runs.peft import adapter_of, with_adapter, write_adapter
from fedfactor.support.hub import local_folder
from tests.helpers import made_data as make

pytestmark = [
    pytest.mark.peft,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT calls it
]

ROWS = torch.randint(1, 50, (24, 12), generator=torch.Generator().manual_seed(0))


def bert() -> Any:
    """Return a tiny BERT, always with the same weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes)).eval()


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A client's texts, as transformers' models take them."""

    def __init__(self, client: int) -> None:
        self.rows = ROWS[client * 8 : client * 8 + 8]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        ids = self.rows[item]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 3}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ROWS[:5]).logits
    return found


METHODS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4}, "ffa_lora": {"rank": 4}, "rolora": {"rank": 4}, "fedsa_lora": {"rank": 4}, "hetlora": {"rank": 4},
    "raflora": {"rank": 4}, "flexlora": {"rank": 4}, "fedsvd": {"rank": 4}, "fed_sb": {"rank": 4}, "fedpara": {"rank": 3},
    "pfedpara": {"rank": 3}, "feddecomp": {"rank": 2},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_peft_loads_what_was_trained(method: str, tmp_path: Path) -> None:
    from peft import PeftModel

    fedfactor.simulate(
        bert, [Texts(client) for client in range(3)], method=create("methods", method, **METHODS[method]),
        tune=Tune(train=("classifier",), alpha=12), rounds=2, epochs=2, lr=0.5, directory=tmp_path / "run",
    )  # fmt: skip
    client = 1 if method in ("fedsa_lora", "pfedpara", "feddecomp") else None
    export(tmp_path / "run", tmp_path / "adapter", client=client, model=bert)
    wanted = logits(fedfactor.load(tmp_path / "run", model=bert).model(client=client))
    assert float((wanted - logits(bert())).abs().max()) > 1e-3, "nothing was learned"
    there = PeftModel.from_pretrained(bert(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(there), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(there.merge_and_unload()), wanted, rtol=1e-4, atol=1e-5)


class Convolutions(nn.Module):
    """All kinds of convolutions that are adapted, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.point = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 12, 1)
        self.line, self.flat = nn.Conv1d(12, 10, 3, padding=1), nn.Linear(160, 20)
        self.classifier = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.point(torch.relu(self.wide(x)))).flatten(2)
        found: Tensor = self.classifier(torch.relu(self.flat(torch.relu(self.line(x)).flatten(1))))
        return found


IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LAYERS = ["wide", "point", "line", "flat"]


@pytest.mark.parametrize(
    "scheme",
    [ChannelSplit(rank=3), ChannelSplit(ratio=0.3), Core(3), Hadamard(rank=3), Hadamard(rank=2, personal=True)],
)
def test_convolutions_compute_the_same_in_peft(scheme: Scheme, tmp_path: Path) -> None:
    from peft import PeftModel

    base = Convolutions()
    network = adapt(base, scheme, targets=LAYERS, train=["classifier"], alpha=5)
    for parameter in network.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    config, tensors = adapter_of(network)
    write_adapter(tmp_path, config, encode(Message("adapter", {}, tensors)))
    there = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path))
    torch.testing.assert_close(there(IMAGES), network(IMAGES), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["lora", "rslora", "loha", "loha with cores"])
def test_a_run_starts_from_an_adapter_of_peft(kind: str, tmp_path: Path) -> None:
    import peft

    settings: dict[str, Any] = {
        "target_modules": LAYERS,
        "modules_to_save": ["classifier"],
        "alpha_pattern": {"flat": 3},
    }
    if "lora" in kind:
        config = peft.LoraConfig(r=3, lora_alpha=5, use_rslora=kind == "rslora", **settings)
    else:
        config = peft.LoHaConfig(r=3, alpha=5, use_effective_conv2d="cores" in kind, **settings)
    base = Convolutions()
    adapted = peft.get_peft_model(copy.deepcopy(base), config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    adapted.save_pretrained(str(tmp_path))
    tune = Tune(adapter=str(tmp_path), train=("classifier",))
    ours = with_adapter(copy.deepcopy(base), tune)
    torch.testing.assert_close(ours(IMAGES), adapted(IMAGES), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(compose(ours)(IMAGES), adapted(IMAGES), rtol=1e-4, atol=1e-3)
    method = create("methods", "lora" if "lora" in kind else "fedpara", rank=3)
    data = fedfactor.FederatedData((IMAGES, torch.arange(5) % 4), [torch.arange(5)])
    start = fedfactor.simulate(base, data, method=method, tune=tune, rounds=0)
    if kind != "loha":  # PEFT's convolutions without cores are only fitted
        torch.testing.assert_close(start.model(IMAGES), adapted(IMAGES), rtol=1e-3, atol=1e-2)


def test_transformers_loads_a_merged_model(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    fedfactor.simulate(
        bert, [Texts(client) for client in range(3)], method="fedavg", tune=Tune(train=("classifier",)), rounds=1,
        lr=0.5, directory=tmp_path / "run",
    )  # fmt: skip
    export(tmp_path / "run", tmp_path / "merged", model=bert, merge=True)
    there = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(there), logits(fedfactor.load(tmp_path / "run", model=bert).model()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of Hugging Face: a tiny BERT and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    bert().bert.save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        ["good bad film"] * 3, trainers.WordPieceTrainer(vocab_size=30, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def test_texts_become_tokens(folder: Path, tmp_path: Path) -> None:
    make.ag_news(tmp_path)
    (tmp_path / "ag_news_csv" / "train.csv").write_text('"3","good","<br />film"\n"1","","bad bad bad bad bad bad"\n')
    data = load_data("ag_news", tmp_path, partial=True, tokenizer=str(folder), length=5)
    words = [[data.vocabulary[int(number)] for number in row] for row in data.train[0]]
    assert words == [["[CLS]", "good", "film", "[SEP]", "[PAD]"], ["[CLS]", "bad", "bad", "bad", "[SEP]"]]
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        load_data("ag_news", tmp_path, partial=True, tokenizer=str(folder), length=5)


def test_padding_is_masked(folder: Path) -> None:
    model = text_classifier(str(folder), 3).eval()
    short, long = torch.tensor([[2, 5, 3]]), torch.tensor([[2, 5, 3, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model(short).logits, model(long).logits)
        torch.testing.assert_close(model(long).logits, model(input_ids=long, attention_mask=(long != 0).long()).logits)
    with pytest.raises(ValueError, match=r"there is no .*config.json: set model.pretrained to a folder"):
        text_classifier("nowhere")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    with pytest.raises(ValueError, match=r"config.json names no pad_token_id, so the padding of shorter texts"):
        text_classifier(str(folder))


VERSION = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a model that is in the hub's cache, as if it had been downloaded."""
    from huggingface_hub import constants

    here = tmp_path / "hub" / "models--someone--tiny"
    (here / "refs").mkdir(parents=True)
    (here / "refs" / "main").write_text(VERSION)
    shutil.copytree(folder, here / "snapshots" / VERSION)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    local_folder.cache_clear()
    return "huggingface:someone/tiny"


def test_models_of_the_hub(hub: str, folder: Path, tmp_path: Path) -> None:
    make.imdb(tmp_path)
    tables = recipes.read(Path(recipes.__file__).parents[1] / "recipes" / "tune" / "imdb.toml")
    del tables["model"]["pretrained_sha256"]
    few = [
        "partition.clients=2",
        "partition.train_share=1.0",
        "partition.alpha=100.0",
        "train.rounds=1",
        "method.rank=2",
    ]
    found = {}
    for name in (hub, f"{hub}@{VERSION}", str(folder)):
        where = [f"model.pretrained={name}", f"data.tokenizer={name}", "data.length=8", "data.partial=true"]
        recipe = recipes.resolve(recipes.override(tables, [*few, *where]), "hub")
        found[name] = execute(recipe, tmp_path / str(len(found)), data_dir=tmp_path).summary["weights_sha256"]
    assert len({*found.values()}) == 1
    export(tmp_path / "1", tmp_path / "adapter", data_dir=tmp_path)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny" and config["revision"] == VERSION
    with pytest.raises(ValueError, match=r"config.json of huggingface:someone/other could not be taken from the"):
        local_folder("huggingface:someone/other", "config.json")


@pytest.mark.parametrize("name", ["ag-news", "imdb"])
def test_two_rounds_of_a_packaged_recipe(name: str, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    make.ag_news(tmp_path)
    make.imdb(tmp_path)
    tables = recipes.read(Path(recipes.__file__).parents[1] / "recipes" / "tune" / f"{name}.toml")
    del tables["model"]["pretrained_sha256"]
    few = [
        "partition.clients=2",
        "partition.train_share=1.0",
        "partition.alpha=100.0",
        "train.rounds=2",
        "data.partial=true",
    ]
    where = [f"model.pretrained={folder}", f"data.tokenizer={folder}", "data.length=8", "method.rank=2"]
    result = execute(
        recipes.resolve(recipes.override(tables, [*few, *where]), name), tmp_path / "run", data_dir=tmp_path
    )
    assert result.summary["rounds"] == 2 and "classifier.weight" in result.server.tensors
    found = export(tmp_path / "run", tmp_path / "adapter", data_dir=tmp_path)
    labels = 4 if name == "ag-news" else 2
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels)
    there = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    ids = torch.tensor([[2, 5, 3, 0, 0]])
    with torch.no_grad():
        wanted = fedfactor.load(tmp_path / "run").model().eval()(ids).logits
        torch.testing.assert_close(there(input_ids=ids, attention_mask=(ids != 0).long()).logits, wanted)
    assert found.accuracy is not None
