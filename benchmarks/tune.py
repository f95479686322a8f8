"""Fine-tuning: a step against PEFT's with the same layers, bytes beyond the adapter, memory of a further worker.

PEFT and transformers are those of `make test-peft`, in a folder of their own.
"""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import emit, medians, note
from fedfactor import FederatedData, Tune, create_method, simulate
from fedfactor.engines import Pool
from fedfactor.factor import ChannelSplit, Hadamard
from fedfactor.factor.base import Scheme
from fedfactor.nn import adapt
from fedfactor.protocol.message import decode
from fedfactor.testing.federation import Recording

PACKAGES = Path(__file__).parents[1] / ".third-party"
BATCH, TOKENS, REPEATS = 8, 48, 15
ATTENTION = ["query", "value"]
ALL = ["query", "key", "value", "dense"]


def bert() -> Any:
    """Return a BERT of MiniLM's size with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=1000, num_labels=4, **sizes, **quiet))


def step_of(model: nn.Module) -> Callable[[], object]:
    """Return a function that makes one step of SGD: forward, cross-entropy, backward."""
    rng = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(1, 1000, (BATCH, TOKENS), generator=rng), torch.randint(4, (BATCH,), generator=rng)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(input_ids=ids).logits, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def steps(name: str, scheme: Scheme, theirs: Any, targets: list[str], target: str) -> None:
    """Time a step of an adapted model against PEFT's."""
    import peft

    base = bert()
    # PEFT's `dense` would also match the pooler's layer, which is named here by its whole path instead.
    layers = [n for n, m in base.named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in targets]
    layers = [layer for layer in layers if ".layer." in layer]
    theirs.target_modules, theirs.modules_to_save = set(layers), ["classifier"]
    adapted = peft.get_peft_model(copy.deepcopy(base), theirs)
    ours = adapt(base, scheme, targets=layers, train=["classifier"])
    counts = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (ours, adapted)]
    assert counts[0] == counts[1], counts
    seconds = medians({"ours": step_of(ours), "PEFT": step_of(adapted)}, REPEATS, warmup=3)
    note(f"{name}: " + ", ".join(f"{key} {1e3 * value:.0f} ms" for key, value in seconds.items()))
    emit(f"tune_{name}_step_over_peft", seconds["ours"] / seconds["PEFT"], "x PEFT", target)


def network(features: int, layers: int = 8) -> nn.Module:
    """Return a deep network of square layers, the base."""
    torch.manual_seed(0)
    body = [nn.Linear(features, features, bias=False) for _ in range(layers)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, features), *body, nn.Linear(features, 10))


def trained(model: nn.Module, engine: Any, **settings: Any) -> None:
    """Fine-tune a model for two rounds with LoRA."""
    rng = torch.Generator().manual_seed(0)
    data = FederatedData((torch.randn(64, 64, generator=rng), torch.arange(64) % 10), torch.arange(64).split(8))
    tune = Tune(targets=[str(number) for number in range(2, 10)], train=["10"])
    simulate(model, data, method=create_method("lora", rank=8), tune=tune, rounds=2, engine=engine, **settings)


def messages() -> None:
    """Measure what a message of training adds to the bytes of its tensors."""
    engine, worst = Recording(), -math.inf
    trained(network(256), engine, evaluate_clients="none")
    for message in [*engine.down, *engine.up]:
        tensors = decode(message).tensors.values()
        worst = max(worst, len(message) - sum(t.nbytes for t in tensors) - 160 * len(tensors))
    note(f"{len(engine.down) + len(engine.up)} messages of {len(tensors)} tensors")
    emit("tune_message_beyond_adapter_and_160_bytes_per_tensor", worst, "bytes", "<= 1024")


def proportional(workers: int, features: int) -> float:
    """Return the proportional set size of all workers of a run, in bytes; this process has memory of its own."""
    most = 0.0

    def watch(event: dict[str, Any]) -> None:
        nonlocal most
        if event["event"] == "answered" and event["round"] == 2:
            texts = [Path(f"/proc/{worker.process.pid}/smaps_rollup").read_text() for worker in pool._workers]
            most = max(most, 1024.0 * sum(int(re.search(r"^Pss: +(\d+)", text, re.M)[1]) for text in texts))  # type: ignore[index]

    with Pool(workers) as pool:
        trained(network(features), pool, on_event=watch)
    return most


def memory(features: int = 2048) -> None:
    """Measure what a further worker adds with a large base, beyond what it adds with a tiny one."""
    found: dict[tuple[int, int], float] = {}
    for case in [(workers, size) for size in (features, 16) for workers in (2, 3)]:  # each in a process of its own
        command = [sys.executable, "-m", "benchmarks.tune", *map(str, case)]
        found[case] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    large, tiny = (found[3, size] - found[2, size] for size in (features, 16))
    base = 4 * 8 * features**2
    note(f"a further worker adds {large / 1e6:.1f} MB, with a tiny model {tiny / 1e6:.1f} MB; base {base / 1e6:.0f} MB")
    emit("tune_further_worker_pss", (large - tiny) / base, "x base", "<= 0.1")


def run() -> None:
    """Measure all figures."""
    sys.path.append(str(PACKAGES))
    import peft

    alpha = {"lora_alpha": 16, "lora_dropout": 0.0}
    steps("lora", ChannelSplit(rank=8), peft.LoraConfig(r=8, **alpha), ATTENTION, "<= 1.0")
    steps("lora_all_linear", ChannelSplit(rank=8), peft.LoraConfig(r=8, **alpha), ALL, "<= 1.0")
    steps("loha", Hadamard(rank=4), peft.LoHaConfig(r=4, alpha=16), ALL, "<= 0.8")
    steps("loha_attention", Hadamard(rank=4), peft.LoHaConfig(r=4, alpha=16), ATTENTION, "none, for comparison")
    messages()
    memory()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(proportional(int(sys.argv[1]), int(sys.argv[2])))
