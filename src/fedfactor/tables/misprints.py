"""Cells that are wrong in print, with the reason. They get the verdict `misprint`.

A cell is listed only if its paper contradicts itself, or if the rest of its table determines the rule it should follow.
"""

from __future__ import annotations

# The other four t_comm of FedPara's Table 7 follow one rule: 2 x size in MiB, over speed in Mbps / 8.
_RULE = "does not fit the rule of the other times"
_SUM = "is not the sum of the cells beside it: 1.64 + 94.04 is 95.68"
_INHERITED = "follows from Table 7's 470.2 s, which does not fit"
_D_1 = "Table 8 prints 9.28 for it"
_CINIC = "Table 5's own 3.31 / 15.25 is 21.7 %"
_CLASSES = "CIFAR10's figure: 90 more classes are 46 K more parameters"
_RNN = "fits no cell that fits the other three widths"
_AVERAGE = "the average of a column with 214 K in it"
_SLIM = "4.29 M is a width of 0.62; the same network's 229.50 M MACs in Table 8 are those of 0.64"
_RANK = "has rank 42 where the parameters beside it have 43 (512 / 12, cut and rounded)"
_PERCENT = "its own 37 / 31.5 is 117 %, before the digits were cut 120 %"
_MEMORY = "30 % of 31.46 M, as printed beside it, is 9.44 M"
_TAU = "tau has more parameters than theta at the ranks the paper chose"

MISPRINTS: dict[tuple[str, str, str, str], str] = {
    ("fedpara", "Table 7", "2 Mbps, original", "t_comm"): _RULE,
    ("fedpara", "Table 7", "2 Mbps, original", "t"): _INHERITED,
    ("fedpara", "Table 7", "2 Mbps, FedPara", "ratio of t"): _INHERITED,
    ("fedpara", "Table 7", "10 Mbps, original", "t_comm"): _RULE,
    ("fedpara", "Table 7", "10 Mbps, original", "t"): _SUM,
    ("fedpara", "Table 8", "2 Mbps, original", "training time"): _INHERITED,
    ("fedpara", "Table 8", "2 Mbps, FedPara", "ratio of training time"): _INHERITED,
    ("fedpara", "Section D.1", "2 Mbps, FedPara", "ratio of training time"): _D_1,
    ("fedpara", "Section 3.2", "VGG16 FedPara, CINIC-10, gamma 0.3", "parameters / original"): _CINIC,
    ("flanc", "Table 1", "CIFAR100 x 1.0", "p-width parameters"): _CLASSES,
    ("flanc", "Table 1", "Shakespeare x 0.50", "p-width parameters"): _RNN,
    ("flanc", "Table 1", "Shakespeare Avg", "p-width parameters"): _AVERAGE,
    ("fedhm", "Table 2", "CIFAR-10, HeteroFL 0.64", "parameters"): _SLIM,
    ("fedhm", "Table 3", "CIFAR-10, HeteroFL 0.64", "parameters"): _SLIM,
    ("fedhm", "Table 8", "CIFAR-10, slim 0.64", "parameters"): _SLIM,
    ("fedhm", "Table 8", "CIFAR-100, low rank 1/12", "MACs"): _RANK,
    ("prism", "Table 1", "0.8", "Mem / full"): _PERCENT,
    ("prism", "Table 1", "0.2", "Mem"): _MEMORY,
    ("prism", "Table 10", "PriSM 0.8", "Mem / full"): _PERCENT,
    ("prism", "Table 10", "PriSM 0.2", "Mem"): _MEMORY,
    ("feddecomp", "Section 3.5", "CIFAR-10 (.6, .6)", "tau / theta"): _TAU,
    ("feddecomp", "Section 3.5", "CIFAR-10 (.6, .6)", "(sigma + tau) / theta"): _TAU,
    ("feddecomp", "Section 3.5", "CIFAR-100 (.8, .4)", "tau / theta"): _TAU,
    ("feddecomp", "Section 3.5", "CIFAR-100 (.8, .4)", "(sigma + tau) / theta"): _TAU,
    ("feddecomp", "Section 3.5", "Tiny ImageNet (.8, .4)", "tau / theta"): _TAU,
    ("feddecomp", "Section 3.5", "Tiny ImageNet (.8, .4)", "(sigma + tau) / theta"): _TAU,
}
